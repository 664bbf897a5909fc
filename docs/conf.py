"""How Sphinx builds the manual. Nothing is fetched: no inventories, no fonts, no scripts."""

import django
from django.conf import settings

import django_workqueue

# Enough of a project for the models to be imported by autodoc.
settings.configure(
    INSTALLED_APPS=[
        "django.contrib.contenttypes",
        "django.contrib.auth",
        "django_workqueue",
    ],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
)
django.setup()

project = "django_workqueue"
author = "the django_workqueue authors"
release = version = django_workqueue.__version__
html_title = f"django_workqueue {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
source_suffix = {".md": "markdown"}
myst_enable_extensions = ["attrs_block", "colon_fence", "deflist", "substitution"]
myst_substitutions = {"release": django_workqueue.__version__}
myst_heading_anchors = 3

# Docstrings put names in single backticks.
default_role = "literal"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_type_aliases = {"LeaseLostReason": "LeaseLostReason", "Backend": "Backend"}
python_maximum_signature_line_length = 100
add_module_names = False

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["manual.css"]
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False
pygments_style = "tango"
pygments_dark_style = "monokai"

#: Classes whose fields a table explains better than a signature of twenty lines.
TABULATED = {"QueuePolicy", "QueueStats", "WorkItem", "WorkQueue"}


def shorten(app, what, name, obj, options, signature, returns):
    """Leave the signature of a class away that a table describes."""
    if what == "class" and name.rpartition(".")[2] in TABULATED:
        return "", None
    return None


def setup(app):
    """Called by Sphinx."""
    app.connect("autodoc-process-signature", shorten)
