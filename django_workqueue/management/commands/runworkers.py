"""Run workers: processes that claim items of the queue and run their handlers."""

from __future__ import annotations

import contextlib
import difflib
import logging
import os
import secrets
import signal
import socket
import sys
import uuid
from argparse import ArgumentParser
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import BaseCommand, CommandError
from django.db import OperationalError, connections

from django_workqueue.conf import WorkQueueSettings, get_settings
from django_workqueue.doctor import missing_tables
from django_workqueue.exceptions import InvalidFieldError
from django_workqueue.items import (
    MAX_DEPLOYMENT_LENGTH,
    MAX_QUEUE_LENGTH,
    MAX_WORKER_LENGTH,
    require_integer,
    require_seconds,
    require_text,
)
from django_workqueue.models import Counter
from django_workqueue.queues import DatabaseWorkQueue
from django_workqueue.worker.connection import wait_for_database
from django_workqueue.worker.health import STARTING, HealthFile
from django_workqueue.worker.options import WorkerOptions, configure_logging
from django_workqueue.worker.presence import namesake
from django_workqueue.worker.reload import Reloader, end_with_reloader, is_reloaded
from django_workqueue.worker.supervisor import Supervisor

#: Longest name of a file that Linux takes, in bytes.
MAX_PATH_LENGTH: Final = 4096

logger: Final = logging.getLogger("django_workqueue")


class Command(BaseCommand):
    """Start a supervisor and its processes, and run until they are told to stop."""

    help = (
        "Runs workers until SIGTERM or SIGINT, which lets running handlers finish; a second "
        "signal ends at once. Exit codes: 0 after a clean drain, 1 if the options or settings "
        "are refused, 3 if a worker process died abnormally (it was replaced), 70 if the "
        "supervisor failed, 128 + number of a second signal."
    )
    requires_migrations_checks = True

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the options; those of the WORKQUEUE setting are their defaults."""
        add = parser.add_argument
        add("--queues", action="append", help="Comma separated. Default: all of QUEUES.")
        add("--database", help="Alias of the queue's database.")
        add("--processes", type=int, help="Number of worker processes.")
        add("--concurrency", type=int, help="Handlers that each process runs at a time.")
        add("--name", help="Name of this worker. Default: unique for each start.")
        add("--deployment-id", help="Take the items pinned to it too.")
        add("--until-empty", action="store_true", help="End once the queues are worked off.")
        add("--max-items", type=int, help="End after so many items were begun.")
        add("--stop-timeout", type=float, help="Seconds that handlers get to finish in a drain.")
        add("--reload", action="store_true", help="Start anew when code changes. To develop with.")
        add("--health-file", metavar="PATH", help="Tell in this file whether the worker is well.")

    def get_check_kwargs(self, options: dict[str, Any]) -> Any:
        """Check the queue's database too."""
        kwargs: dict[Any, Any] = super().get_check_kwargs(options)
        # Wrong settings name no database; the check of the settings is about to say so, as
        # `handle` does of a wrong option.
        with contextlib.suppress(ImproperlyConfigured):
            alias = options["database"] or DatabaseWorkQueue().using
            kwargs["databases"] = [alias] if alias in connections else []
        return kwargs

    def execute(self, *args: Any, **options: Any) -> Any:
        """Run; a service waits until its database can be reached, all else is told."""
        configure_logging(options["verbosity"])
        try:
            if not (options["until_empty"] or options["reload"]):
                self._wait_for_databases(options)
            return super().execute(*args, **options)
        except OperationalError as error:
            raise CommandError(f"The database can't be reached: {error}") from error
        except KeyboardInterrupt:
            sys.exit(128 + signal.SIGINT)

    def _wait_for_databases(self, options: dict[str, Any]) -> None:
        def waits() -> None:
            if path := options["health_file"]:
                with contextlib.suppress(OSError, ValueError):  # `handle` refuses what it can't be
                    HealthFile(path).write(STARTING)

        for alias in self.get_check_kwargs(options).get("databases", []):
            wait_for_database(alias, waits)

    def handle(self, *args: Any, **options: Any) -> None:
        settings = get_settings()
        if not settings.enabled:
            raise CommandError("The work queue is switched off: WORKQUEUE['ENABLED'] is False.")
        try:
            worker = _worker_options(settings, options)
            _claim_health_file(worker)
        except InvalidFieldError as error:
            raise CommandError(str(error)) from None
        _refuse_long_drain(settings, worker)
        if missing_tables(worker.alias):
            raise CommandError(f"Tables are missing in {worker.alias!r}: run manage.py migrate.")
        _refuse_a_name_of_others(worker)
        if not (reloads := options["reload"] and not is_reloaded()):
            _warn_of_unknown_queues(settings, worker)
        connections.close_all()  # nothing of ours stays open in this thread
        if code := Reloader().run() if reloads else _run(worker):
            sys.exit(code)


