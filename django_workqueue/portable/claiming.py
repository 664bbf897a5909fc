"""Promoting what is due, and claiming it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Final

from django_workqueue.models import (
    Hold,
    Lease,
    QueueItem,
    Ready,
    Turn,
    Waiting,
)
from django_workqueue.moves import (
    PROMOTED_PER_CLAIM,
    RECALL_BATCH,
    TURNS_KEPT,
    ClaimRequest,
    Promotion,
    Recall,
    Row,
)
from django_workqueue.portable.base import chunks, place_again
from django_workqueue.portable.upkeep import Upkeep


class Claiming(Upkeep):
    """Serves the tenants in rotation."""

    def promote(self, queue: str, limit: int = PROMOTED_PER_CLAIM) -> Promotion:
        with self._writing() as now:
            due = list(
                self._all(Waiting)
                .filter(queue=queue, due_at__lte=now)
                .order_by("due_at", "item_id")[:limit]
            )
            self._make_ready(queue, due)
            holds = self._all(Hold)
            return Promotion(
                promoted=len(due),
                held=holds.filter(queue=queue, tenant="").exists(),
                has_held_tenants=holds.filter(queue__in=["", queue]).exclude(tenant="").exists(),
            )

    def recall(
        self,
        queue: str,
        lanes: Sequence[str],
        handlers: Sequence[str],
        after: datetime | None = None,
        limit: int = RECALL_BATCH,
    ) -> Recall:
        with self._writing():
            waiting = self._all(Waiting).filter(queue=queue, cause=Waiting.Cause.UNKNOWN_HANDLER)
            if after is not None:
                waiting = waiting.filter(since__gt=after)
            times = waiting.order_by("since").values_list("since", flat=True)
            seen = next(iter(times[limit - 1 : limit]), None)
            if seen is not None:  # and all rows of that time
                waiting = waiting.filter(since__lte=seen)
            known = waiting.filter(deployment_id__in=lanes, item__handler__in=handlers)
            recalled = list(known)
            self._make_ready(queue, recalled)
            return Recall(recalled=len(recalled), seen=seen)

    def _make_ready(self, queue: str, rows: Sequence[Waiting]) -> None:
        for chunk in chunks([row.item_id for row in rows]):
            self._all(Waiting).filter(item_id__in=chunk).delete()
        self._all(Ready).bulk_create(_ready(row) for row in rows)
        if rows:
            self._count(queue, ready=len(rows), waiting=-len(rows))

    def claim(self, request: ClaimRequest) -> list[Row]:
        with self._writing() as now:
            turn = self._newest_turn(request)
            tenant = turn.tenant if turn else ""
            held = self._held_tenants(request.queue) if request.has_held_tenants else frozenset()
            picked: list[Ready] = []
            while len(picked) < request.limit:
                best = self._next_ready(request.queue, request.deployment_id, tenant, held)
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
                item=picked[-1].item_id,
                tenant=tenant,
            )
            if number % TURNS_KEPT == 0:
                self.trim_turns(request.queue, request.deployment_id, number)
                self.fold_counters()
            rows = self._lease(request, picked, now)
            self._count(request.queue, ready=-len(picked), claimed=len(rows))
            return rows

    def serves(self, queue: str, deployment_id: str) -> bool:
        if self._all(Hold).filter(queue=queue, tenant="").exists():
            return False
        return self._next_ready(queue, deployment_id, "", self._held_tenants(queue)) is not None

    def _newest_turn(self, request: ClaimRequest) -> Turn | None:
        turns = self._all(Turn).filter(queue=request.queue, deployment_id=request.deployment_id)
        newest: Turn | None = turns.order_by("-number").first()
        return newest

    def _held_tenants(self, queue: str) -> frozenset[str]:
        holds = self._all(Hold).filter(queue__in=["", queue]).exclude(tenant="")
        return frozenset(holds.values_list("tenant", flat=True))

    def _next_ready(
        self, queue: str, deployment_id: str, served: str, held: frozenset[str]
    ) -> Ready | None:
        """The best row of the next tenant after *served*, all the way round; not of a held one."""
        for after, last in ((served, None), ("", served)):
            row = self._best_after(queue, deployment_id, after)
            while row is not None and row.tenant in held:
                row = self._best_after(queue, deployment_id, row.tenant)
            if row is not None and (last is None or row.tenant <= last):
                return row
        return None

    def _best_after(self, queue: str, deployment_id: str, tenant: str) -> Ready | None:
        best: list[Ready] = [
            row
            for lane in {"", deployment_id}
            for row in self._all(Ready)
            .filter(queue=queue, deployment_id=lane, tenant__gt=tenant)
            .order_by("tenant", "rank", "item_id")[:1]
        ]
        return min(best, key=lambda row: (row.tenant, row.rank, row.item_id), default=None)

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
        for chunk in chunks([row.item_id for row in picked]):
            # The payload stays as it is: one that can't be read must not stop the others.
            raw = self._all(QueueItem).filter(pk__in=chunk).extra(select={"raw": _RAW_PAYLOAD})
            bodies.update({body["id"]: body for body in raw.values(*_CLAIMED_COLUMNS, "raw")})
        rows: list[Row] = []
        for ready in picked:
            body = bodies.get(ready.item_id)
            if body is None:  # nothing is left to do, and `workqueue doctor` was not asked
                continue
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
            place = place_again(ready) | {"fence": ready.fence + 1}
            self._all(Lease).create(
                **place, **claim, max_attempts=body["max_attempts"], lease_seconds=seconds
            )
            rows.append({**place, **body, **claim, "item": ready.item_id, "payload": body["raw"]})
        return rows

    def trim_turns(self, queue: str, deployment_id: str, newest: int) -> None:
        self._all(Turn).filter(
            queue=queue, deployment_id=deployment_id, number__lt=newest - TURNS_KEPT
        ).delete()


_RAW_PAYLOAD: Final = "cast(payload as blob)"
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


def _ready(row: Waiting) -> Ready:
    return Ready(**place_again(row), settled_by=row.settled_by)
