"""System checks. An id is never used again; each message says what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from django.apps import AppConfig
from django.conf import settings as django_settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import Error, NotSupportedError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils.module_loading import import_string

from django_workqueue.conf import ApiSettings, WorkQueueSettings, get_settings
from django_workqueue.queues import get_queue

TAG: Final = "workqueue"
#: Of the oldest Django that is supported; a newer one may need more, and says so itself.
OLDEST_POSTGRESQL: Final = (14,)
#: The first with RETURNING, by which an insert of many rows tells their ids.
OLDEST_SQLITE: Final = (3, 35)
# By the number that OPTIONS has. READ UNCOMMITTED is READ COMMITTED to PostgreSQL.
_STRICTER: Final = {3: "REPEATABLE READ", 4: "SERIALIZABLE"}


def register_checks() -> None:
    """Register all checks of the app."""
    checks.register(check_settings, TAG)
    checks.register(check_database, checks.Tags.database)
    checks.register(check_access, checks.Tags.security, deploy=True)


def check_settings(
    app_configs: Sequence[AppConfig] | None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """E001: WORKQUEUE can't be used. E002: a drain outlasts a lease. E004: no such
    database. E005: USE_TZ is off. E010: what is to redact can't be called."""
    try:
        settings = get_settings()
    except ImproperlyConfigured as error:
        hint = "See the settings reference of django_workqueue for the keys and their values."
        return [checks.Error(str(error), hint=hint, id="django_workqueue.E001")]
    return [
        *_contradictions(settings),
        *_unknown_database(settings),
        *_naive_times(),
        *_no_redaction(settings.api),
    ]


def check_access(
    app_configs: Sequence[AppConfig] | None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """W003: whoever reaches `/queue` is let in."""
    try:
        is_open = get_settings().api.open
    except ImproperlyConfigured:
        return []  # E001 says it
    if not is_open:
        return []
    return [
        checks.Warning(
            "WORKQUEUE: API['open'] is True: whoever reaches /queue may move jobs",
            hint="Leave it out, or see to it that only operators reach the address.",
            id="django_workqueue.W003",
        )
    ]


def _no_redaction(api: ApiSettings) -> Iterable[checks.CheckMessage]:
    if api.redact is None:
        return
    try:
        found = import_string(api.redact)
        problem = "" if callable(found) else "it can't be called"
    except ImportError as error:
        problem = str(error)
    if problem:
        yield checks.Error(
            f"WORKQUEUE: API['redact'] is {api.redact!r}: {problem}",
            hint="Name a function by its dotted path.",
            id="django_workqueue.E010",
        )


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
    """
    The queue's database. E003: an unknown vendor. E006: too old. E007: psycopg2. E008: another
    isolation than READ COMMITTED. E009: no autocommit. W001: SQLite without the options
    that several processes need. W002: a pooler that server-side cursors would break on.
    """
    try:
        alias = get_queue().using
    except ImproperlyConfigured:
        return []  # E001 says it
    if alias not in (databases or []) or alias not in connections:
        return []
    connection = connections[alias]
    if connection.vendor == "sqlite":
        return [*_no_autocommit(connection), *_sqlite(connection)]
    if connection.vendor == "postgresql":
        return [*_no_autocommit(connection), *_postgresql(connection)]
    return [
        checks.Error(
            f"The work queue can't run on {connection.display_name}",
            hint="Use PostgreSQL; SQLite serves for a first try.",
            id="django_workqueue.E003",
        )
    ]


def _no_autocommit(connection: BaseDatabaseWrapper) -> Iterable[checks.CheckMessage]:
    if not connection.settings_dict.get("AUTOCOMMIT", True):
        yield checks.Error(
            f"The database {connection.alias!r} has AUTOCOMMIT = False: workers would never commit",
            hint="Leave AUTOCOMMIT out of DATABASES; its default is True.",
            id="django_workqueue.E009",
        )


def _sqlite(connection: Any) -> Iterable[checks.CheckMessage]:
    version = connection.Database.sqlite_version_info
    if version < OLDEST_SQLITE:
        yield _too_old("SQLite", version, OLDEST_SQLITE)
    options = connection.settings_dict.get("OPTIONS", {})
    wal = "journal_mode=wal" in str(options.get("init_command", "")).lower().replace(" ", "")
    if str(options.get("transaction_mode", "")).upper() != "IMMEDIATE" or not wal:
        yield checks.Warning(
            f"The SQLite database {connection.alias!r} lacks options that several processes need",
            hint='Set OPTIONS to {"transaction_mode": "IMMEDIATE", "timeout": 20, '
            '"init_command": "PRAGMA journal_mode=WAL;"}.',
            id="django_workqueue.W001",
        )


def _postgresql(connection: Any) -> Iterable[checks.CheckMessage]:
    if connection.Database.__name__ == "psycopg2":
        yield checks.Error(
            f"The engine of the database {connection.alias!r} uses psycopg2",
            hint="The work queue needs psycopg 3: use an ENGINE that does, such as Django's own.",
            id="django_workqueue.E007",
        )
        return
    if get_settings().pooler and not connection.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS"):
        yield checks.Warning(
            f"WORKQUEUE: POOLER is True, but the database {connection.alias!r} has "
            "server-side cursors: iterator() can fail behind such a pooler",
            hint=f"Set DISABLE_SERVER_SIDE_CURSORS = True in DATABASES[{connection.alias!r}].",
            id="django_workqueue.W002",
        )
    options = connection.settings_dict.get("OPTIONS", {})
    if options.get("isolation_level", 0) in _STRICTER:
        yield _isolated(_STRICTER[options["isolation_level"]], "its OPTIONS say so")
    else:
        yield from _server(connection, told="isolation_level" in options)


def _server(connection: Any, told: bool) -> Iterable[checks.CheckMessage]:
    """Ask the server; one that can't be reached is no mistake of the settings."""
    try:
        connection.ensure_connection()
        version = connection.get_database_version()
        with connection.cursor() as cursor:
            cursor.execute("show default_transaction_isolation")
            [isolation] = cursor.fetchone()
    except NotSupportedError as error:  # Django's own refusal
        yield _too_old("PostgreSQL", None, connection.features.minimum_database_version, error)
        return
    except (Error, ImproperlyConfigured):
        return
    if version < OLDEST_POSTGRESQL:
        yield _too_old("PostgreSQL", version, OLDEST_POSTGRESQL)
    if not told and isolation.upper() in _STRICTER.values():
        yield _isolated(isolation.upper(), "the server's default_transaction_isolation says so")


def _isolated(level: str, why: str) -> checks.CheckMessage:
    return checks.Error(
        f"The work queue needs READ COMMITTED, and transactions are {level}: {why}",
        hint='Set "isolation_level": psycopg.IsolationLevel.READ_COMMITTED in OPTIONS.',
        id="django_workqueue.E008",
    )


def _too_old(
    name: str, version: Sequence[int] | None, oldest: Sequence[int], error: Exception | None = None
) -> checks.CheckMessage:
    needed = ".".join(map(str, oldest))
    found = str(error) if version is None else f"this is {'.'.join(map(str, version))}"
    return checks.Error(
        f"The work queue needs {name} {needed} or newer: {found}",
        hint=f"Update {name}.",
        id="django_workqueue.E006",
    )
