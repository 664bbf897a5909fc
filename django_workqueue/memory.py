"""
The contract in the plainest code: what other queues are compared with, and what a user's
tests can run on. What each verb means is written in `contract.WorkQueue`.
"""

from __future__ import annotations

import json
import threading
from bisect import bisect_right
from collections import ChainMap, Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Protocol

from django_workqueue import contract
from django_workqueue.contract import AsyncVerbs
from django_workqueue.exceptions import (
    InvalidFieldError,
    LeaseLostError,
    QueueFullError,
    WorkItemNotFoundError,
)
from django_workqueue.failures import describe
from django_workqueue.items import (
    DEFAULT_QUEUE,
    QueueStats,
    WorkItem,
    WorkState,
    encode_payload,
    encode_result,
    require_seconds,
)
from django_workqueue.policy import (
    LEASE_LAPSED,
    WORKER_RESTARTED,
    QueuePolicy,
    after_attempt,
    check_move,
)


class Clock(Protocol):
    """Tells a `MemoryWorkQueue` the time, so that tests can move it."""

    def now(self) -> datetime:
        """Return the present as an aware datetime."""


class SystemClock:
    """The machine's clock, in UTC."""

    def now(self) -> datetime:
        return datetime.now(UTC)


@dataclass(slots=True)
class _Row:
    """One acceptance: the item as it stands, and what an item doesn't show."""

    job_id: int
    item: WorkItem
    policy: QueuePolicy
    due_at: datetime
    #: Of the latest claim: the length that a renewal gives, and how long it can be renewed.
    lease: timedelta = timedelta(0)
    renewable_until: datetime | None = None
    #: Time and job id of the last burial; stays when the item leaves the dead letter.
    burial: tuple[datetime, int] | None = None
    #: Verb, worker and fence of the settlement after which nothing has happened yet.
    settled: tuple[str, str, int | None] | None = None

    def due(self, now: datetime) -> bool:
        return self.item.state is WorkState.QUEUED and self.due_at <= now

    def age(self, now: datetime) -> float:
        return max(0.0, (now - (self.item.enqueued_at or now)).total_seconds())

    def shown(self, now: datetime) -> WorkItem:
        """Return the item as a copy through which nobody can change the store."""
        return replace(
            self.item,
            payload=deepcopy(self.item.payload),
            result=deepcopy(self.item.result),
            available_at=self.due_at if self.due_at > now else self.item.available_at,
        )


_Name = tuple[str, str]  # a tenant, and an id or a dedupe key
_UNHELD: dict[str, None] = {"worker": None, "first_claimed_at": None, "lease_expires_at": None}


