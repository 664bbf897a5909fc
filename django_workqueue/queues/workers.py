"""The verbs of workers, and those that free what workers have lost."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from django_workqueue import arguments
from django_workqueue.exceptions import (
    PayloadError,
)
from django_workqueue.failures import FailureKind, describe
from django_workqueue.holding import Holder
from django_workqueue.items import (
    DEFAULT_QUEUE,
    WorkItem,
    WorkState,
    encode_result,
    require_seconds,
)
from django_workqueue.moves import (
    BATCH,
    ClaimRequest,
    Completion,
    EndedAttempt,
    Release,
    Row,
)
from django_workqueue.queues.store import Store
from django_workqueue.reading import claimed_item, decode_payload


class WorkerVerbs(Store):
    """Claim, hold, settle, reap and adopt."""

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
        request = ClaimRequest(
            queue=queue,
            worker=worker,
            limit=limit,
            lease_seconds=lease_seconds,
            deployment_id=deployment_id or "",
        )
        return tuple(self._claim(request, full=True)[0])

    def claim_for(self, request: ClaimRequest) -> tuple[list[WorkItem], bool]:
        """
        Claim for a worker that tells its boot and process; say whether more may be due.

        Unlike `claim_many` it stops at payloads that can't be read. However many there are: what
        else was claimed, or is settled in the same transaction, must not wait for their end.
        """
        return self._claim(request, full=False)

    def _claim(self, request: ClaimRequest, *, full: bool) -> tuple[list[WorkItem], bool]:
        claimed: list[WorkItem] = []
        more = True
        with self._store("claim", request.queue):
            # By itself: what is promoted is there for others too, before this claim ends.
            promotion = self.moves.promote(request.queue)
            if promotion.held:
                return [], False
            request = replace(request, has_held_tenants=promotion.has_held_tenants)
            with self._atomic():
                while more and len(claimed) < request.limit:
                    # A tenant that ran short leaves a batch short; so does a bad payload.
                    rest = replace(request, limit=min(BATCH, request.limit - len(claimed)))
                    rows = self.moves.claim(rest)
                    items = self._decoded(rows)
                    claimed += items
                    more = not _ran_dry(rows, rest.limit)
                    if len(items) < len(rows) and not full:
                        break
        return claimed, more

    def _decoded(self, rows: Sequence[Row]) -> list[WorkItem]:
        """Read claimed rows; end those whose payload can't be read, so that they go away."""
        texts = self._reader.failure_texts([row["item"] for row in rows if row["attempts"]])
        items, bad = [], []
        for row in rows:
            try:
                payload = decode_payload(row["payload"])
            except PayloadError as error:
                bad.append(_undecodable(row, error))
            else:
                items.append(claimed_item(row, payload, texts.get(row["item"], ())))
        if bad:
            self.moves.fail(rows[0]["worker"], bad)
        return items

    def heartbeat(
        self, item_id: str, *, tenant: str, worker: str, fence: int | None = None
    ) -> WorkItem:
        holder = self._holder(item_id, tenant, worker, fence)
        with self._store("heartbeat"):
            return self._shown([holder.renew()])[0]

    def complete(
        self,
        item_id: str,
        *,
        tenant: str,
        worker: str,
        fence: int | None = None,
        result: Any = None,
    ) -> WorkItem:
        def settle(row: Any, held: int) -> dict[int, WorkState]:
            text = encode_result(result, self.policy_for(row.queue).max_payload_bytes)
            completion = Completion(item=row.pk, fence=held, result=text)
            return self.moves.complete(worker, [completion])

        return self._settle("complete", item_id, tenant, worker, fence, settle)

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
        text = describe(error)

        def settle(row: Any, held: int) -> dict[int, WorkState]:
            ended = EndedAttempt(
                item=row.pk,
                fence=held,
                kind=FailureKind.ERROR,
                text=text,
                retryable=retryable,
                delay=delay_seconds,
            )
            return self.moves.fail(worker, [ended])

        return self._settle("fail", item_id, tenant, worker, fence, settle)

    def release(
        self,
        item_id: str,
        *,
        tenant: str,
        worker: str,
        delay_seconds: float = 0,
        fence: int | None = None,
    ) -> WorkItem:
        require_seconds("delay_seconds", delay_seconds)

        def settle(row: Any, held: int) -> dict[int, WorkState]:
            return self.moves.release(
                worker, [Release(item=row.pk, fence=held, delay=delay_seconds)]
            )

        return self._settle("release", item_id, tenant, worker, fence, settle)

    def pause(
        self, item_id: str, *, tenant: str, worker: str, fence: int | None = None
    ) -> WorkItem:
        def settle(row: Any, held: int) -> dict[int, WorkState]:
            return self.moves.release(worker, [Release(item=row.pk, fence=held, cause="paused")])

        return self._settle("pause", item_id, tenant, worker, fence, settle)

    def _settle(
        self,
        verb: str,
        item_id: str,
        tenant: str,
        worker: str,
        fence: int | None,
        settle: Callable[[Any, int], dict[int, WorkState]],
    ) -> WorkItem:
        holder = self._holder(item_id, tenant, worker, fence)
        with self._store(verb):
            return self._shown([holder.settle(verb, settle)])[0]

    def _holder(self, item_id: str, tenant: str, worker: str, fence: int | None) -> Holder:
        arguments.check_holder(item_id, tenant=tenant, worker=worker, fence=fence)
        return Holder(
            self.using, self.moves, item_id=item_id, tenant=tenant, worker=worker, fence=fence
        )

    def reap(self, *, limit: int | None = None) -> tuple[WorkItem, ...]:
        arguments.check_limit(limit)
        moved: list[int] = []
        with self._store("reap"):
            while limit is None or len(moved) < limit:
                batch = self.moves.reap(BATCH if limit is None else min(BATCH, limit - len(moved)))
                if not batch:
                    break
                moved += batch
            return tuple(self._shown(self._reader.rows(moved)))

    def adopt(self, *, worker: str) -> tuple[WorkItem, ...]:
        arguments.check_worker(worker)
        adopted = self._repeated("adopt", lambda: self.moves.adopt(worker))
        with self._store("adopt"):
            return tuple(self._shown(self._reader.rows([*adopted])))


def _undecodable(row: Row, error: PayloadError) -> EndedAttempt:
    return EndedAttempt(
        item=row["item"],
        fence=row["fence"],
        kind=FailureKind.UNDECODABLE,
        text=describe(error),
        retryable=False,
    )


def _ran_dry(rows: Sequence[Row], limit: int) -> bool:
    """True if a claim of *limit* items found every tenant's work at an end."""
    served = Tally(row["tenant"] for row in rows)
    return not rows or max(served.values()) < limit // len(served)
