"""
The figures of a queue: what `stats` tells, and the minute's samples for charts.

Nothing that a caller asks costs more for a longer backlog. Counts are sums of deltas; what
has to be looked for among the rows is looked for among so many at most. Only the minute's
sample reads a whole queue.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any, Final

from django.db.models import Min, Sum

from django_workqueue.items import QueueStats
from django_workqueue.models import COUNTED, Counter, Ready, Sample, Waiting
from django_workqueue.moves import Moves
from django_workqueue.reading import planned

#: Queued items up to which the oldest age, and overdue ones up to which these, are exact.
EXACT_UP_TO: Final = 100_000
#: How old a sample may be that tells the age of a longer backlog.
SAMPLE_LAPSE: Final = timedelta(minutes=5)
SAMPLES_KEPT: Final = timedelta(days=7)
#: Rows among which the oldest is looked for in a longer backlog without a sample, and by one.
_LOOKED_AT: Final = 10_000
_SAMPLED: Final = 10_000_000


class Figures:
    """Reads the figures of the database *using*."""

    def __init__(self, using: str, moves: Moves) -> None:
        self._using = using
        self._moves = moves

    def depth(self, queue: str) -> int:
        """How many items of *queue* are queued."""
        counts = self._counts(queue)
        return counts["ready"] + counts["waiting"]

    def stats(self, queue: str) -> QueueStats:
        """All figures of *queue*; of a long backlog as of the latest sample."""
        now = self._moves.now()
        counts = self._counts(queue)
        depth = counts["ready"] + counts["waiting"]
        sample = self._recent_sample(queue, now) if depth > EXACT_UP_TO else None
        age = sample.oldest_age_seconds if sample else self._oldest_age(queue, now, depth)
        return QueueStats(
            depth=depth,
            due=counts["ready"] + self._overdue(queue, now),
            claimed=counts["claimed"],
            paused=counts["paused"],
            dead_lettered=counts["dead_lettered"],
            completed=counts["completed"],
            cancelled=counts["cancelled"],
            oldest_age_seconds=age,
            reaped=counts["reaped"],
            duplicates_suppressed=counts["duplicates_suppressed"],
            as_of=sample.at if sample else now,
        )

    def take_samples(self) -> None:
        """Keep this minute's figures of every queue, unless somebody has; drop old ones."""
        minute = self._moves.now().replace(second=0, microsecond=0)
        samples = self._all(Sample)
        if samples.filter(at=minute).exists():
            return
        queues = self._all(Counter).order_by().values_list("queue", flat=True).distinct()
        taken = [self._sample(queue, minute) for queue in list(queues)]
        samples.bulk_create(taken, ignore_conflicts=True)
        samples.filter(at__lt=minute - SAMPLES_KEPT).delete()

    def _sample(self, queue: str, at: datetime) -> Sample:
        counts = self._counts(queue)
        with planned(self._using, enable_seqscan="on", enable_bitmapscan="on"):
            age = self._age_among(queue, at, _SAMPLED)
        return Sample(
            queue=queue,
            at=at,
            depth=counts["ready"] + counts["waiting"],
            claimed=counts["claimed"],
            dead_lettered=counts["dead_lettered"],
            completions=counts["completions"],
            failures=counts["failures"],
            oldest_age_seconds=age,
        )

    def _counts(self, queue: str) -> dict[str, int]:
        sums = self._all(Counter).filter(queue=queue).aggregate(**{n: Sum(n) for n in COUNTED})
        return {name: int(value or 0) for name, value in sums.items()}

    def _recent_sample(self, queue: str, now: datetime) -> Sample | None:
        samples = self._all(Sample).filter(queue=queue, at__gt=now - SAMPLE_LAPSE)
        latest: Sample | None = samples.order_by("-at").first()
        return latest

    def _oldest_age(self, queue: str, now: datetime, depth: int) -> float:
        """The longest wait in seconds; a lower bound for a backlog longer than is read exactly."""
        if depth <= EXACT_UP_TO:
            with planned(self._using, enable_seqscan="off"):
                return self._age_among(queue, now, EXACT_UP_TO)
        with planned(self._using, enable_seqscan="off", enable_bitmapscan="off"):
            return self._age_among(queue, now, _LOOKED_AT)

    def _age_among(self, queue: str, now: datetime, limit: int) -> float:
        """The longest wait in seconds among *limit* rows of each place."""
        ready = self._all(Ready).filter(queue=queue)
        waiting = self._all(Waiting).filter(queue=queue, due_at__isnull=False)
        oldest = [
            place.order_by()[:limit].aggregate(oldest=Min("enqueued_at"))["oldest"]
            for place in (ready, waiting)
        ]
        ages: list[float] = [
            (now - moment).total_seconds() for moment in oldest if moment is not None
        ]
        return max([0.0, *ages])

    def _overdue(self, queue: str, now: datetime) -> int:
        """Waiting items whose time has come; they are promoted soon, so they are few."""
        late = self._all(Waiting).filter(queue=queue, due_at__lte=now).order_by()
        with planned(self._using, enable_seqscan="off", enable_bitmapscan="off"):
            return int(late[:EXACT_UP_TO].count())

    def _all(self, model: Any) -> Any:
        return model._base_manager.using(self._using)