def _run(worker: WorkerOptions) -> int:
    supervisor = Supervisor(worker)
    if is_reloaded():
        end_with_reloader(supervisor)
    return supervisor.run()


def _worker_options(settings: WorkQueueSettings, options: dict[str, Any]) -> WorkerOptions:
    """Return what the command line asks for, the settings filled in."""
    worker = settings.worker

    def given(name: str, default: Any) -> Any:
        return default if options[name] is None else options[name]

    queues = [name.strip() for text in options["queues"] or [] for name in text.split(",")]
    alias = options["database"] or DatabaseWorkQueue().using
    if alias not in connections:
        raise InvalidFieldError(f"there is no database {alias!r}", field="--database")
    deployment = given("deployment_id", settings.deployment_id or "")
    limit, health_file = options["max_items"], options["health_file"]
    if options["reload"] and limit is not None:
        raise InvalidFieldError(
            "can't go with --reload: the count would begin anew", field="--max-items"
        )
    if health_file is not None:
        health_file = os.path.abspath(require_text("--health-file", health_file, MAX_PATH_LENGTH))
    return WorkerOptions(
        name=_printable_name(given("name", _unique_name())),
        boot=str(uuid.uuid4()),
        alias=alias,
        queues=tuple(
            dict.fromkeys(
                require_text("--queues", name, MAX_QUEUE_LENGTH)
                for name in queues or settings.queues
            )
        ),
        deployment_id=require_text(
            "--deployment-id", deployment, MAX_DEPLOYMENT_LENGTH, empty=True
        ),
        processes=require_integer("--processes", given("processes", worker.processes), 1, 1000),
        concurrency=require_integer(
            "--concurrency", given("concurrency", worker.concurrency), 1, 10_000
        ),
        stop_timeout=require_seconds(
            "--stop-timeout", given("stop_timeout", worker.stop_timeout_seconds)
        ),
        poll_seconds=worker.poll_seconds,
        reap_seconds=worker.reap_seconds,
        retention_sweep_seconds=worker.retention_sweep_seconds,
        until_empty=options["until_empty"],
        max_items=None if limit is None else require_integer("--max-items", limit, 1, 2**62),
        health_file=health_file,
        verbosity=options["verbosity"],
    )


def _printable_name(name: str) -> str:
    if not name.strip() or not name.isprintable():
        raise InvalidFieldError("must be printable text, and not blank", field="--name")
    return require_text("--name", name, MAX_WORKER_LENGTH)


def _unique_name() -> str:
    return f"{socket.gethostname()[:150]}-{os.getpid()}-{secrets.token_hex(4)}"


def _claim_health_file(worker: WorkerOptions) -> None:
    """Write the file for the first time, over whatever a worker that was killed has left."""
    if worker.health_file is not None:
        try:
            HealthFile(worker.health_file).write(STARTING)
        except OSError as error:
            raise InvalidFieldError(
                f"{worker.health_file} can't be written: {error.strerror}", field="--health-file"
            ) from None


def _warn_of_unknown_queues(settings: WorkQueueSettings, worker: WorkerOptions) -> None:
    """Point out queues that are served for no reason to be seen: a slip of the pen, most likely."""
    counters = Counter._base_manager.using(worker.alias).filter(queue__in=worker.queues)
    used = counters.values_list("queue", flat=True).distinct()
    for name in sorted({*worker.queues} - {*settings.queues, *used}):
        close = difflib.get_close_matches(name, settings.queues, n=1)
        hint = f" did_you_mean={close[0]}" if close else ""
        logger.warning("queue is neither in QUEUES nor ever used: queue=%s%s", name, hint)


def _refuse_a_name_of_others(worker: WorkerOptions) -> None:
    if other := namesake(worker, DatabaseWorkQueue(worker.alias).moves.now()):
        raise CommandError(
            f"--name: {worker.name!r} is the name of a living worker that serves other queues, "
            f"{', '.join(other.queues)} (process {other.pid} on {other.host}); this one would "
            f"serve {', '.join(worker.queues)}. Give each a name of its own."
        )


def _refuse_long_drain(settings: WorkQueueSettings, worker: WorkerOptions) -> None:
    leases = {queue: settings.policy_for(queue).lease_seconds for queue in worker.queues}
    queue = min(leases, key=lambda name: leases[name])
    if worker.stop_timeout >= leases[queue]:
        raise CommandError(
            f"The stop timeout of {worker.stop_timeout:g} s is not below the lease_seconds of "
            f"queue {queue!r}, {leases[queue]:g} s: a drain must end before a lease does."
        )
