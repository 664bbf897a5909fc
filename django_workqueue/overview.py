"""
What an operator looks at first: the queues' figures, the workers, and what goes unserved.

Nothing here costs more for a longer backlog: figures are sums of deltas, and what has to be
looked for among rows is looked for among so many at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from django.db.models import Count, F, Max, Sum

from django_workqueue.conf import get_settings
from django_workqueue.items import QueueHold, QueueStats
from django_workqueue.models import Counter, DeadLetter, Waiting, WorkerProcess
from django_workqueue.queues import DatabaseWorkQueue
from django_workqueue.worker.presence import PRESENCE_LAPSE, lives

#: Items without a handler that are counted in a queue, and workers that are shown.
MOST_UNKNOWN: Final = 1_000
MOST_WORKERS: Final = 1_000
#: Dead letters among which errors are grouped.
MOST_DEAD: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFigures:
    """The figures of a queue. `held`: the whole of it; `unserved`: it has work, but no worker."""

    name: str
    stats: QueueStats
    held: bool
    unserved: bool

    @property
    def live(self) -> int:
        """Items that a worker is to run, or runs."""
        return self.stats.depth + self.stats.claimed


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownHandler:
    """
    Items that wait because no worker knew their handler. `number` counts among the first
    `MOST_UNKNOWN` of the queue; `is_capped`: there are more. The age is of the oldest.
    """

    queue: str
    handler: str
    number: int
    is_capped: bool
    oldest_age_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """
    The workers that are `alive`: that showed their presence lately, and run if they are of this
    host. Of the others, that neither ended as they should nor were cleared away yet: how many.
    """

    alive: Sequence[WorkerProcess]
    gone: int
    last_gone_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Overview:
    """All of it, as of the store's time."""

    as_of: datetime
    enabled: bool
    queues: Sequence[QueueFigures]
    workers: Workers
    holds: Sequence[QueueHold]
    unknown_handlers: Sequence[UnknownHandler]


@dataclass(slots=True, kw_only=True)
class ErrorGroup:
    """Dead letters of one last error; `example` is the job id of the latest."""

    fingerprint: str
    error_class: str
    example: int
    count: int = 0
    queues: set[str] = field(default_factory=set)
    first_dead_at: datetime
    last_dead_at: datetime


def error_groups(
    queue: DatabaseWorkQueue, *, tenant: str | None = None, name: str | None = None
) -> tuple[Sequence[ErrorGroup], bool]:
    """
    Return the dead letters by their last error, those first that came last, and whether there are
    more than were looked at: the latest `MOST_DEAD`.
    """
    rows = _all(queue, DeadLetter).order_by("-dead_at")
    rows = rows.filter(tenant=tenant) if tenant is not None else rows
    columns = ("item_id", "queue", "fingerprint", "error_class", "dead_at")
    latest = list(rows.values_list(*columns)[: MOST_DEAD + 1])
    groups: dict[tuple[str, str], ErrorGroup] = {}
    for job_id, its_queue, fingerprint, error_class, dead_at in latest[:MOST_DEAD]:
        if name not in (None, its_queue):
            continue
        group = groups.setdefault(
            (fingerprint, error_class),
            ErrorGroup(
                fingerprint=fingerprint,
                error_class=error_class,
                example=job_id,
                first_dead_at=dead_at,
                last_dead_at=dead_at,
            ),
        )
        group.count += 1
        group.queues.add(its_queue)
        group.first_dead_at = dead_at
    return [*groups.values()], len(latest) > MOST_DEAD


def known_queues(queue: DatabaseWorkQueue) -> list[str]:
    """The queues of the settings, and those that have ever had an item."""
    counted = _all(queue, Counter).order_by().values_list("queue", flat=True).distinct()
    return sorted({*get_settings().queues, *counted})


def no_queue(name: str, known: Sequence[str]) -> str:
    """Say that a queue isn't *known*."""
    return f"there is no queue {name!r}; there are {', '.join(map(repr, known))}"


def look(queue: DatabaseWorkQueue, names: Sequence[str]) -> Overview:
    """Look at the queues *names*, all workers and all holds."""
    now, holds = queue.moves.now(), queue.holds()
    workers = _workers(queue, now)
    served = {name for row in workers.alive for name in row.queues}
    held = {hold.queue for hold in holds if hold.tenant is None}
    live = _live(queue)
    return Overview(
        as_of=now,
        enabled=get_settings().enabled,
        queues=[
            QueueFigures(
                name=name,
                stats=queue.stats(queue=name),
                held=name in held,
                unserved=live.get(name, 0) > 0 and name not in served,
            )
            for name in names
        ],
        workers=workers,
        holds=holds,
        unknown_handlers=[each for name in names for each in _unknown_handlers(queue, name, now)],
    )


def _workers(queue: DatabaseWorkQueue, now: datetime) -> Workers:
    lapse = now - timedelta(seconds=PRESENCE_LAPSE)
    rows = _all(queue, WorkerProcess)
    lately = list(rows.filter(seen_at__gt=lapse).order_by("name", "started_at")[:MOST_WORKERS])
    alive = [row for row in lately if lives(row, now)]
    died = [row.seen_at for row in lately if row not in alive]
    silent = rows.filter(seen_at__lte=lapse).aggregate(number=Count("pk"), last=Max("seen_at"))
    return Workers(
        alive=alive,
        gone=len(died) + silent["number"],
        last_gone_at=max(died, default=silent["last"]),
    )


def _live(queue: DatabaseWorkQueue) -> dict[str, int]:
    figures = Sum(F("ready") + F("waiting") + F("claimed"))
    return dict(_all(queue, Counter).order_by().values_list("queue").annotate(live=figures))


def _unknown_handlers(queue: DatabaseWorkQueue, name: str, now: datetime) -> list[UnknownHandler]:
    waiting = _all(queue, Waiting).filter(queue=name, cause=Waiting.Cause.UNKNOWN_HANDLER)
    rows = waiting.order_by("since").values_list("item__handler", "enqueued_at")
    found: dict[str, list[datetime]] = {}
    first = list(rows[: MOST_UNKNOWN + 1])
    for handler, enqueued_at in first[:MOST_UNKNOWN]:
        found.setdefault(handler or "", []).append(enqueued_at)
    return [
        UnknownHandler(
            queue=name,
            handler=handler,
            number=len(times),
            is_capped=len(first) > MOST_UNKNOWN,
            oldest_age_seconds=max(0.0, (now - min(times)).total_seconds()),
        )
        for handler, times in sorted(found.items())
    ]


def _all(queue: DatabaseWorkQueue, model: Any) -> Any:
    return model._base_manager.using(queue.using)
