"""
What tests of your own need: a fresh queue whose clock the test moves.

>>> queue = make_queue("memory")
>>> item = queue.enqueue(WorkItem(tenant="acme"))
>>> claim = queue.claim(worker="w", lease_seconds=60)
>>> queue.advance(61)
>>> [lapsed.id for lapsed in queue.reap()] == [item.id]
True
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import PurePath
from typing import Literal, overload

from django.apps import apps
from django.core.exceptions import ImproperlyConfigured
from django.core.management.color import no_style
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_workqueue.memory import MemoryWorkQueue
from django_workqueue.policy import QueuePolicy
from django_workqueue.queues import DatabaseWorkQueue

Backend = Literal["memory", "sqlite", "postgresql"]


class ManualClock:
    """The machine's clock plus what a test has added."""

    def __init__(self) -> None:
        self.skew = timedelta(0)

    def now(self) -> datetime:
        """Return the present, as an aware datetime."""
        return datetime.now(UTC) + self.skew


class MemoryTestQueue(MemoryWorkQueue):
    """A `MemoryWorkQueue` whose clock a test moves."""

    def __init__(self, policy: QueuePolicy | None = None) -> None:
        self._manual_clock = ManualClock()
        super().__init__(policy, self._manual_clock)

    def advance(self, seconds: float) -> None:
        """Move the store's clock forward."""
        self._manual_clock.skew += timedelta(seconds=seconds)


class DatabaseTestQueue(DatabaseWorkQueue):
    """A `DatabaseWorkQueue` whose clock a test moves. Other queue objects don't see it."""

    def advance(self, seconds: float) -> None:
        """Move the store's clock forward."""
        self._skew += timedelta(seconds=seconds)


@overload
def make_queue(
    backend: Literal["memory"], policy: QueuePolicy | None = None
) -> MemoryTestQueue: ...
@overload
def make_queue(
    backend: Literal["sqlite", "postgresql"], policy: QueuePolicy | None = None
) -> DatabaseTestQueue: ...
def make_queue(
    backend: Backend, policy: QueuePolicy | None = None
) -> MemoryTestQueue | DatabaseTestQueue:
    """
    Return a fresh, empty queue with the verbs of `WorkQueue` and ``advance(seconds)``.

    For "sqlite" and "postgresql" it is in the first configured database of that kind, of
    which **all items are deleted**; raise `ImproperlyConfigured` if there is none or it is
    not a test database. The test needs access to that database: with pytest-django,
    ``django_db(transaction=True, databases="__all__")``.
    """
    if backend == "memory":
        return MemoryTestQueue(policy)
    alias = _alias_of(backend)
    if not is_test_database(connections[alias]):
        raise ImproperlyConfigured(
            f"make_queue deletes all items, and {alias!r} is not a test database"
        )
    empty(alias)
    return DatabaseTestQueue(alias, policy=policy or QueuePolicy())


def _alias_of(backend: str) -> str:
    for alias in connections:
        if connections[alias].vendor == backend:
            return str(alias)
    raise ImproperlyConfigured(f"no database of kind {backend!r} is configured")


def is_test_database(connection: BaseDatabaseWrapper) -> bool:
    """True if the connection leads to a database that a test runner has made."""
    settings = connection.settings_dict
    name = str(settings["NAME"])
    if ":memory:" in name or "mode=memory" in name:
        return True
    own = (settings.get("TEST") or {}).get("NAME")
    return name == str(own) or PurePath(name).name.startswith("test_")


def empty(alias: str) -> None:
    """Delete every row of the queue's tables in the database *alias*."""
    connection = connections[alias]
    tables = [
        model._meta.db_table for model in apps.get_app_config("django_workqueue").get_models()
    ]
    statements = connection.ops.sql_flush(no_style(), tables)
    connection.ops.execute_sql_flush(statements)
