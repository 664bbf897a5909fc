"""System checks. An id is never used again; each message says what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from django.apps import AppConfig
from django.conf import settings as django_settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from django_workqueue.conf import WorkQueueSettings, get_settings
from django_workqueue.queues import get_queue

TAG: Final = "workqueue"


def register_checks() -> None:
    """Register all checks of the app."""
    checks.register(check_settings, TAG)
    checks.register(check_database, checks.Tags.database)


def check_settings(
    app_configs: Sequence[AppConfig] | None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """E001: WORKQUEUE can't be used. E002: a drain outlasts a lease. E004: no such
    database. E005: USE_TZ is off."""
    try:
        settings = get_settings()
    except ImproperlyConfigured as error:
        hint = "See the settings reference of django_workqueue for the keys and their values."
        return [checks.Error(str(error), hint=hint, id="django_workqueue.E001")]
    return [*_contradictions(settings), *_unknown_database(settings), *_naive_times()]


def _unknown_database(settings: WorkQueueSettings) -> Iterable[checks.CheckMessage]:
    if settings.database is not None and settings.database not in connections:
        yield checks.Error(
            f"WORKQUEUE: DATABASE names {settings.database!r}, which DATABASES doesn't have",
            hint="Name an alias of DATABASES, or leave it out for the router's choice.",
            id="django_workqueue.E004",
        )


def _naive_times() -> Iterable[checks.CheckMessage]:
    if not django_settings.USE_TZ:
        yield checks.Error(
            "The work queue needs USE_TZ = True: its times are aware",
            hint="Set USE_TZ = True; Django's default since 5.0.",
            id="django_workqueue.E005",
        )


def _contradictions(settings: WorkQueueSettings) -> Iterable[checks.CheckMessage]:
    stop = settings.worker.stop_timeout_seconds
    for name, policy in settings.queues.items():
        lease = policy.lease_for(None)
        if stop >= lease:
            yield checks.Error(
                f"WORKQUEUE: stop_timeout_seconds ({stop:g}) is not below the lease_seconds "
                f"({lease:g}) of queue {name!r}",
                hint="A drain must end before a lease does: lower the one or raise the other.",
                id="django_workqueue.E002",
            )


def check_database(
    app_configs: Sequence[AppConfig] | None, databases: Iterable[str] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """W001: SQLite without the options that several processes need. E003: an unknown vendor."""
    try:
        alias = get_queue().using
    except ImproperlyConfigured:
        return []  # E001 says it
    if alias not in (databases or []) or alias not in connections:
        return []
    connection = connections[alias]
    if connection.vendor == "postgresql":
        return []
    if connection.vendor != "sqlite":
        return [
            checks.Error(
                f"The work queue can't run on {connection.display_name}",
                hint="Use PostgreSQL; SQLite serves for a first try.",
                id="django_workqueue.E003",
            )
        ]
    options = connection.settings_dict.get("OPTIONS", {})
    wal = "journal_mode=wal" in str(options.get("init_command", "")).lower().replace(" ", "")
    if str(options.get("transaction_mode", "")).upper() == "IMMEDIATE" and wal:
        return []
    return [
        checks.Warning(
            f"The SQLite database {alias!r} lacks options that several processes need",
            hint='Set OPTIONS to {"transaction_mode": "IMMEDIATE", "timeout": 20, '
            '"init_command": "PRAGMA journal_mode=WAL;"}.',
            id="django_workqueue.W001",
        )
    ]
