"""What all repairs stand on: an item under its lock, with all its places."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from django.db.models import Exists, OuterRef

from django_workqueue import doctor
from django_workqueue.doctor.findings import Finding
from django_workqueue.models import (
    DeadLetter,
    Finished,
    Lease,
    QueueItem,
    Ready,
    Waiting,
)
from django_workqueue.reading import ItemReader

# The names by which an item that is read with its places has their rows.
_NAMES: Final = {
    Lease: "lease",
    Waiting: "waiting",
    DeadLetter: "dead_letter",
    Finished: "finished",
}


class MovedError(Exception):
    """Others moved the item while it was looked at."""


class RefusedError(Exception):
    """The finding can't be repaired safely; the text says why."""


@dataclass(frozen=True, slots=True)
class Case:
    """An item under its lock, with the rows of its places, which are locked too."""

    body: Any
    places: dict[type[Any], Any]

    @property
    def only(self) -> Any:
        """The row of its only place."""
        if len(self.places) != 1:
            raise RefusedError("it is not in exactly one place")
        [row] = self.places.values()
        return row


class Base:
    """Looks at the items of one database, and locks what it sees."""

    def __init__(self, using: str) -> None:
        self._using = using
        self._moves = Lease.claims.db_manager(using).moves()
        self._bodies = QueueItem.bodies.db_manager(using)
        self._now = self._moves.now()

    def _case(self, finding: Finding, others: Iterable[int] = ()) -> Case:
        """Lock the item, and *others*, and read it with its places, which are locked too."""
        job_id = self._job_id(finding)
        self._bodies.lock([job_id, *others])
        ready = Ready.objects.filter(
            queue=OuterRef("queue"),
            deployment_id=OuterRef("deployment_id"),
            tenant=OuterRef("tenant"),
            rank=OuterRef("priority") * -1,
            item_id=OuterRef("pk"),
        )
        # One statement for all places: between two of them the item could have moved.
        items = ItemReader(self._using).items().annotate(is_ready=Exists(ready))
        body = items.filter(pk=job_id).first()
        if body is None:
            raise RefusedError("it was deleted meanwhile")
        places = {place: name for place, name in _NAMES.items() if hasattr(body, name)}
        found = {place: self._all(place).filter(item_id=job_id) for place in places}
        if body.is_ready:
            key = {name: getattr(body, name) for name in doctor.KEPT[Ready]}
            found[Ready] = self._all(Ready).filter(item_id=job_id, rank=-body.priority, **key)
        rows = {
            place: (each.defer("result") if place is Finished else each).select_for_update().first()
            for place, each in found.items()
        }
        if None in rows.values():
            raise MovedError
        return Case(body=body, places=rows)

    def _stands(self, row: Any) -> bool:
        """True for a lease whose worker may go on with it."""
        return isinstance(row, Lease) and row.expires_at > self._now

    def _job_id(self, finding: Finding) -> int:
        assert finding.job_id is not None
        return finding.job_id

    def _all(self, model: Any) -> Any:
        return model._base_manager.using(self._using)
