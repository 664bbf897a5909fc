import os
import sys

from django.apps import AppConfig


class WorkerAppConfig(AppConfig):
    name = "tests.workerapp"
    label = "workerapp"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self):
        """Let a test say which handlers the processes that it starts have not, and how long
        they keep what they prefetched."""
        from tests.workerapp import stubborn  # noqa: F401 - its handlers; found are `handlers` only

        crash = os.environ.get("WORKQUEUE_TEST_CRASH")
        if crash and "runworkers" not in sys.orig_argv:  # only the processes of a worker
            os._exit(int(crash))
        if absent := os.environ.get("WORKQUEUE_TEST_ABSENT"):
            from django_workqueue.handlers import registry

            del registry._by_name[absent]
        if patience := os.environ.get("WORKQUEUE_TEST_PREFETCH_PATIENCE"):
            from django_workqueue.worker import dispatcher

            dispatcher.PREFETCH_PATIENCE = float(patience)
            if dispatcher.PREFETCH_PATIENCE >= 3600:
                # For good: then how quick the machine is must not decide either.
                dispatcher.SHORT_ATTEMPT = dispatcher.PREFETCH_SECONDS = float(10**9)
