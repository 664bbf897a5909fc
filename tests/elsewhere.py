"""A second connection for tests of races: its steps are gates, nothing sleeps."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Self

from django.db import connections, transaction

#: A lost SKIP LOCKED must fail a test, not hang it.
PATIENCE = 20.0


class Elsewhere:
    """A thread with a connection of its own, which does one thing after the other."""

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._thread = ThreadPoolExecutor(1)
        self._atomic: Any = None
        self.pid = self.call(self._backend_pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is TimeoutError and self.pid:  # stuck in a lock that nobody will release
            with connections[self._alias].cursor() as cursor:
                cursor.execute("select pg_terminate_backend(%s)", [self.pid])
        if self._atomic:
            self.rollback()
        self._thread.submit(connections.close_all).result(PATIENCE)
        self._thread.shutdown()

    def start(self, step: Callable[[], Any]) -> "Future[Any]":
        """Begin *step* and don't wait for it."""
        return self._thread.submit(step)

    def call(self, step: Callable[[], Any]) -> Any:
        """Do *step* and return its answer."""
        return self.start(step).result(PATIENCE)

    def begin(self) -> None:
        """Open a transaction that stays open."""
        self._atomic = transaction.atomic(using=self._alias)
        self.call(self._atomic.__enter__)

    def commit(self) -> None:
        """Commit what was begun."""
        atomic, self._atomic = self._atomic, None
        self.call(lambda: atomic.__exit__(None, None, None))

    def rollback(self) -> None:
        """Take back what was begun."""
        atomic, self._atomic = self._atomic, None
        error = RuntimeError("rolled back by the test")
        self.call(lambda: atomic.__exit__(type(error), error, None))

    def wait_until_blocked(self, step: "Future[Any]") -> None:
        """Return once the server says that this connection waits for a lock."""
        pause = threading.Event()
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            if step.done():
                raise AssertionError(
                    f"did not wait, but ended: {step.exception() or step.result()}"
                )
            with connections[self._alias].cursor() as cursor:
                cursor.execute(
                    "select wait_event_type from pg_stat_activity where pid = %s", [self.pid]
                )
                if cursor.fetchone() == ("Lock",):
                    return
            pause.wait(0.002)
        raise AssertionError("never waited for a lock")

    def _backend_pid(self) -> int:
        connections[self._alias].ensure_connection()
        if connections[self._alias].vendor != "postgresql":
            return 0
        return int(connections[self._alias].connection.info.backend_pid)


@contextmanager
def crowd(alias: str, number: int) -> Iterator[list[Elsewhere]]:
    """That many connections, closed whatever happens."""
    with ExitStack() as stack:
        yield [stack.enter_context(Elsewhere(alias)) for _ in range(number)]
