"""The queue: the verbs of producers and readers, and those of workers and operators."""

from __future__ import annotations

from collections import ChainMap, Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime

from django_workqueue import arguments
from django_workqueue.contract import AsyncVerbs
from django_workqueue.exceptions import InvalidFieldError, QueueFullError
from django_workqueue.items import DEFAULT_QUEUE, QueueStats, WorkItem, WorkState
from django_workqueue.memory.operators import OperatorVerbs
from django_workqueue.memory.store import Row, live_twin
from django_workqueue.memory.workers import WorkerVerbs


class MemoryWorkQueue(WorkerVerbs, OperatorVerbs, AsyncVerbs):
    """
    A work queue in this process's memory, safe between threads, with one policy for all
    queues. Nothing survives the process, and there is no audit of who did what.
    """

    def enqueue(self, item: WorkItem) -> WorkItem:
        return self.enqueue_many([item])[0]

    def enqueue_many(self, items: Iterable[WorkItem]) -> tuple[WorkItem, ...]:
        offered = [
            replace(item, payload=self._private(item.payload))
            for item in arguments.check_offered(items)
        ]
        with self._moment() as now:
            answers: list[Row] = []
            new: dict[int, Row] = {}
            suppressed: Counter[str] = Counter()
            # Written aside first, so that nothing of a refused call remains.
            by_id, by_key = ChainMap({}, self._by_id), ChainMap({}, self._by_key)
            for item in offered:
                row = live_twin(item, by_id, by_key)
                if row is None:
                    row = self._accept(item, by_id.get((item.tenant, item.id)), now)
                    new[row.job_id] = by_id[item.tenant, item.id] = row
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

    def _accept(self, item: WorkItem, before: Row | None, now: datetime) -> Row:
        """Return the new row of *item*, whose id *before* had."""
        job_id = next(self._job_ids)
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
        return Row(job_id, accepted, policy, due_at=item.available_at or now, moved_at=now)

    def _refuse_overflow(self, new: Iterable[Row]) -> None:
        limit = self.policy.max_depth
        if limit is None:
            return
        for queue, more in Counter(row.item.queue for row in new).items():
            depth = sum(row.item.state is WorkState.QUEUED for row in self._of_queue(queue))
            if depth + more > limit:
                raise QueueFullError(queue=queue, depth=depth, limit=limit)

    def get(self, item_id: str, *, tenant: str, job_id: int | None = None) -> WorkItem:
        arguments.check_item(item_id, tenant, job_id)
        with self._moment() as now:
            return self._row(item_id, tenant, job_id).shown(now)

    def dead_letters(
        self, *, tenant: str, limit: int = 50, after: int | None = None
    ) -> tuple[WorkItem, ...]:
        arguments.check_page(tenant=tenant, limit=limit, after=after)
        with self._moment() as now:
            own = [row for row in self._rows.values() if row.item.tenant == tenant]
            jobs = [job_id for _, job_id in sorted(row.burial for row in own if row.burial)]
            if after is not None:
                if after not in jobs:
                    raise InvalidFieldError(
                        f"{after} never was a dead letter, or it was deleted since", field="after"
                    )
                jobs = jobs[jobs.index(after) + 1 :]
            items = [self._rows[job_id].shown(now) for job_id in jobs]
            return tuple([item for item in items if item.state is WorkState.DEAD_LETTERED][:limit])

    def stats(self, *, queue: str = DEFAULT_QUEUE) -> QueueStats:
        arguments.check_queue(queue)
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
