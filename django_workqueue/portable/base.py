"""What all moves stand on: the write lock, the rows of places, and the figures."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from django.db import connections, transaction

from django_workqueue.managers import SQLITE_LOCK
from django_workqueue.models import (
    Counter,
    Lease,
    Ready,
    Waiting,
)

_CHUNK: Final = 500


class Base:
    """A database in which one writes at a time; its clock is off by *skew* (tests)."""

    def __init__(self, alias: str, skew: timedelta) -> None:
        self._alias = alias
        self._skew = skew

    def now(self) -> datetime:
        return datetime.now(UTC) + self._skew

    @contextlib.contextmanager
    def _writing(self) -> Iterator[datetime]:
        """Hold the write lock, whatever transaction mode is set; yield the time under it."""
        with transaction.atomic(using=self._alias):
            with connections[self._alias].cursor() as cursor:
                cursor.execute(SQLITE_LOCK)
            yield self.now()

    def _all(self, model: Any) -> Any:
        return model._base_manager.using(self._alias)

    def _put(self, model: Any, **fields: Any) -> None:
        # A row that shouldn't be there is left to `workqueue doctor`.
        self._all(model).bulk_create([model(**fields)], ignore_conflicts=True)

    def _leave(self, lease: Lease) -> None:
        self._all(Lease).filter(item_id=lease.item_id).delete()

    def _count(self, queue: str, **deltas: int) -> int:
        """Append a delta; the number of its row."""
        row: Counter = self._all(Counter).create(queue=queue, **deltas)
        return row.pk


KEPT_BY_PLACES: Final = (
    "item_id",
    "queue",
    "deployment_id",
    "tenant",
    "rank",
    "fence",
    "attempts",
    "enqueued_at",
)


def place_again(row: Ready | Waiting | Lease) -> dict[str, Any]:
    return {name: getattr(row, name) for name in KEPT_BY_PLACES}


def chunks(values: Sequence[Any]) -> Iterable[Sequence[Any]]:
    for start in range(0, len(values), _CHUNK):
        yield values[start : start + _CHUNK]
