"""A project of a single app, `shop`, that a test writes; it lives on the test databases."""

import os
from pathlib import Path


class Project:
    """The project's files, for the workers of a scene from now on."""

    def __init__(self, it, handlers: str, settings: str = "") -> None:
        self.folder = it.folder / "project"
        self.handlers = self.folder / "shop" / "handlers.py"
        self.handlers.parent.mkdir(parents=True)
        (self.handlers.parent / "__init__.py").touch()
        self.handlers.write_text(handlers)
        (self.folder / "shop_settings.py").write_text(
            "from tests.settings import *\n"
            "INSTALLED_APPS = [*INSTALLED_APPS, 'shop']\n"
            f"{settings}\n"
        )
        path: list[str | Path] = [self.folder, it.environment["PYTHONPATH"]]
        it.environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
        it.environment["DJANGO_SETTINGS_MODULE"] = "shop_settings"
