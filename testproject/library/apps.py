"""The app that reads Python's standard library, as work for the queue."""

from django.apps import AppConfig


class LibraryConfig(AppConfig):
    """The demo's app, as an entry of INSTALLED_APPS."""

    name = "library"
    default_auto_field = "django.db.models.BigAutoField"
