"""What the verbs stand on: which database and which policy, and the store's troubles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final, TypeVar

from django.db import (
    DataError,
    Error,
    IntegrityError,
    ProgrammingError,
    connections,
    router,
    transaction,
)

from django_workqueue.accepting import TRIES
from django_workqueue.conf import get_settings
from django_workqueue.exceptions import (
    QueueUnavailableError,
)
from django_workqueue.items import (
    DEFAULT_QUEUE,
    WorkItem,
)
from django_workqueue.models import Lease, QueueItem
from django_workqueue.moves import (
    Moves,
)
from django_workqueue.policy import QueuePolicy
from django_workqueue.reading import ItemReader

T = TypeVar("T")

#: Not our mistake: a table, a column or the schema is missing, or the right to use it.
NOT_SET_UP: Final = {"42P01", "42703", "3F000", "42501"}
_DEADLOCK: Final = "40P01"


class Store:
    """The database of the queue, its policies and its clock."""

    def __init__(
        self,
        using: str | None = None,
        *,
        policy: QueuePolicy | None = None,
        skew: timedelta = timedelta(0),
    ) -> None:
        self._using = using
        self._policy = policy
        self._skew = skew

    @property
    def using(self) -> str:
        """The alias of the database."""
        return self._using or get_settings().database or router.db_for_write(QueueItem)

    @property
    def policy(self) -> QueuePolicy:
        return self.policy_for(DEFAULT_QUEUE)

    def policy_for(self, queue: str) -> QueuePolicy:
        """Return the policy that is stamped on items of *queue*."""
        return self._policy or get_settings().policy_for(queue)

    @property
    def moves(self) -> Moves:
        """The moves between places, on which the verbs and the workers stand."""
        return Lease.claims.db_manager(self.using).moves(self._skew)

    @property
    def _reader(self) -> ItemReader:
        return ItemReader(self.using)

    def _shown(self, rows: Sequence[Any]) -> list[WorkItem]:
        return self._reader.shown(rows, self.moves.now())

    def _atomic(self) -> Any:
        return transaction.atomic(using=self.using)

    @contextmanager
    def _store(self, operation: str, queue: str = "") -> Iterator[None]:
        """Turn trouble of the database into `QueueUnavailableError`."""
        try:
            yield
        # An OverflowError is SQLite's word for a number that it can't keep.
        except (Error, OverflowError) as error:
            if isinstance(error, ProgrammingError) and sqlstate(error) not in NOT_SET_UP:
                raise
            connection = connections[self.using]
            if not connection.in_atomic_block:
                connection.close_if_unusable_or_obsolete()
            refused = isinstance(error, DataError | IntegrityError | OverflowError)
            told = "the store refused it" if refused else "the store is unavailable"
            cause = str(error).strip().partition("\n")[0]
            raise QueueUnavailableError(
                f"{operation}: {told}: {cause}", queue=queue, operation=operation
            ) from error

    def _repeated(self, operation: str, call: Callable[[], T], queue: str = "") -> T:
        """
        Return what *call* returns; call it again if it met others crosswise and was undone.

        In a transaction of the caller's there is more to repeat than this call.
        """
        tries = 1
        while True:
            try:
                with self._store(operation, queue):
                    return call()
            except QueueUnavailableError as trouble:
                in_transaction = connections[self.using].in_atomic_block
                if in_transaction or tries == TRIES or not _is_deadlock(trouble):
                    raise
                tries += 1


def _is_deadlock(trouble: QueueUnavailableError) -> bool:
    return isinstance(trouble.__cause__, Error) and sqlstate(trouble.__cause__) == _DEADLOCK


def sqlstate(error: Error) -> str:
    """Return the server's code of *error*; empty if there is none."""
    return getattr(error.__cause__, "sqlstate", None) or ""
