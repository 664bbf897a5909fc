"""The verbs of workers: from the claim to the end of it."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django_workqueue import arguments
from django_workqueue.exceptions import LeaseLostError
from django_workqueue.failures import describe
from django_workqueue.items import (
    DEFAULT_QUEUE,
    WorkItem,
    WorkState,
    encode_result,
    require_seconds,
)
from django_workqueue.memory.store import Row, Store
from django_workqueue.policy import LEASE_LAPSED, WORKER_RESTARTED, after_attempt


class WorkerVerbs(Store):
    """Claim, renew, settle; and free the claims that nobody settles."""

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
        arguments.check_claim(
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
                    now,
                    worker=worker,
                    fence=(row.item.fence or 0) + 1,
                    first_claimed_at=now,
                    lease_expires_at=now + row.lease,
                )
            return tuple(row.shown(now) for row in rows)

    def _serve(self, queue: str, deployment: str, limit: int, now: datetime) -> list[Row]:
        """Return the next *limit* due rows, tenant by tenant from the one served last."""
        pins = {None, deployment or None}
        due = [r for r in self._of_queue(queue) if r.due(now) and r.item.deployment_id in pins]
        due.sort(key=lambda row: (row.item.priority, -row.job_id))
        lanes: defaultdict[str, list[Row]] = defaultdict(list)
        for row in due:
            if not self._on_hold(row.item):
                lanes[row.item.tenant].append(row)
        tenants = sorted(lanes)
        start = bisect_right(tenants, self._served.get((queue, deployment), ""))
        turns = deque(tenants[start:] + tenants[:start])
        served: list[Row] = []
        while turns and len(served) < limit:
            tenant = turns.popleft()
            served.append(lanes[tenant].pop())
            self._served[queue, deployment] = tenant
            if lanes[tenant]:
                turns.append(tenant)
        return served

    def _on_hold(self, item: WorkItem) -> bool:
        scopes = ((item.queue, None), (None, item.tenant), (item.queue, item.tenant))
        return any(scope in self._holds for scope in scopes)

    def heartbeat(
        self, item_id: str, *, tenant: str, worker: str, fence: int | None = None
    ) -> WorkItem:
        arguments.check_holder(item_id, tenant=tenant, worker=worker, fence=fence)
        with self._moment() as now:
            row = self._row(item_id, tenant)
            self._require_claim(row, worker, fence, now)
            renewed = min(now + row.lease, row.renewable_until or now)
            expires = max(renewed, row.item.lease_expires_at or renewed)
            self._move(row, "heartbeat", WorkState.CLAIMED, now, lease_expires_at=expires)
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
        def move(row: Row, now: datetime) -> None:
            kept = json.loads(encode_result(result, self.policy.max_payload_bytes) or "null")
            self._move(row, "complete", WorkState.COMPLETED, now, result=kept)

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
        arguments.check_failure(retryable=retryable, delay_seconds=delay_seconds)
        text = describe(error).message

        def move(row: Row, now: datetime) -> None:
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

        def move(row: Row, now: datetime) -> None:
            to = WorkState.CANCELLED if row.item.cancel_requested else WorkState.QUEUED
            self._move(row, "release", to, now)
            row.due_at = now + delay

        return self._settle("release", item_id, tenant, worker, fence, move)

    def pause(
        self, item_id: str, *, tenant: str, worker: str, fence: int | None = None
    ) -> WorkItem:
        def move(row: Row, now: datetime) -> None:
            to = WorkState.CANCELLED if row.item.cancel_requested else WorkState.PAUSED
            self._move(row, "pause", to, now)

        return self._settle("pause", item_id, tenant, worker, fence, move)

    def reap(self, *, limit: int | None = None) -> tuple[WorkItem, ...]:
        arguments.check_limit(limit)
        with self._moment() as now:
            lapsed = [row for row in self._rows.values() if row.item.lapsed_at(now)]
            reaped = sorted(lapsed, key=lambda r: (r.item.lease_expires_at, r.job_id))[:limit]
            for row in reaped:
                self._end_attempt(row, "reap", LEASE_LAPSED, now)
                self._reaped[row.item.queue] += 1
            return tuple(row.shown(now) for row in reaped)

    def adopt(self, *, worker: str) -> tuple[WorkItem, ...]:
        arguments.check_worker(worker)
        with self._moment() as now:
            held = [row for row in self._rows.values() if row.item.worker == worker]
            held.sort(key=lambda row: (row.item.lease_expires_at, row.job_id))
            for row in held:
                self._end_attempt(row, "adopt", WORKER_RESTARTED, now, delay_seconds=0)
            return tuple(row.shown(now) for row in held)

    def _settle(
        self,
        verb: str,
        item_id: str,
        tenant: str,
        worker: str,
        fence: int | None,
        move: Callable[[Row, datetime], None],
    ) -> WorkItem:
        """Make *move* for the holder of the claim, or answer the repetition of it."""
        arguments.check_holder(item_id, tenant=tenant, worker=worker, fence=fence)
        with self._moment() as now:
            row = self._row(item_id, tenant)
            if fence is None or row.settled != (_way(verb, row), worker, fence):
                self._require_claim(row, worker, fence, now)
                move(row, now)
                row.settled = (_way(verb, row), worker, row.item.fence)
            return row.shown(now)

    def _require_claim(self, row: Row, worker: str, fence: int | None, now: datetime) -> None:
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
        row: Row,
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
        self._move(row, verb, to, now, attempts=attempts, failures=(*row.item.failures, text))
        wait = row.policy.backoff(attempts) if delay_seconds is None else delay_seconds
        row.due_at = now + timedelta(seconds=wait)


def _way(verb: str, row: Row) -> str:
    """The *verb* that a repetition must have: cancelled instead, pause and release are one."""
    cancelled = row.item.state is WorkState.CANCELLED
    return "release" if cancelled and verb == "pause" else verb
