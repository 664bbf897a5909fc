"""A runtime thread's own connection, and waiting for a database that isn't there yet."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping
from typing import Any, Final, Self, TypeVar

from django.db import OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from django_workqueue import sql
from django_workqueue.conf import get_settings
from django_workqueue.worker.trouble import Backoff, back_off

logger: Final = logging.getLogger("django_workqueue")

T = TypeVar("T")

#: The runs of a statement after which it is prepared: its plan is kept from then on.
PREPARED_FROM: Final = 2
#: Seconds after which a statement counts as lost. The server's own limit comes first, if the
#: server can still tell.
ANSWER_WITHIN: Final = 20.0

# A connection that has gone silent must be noticed well within a lease.
_PATIENCE: Final = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
_LIMITS: Final = {"statement_timeout": "15s", "lock_timeout": "1s"}


def own_connection(alias: str, purpose: str) -> None:
    """
    Give the calling thread a connection to *alias* that is the runtime's alone.

    It is direct (outside a project's pool), stays open, and on PostgreSQL prepares its
    statements and bounds how long they may take and wait. *purpose* shows in the server's
    list of sessions.
    """
    connections[alias] = _make(alias, purpose)


def wait_for_database(alias: str, waits: Callable[[], None] = lambda: None) -> None:
    """
    Return once a PostgreSQL database lets us in. Until then say each time why it doesn't, and
    call *waits*.

    Also a wrong password and a missing database are waited for: the driver tells them from a
    server that is down by nothing but words in the server's language, and both can be put
    right while we wait.
    """
    connection = _make(alias, "start")
    trouble = Backoff()
    while connection.vendor == "postgresql" and connection.connection is None:
        try:
            connection.ensure_connection()
        except OperationalError as error:
            wait = back_off(trouble, alias, "duty=start", error)
            waits()
            time.sleep(wait)
    connection.close()
    if trouble.over():
        logger.info("database back: duty=start")


def _make(alias: str, purpose: str) -> BaseDatabaseWrapper:
    connection = connections.create_connection(alias)
    own: dict[str, Any] = {**connection.settings_dict, "CONN_MAX_AGE": None}
    own["OPTIONS"] = dict(own.get("OPTIONS") or {})
    if connection.vendor == "postgresql":
        own["OPTIONS"].pop("pool", None)
        own["OPTIONS"] = {
            **_PATIENCE,
            "application_name": f"workqueue {purpose}",
            **own["OPTIONS"],
        }
        limits = _LIMITS | sql.WORKER_OPTIONS
        own["OPTIONS"] |= _pooled(limits) if get_settings().pooler else _direct(own, limits)
        _lose_patience(connection)
    connection.settings_dict = own
    return connection


def _direct(own: Mapping[str, Any], limits: Mapping[str, str]) -> dict[str, Any]:
    given = own["OPTIONS"].get("options", "")
    settings = " ".join(f"-c {name}={value}" for name, value in limits.items())
    return {
        "options": f"{given} {settings}".strip(),
        "server_side_binding": True,
        "prepare_threshold": PREPARED_FROM,
    }


def _pooled(limits: Mapping[str, str]) -> dict[str, Any]:
    """
    Of a session that others will have after this transaction: nothing may stay on it.

    So each statement brings its limits along, in the same message: without a block they hold
    for the transaction that the message is.
    """
    # Imported late: it is for PostgreSQL only.
    from psycopg import ClientCursor

    preamble = "".join(f"set local {name} = '{value}'; " for name, value in limits.items())

    class LimitedCursor(ClientCursor[Any]):
        def execute(self, query: Any, *args: Any, **kwargs: Any) -> Self:
            super().execute(preamble + query, *args, **kwargs)
            for _ in limits:
                self.nextset()
            return self

    return {
        "server_side_binding": False,
        "prepare_threshold": None,
        "cursor_factory": LimitedCursor,
    }


def _lose_patience(connection: Any) -> None:
    """
    Let statements fail that get no answer, however alive the connection looks: behind a proxy
    that hangs, or a server that stands still, the kernel goes on acknowledging.
    """
    connect = connection.get_new_connection

    def get_new_connection(parameters: Mapping[str, Any]) -> Any:
        raw = connect(parameters)
        wait = raw.wait
        raw.wait = lambda steps, *args, **kwargs: wait(_in_time(steps), *args, **kwargs)
        return raw

    connection.get_new_connection = get_new_connection


def _in_time(steps: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
    """Go through the *steps* of the driver, which comes back also while nothing arrives."""
    from psycopg import OperationalError as NoAnswerError

    until = time.monotonic() + ANSWER_WITHIN
    try:
        wanted = next(steps)
        while True:
            ready = yield wanted
            if not ready and time.monotonic() >= until:
                raise NoAnswerError(f"no answer within {ANSWER_WITHIN:g} s")
            wanted = steps.send(ready)
    except StopIteration as end:
        result: T = end.value
        return result
