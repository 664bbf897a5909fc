"""Repairs of where items stand: each gets exactly one place, which is like its body."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Final

from django_workqueue import doctor
from django_workqueue.doctor.base import Base
from django_workqueue.doctor.findings import Finding
from django_workqueue.failures import FailureKind, describe
from django_workqueue.items import WorkState
from django_workqueue.models import (
    Counter,
    DeadLetter,
    Failure,
    Finished,
    Lease,
    QueueItem,
    Ready,
    Waiting,
)

#: What the fence of a lost item is raised by: releases raised it too, and left no trace. A
#: worker that is late by fewer claims can't be taken for the next holder.
FENCE_MARGIN: Final = 1_000
LOST: Final = "found in no place by workqueue doctor; whether it had begun or ended is not known"

# In which order a place is kept if an item is in several; a completed one comes before all.
_CAREFUL: Final = (DeadLetter, Finished, Lease, Waiting, Ready)
_ENDED: Final = (WorkState.DEAD_LETTERED, WorkState.CANCELLED)


class Placing(Base):
    """Each mend returns what it did, or nothing if there was nothing to do any more."""

    def __init__(self, using: str) -> None:
        super().__init__(using)
        # The queues whose counters know of more ends than there are records. Asked first of
        # all: the repairs change what the counters prove.
        self._lacking = frozenset(
            each.queue
            for each in doctor.wrong_counters(using)
            if each.figure in ("completed", "cancelled", "dead_lettered") and each.error > 0
        )

    # Rows that don't fit their item.

    def _delete_without_body(self, finding: Finding) -> str:
        if self._bodies.lock([self._job_id(finding)]) or self._locked(finding) is None:
            return ""
        self._all(finding.place).filter(pk=finding.cursor).delete()
        return f"deleted its row in {finding.place.__name__}"

    def _write_as_body(self, finding: Finding) -> str:
        place, job_id = finding.place, self._job_id(finding)
        self._bodies.lock([job_id])
        row = self._locked(finding)
        body = self._bodies.defer("payload").filter(pk=job_id).first()
        if row is None or body is None:
            return ""
        kept = {name: getattr(body, name) for name in doctor.KEPT[place]}
        if place in doctor.RANKED:
            kept["rank"] = -body.priority
        if all(getattr(row, name) == value for name, value in kept.items()):
            return ""
        if place is not Ready:
            self._all(place).filter(pk=row.pk).update(**kept)
            return f"wrote its row in {place.__name__} as the item is"
        # All of that is its key.
        self._all(Ready).filter(pk=row.pk).delete()
        if self._all(Ready).filter(item_id=job_id, **kept).exists():
            return "deleted a second row in Ready"
        others = {name: getattr(row, name) for name in ("fence", "attempts", "settled_by")}
        self._all(Ready).create(item_id=job_id, enqueued_at=row.enqueued_at, **kept, **others)
        return "wrote its row in Ready as the item is"

    def _locked(self, finding: Finding) -> Any:
        rows = self._all(finding.place).select_for_update()
        if finding.place is Finished:
            rows = rows.defer("result")
        return rows.filter(pk=finding.cursor).first()

    # Several places, or none.

    def _keep_one_place(self, finding: Finding) -> str:
        case = self._case(finding)
        if len(case.places) < 2:
            return ""
        kept = self._most_careful(case.places)
        for place, row in case.places.items():
            if place is not kept:
                self._all(place).filter(pk=row.pk).delete()
        row, fence = case.places[kept], max(each.fence for each in case.places.values())
        if not self._stands(row) and row.fence < fence:
            self._all(kept).filter(pk=row.pk).update(fence=fence)
        gone = ", ".join(place.__name__ for place in case.places if place is not kept)
        return f"kept {kept.__name__}, deleted {gone}"

    def _most_careful(self, places: dict[type[Any], Any]) -> type[Any]:
        if Finished in places and places[Finished].state == WorkState.COMPLETED:
            return Finished
        return next(place for place in _CAREFUL if place in places)

    def _place(self, finding: Finding) -> str:
        """Do with an item in no place as the reaper would with a lapsed lease."""
        case = self._case(finding)
        if case.places:
            return ""
        body = case.body
        failures = list(self._all(Failure).filter(item_id=body.pk).order_by("number"))
        known = max([self._fence_of_namesakes(body), *(each.fence for each in failures)])
        attempts = max([0, *(each.number for each in failures)])
        had_ended = any(each.outcome in _ENDED for each in failures[-1:])
        if not had_ended and attempts < body.max_attempts:
            attempts += 1
            failures.append(self._count_as_lost(body, attempts, known))
        if had_ended:
            why = "its last failure had ended it"
        elif attempts >= body.max_attempts:
            why = "no attempt is left"
        else:
            why = self._why_it_may_have_ended(body)
        if why:
            self._bury(body, failures[-1], known + FENCE_MARGIN, attempts)
            return f"put into the dead letter: {why}"
        self._all(Ready).create(
            queue=body.queue,
            deployment_id=body.deployment_id,
            tenant=body.tenant,
            rank=-body.priority,
            item_id=body.pk,
            fence=known + FENCE_MARGIN,
            attempts=attempts,
            enqueued_at=body.enqueued_at,
        )
        return f"queued again, with {attempts} of {body.max_attempts} attempts counted"

    def _fence_of_namesakes(self, body: Any) -> int:
        """The highest fence of other acceptances of the id: they share its row of numbers."""
        items = QueueItem.objects.using(self._using).with_state()
        named = items.filter(tenant=body.tenant, item_id=body.item_id)
        fences: list[int | None] = [*named.values_list("fence", flat=True)]
        return max(fence or 0 for fence in fences)

    def _why_it_may_have_ended(self, body: Any) -> str:
        if body.id_freed or (body.key_freed and body.dedupe_key is not None):
            return "its id or key was given on, as those of ended items are"
        if body.queue in self._lacking:
            return "it may have ended: its queue counts more ended items than it has"
        return ""

    def _count_as_lost(self, body: Any, number: int, fence: int) -> Any:
        text = describe(LOST)
        self._all(Counter).create(queue=body.queue, failures=1)
        return self._all(Failure).create(
            item_id=body.pk,
            number=number,
            fence=fence,
            kind=FailureKind.LAPSED.value,
            outcome=WorkState.QUEUED.value,
            message=text.message,
            fingerprint=text.fingerprint,
            failed_at=self._now,
        )

    def _bury(self, body: Any, last: Any, fence: int, attempts: int) -> None:
        kept = body.dead_letter_retention_seconds
        exhausted = attempts >= body.max_attempts
        # A page of dead letters goes on from the failure that ended an item, and its time.
        self._all(Failure).filter(pk=last.pk).update(outcome=WorkState.DEAD_LETTERED.value)
        self._all(DeadLetter).create(
            item_id=body.pk,
            tenant=body.tenant,
            queue=body.queue,
            deployment_id=body.deployment_id,
            fence=fence,
            attempts=attempts,
            dead_at=last.failed_at,
            keep_until=None if kept is None else self._now + timedelta(seconds=kept),
            reason=DeadLetter.Reason.EXHAUSTED if exhausted else DeadLetter.Reason.REJECTED,
            error_class=last.error_class,
            fingerprint=last.fingerprint,
        )
