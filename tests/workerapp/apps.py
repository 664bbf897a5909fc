from django.apps import AppConfig


class WorkerAppConfig(AppConfig):
    name = "tests.workerapp"
    label = "workerapp"
    default_auto_field = "django.db.models.BigAutoField"
