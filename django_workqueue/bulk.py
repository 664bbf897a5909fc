"""
Requeueing many items: a few statements per batch, and yet each item is judged by itself.

What can't be requeued is skipped, and told by why; it never stops the others.
"""

from __future__ import annotations

import contextlib
from collections import Counter as Tally
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final, Literal

from django.db import IntegrityError

from django_workqueue.exceptions import (
    InvalidTransitionError,
    LiveTwinError,
    WorkItemNotFoundError,
)
from django_workqueue.items import WorkState
from django_workqueue.models import (
    AuditEntry,
    Counter,
    DeadLetter,
    Finished,
    QueueItem,
    Ready,
)
from django_workqueue.moves import BATCH, Moves
from django_workqueue.operating import Operator, Wish, audit_detail

Why = Literal["not_found", "wrong_state", "live_twin"]

#: Where a requeue finds its items, and as what they count there.
_ENDED: Final = {
    WorkState.DEAD_LETTERED.value: (DeadLetter, "dead_lettered"),
    WorkState.CANCELLED.value: (Finished, "cancelled"),
}


@dataclass(slots=True)
class BulkOutcome:
    """Job ids: those that were requeued, and those that were not, by why."""

    done: list[int] = field(default_factory=list)
    skipped: dict[Why, list[int]] = field(default_factory=dict)

    def skip(self, why: Why, job_id: int) -> None:
        """Note that an item was not requeued."""
        self.skipped.setdefault(why, []).append(job_id)


class BulkOperator:
    """Makes the moves of operators on many items of the database *using*."""

    def __init__(self, using: str, moves: Moves) -> None:
        self._using = using
        self._moves = moves
        self._bodies = QueueItem.bodies.db_manager(using)
        self._one = Operator(using, moves)

    def requeue(self, job_ids: Iterable[int], by: str, reason: str) -> BulkOutcome:
        """Give each of the items that have ended one more attempt, the oldest first."""
        outcome, wanted = BulkOutcome(), sorted({*job_ids})
        for start in range(0, len(wanted), BATCH):
            batch = wanted[start : start + BATCH]
            done: Sequence[int] = ()
            # A place that isn't as it should be undoes the batch; then each goes by itself.
            with contextlib.suppress(IntegrityError):
                done = self._requeue_plain(batch, by, reason)
            outcome.done += done
            for job_id in sorted({*batch} - {*done}):
                self._requeue_one(job_id, by, reason, outcome)
        return outcome

    def _requeue_plain(self, batch: Sequence[int], by: str, reason: str) -> list[int]:
        """
        Requeue what has ended and still holds its own names: nothing can stand in its way, and
        nobody but who has the body's lock moves it. Return the job ids.
        """
        with self._bodies.changing():
            self._bodies.lock(batch)
            items = QueueItem.objects.using(self._using).with_state()
            rows = [
                row
                for row in items.defer("payload", "finished__result")
                .filter(pk__in=batch)
                .order_by("pk")
                if row.state in _ENDED and not row.id_freed
                if row.dedupe_key is None or not row.key_freed
            ]
            self._leave(rows)
            self._queue_again(rows)
            self._record(rows, by, reason, self._moves.now())
        return [row.pk for row in rows]

    def _leave(self, rows: Sequence[Any]) -> None:
        for state, (place, _) in _ENDED.items():
            leaving = [row.pk for row in rows if row.state == state]
            if self._all(place).filter(item_id__in=leaving).delete()[0] != len(leaving):
                raise IntegrityError("not each item was in its place")

    def _queue_again(self, rows: Sequence[Any]) -> None:
        for attempts in sorted({row.attempts for row in rows}):
            same = [row.pk for row in rows if row.attempts == attempts]
            self._bodies.filter(pk__in=same).update(max_attempts=attempts + 1)
        self._all(Ready).bulk_create(
            Ready(
                queue=row.queue,
                deployment_id=row.deployment_id,
                tenant=row.tenant,
                rank=-row.priority,
                item_id=row.pk,
                fence=row.fence,
                attempts=row.attempts,
                enqueued_at=row.enqueued_at,
            )
            for row in rows
        )
        tally = Tally((row.queue, _ENDED[row.state][1]) for row in rows)
        self._all(Counter).bulk_create(
            Counter(queue=queue, ready=number, **{figure: -number})
            for (queue, figure), number in sorted(tally.items())
        )

    def _record(self, rows: Sequence[Any], by: str, reason: str, now: datetime) -> None:
        self._all(AuditEntry).bulk_create(
            AuditEntry(
                at=now,
                actor=by,
                verb="requeue",
                queue=row.queue,
                tenant=row.tenant,
                item=row.pk,
                item_id=row.item_id,
                reason=reason,
                detail=audit_detail() | {"job_id": row.pk, "state": row.state},
            )
            for row in rows
        )

    def _requeue_one(self, job_id: int, by: str, reason: str, outcome: BulkOutcome) -> None:
        names = self._bodies.filter(pk=job_id).values_list("item_id", "tenant").first()
        if names is None:
            outcome.skip("not_found", job_id)
            return
        wish = Wish(
            verb="requeue", item_id=names[0], tenant=names[1], job_id=job_id, by=by, reason=reason
        )
        try:
            self._one.requeue(wish)
        except WorkItemNotFoundError:
            outcome.skip("not_found", job_id)
        except LiveTwinError:
            outcome.skip("live_twin", job_id)
        except InvalidTransitionError:
            outcome.skip("wrong_state", job_id)
        else:
            outcome.done.append(job_id)

    def _all(self, model: Any) -> Any:
        return model._base_manager.using(self._using)
