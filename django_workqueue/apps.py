"""The Django app: its label, its name for people, and what happens when apps are ready."""

from django.apps import AppConfig
from django.utils.translation import gettext_lazy as _


class WorkQueueConfig(AppConfig):
    """The work queue, as an entry of INSTALLED_APPS."""

    name = "django_workqueue"
    label = "django_workqueue"
    verbose_name = _("Work queue")
    # Ours, so that a project's own setting never makes a migration of our tables.
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks and find the handlers of all apps."""
        from django_workqueue import checks, handlers

        checks.register_checks()
        handlers.autodiscover()
