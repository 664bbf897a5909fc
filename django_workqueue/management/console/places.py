"""
The rows of a place, as far as an index leads to them.

What no index has is looked for among so many rows of a queue at most: a list never costs more
for a longer backlog.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django_workqueue.models import DeadLetter, Lease, Ready, Waiting

#: Rows among which is looked for what no index has.
LOOKED_AT: Final = 10_000

#: Rows, and whether others like them may be beyond those that were looked at.
Found = tuple[list[Any], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Up to `most` rows; `queue` or `tenant` None: of all. `queues` are all there are."""

    using: str
    queue: str | None
    tenant: str | None
    most: int
    queues: Sequence[str]

    def served(self) -> Sequence[str]:
        """The queues to look at, where an index begins with the queue."""
        return self.queues if self.queue is None else [self.queue]

    def rows(self, model: Any, **values: Any) -> Any:
        """The rows of *model* with *values*, each of them None for any."""
        wanted = {name: value for name, value in values.items() if value is not None}
        return model._base_manager.using(self.using).filter(**wanted)


def dead_letters(wanted: Wanted) -> Found:
    """The latest first."""
    letters = wanted.rows(DeadLetter, tenant=wanted.tenant).order_by("-dead_at", "-item_id")
    if wanted.queue is None:
        return list(letters[: wanted.most]), False
    return _look(letters, queue=wanted.queue)


def claimed(wanted: Wanted) -> Found:
    """Those first that are held the longest; the table is as large as what is in flight."""
    leases = wanted.rows(Lease, queue=wanted.queue, tenant=wanted.tenant)
    return list(leases.order_by("claimed_at", "item_id")[: wanted.most]), False


def paused(wanted: Wanted) -> Found:
    """Those first that are put aside the longest."""
    found, is_capped = [], False
    for queue in wanted.served():
        # Unordered: this is a range of the index, which has no time to sort by.
        rows = wanted.rows(Waiting, queue=queue).filter(due_at__isnull=True).order_by()
        more, is_cut = _look(rows, tenant=wanted.tenant)
        found += more
        is_capped |= is_cut
    return sorted(found, key=lambda row: (row.since, row.pk)), is_capped


def queued(wanted: Wanted) -> Found:
    """
    First what can be claimed, by queue, deployment and tenant, in the order of service; then
    what is due later, the earliest first.
    """
    ready: list[Any] = []
    for queue in wanted.served():
        for deployment_id in _deployments(wanted, queue):
            lane = {"queue": queue, "deployment_id": deployment_id, "tenant": wanted.tenant}
            rows = wanted.rows(Ready, **lane).order_by("tenant", "rank", "item_id")
            ready += rows[: wanted.most - len(ready)]
            if len(ready) == wanted.most:
                return ready, False
    later, is_capped = _due_later(wanted)
    return ready + later, is_capped


def _deployments(wanted: Wanted, queue: str) -> Iterator[str]:
    """The deployments with something ready in *queue*: a step along the index each."""
    rows = wanted.rows(Ready, queue=queue).order_by("deployment_id")
    names = rows.values_list("deployment_id", flat=True)
    name = names.first()
    while name is not None:
        yield name
        name = names.filter(deployment_id__gt=name).first()


def _due_later(wanted: Wanted) -> Found:
    found, is_capped = [], False
    for queue in wanted.served():
        rows = wanted.rows(Waiting, queue=queue).filter(due_at__isnull=False)
        rows = rows.order_by("due_at", "item_id")
        if wanted.tenant is None:
            found += rows[: wanted.most]
            continue
        own, is_cut = _look(rows, tenant=wanted.tenant)
        found += own
        is_capped |= is_cut
    return sorted(found, key=lambda row: (row.due_at, row.pk)), is_capped


def _look(rows: Any, **values: Any) -> Found:
    """Those of the first rows that have *values*, each of them None for any."""
    looked = list(rows[:LOOKED_AT])
    wanted = {name: value for name, value in values.items() if value is not None}
    found = [row for row in looked if all(getattr(row, n) == v for n, v in wanted.items())]
    return found, len(looked) == LOOKED_AT
