"""
The moves between places in portable ORM calls, for SQLite.

One writer at a time: each move opens a transaction, takes the database's write lock first
and then looks, so there is nothing to skip and nothing can change under it. Short
statements, no cleverness; the conformance suite proves it equal to the other stores.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from django.db import connections, transaction
from django.db.models import Sum

from django_workqueue.failures import FailureKind, FailureText, describe
from django_workqueue.items import WorkState
from django_workqueue.managers import (
    PROMOTED_PER_CLAIM,
    TURNS_KEPT,
    Acceptance,
    Claim,
    ClaimRequest,
    Completion,
    EndedAttempt,
    Release,
    Renewal,
    Row,
    Stored,
)
from django_workqueue.models import (
    COUNTED,
    Counter,
    DeadLetter,
    Failure,
    Finished,
    Lease,
    QueueItem,
    Ready,
    Turn,
    Waiting,
)
from django_workqueue.policy import (
    LEASE_LAPSED,
    WORKER_RESTARTED,
    after_attempt,
    doubled_wait,
)

_LOCK: Final = "update django_workqueue_counter set id = id where false"
# Where SQLite keeps the highest id that a table ever had.
_LATEST_ID: Final = "select seq from sqlite_sequence where name = %s"
_CHUNK: Final = 500


class PortableMoves:
    """`managers.Moves` by the ORM, one writer at a time."""

    def __init__(self, alias: str, skew: timedelta) -> None:
        self._alias = alias
        self._skew = skew

    def now(self) -> datetime:
        return datetime.now(UTC) + self._skew

    def reserve(self, number: int) -> list[int]:
        # Valid while the caller's transaction keeps the write lock.
        with self._writing(), connections[self._alias].cursor() as cursor:
            cursor.execute(_LATEST_ID, [QueueItem._meta.db_table])
            latest = cursor.fetchone()
        start = latest[0] + 1 if latest else 1
        return [*range(start, start + number)]

    def accept(self, items: Sequence[Acceptance]) -> dict[int, Stored]:
        with self._writing() as now:
            taken = self._taken(items)
            free = [
                place
                for place, item in enumerate(items)
                if (item.tenant, item.item_id) not in taken
                and (item.tenant, None, item.dedupe_key) not in taken
            ]
            bodies = self._all(QueueItem).bulk_create(_body(items[place], now) for place in free)
            due = [
                (body, items[place])
                for place, body in zip(free, bodies, strict=True)
                if body.available_at <= now
            ]
            later = [
                (body, items[place])
                for place, body in zip(free, bodies, strict=True)
                if body.available_at > now
            ]
            self._all(Ready).bulk_create(Ready(**_place(*each)) for each in due)
            self._all(Waiting).bulk_create(
                Waiting(
                    **_place(body, item), due_at=body.available_at, since=now, cause="scheduled"
                )
                for body, item in later
            )
            for queue in {items[place].queue for place in free}:
                self._count(
                    queue,
                    ready=sum(item.queue == queue for _, item in due),
                    waiting=sum(item.queue == queue for _, item in later),
                )
            return {
                place: Stored(
                    job_id=body.pk, enqueued_at=body.enqueued_at, available_at=body.available_at
                )
                for place, body in zip(free, bodies, strict=True)
            }

    def _taken(self, items: Sequence[Acceptance]) -> set[tuple[Any, ...]]:
        """Return (tenant, id) and (tenant, None, key) of all holders in the way of *items*."""
        ids, keys = defaultdict(list), defaultdict(list)
        for item in items:
            ids[item.tenant].append(item.item_id)
            if item.dedupe_key is not None:
                keys[item.tenant].append(item.dedupe_key)
        taken: set[tuple[Any, ...]] = set()
        for tenant, wanted in ids.items():
            for chunk in _chunks(wanted):
                holders = self._all(QueueItem).filter(tenant=tenant, id_freed=False)
                found = holders.filter(item_id__in=chunk).values_list("item_id", flat=True)
                taken.update((tenant, item_id) for item_id in found)
        for tenant, wanted in keys.items():
            for chunk in _chunks(wanted):
                holders = self._all(QueueItem).filter(tenant=tenant, key_freed=False)
                found = holders.filter(dedupe_key__in=chunk).values_list("dedupe_key", flat=True)
                taken.update((tenant, None, key) for key in found)
        return taken

    def promote(self, queue: str, limit: int = PROMOTED_PER_CLAIM) -> int:
        with self._writing() as now:
            due = list(
                self._all(Waiting)
                .filter(queue=queue, due_at__lte=now)
                .order_by("due_at", "item_id")[:limit]
            )
            for chunk in _chunks([row.item_id for row in due]):
                self._all(Waiting).filter(item_id__in=chunk).delete()
            self._all(Ready).bulk_create(_ready(row) for row in due)
            if due:
                self._count(queue, ready=len(due), waiting=-len(due))
            return len(due)

    def claim(self, request: ClaimRequest) -> list[Row]:
        with self._writing() as now:
            turn = self._newest_turn(request)
            tenant = turn.tenant if turn else ""
            picked: list[Ready] = []
            while len(picked) < request.limit:
                best = self._next_ready(request, tenant)
                if best is None:
                    break
                self._take(best)
                picked.append(best)
                tenant = best.tenant
            if not picked:
                return []
            number = turn.number + 1 if turn else 1
            self._all(Turn).create(
                queue=request.queue,
                deployment_id=request.deployment_id,
                number=number,
                tenant=tenant,
            )
            if number % TURNS_KEPT == 0:
                self.trim_turns(request.queue, request.deployment_id, number)
                self.fold_counters()
            self._count(request.queue, ready=-len(picked), claimed=len(picked))
            return self._lease(request, picked, now)

    def _newest_turn(self, request: ClaimRequest) -> Turn | None:
        turns = self._all(Turn).filter(queue=request.queue, deployment_id=request.deployment_id)
        newest: Turn | None = turns.order_by("-number").first()
        return newest

    def _next_ready(self, request: ClaimRequest, tenant: str) -> Ready | None:
        """The best row of the next tenant after *tenant*, else of the first one."""
        lanes = {"", request.deployment_id}
        for after in ({"tenant__gt": tenant}, {}):
            best: list[Ready] = [
                row
                for lane in lanes
                for row in self._all(Ready)
                .filter(queue=request.queue, deployment_id=lane, **after)
                .order_by("tenant", "rank", "item_id")[:1]
            ]
            if best:
                return min(best, key=lambda row: (row.tenant, row.rank, row.item_id))
        return None

    def _take(self, row: Ready) -> None:
        self._all(Ready).filter(
            queue=row.queue,
            deployment_id=row.deployment_id,
            tenant=row.tenant,
            rank=row.rank,
            item_id=row.item_id,
        ).delete()

    def _lease(self, request: ClaimRequest, picked: list[Ready], now: datetime) -> list[Row]:
        bodies: dict[int, dict[str, Any]] = {}
        for chunk in _chunks([row.item_id for row in picked]):
            # The payload stays text: one that can't be read must not stop the others.
            raw = self._all(QueueItem).filter(pk__in=chunk).extra(select={"raw": "payload"})
            bodies.update({body["id"]: body for body in raw.values(*_CLAIMED_COLUMNS, "raw")})
        rows: list[Row] = []
        for ready in picked:
            body = bodies[ready.item_id]
            asked = request.lease_seconds or body["lease_seconds"]
            seconds = min(asked, body["max_lease_seconds"])
            claim = {
                "worker": request.worker,
                "boot": request.boot,
                "process": request.process,
                "claimed_at": now,
                "expires_at": now + timedelta(seconds=seconds),
                "renewable_until": now + timedelta(seconds=body["max_lease_seconds"]),
            }
            place = _place_again(ready) | {"fence": ready.fence + 1}
            self._all(Lease).create(
                **place, **claim, max_attempts=body["max_attempts"], lease_seconds=seconds
            )
            rows.append({**place, **body, **claim, "item": ready.item_id, "payload": body["raw"]})
        return rows

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
                    expires_at=lease.expires_at, cancel_requested=lease.cancel_requested
                )
        return renewed

    def complete(self, worker: str, settlements: Sequence[Completion]) -> dict[int, WorkState]:
        settled = {}
        with self._writing() as now:
            for each in settlements:
                lease = self._mine(worker, each.item, each.fence, now)
                if lease is None:
                    continue
                result = None if each.result is None else json.loads(each.result)
                self._finish(lease, WorkState.COMPLETED, lease.attempts, now, result)
                self._count(lease.queue, claimed=-1, completed=1)
                settled[each.item] = WorkState.COMPLETED
        return settled

    def release(self, worker: str, settlements: Sequence[Release]) -> dict[int, WorkState]:
        settled = {}
        with self._writing() as now:
            for each in settlements:
                lease = self._mine(worker, each.item, each.fence, now)
                if lease is None:
                    continue
                if lease.cancel_requested:
                    self._finish(lease, WorkState.CANCELLED, lease.attempts, now)
                    self._count(lease.queue, claimed=-1, cancelled=1)
                    settled[each.item] = WorkState.CANCELLED
                    continue
                place = _place_again(lease) | {"released_by": lease.worker}
                self._queue_again(lease, place, each.delay, each.cause, now)
                settled[each.item] = WorkState.QUEUED
        return settled

    def fail(self, worker: str, settlements: Sequence[EndedAttempt]) -> dict[int, WorkState]:
        settled = {}
        with self._writing() as now:
            for each in settlements:
                lease = self._mine(worker, each.item, each.fence, now)
                if lease is not None:
                    settled[each.item] = self._end(
                        lease, each.kind, each.text, now, each.retryable, each.delay
                    )
        return settled

    def reap(self, limit: int) -> dict[int, WorkState]:
        with self._writing() as now:
            lapsed = self._all(Lease).filter(expires_at__lte=now)
            return {
                lease.item_id: self._end(lease, FailureKind.LAPSED, describe(LEASE_LAPSED), now)
                for lease in list(lapsed.order_by("expires_at", "item_id")[:limit])
            }

    def adopt(self, worker: str, spare: Sequence[str] = ()) -> dict[int, WorkState]:
        with self._writing() as now:
            held = self._all(Lease).filter(worker=worker).exclude(boot__in=spare)
            text = describe(WORKER_RESTARTED)
            return {
                lease.item_id: self._end(lease, FailureKind.RESTARTED, text, now, delay=0.0)
                for lease in list(held.order_by("expires_at", "item_id"))
            }

    def count_suppressed(self, queue: str, number: int) -> None:
        self._count(queue, duplicates_suppressed=number)

    def fold_counters(self) -> None:
        with self._writing():
            sums = list(
                self._all(Counter)
                .order_by()
                .values("queue")
                .annotate(**{f"sum_{name}": Sum(name) for name in COUNTED})
            )
            self._all(Counter).all().delete()
            self._all(Counter).bulk_create(
                Counter(queue=row["queue"], **{name: row[f"sum_{name}"] for name in COUNTED})
                for row in sums
            )

    def trim_turns(self, queue: str, deployment_id: str, newest: int) -> None:
        self._all(Turn).filter(
            queue=queue, deployment_id=deployment_id, number__lt=newest - TURNS_KEPT
        ).delete()

    # What the moves share.

    @contextlib.contextmanager
    def _writing(self) -> Iterator[datetime]:
        """Hold the write lock, whatever transaction mode is set; yield the time under it."""
        with transaction.atomic(using=self._alias):
            with connections[self._alias].cursor() as cursor:
                cursor.execute(_LOCK)
            yield self.now()

    def _all(self, model: Any) -> Any:
        return model._base_manager.using(self._alias)

    def _put(self, model: Any, **fields: Any) -> None:
        # A row that shouldn't be there is left to `workqueue doctor`.
        self._all(model).bulk_create([model(**fields)], ignore_conflicts=True)

    def _mine(self, worker: str, item: int, fence: int, now: datetime) -> Lease | None:
        mine = self._all(Lease).filter(item_id=item, fence=fence, worker=worker, expires_at__gt=now)
        lease: Lease | None = mine.first()
        return lease

    def _count(self, queue: str, **deltas: int) -> None:
        self._all(Counter).create(queue=queue, **deltas)

    def _end(
        self,
        lease: Lease,
        kind: FailureKind,
        text: FailureText,
        now: datetime,
        retryable: bool = True,
        delay: float | None = None,
    ) -> WorkState:
        """End an attempt without success: count it, record it, and put the item on."""
        attempts = lease.attempts + 1
        state = after_attempt(
            attempts=attempts,
            max_attempts=lease.max_attempts,
            retryable=retryable,
            cancel_requested=lease.cancel_requested,
        )
        self._record(lease, kind, text, state, now)
        if kind is FailureKind.LAPSED:
            self._count(lease.queue, reaped=1)
        # Without the payload, which may be one that can't be read.
        body = self._all(QueueItem).defer("payload").get(pk=lease.item_id)
        if state is WorkState.QUEUED:
            backoff = doubled_wait(attempts, body.backoff_seconds, body.backoff_cap_seconds)
            place = _place_again(lease) | {"attempts": attempts}
            self._queue_again(lease, place, backoff if delay is None else delay, "backoff", now)
        elif state is WorkState.CANCELLED:
            self._finish(lease, state, attempts, now)
            self._count(lease.queue, claimed=-1, cancelled=1)
        else:
            self._bury(lease, body, text, "exhausted" if retryable else "rejected", now)
        return state

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
        self, lease: Lease, state: WorkState, attempts: int, now: datetime, result: Any = None
    ) -> None:
        self._leave(lease)
        keep = self._all(QueueItem).values_list("retention_seconds", flat=True)
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
            keep_until=_after(now, keep.get(pk=lease.item_id)),
            result=result,
        )

    def _bury(
        self, lease: Lease, body: QueueItem, text: FailureText, reason: str, now: datetime
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
            reason=reason,
            error_class=text.error_class,
            fingerprint=text.fingerprint,
        )
        self._count(lease.queue, claimed=-1, dead_lettered=1)

    def _leave(self, lease: Lease) -> None:
        self._all(Lease).filter(item_id=lease.item_id).delete()


_CLAIMED_COLUMNS: Final = (
    "id",
    "item_id",
    "queue",
    "handler",
    "priority",
    "dedupe_key",
    "max_attempts",
    "timeout_seconds",
    "enqueued_at",
    "available_at",
    "lease_seconds",
    "max_lease_seconds",
)


def _body(item: Acceptance, now: datetime) -> QueueItem:
    return QueueItem(
        id=item.id,
        tenant=item.tenant,
        item_id=item.item_id,
        queue=item.queue,
        deployment_id=item.deployment_id,
        handler=item.handler,
        payload=json.loads(item.payload),
        priority=item.priority,
        dedupe_key=item.dedupe_key,
        max_attempts=item.max_attempts,
        lease_seconds=item.lease_seconds,
        max_lease_seconds=item.max_lease_seconds,
        timeout_seconds=item.timeout_seconds,
        backoff_seconds=item.backoff_seconds,
        backoff_cap_seconds=item.backoff_cap_seconds,
        retention_seconds=item.retention_seconds,
        dead_letter_retention_seconds=item.dead_letter_retention_seconds,
        enqueued_at=item.enqueued_at or now,
        available_at=item.available_at or now,
        created_at=now,
    )


def _place(body: QueueItem, item: Acceptance) -> dict[str, Any]:
    return {
        "item_id": body.pk,
        "queue": body.queue,
        "deployment_id": body.deployment_id,
        "tenant": body.tenant,
        "rank": -body.priority,
        "fence": item.fence,
        "attempts": 0,
    }


def _place_again(row: Ready | Waiting | Lease) -> dict[str, Any]:
    names = ("item_id", "queue", "deployment_id", "tenant", "rank", "fence", "attempts")
    return {name: getattr(row, name) for name in names}


def _ready(row: Waiting) -> Ready:
    return Ready(**_place_again(row), released_by=row.released_by)


def _after(now: datetime, seconds: float | None) -> datetime | None:
    return None if seconds is None else now + timedelta(seconds=seconds)


def _chunks(values: Sequence[Any]) -> Iterable[Sequence[Any]]:
    for start in range(0, len(values), _CHUNK):
        yield values[start : start + _CHUNK]
