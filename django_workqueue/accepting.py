"""
Accepting items: what is new is stored, what has a live twin is answered with it, and ids
and keys of finished items are taken over.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from django.db import transaction

from django_workqueue.exceptions import QueueUnavailableError
from django_workqueue.items import WorkItem, WorkState
from django_workqueue.managers import Acceptance, Moves
from django_workqueue.models import QueueItem
from django_workqueue.reading import ItemReader, accepted_item

#: Items per statement.
ENQUEUE_BATCH: Final = 2000
#: How often it looks again when others change what is in the way.
TRIES: Final = 5


class Intake:
    """
    Accepts the items *wanted* on the database *using*.

    The hot path is one statement per `ENQUEUE_BATCH` items that looks at nothing before:
    only what it could not store is looked at, in a transaction.
    """

    def __init__(self, using: str, moves: Moves, wanted: Iterable[Acceptance]) -> None:
        self._using = using
        self._moves = moves
        self._wanted = list(wanted)
        self._answers: dict[int, WorkItem] = {}
        self._reader = ItemReader(using)
        #: How many new items were stored, by queue.
        self.new: Tally[str] = Tally()

    def accept(self) -> list[WorkItem]:
        """Return what is stored, in the order asked for. Not atomic by itself for several."""
        everything = range(len(self._wanted))
        self._store_free(everything)
        for _ in range(TRIES):
            if len(self._answers) == len(self._wanted):
                return [self._answers[place] for place in everything]
            with transaction.atomic(using=self._using):
                self._look_at_holders()
        raise QueueUnavailableError(
            "the holders of the ids or dedupe keys change too fast",
            queue=self._wanted[0].queue,
            operation="enqueue",
        )

    def _store_free(self, places: Iterable[int]) -> None:
        """Store the items at *places* whose id and key are free."""
        first = _without_repeats(self._wanted, places)
        for start in range(0, len(first), ENQUEUE_BATCH):
            batch = first[start : start + ENQUEUE_BATCH]
            stored = self._moves.accept([self._wanted[place] for place in batch])
            for number, row in stored.items():
                wanted = self._wanted[batch[number]]
                self._answers[batch[number]] = accepted_item(wanted, row)
                self.new[wanted.queue] += 1

    def _look_at_holders(self) -> None:
        """Answer with live twins; else take id and key from their finished holders, and store."""
        wanted = self._wanted
        rest = [place for place in range(len(wanted)) if place not in self._answers]
        bodies = QueueItem.bodies.db_manager(self._using)
        # All locked first, in one order, and looked at in a new statement: nobody else can
        # now free or requeue them, and what they are is what they stay.
        rows = self._reader.rows(bodies.lock_holders([wanted[place] for place in rest]))
        holders = _Holders(rows)
        twins = {place: twin for place in rest if (twin := holders.live_twin(wanted[place]))}
        shown = self._reader.shown([*twins.values()], self._moves.now())
        self._answers.update(zip(twins, shown, strict=True))
        for queue, number in Tally(wanted[place].queue for place in twins).items():
            self._moves.count_suppressed(queue, number)
        again = [place for place in rest if place not in twins]
        bodies.free_names([row.pk for row in rows], [wanted[place] for place in again])
        for place in again:
            wanted[place] = replace(wanted[place], fence=holders.fence(wanted[place]))
        self._store_free(again)


def _without_repeats(wanted: Sequence[Acceptance], places: Iterable[int]) -> list[int]:
    """Those of *places* whose id and key no earlier one of them has."""
    seen: set[tuple[str, str, str]] = set()
    first = []
    for place in places:
        each = wanted[place]
        names = {("id", each.tenant, each.item_id)}
        if each.dedupe_key is not None:
            names.add(("key", each.tenant, each.dedupe_key))
        if not names & seen:
            first.append(place)
        seen |= names
    return first


class _Holders:
    """The bodies that hold ids and keys, by these names."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self._by_id = {(row.tenant, row.item_id): row for row in rows if not row.id_freed}
        self._by_key = {(row.tenant, row.dedupe_key): row for row in rows if not row.key_freed}

    def live_twin(self, wanted: Acceptance) -> Any:
        """The live holder of the key, or else of the id."""
        key = wanted.dedupe_key
        by_key = self._by_key.get((wanted.tenant, key)) if key is not None else None
        by_id = self._by_id.get((wanted.tenant, wanted.item_id))
        live = (row for row in (by_key, by_id) if row and row.state and WorkState(row.state).live)
        return next(live, None)

    def fence(self, wanted: Acceptance) -> int:
        """The latest claim number under the id."""
        row = self._by_id.get((wanted.tenant, wanted.item_id))
        return int(row.fence or 0) if row else 0
