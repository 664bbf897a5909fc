"""
A runtime thread's own way to the database, and how it behaves when there is none.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from django.db import Error, ProgrammingError, connections

from django_workqueue import sql
from django_workqueue.conf import get_settings
from django_workqueue.worker.children import Crew

logger: Final = logging.getLogger("django_workqueue")

FIRST_WAIT: Final = 0.2
LONGEST_WAIT: Final = 15.0

# A connection that has gone silent must be noticed well within a lease.
_PATIENCE: Final = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 15_000,
}
_LIMITS: Final = {"statement_timeout": "15s", "lock_timeout": "1s"}
#: The runs of a statement after which it is prepared: its plan is kept from then on.
PREPARED_FROM: Final = 2


def own_connection(alias: str, purpose: str) -> None:
    """
    Give the calling thread a connection to *alias* that is the runtime's alone.

    It is direct (outside a project's pool), stays open, and on PostgreSQL prepares its
    statements and bounds how long they may take and wait. *purpose* shows in the server's
    list of sessions.
    """
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
        if not get_settings().pooler:
            # A pooler in transaction mode would refuse them, or leak them to others.
            limits = _LIMITS | sql.WORKER_OPTIONS
            given = own["OPTIONS"].get("options", "")
            settings = " ".join(f"-c {name}={value}" for name, value in limits.items())
            own["OPTIONS"] |= {
                "options": f"{given} {settings}".strip(),
                "server_side_binding": True,
                "prepare_threshold": PREPARED_FROM,
            }
    connection.settings_dict = own
    connections[alias] = connection


class Backoff:
    """Doubling waits with jitter while something keeps going wrong."""

    def __init__(self, first: float = FIRST_WAIT, longest: float = LONGEST_WAIT) -> None:
        self._first = first
        self._longest = longest
        self._failures = 0
        self._until = 0.0

    def failed(self) -> float:
        """Note one more failure; return the seconds to wait now."""
        wait = min(self._first * 2.0 ** min(self._failures, 30), self._longest)
        self._failures += 1
        wait *= random.uniform(0.5, 1.0)
        self._until = time.monotonic() + wait
        return wait

    def over(self) -> bool:
        """Note a success; return whether there had been failures."""
        had, self._failures, self._until = self._failures > 0, 0, 0.0
        return had

    @property
    def remaining(self) -> float:
        """Seconds of the present wait that are left; 0.0: go ahead."""
        return max(0.0, self._until - time.monotonic())


class DutyThread:
    """
    A thread with duties, which go on after any trouble of the database.

    Any other error ends it, and the supervisor hears of it: a worker whose leases nobody
    renews must not look healthy.
    """

    def __init__(self, purpose: str, alias: str, crew: Crew) -> None:
        self._purpose = purpose
        self._alias = alias
        self._crew = crew
        self._post = crew.post
        self._nudged = threading.Event()
        self._ending = threading.Event()
        self._trouble = Backoff()
        self._thread = threading.Thread(target=self._run, name=f"workqueue-{purpose}", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def nudge(self) -> None:
        """Look at the duties now. From any thread."""
        self._nudged.set()

    def end(self, timeout: float) -> None:
        """Finish and end, within *timeout* seconds."""
        self._ending.set()
        self._nudged.set()
        self._thread.join(timeout)

    def turn(self) -> float | None:
        """Do what is due; return the seconds until there is more, None if only a nudge tells."""
        raise NotImplementedError

    def finish(self) -> None:
        """Do what is to be done at the end."""

    def _run(self) -> None:
        own_connection(self._alias, self._purpose)
        try:
            while not self._ending.is_set():
                self._nudged.clear()
                self._wait(self._guarded(self.turn))
            self._guarded(self.finish)
        except BaseException:
            logger.exception("duties failed: purpose=%s", self._purpose)
            self._post(self._crew.failed)
        finally:
            connections[self._alias].close()

    def _guarded(self, turn: Callable[[], float | None]) -> float | None:
        try:
            wait = turn()
        except Error as error:
            if isinstance(error, ProgrammingError):
                raise  # a missing table or column: repeating can't help
            pause = self._trouble.failed()
            logger.warning(
                "database trouble: duty=%s retry_in=%.1fs error=%s",
                self._purpose,
                pause,
                str(error).strip(),
            )
            connections[self._alias].close()
            return pause
        if self._trouble.over():
            logger.info("database back: duty=%s", self._purpose)
        return wait

    def _wait(self, seconds: float | None) -> None:
        if self._trouble.remaining:  # whoever nudges: no hot loop
            self._ending.wait(self._trouble.remaining)
        else:
            self._nudged.wait(seconds)
