"""The verbs of operators, and retention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, Final

from django_workqueue import arguments
from django_workqueue.bulk import BulkOperator, BulkOutcome
from django_workqueue.items import (
    QueueHold,
    WorkItem,
    encode_payload,
    require_integer,
)
from django_workqueue.moves import PRUNE_BATCH
from django_workqueue.operating import Operator, Wish
from django_workqueue.queues.store import Store

#: Most jobs that one call of `requeue_many` takes.
MAX_BULK: Final = 10_000


class OperatorVerbs(Store):
    """Let items go on, or end them; hold work back; prune."""

    def resume(
        self,
        item_id: str,
        *,
        tenant: str,
        payload: Mapping[str, Any] | None = None,
        job_id: int | None = None,
        by: str | None = None,
        reason: str = "",
    ) -> WorkItem:
        arguments.check_item(item_id, tenant, job_id)
        arguments.check_actor(by, reason)
        wish = partial(self._wish, "resume", item_id, tenant, job_id, by, reason, payload)
        return self._repeated("resume", lambda: self._operator.resume(wish()))

    def cancel(
        self,
        item_id: str,
        *,
        tenant: str,
        job_id: int | None = None,
        by: str | None = None,
        reason: str = "",
    ) -> WorkItem:
        arguments.check_item(item_id, tenant, job_id)
        arguments.check_actor(by, reason)
        wish = partial(self._wish, "cancel", item_id, tenant, job_id, by, reason)
        return self._repeated("cancel", lambda: self._operator.cancel(wish()))

    def requeue(
        self,
        item_id: str,
        *,
        tenant: str,
        payload: Mapping[str, Any] | None = None,
        job_id: int | None = None,
        by: str | None = None,
        reason: str = "",
    ) -> WorkItem:
        arguments.check_item(item_id, tenant, job_id)
        arguments.check_actor(by, reason)
        wish = partial(self._wish, "requeue", item_id, tenant, job_id, by, reason, payload)
        return self._repeated("requeue", lambda: self._operator.requeue(wish()))

    def requeue_many(
        self, job_ids: Iterable[int], *, by: str | None = None, reason: str = ""
    ) -> BulkOutcome:
        """
        Give each of these jobs that has ended one more attempt, as `requeue` does.

        Up to `MAX_BULK`, in batches: one that fails leaves those before it requeued. What can't
        be requeued is skipped, and the outcome says why.
        """
        arguments.check_actor(by, reason)
        wanted = [require_integer("job_ids", job_id, 0, 2**63 - 1) for job_id in job_ids]
        require_integer("number of job_ids", len(wanted), 0, MAX_BULK)
        with self._store("requeue_many"):
            return BulkOperator(self.using, self.moves).requeue(wanted, by or "", reason)

    def discard(
        self, item_id: str, *, tenant: str, by: str, reason: str, job_id: int | None = None
    ) -> WorkItem:
        arguments.check_discard(by, reason)
        arguments.check_item(item_id, tenant, job_id)
        wish = partial(self._wish, "discard", item_id, tenant, job_id, by, reason)
        return self._repeated("discard", lambda: self._operator.discard(wish()))

    def hold(
        self,
        *,
        queue: str | None = None,
        tenant: str | None = None,
        by: str | None = None,
        reason: str = "",
    ) -> QueueHold:
        arguments.check_hold(queue, tenant)
        arguments.check_actor(by, reason)
        with self._store("hold", queue or ""):
            return self._operator.hold(queue or "", tenant or "", by or "", reason)

    def unhold(
        self,
        *,
        queue: str | None = None,
        tenant: str | None = None,
        by: str | None = None,
        reason: str = "",
    ) -> QueueHold | None:
        arguments.check_hold(queue, tenant)
        arguments.check_actor(by, reason)
        with self._store("unhold", queue or ""):
            return self._operator.unhold(queue or "", tenant or "", by or "", reason)

    def holds(self) -> tuple[QueueHold, ...]:
        with self._store("holds"):
            return self._operator.holds()

    @property
    def _operator(self) -> Operator:
        return Operator(self.using, self.moves)

    def _wish(
        self,
        verb: str,
        item_id: str,
        tenant: str,
        job_id: int | None,
        by: str | None,
        reason: str,
        payload: Mapping[str, Any] | None = None,
    ) -> Wish:
        text = None
        if payload is not None:
            queue = self._reader.row(item_id, tenant, job_id).queue
            text = encode_payload(payload, self.policy_for(queue).max_payload_bytes)
        return Wish(
            verb=verb,
            item_id=item_id,
            tenant=tenant,
            job_id=job_id,
            payload=text,
            by=by or "",
            reason=reason,
        )

    def prune(self, *, limit: int | None = None) -> int:
        arguments.check_limit(limit)
        gone = 0
        with self._store("prune"):
            while limit is None or gone < limit:
                batch = PRUNE_BATCH if limit is None else min(PRUNE_BATCH, limit - gone)
                pruned = self.moves.prune(batch)
                if not pruned:
                    break
                gone += pruned
        return gone