class MemoryWorkQueue(AsyncVerbs):
    """
    A work queue in this process's memory, safe between threads, with one policy for all
    queues. Nothing survives the process, and nothing is ever pruned.
    """

    def __init__(self, policy: QueuePolicy | None = None, clock: Clock | None = None) -> None:
        self.policy = policy or QueuePolicy()
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._rows: dict[int, _Row] = {}
        # The acceptance that holds the id or the key: the live one, else the latest.
        self._by_id: dict[_Name, _Row] = {}
        self._by_key: dict[_Name, _Row] = {}
        # The tenant served last, by queue and worker deployment.
        self._served: dict[tuple[str, str], str] = {}
        self._reaped: Counter[str] = Counter()
        self._suppressed: Counter[str] = Counter()

    @contextmanager
    def _moment(self) -> Iterator[datetime]:
        """Hold the store for one verb, and give the time at which it happens."""
        with self._lock:
            yield self._clock.now()

    def enqueue(self, item: WorkItem) -> WorkItem:
        return self.enqueue_many([item])[0]

    def enqueue_many(self, items: Iterable[WorkItem]) -> tuple[WorkItem, ...]:
        size = self.policy.max_payload_bytes
        offered = [
            replace(item, payload=json.loads(encode_payload(item.payload, size)))
            for item in contract.check_offered(items)
        ]
        with self._moment() as now:
            answers: list[_Row] = []
            new: dict[int, _Row] = {}
            suppressed: Counter[str] = Counter()
            # Written aside first, so that nothing of a refused call remains.
            by_id, by_key = ChainMap({}, self._by_id), ChainMap({}, self._by_key)
            for item in offered:
                id_holder = by_id.get((item.tenant, item.id))
                key_holder = by_key.get((item.tenant, item.dedupe_key or ""))
                live = (row for row in (key_holder, id_holder) if row and row.item.live)
                row = next(live, None)
                if row is None:
                    job_id = len(self._rows) + len(new) + 1
                    row = self._accept(item, job_id, id_holder, now)
                    new[job_id] = by_id[item.tenant, item.id] = row
                    if item.dedupe_key is not None:
                        by_key[item.tenant, item.dedupe_key] = row
                else:
                    suppressed[item.queue] += 1
                answers.append(row)
            self._refuse_overflow(new.values())
            self._rows |= new
            self._by_id |= by_id.maps[0]
            self._by_key |= by_key.maps[0]
            self._suppressed += suppressed
            return tuple(row.shown(now) for row in answers)

    def _accept(self, item: WorkItem, job_id: int, before: _Row | None, now: datetime) -> _Row:
        """Return the new row of *item*, whose id *before* had."""
        policy = self.policy.for_item(item)
        accepted = WorkItem(
            tenant=item.tenant,
            id=item.id,
            queue=item.queue,
            handler=item.handler,
            payload=item.payload,
            priority=item.priority,
            dedupe_key=item.dedupe_key,
            deployment_id=item.deployment_id or None,
            max_attempts=policy.max_attempts,
            timeout_seconds=policy.timeout_seconds,
            enqueued_at=item.enqueued_at or now,
            available_at=item.available_at or now,
            fence=before.item.fence if before else None,
            job_id=job_id,
        )
        return _Row(job_id, accepted, policy, due_at=item.available_at or now)

    def _refuse_overflow(self, new: Iterable[_Row]) -> None:
        limit = self.policy.max_depth
        if limit is None:
            return
        for queue, more in Counter(row.item.queue for row in new).items():
            depth = sum(row.item.state is WorkState.QUEUED for row in self._of_queue(queue))
            if depth + more > limit:
                raise QueueFullError(queue=queue, depth=depth, limit=limit)

    def _of_queue(self, queue: str) -> Iterator[_Row]:
        return (row for row in self._rows.values() if row.item.queue == queue)

    def claim(
        self,
        *,
        worker: str,
        queue: str = DEFAULT_QUEUE,
        lease_seconds: float | None = None,
        deployment_id: str | None = None,
    ) -> WorkItem | None:
        items = self.claim_many(
            worker=worker,
            limit=1,
            queue=queue,
            lease_seconds=lease_seconds,
            deployment_id=deployment_id,
        )
        return items[0] if items else None

    def claim_many(
        self,
        *,
        worker: str,
        limit: int,
        queue: str = DEFAULT_QUEUE,
        lease_seconds: float | None = None,
        deployment_id: str | None = None,
    ) -> tuple[WorkItem, ...]:
        contract.check_claim(
            worker=worker,
            queue=queue,
            limit=limit,
            lease_seconds=lease_seconds,
            deployment_id=deployment_id,
        )
        with self._moment() as now:
            rows = self._serve(queue, deployment_id or "", limit, now)
            for row in rows:
                row.lease = timedelta(seconds=row.policy.lease_for(lease_seconds))
                row.renewable_until = now + timedelta(seconds=row.policy.max_lease_seconds)
                self._move(
                    row,
                    "claim",
                    WorkState.CLAIMED,
                    worker=worker,
                    fence=(row.item.fence or 0) + 1,
                    first_claimed_at=now,
                    lease_expires_at=now + row.lease,
                )
            return tuple(row.shown(now) for row in rows)

    def _serve(self, queue: str, deployment: str, limit: int, now: datetime) -> list[_Row]:
        """Return the next *limit* due rows, tenant by tenant from the one served last."""
        pins = {None, deployment or None}
        due = [r for r in self._of_queue(queue) if r.due(now) and r.item.deployment_id in pins]
        due.sort(key=lambda row: (row.item.priority, -row.job_id))
        lanes: defaultdict[str, list[_Row]] = defaultdict(list)
        for row in due:
            lanes[row.item.tenant].append(row)
        tenants = sorted(lanes)
        start = bisect_right(tenants, self._served.get((queue, deployment), ""))
        turns = deque(tenants[start:] + tenants[:start])
        served: list[_Row] = []
        while turns and len(served) < limit:
            tenant = turns.popleft()
            served.append(lanes[tenant].pop())
            self._served[queue, deployment] = tenant
            if lanes[tenant]:
                turns.append(tenant)
        return served

    def heartbeat(
        self, item_id: str, *, tenant: str, worker: str, fence: int | None = None
    ) -> WorkItem:
        contract.check_holder(item_id, tenant=tenant, worker=worker, fence=fence)
        with self._moment() as now:
            row = self._row(item_id, tenant)
            self._require_claim(row, worker, fence, now)
            renewed = min(now + row.lease, row.renewable_until or now)
            expires = max(renewed, row.item.lease_expires_at or renewed)
            self._move(row, "heartbeat", WorkState.CLAIMED, lease_expires_at=expires)
            return row.shown(now)

    def complete(
        self,
        item_id: str,
        *,
        tenant: str,
        worker: str,
        fence: int | None = None,
        result: Any = None,
    ) -> WorkItem:
        def move(row: _Row, now: datetime) -> None:
            kept = json.loads(encode_result(result, self.policy.max_payload_bytes) or "null")
            self._move(row, "complete", WorkState.COMPLETED, result=kept, **_UNHELD)

        return self._settle("complete", item_id, tenant, worker, fence, move)

    def fail(
        self,
        item_id: str,
        *,
        tenant: str,
        worker: str,
        error: str | BaseException,
        retryable: bool = True,
        delay_seconds: float | None = None,
        fence: int | None = None,
    ) -> WorkItem:
        contract.check_failure(retryable=retryable, delay_seconds=delay_seconds)
        text = describe(error).message

        def move(row: _Row, now: datetime) -> None:
            self._end_attempt(row, "fail", text, now, delay_seconds, retryable=retryable)

        return self._settle("fail", item_id, tenant, worker, fence, move)

    def release(
        self,
        item_id: str,
        *,
        tenant: str,
        worker: str,
        delay_seconds: float = 0,
        fence: int | None = None,
    ) -> WorkItem:
        delay = timedelta(seconds=require_seconds("delay_seconds", delay_seconds))

        def move(row: _Row, now: datetime) -> None:
            to = WorkState.CANCELLED if row.item.cancel_requested else WorkState.QUEUED
            self._move(row, "release", to, **_UNHELD)
            row.due_at = now + delay

        return self._settle("release", item_id, tenant, worker, fence, move)

    def reap(self, *, limit: int | None = None) -> tuple[WorkItem, ...]:
        contract.check_reap(limit)
        with self._moment() as now:
            lapsed = [row for row in self._rows.values() if row.item.lapsed_at(now)]
            reaped = sorted(lapsed, key=lambda r: (r.item.lease_expires_at, r.job_id))[:limit]
            for row in reaped:
                self._end_attempt(row, "reap", LEASE_LAPSED, now)
                self._reaped[row.item.queue] += 1
            return tuple(row.shown(now) for row in reaped)

    def adopt(self, *, worker: str) -> tuple[WorkItem, ...]:
        contract.check_worker(worker)
        with self._moment() as now:
            held = [row for row in self._rows.values() if row.item.worker == worker]
            held.sort(key=lambda row: (row.item.lease_expires_at, row.job_id))
            for row in held:
                self._end_attempt(row, "adopt", WORKER_RESTARTED, now, delay_seconds=0)
            return tuple(row.shown(now) for row in held)

    def get(self, item_id: str, *, tenant: str) -> WorkItem:
        contract.check_item(item_id, tenant)
        with self._moment() as now:
            return self._row(item_id, tenant).shown(now)

    def dead_letters(
        self, *, tenant: str, limit: int = 50, after: int | None = None
    ) -> tuple[WorkItem, ...]:
        contract.check_page(tenant=tenant, limit=limit, after=after)
        with self._moment() as now:
            own = [row for row in self._rows.values() if row.item.tenant == tenant]
            jobs = [job_id for _, job_id in sorted(row.burial for row in own if row.burial)]
            if after is not None:
                if after not in jobs:
                    raise InvalidFieldError(f"{after} never was a dead letter", field="after")
                jobs = jobs[jobs.index(after) + 1 :]
            items = [self._rows[job_id].shown(now) for job_id in jobs]
            return tuple([item for item in items if item.state is WorkState.DEAD_LETTERED][:limit])

    def stats(self, *, queue: str = DEFAULT_QUEUE) -> QueueStats:
        contract.check_queue(queue)
        with self._moment() as now:
            rows = list(self._of_queue(queue))
            counts = Counter(row.item.state for row in rows)
            ages = [row.age(now) for row in rows if row.item.state is WorkState.QUEUED]
            return QueueStats(
                depth=counts[WorkState.QUEUED],
                due=sum(row.due(now) for row in rows),
                claimed=counts[WorkState.CLAIMED],
                paused=counts[WorkState.PAUSED],
                dead_lettered=counts[WorkState.DEAD_LETTERED],
                completed=counts[WorkState.COMPLETED],
                cancelled=counts[WorkState.CANCELLED],
                oldest_age_seconds=max(ages, default=0.0),
                reaped=self._reaped[queue],
                duplicates_suppressed=self._suppressed[queue],
                as_of=now,
            )

    def _row(self, item_id: str, tenant: str) -> _Row:
        row = self._by_id.get((tenant, item_id))
        if row is None:
            raise WorkItemNotFoundError(item_id=item_id, tenant=tenant)
        return row

    def _settle(
        self,
        verb: str,
        item_id: str,
        tenant: str,
        worker: str,
        fence: int | None,
        move: Callable[[_Row, datetime], None],
    ) -> WorkItem:
        """Make *move* for the holder of the claim, or answer the repetition of it."""
        contract.check_holder(item_id, tenant=tenant, worker=worker, fence=fence)
        with self._moment() as now:
            row = self._row(item_id, tenant)
            if fence is None or row.settled != (verb, worker, fence):
                self._require_claim(row, worker, fence, now)
                move(row, now)
                row.settled = (verb, worker, row.item.fence)
            return row.shown(now)

    def _require_claim(self, row: _Row, worker: str, fence: int | None, now: datetime) -> None:
        """Raise `LeaseLostError` unless *worker* holds this very claim and may act on it."""
        item = row.item
        lost = partial(LeaseLostError, item_id=item.id, worker=worker)
        if not item.held:
            raise lost(reason="expired")
        if item.worker != worker or fence not in (None, item.fence):
            raise lost(reason="taken", holder=item.worker)
        if row.renewable_until is not None and now >= row.renewable_until:
            raise lost(reason="capped", holder=worker)
        if item.lapsed_at(now):
            raise lost(reason="expired")

    def _end_attempt(
        self,
        row: _Row,
        verb: str,
        text: str,
        now: datetime,
        delay_seconds: float | None = None,
        *,
        retryable: bool = True,
    ) -> None:
        """Count an attempt that ended without success, and send the item where it belongs."""
        attempts = row.item.attempts + 1
        to = after_attempt(
            attempts=attempts,
            max_attempts=row.policy.max_attempts,
            retryable=retryable,
            cancel_requested=row.item.cancel_requested,
        )
        failures = (*row.item.failures, text)
        self._move(row, verb, to, attempts=attempts, failures=failures, **_UNHELD)
        if to is WorkState.QUEUED:
            wait = row.policy.backoff(attempts) if delay_seconds is None else delay_seconds
            row.due_at = now + timedelta(seconds=wait)
        elif to is WorkState.DEAD_LETTERED:
            row.burial = (now, row.job_id)

    def _move(self, row: _Row, verb: str, to: WorkState, **changes: Any) -> None:
        check_move(row.item.id, row.item.state, verb, to)
        row.item = replace(row.item, state=to, **changes)
        row.settled = None
