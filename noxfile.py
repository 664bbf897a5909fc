"""The matrix of interpreters and Django lines: `nox` runs all of it, `nox -s "tests(…)"` a part."""

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.error_on_missing_interpreters = False

PAIRS = [("3.11", "5.2"), ("3.12", "6.0"), ("3.13", "6.0"), ("3.13", "6.1")]


@nox.session
@nox.parametrize("python,django", PAIRS, ids=[f"{python}-{django}" for python, django in PAIRS])
def tests(session: nox.Session, django: str) -> None:
    """Run the tests on one pair."""
    session.install("--editable", ".[binary,dev]", f"Django~={django}.0")
    session.run("python", "-m", "pytest", *session.posargs)


@nox.session(python="3.11")
def lowest(session: nox.Session) -> None:
    """Run the tests on the lowest versions that pyproject.toml allows."""
    dependencies = nox.project.load_toml("pyproject.toml")["project"]["dependencies"]
    lowest = [dependency.replace(">=", "==") for dependency in dependencies]
    session.install("--editable", ".[binary,dev]", *lowest)
    session.run("python", "-m", "pytest", *session.posargs)
