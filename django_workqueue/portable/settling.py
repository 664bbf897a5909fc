"""Renewing claims, and ending them, by their holders and without."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

from django_workqueue.failures import FailureKind, FailureText, describe
from django_workqueue.items import WorkState
from django_workqueue.models import (
    DeadLetter,
    Failure,
    Finished,
    Lease,
    QueueItem,
    Ready,
    Waiting,
)
from django_workqueue.moves import (
    Claim,
    Completion,
    EndedAttempt,
    Release,
    Renewal,
)
from django_workqueue.policy import (
    LEASE_LAPSED,
    WORKER_RESTARTED,
    after_attempt,
    doubled_wait,
)
from django_workqueue.portable.base import Base, place_again


class Settling(Base):
    """Renews and ends claims, each by its fence."""

    def renew(self, worker: str, claims: Sequence[Claim], *, wait: bool) -> dict[int, Renewal]:
        renewed = {}
        with self._writing() as now:
            for item, fence in claims:
                lease = self._mine(worker, item, fence, now)
                if lease is None or lease.renewable_until <= now:
                    continue
                longest = min(now + timedelta(seconds=lease.lease_seconds), lease.renewable_until)
                lease.expires_at = max(lease.expires_at, longest)
                lease.save(using=self._alias, update_fields=["expires_at"])
                renewed[item] = Renewal(
                    expires_at=lease.expires_at,
                    cancel_requested=lease.cancel_requested,
                    renewable_for=(lease.renewable_until - now).total_seconds(),
                )
        return renewed

    def complete(self, worker: str, settlements: Sequence[Completion]) -> dict[int, WorkState]:
        settled = {}
        with self._writing() as now:
            for each in settlements:
                lease = self._mine(worker, each.item, each.fence, now)
                if lease is None or (body := self._body(lease)) is None:
                    continue
                result = None if each.result is None else json.loads(each.result)
                self._finish(lease, body, WorkState.COMPLETED, lease.attempts, now, result)
                self._count(lease.queue, claimed=-1, completed=1, completions=1)
                settled[each.item] = WorkState.COMPLETED
        return settled

    def release(self, worker: str, settlements: Sequence[Release]) -> dict[int, WorkState]:
        settled = {}
        with self._writing() as now:
            for each in settlements:
                lease = self._mine(worker, each.item, each.fence, now)
                if lease is None or (body := self._body(lease)) is None:
                    continue
                if lease.cancel_requested:
                    self._finish(lease, body, WorkState.CANCELLED, lease.attempts, now)
                    self._count(lease.queue, claimed=-1, cancelled=1)
                    settled[each.item] = WorkState.CANCELLED
                    continue
                place = place_again(lease) | {"settled_by": lease.worker}
                if each.cause == Waiting.Cause.PAUSED:
                    self._leave(lease)
                    self._put(Waiting, **place, due_at=None, since=now, cause=each.cause)
                    self._count(lease.queue, claimed=-1, paused=1)
                    settled[each.item] = WorkState.PAUSED
                    continue
                self._queue_again(lease, place, each.delay, each.cause, now)
                settled[each.item] = WorkState.QUEUED
        return settled

    def fail(self, worker: str, settlements: Sequence[EndedAttempt]) -> dict[int, WorkState]:
        settled: dict[int, WorkState] = {}
        with self._writing() as now:
            for each in settlements:
                lease = self._mine(worker, each.item, each.fence, now)
                if lease is not None:
                    settled |= self._end(
                        lease, each.kind, each.text, now, each.retryable, each.delay, worker
                    )
        return settled

    def reap(self, limit: int) -> dict[int, WorkState]:
        ended: dict[int, WorkState] = {}
        with self._writing() as now:
            lapsed = self._all(Lease).filter(expires_at__lte=now)
            for lease in list(lapsed.order_by("expires_at", "item_id")[:limit]):
                ended |= self._end(lease, FailureKind.LAPSED, describe(LEASE_LAPSED), now)
        return ended

    def adopt(self, worker: str, spare: Sequence[str] = ()) -> dict[int, WorkState]:
        ended: dict[int, WorkState] = {}
        with self._writing() as now:
            held = self._all(Lease).filter(worker=worker).exclude(boot__in=spare)
            text = describe(WORKER_RESTARTED)
            for lease in list(held.order_by("expires_at", "item_id")):
                ended |= self._end(lease, FailureKind.RESTARTED, text, now, delay=0.0)
        return ended

    def _mine(self, worker: str, item: int, fence: int, now: datetime) -> Lease | None:
        mine = self._all(Lease).filter(item_id=item, fence=fence, worker=worker, expires_at__gt=now)
        lease: Lease | None = mine.first()
        return lease

    def _body(self, lease: Lease) -> QueueItem | None:
        """The item; of one that somebody deleted only the lease is left, which goes."""
        # Without the payload, which may be one that can't be read.
        bodies = self._all(QueueItem).defer("payload").filter(pk=lease.item_id)
        body: QueueItem | None = bodies.first()
        if body is None:
            self._leave(lease)
            self._count(lease.queue, claimed=-1)
        return body

    def _end(
        self,
        lease: Lease,
        kind: FailureKind,
        text: FailureText,
        now: datetime,
        retryable: bool = True,
        delay: float | None = None,
        settled_by: str = "",
    ) -> dict[int, WorkState]:
        """End an attempt without success: count it, record it, and put the item on."""
        body = self._body(lease)
        if body is None:
            return {}
        attempts = lease.attempts + 1
        state = after_attempt(
            attempts=attempts,
            max_attempts=lease.max_attempts,
            retryable=retryable,
            cancel_requested=lease.cancel_requested,
        )
        self._record(lease, kind, text, state, now)
        self._count(lease.queue, failures=1, reaped=int(kind is FailureKind.LAPSED))
        if state is WorkState.QUEUED:
            backoff = doubled_wait(attempts, body.backoff_seconds, body.backoff_cap_seconds)
            place = place_again(lease) | {"attempts": attempts, "settled_by": settled_by}
            self._queue_again(lease, place, backoff if delay is None else delay, "backoff", now)
        elif state is WorkState.CANCELLED:
            self._finish(lease, body, state, attempts, now)
            self._count(lease.queue, claimed=-1, cancelled=1)
        else:
            reason = "exhausted" if retryable else "rejected"
            self._bury(lease, body, text, now, reason=reason, settled_by=settled_by)
        return {lease.item_id: state}

    def _record(
        self, lease: Lease, kind: FailureKind, text: FailureText, state: WorkState, now: datetime
    ) -> None:
        self._put(
            Failure,
            item_id=lease.item_id,
            number=lease.attempts + 1,
            fence=lease.fence,
            kind=kind.value,
            outcome=state.value,
            error_class=text.error_class,
            message=text.message,
            traceback=text.traceback,
            fingerprint=text.fingerprint,
            worker=lease.worker,
            claimed_at=lease.claimed_at,
            failed_at=now,
        )

    def _queue_again(
        self, lease: Lease, place: dict[str, Any], delay: float, cause: str, now: datetime
    ) -> None:
        self._leave(lease)
        if delay <= 0:
            self._put(Ready, **place)
            self._count(lease.queue, claimed=-1, ready=1)
            return
        due_at = now + timedelta(seconds=delay)
        self._put(Waiting, **place, due_at=due_at, since=now, cause=cause)
        self._count(lease.queue, claimed=-1, waiting=1)

    def _finish(
        self,
        lease: Lease,
        body: QueueItem,
        state: WorkState,
        attempts: int,
        now: datetime,
        result: Any = None,
    ) -> None:
        self._leave(lease)
        self._put(
            Finished,
            item_id=lease.item_id,
            queue=lease.queue,
            tenant=lease.tenant,
            state=state.value,
            fence=lease.fence,
            attempts=attempts,
            worker=lease.worker,
            claimed_at=lease.claimed_at,
            finished_at=now,
            keep_until=_after(now, body.retention_seconds),
            result=result,
        )

    def _bury(
        self,
        lease: Lease,
        body: QueueItem,
        text: FailureText,
        now: datetime,
        *,
        reason: str,
        settled_by: str,
    ) -> None:
        self._leave(lease)
        self._put(
            DeadLetter,
            item_id=lease.item_id,
            tenant=lease.tenant,
            queue=lease.queue,
            deployment_id=lease.deployment_id,
            fence=lease.fence,
            attempts=lease.attempts + 1,
            dead_at=now,
            keep_until=_after(now, body.dead_letter_retention_seconds),
            settled_by=settled_by,
            reason=reason,
            error_class=text.error_class,
            fingerprint=text.fingerprint,
        )
        self._count(lease.queue, claimed=-1, dead_lettered=1)


def _after(now: datetime, seconds: float | None) -> datetime | None:
    return None if seconds is None else now + timedelta(seconds=seconds)
