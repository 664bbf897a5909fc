"""A duty of the supervisor: done again and again, whatever the database does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from django.db import Error, connections

from django_workqueue.worker.children import Crew
from django_workqueue.worker.connection import own_connection
from django_workqueue.worker.trouble import Backoff, back_off, is_hopeless

logger: Final = logging.getLogger("django_workqueue")


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
        self._troubled_at: float | None = None
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

    @property
    def troubled_for(self) -> float:
        """Seconds since the first turn began that has not ended well; 0.0: all have."""
        began = self._troubled_at
        return 0.0 if began is None else time.monotonic() - began

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
        if self._troubled_at is None:
            self._troubled_at = time.monotonic()
        try:
            wait = turn()
        except Error as error:
            if is_hopeless(error):
                raise
            return back_off(self._trouble, self._alias, f"duty={self._purpose}", error)
        self._troubled_at = None
        if self._trouble.over():
            logger.info("database back: duty=%s", self._purpose)
        return wait

    def _wait(self, seconds: float | None) -> None:
        if self._trouble.remaining:  # whoever nudges: no hot loop
            self._ending.wait(self._trouble.remaining)
        else:
            self._nudged.wait(seconds)
