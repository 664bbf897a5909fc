"""
Accepting items: what is new is stored, what has a live twin is answered with it, and ids
and keys of finished items are taken over.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final

from django_workqueue.exceptions import QueueUnavailableError
from django_workqueue.items import WorkItem, WorkState
from django_workqueue.models import QueueItem
from django_workqueue.moves import Acceptance, Moves
from django_workqueue.reading import ItemReader, accepted_item

#: Items per statement.
ENQUEUE_BATCH: Final = 2000
#: How often it looks again in vain, because others change what is in the way.
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
        """
        Return what is stored, in the order asked for.

        As if accepted one after the other. Several belong into one transaction.
        """
        everything = range(len(self._wanted))
        if len(everything) > 1:
            self._reserve_job_ids()
        self._store_free(_without_repeats(self._wanted))
        fruitless = 0
        while rest := [place for place in everything if place not in self._answers]:
            with QueueItem.bodies.db_manager(self._using).changing():
                self._look_at_holders(rest)
            fruitless += all(place not in self._answers for place in rest)
            if fruitless == TRIES:
                raise QueueUnavailableError(
                    "the holders of the ids or dedupe keys change too fast",
                    queue=self._wanted[0].queue,
                    operation="enqueue",
                )
        return [self._answers[place] for place in everything]

    def _reserve_job_ids(self) -> None:
        # Age goes by job id: whatever has to be looked at must not lose its place.
        job_ids = self._moves.reserve(len(self._wanted))
        self._wanted = [
            replace(each, id=job_id) for each, job_id in zip(self._wanted, job_ids, strict=True)
        ]

    def _store_free(self, places: Sequence[int]) -> None:
        """Store the items at *places* whose id and key are free; no two of them share one."""
        for start in range(0, len(places), ENQUEUE_BATCH):
            batch = places[start : start + ENQUEUE_BATCH]
            stored = self._moves.accept([self._wanted[place] for place in batch])
            for number, row in stored.items():
                wanted = self._wanted[batch[number]]
                self._answers[batch[number]] = accepted_item(wanted, row)
                self.new[wanted.queue] += 1

    def _look_at_holders(self, rest: Sequence[int]) -> None:
        """Answer with live twins; else take id and key from their finished holders, and store."""
        bodies = QueueItem.bodies.db_manager(self._using)
        # All locked first, in one order, and looked at in a new statement: nobody else can
        # now free or requeue them, and what they are is what they stay.
        names = [self._wanted[place] for place in rest]
        holding = bodies.holders((each.tenant, each.item_id, each.dedupe_key) for each in names)
        rows = self._reader.rows(bodies.lock(holding))
        holders = _Holders(rows)
        twins, followers, new = self._sort_out(rest, holders)
        shown = self._reader.shown([*twins.values()], self._moves.now())
        self._answers.update(zip(twins, shown, strict=True))
        finished = [self._wanted[place] for place in new]
        bodies.set_freed(True, **holders.of(finished))
        for place in new:
            wanted = self._wanted[place]
            row = holders.by_id(wanted)
            self._wanted[place] = replace(wanted, fence=int(row.fence or 0) if row else 0)
        self._store_free(new)
        # Whose other name somebody took just now lets go of nothing: it is looked at again.
        unstored = [self._wanted[place] for place in new if place not in self._answers]
        bodies.set_freed(False, **holders.of(unstored))
        answered = {
            place: self._answers[leader]
            for place, leader in followers.items()
            if leader in self._answers
        }
        self._answers |= answered
        for queue, number in Tally(self._wanted[p].queue for p in (*twins, *answered)).items():
            self._moves.count_suppressed(queue, number)

    def _sort_out(
        self, rest: Sequence[int], holders: _Holders
    ) -> tuple[dict[int, Any], dict[int, int], list[int]]:
        """Tell, one after the other: twins of live holders, of earlier places, and new ones."""
        twins: dict[int, Any] = {}
        followers: dict[int, int] = {}
        new: list[int] = []
        taken: dict[_Name, int] = {}
        for place in rest:
            names = _names(self._wanted[place])
            for name in names:  # the key first
                if name in taken:
                    followers[place] = taken[name]
                    break
                if twin := holders.live(name):
                    twins[place] = twin
                    break
            else:
                new.append(place)
                taken |= dict.fromkeys(names, place)
        return twins, followers, new


_Name = tuple[str, str, str]


def _names(wanted: Acceptance) -> list[_Name]:
    """The names that an item needs for itself while it lives, its key first."""
    names = [("id", wanted.tenant, wanted.item_id)]
    if wanted.dedupe_key is not None:
        names.insert(0, ("key", wanted.tenant, wanted.dedupe_key))
    return names


def _without_repeats(wanted: Sequence[Acceptance]) -> list[int]:
    """The places of those whose id and key no earlier one has."""
    seen: set[_Name] = set()
    first = []
    for place, each in enumerate(wanted):
        names = _names(each)
        if seen.isdisjoint(names):
            first.append(place)
        seen.update(names)
    return first


class _Holders:
    """The bodies that hold ids and keys, by these names."""

    def __init__(self, rows: Sequence[Any]) -> None:
        self._rows: dict[_Name, Any] = {}
        for row in rows:
            if not row.id_freed:
                self._rows["id", row.tenant, row.item_id] = row
            if not row.key_freed and row.dedupe_key is not None:
                self._rows["key", row.tenant, row.dedupe_key] = row

    def live(self, name: _Name) -> Any:
        """The holder of *name*, if it is live. Raise if nobody can know."""
        row = self._rows.get(name)
        if row and not row.state:  # as a twin it would swallow the new item, else it may run twice
            raise QueueUnavailableError(
                f"enqueue: item {row.pk} has the id or the dedupe key, and nobody can tell whether "
                "it lives: run workqueue doctor",
                queue=row.queue,
                operation="enqueue",
            )
        return row if row and WorkState(row.state).live else None

    def of(self, wanted: Sequence[Acceptance]) -> dict[str, list[int]]:
        """The job ids of the holders of `ids` and of `keys`."""
        return {
            "ids": [row.pk for each in wanted if (row := self.by_id(each))],
            "keys": [row.pk for each in wanted if (row := self.by_key(each))],
        }

    def by_id(self, wanted: Acceptance) -> Any:
        """The holder of the id."""
        return self._rows.get(("id", wanted.tenant, wanted.item_id))

    def by_key(self, wanted: Acceptance) -> Any:
        """The holder of the key."""
        key = wanted.dedupe_key
        return None if key is None else self._rows.get(("key", wanted.tenant, key))
