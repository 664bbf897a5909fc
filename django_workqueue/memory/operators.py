"""The verbs of operators, and the upkeep that forgets what is over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from django_workqueue import arguments
from django_workqueue.exceptions import LiveTwinError
from django_workqueue.items import QueueHold, WorkItem, WorkState
from django_workqueue.memory.store import Row, Store, live_twin
from django_workqueue.policy import check_move

_NEVER = datetime.max.replace(tzinfo=UTC)


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
        with self._moment() as now:
            row = self._row(item_id, tenant, job_id)
            new = {} if payload is None else {"payload": self._private(payload)}
            attempts = max(row.policy.max_attempts, row.item.attempts + 1)
            self._queue_again(row, "resume", attempts, now, **new)
            return row.shown(now)

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
        with self._moment() as now:
            row = self._row(item_id, tenant, job_id)
            if row.item.held:
                self._move(row, "cancel", WorkState.CLAIMED, now, cancel_requested=True)
            else:
                self._move(row, "cancel", WorkState.CANCELLED, now)
            return row.shown(now)

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
        with self._moment() as now:
            row = self._row(item_id, tenant, job_id)
            new = {} if payload is None else {"payload": self._private(payload)}
            state = row.item.state
            check_move(item_id, state, "requeue", WorkState.QUEUED)
            if twin := live_twin(row.item, self._by_id, self._by_key):
                raise LiveTwinError(
                    item_id=item_id, state=state, verb="requeue", twin=twin.shown(now)
                )
            latest = self._by_id[tenant, item_id].item.fence or 0
            fence = max(row.item.fence or 0, latest) or None
            self._queue_again(row, "requeue", row.item.attempts + 1, now, fence=fence, **new)
            self._by_id[tenant, item_id] = row
            if row.item.dedupe_key is not None:
                self._by_key[tenant, row.item.dedupe_key] = row
            return row.shown(now)

    def _queue_again(
        self, row: Row, verb: str, max_attempts: int, now: datetime, **changes: Any
    ) -> None:
        """Queue *row*, due now, with so many attempts in all."""
        self._move(row, verb, WorkState.QUEUED, now, max_attempts=max_attempts, **changes)
        row.policy = replace(row.policy, max_attempts=max_attempts)
        row.due_at = now

    def discard(
        self, item_id: str, *, tenant: str, by: str, reason: str, job_id: int | None = None
    ) -> WorkItem:
        arguments.check_item(item_id, tenant, job_id)
        arguments.check_discard(by, reason)
        with self._moment() as now:
            row = self._row(item_id, tenant, job_id)
            self._move(row, "discard", WorkState.CANCELLED, now)
            return row.shown(now)

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
        with self._moment() as now:
            new = QueueHold(queue=queue, tenant=tenant, since=now, by=by or "", reason=reason)
            return self._holds.setdefault((queue, tenant), new)

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
        with self._moment():
            return self._holds.pop((queue, tenant), None)

    def holds(self) -> tuple[QueueHold, ...]:
        with self._moment():
            found = self._holds.values()
            return tuple(sorted(found, key=lambda hold: (hold.queue or "", hold.tenant or "")))

    def prune(self, *, limit: int | None = None) -> int:
        arguments.check_limit(limit)
        with self._moment() as now:
            over = [row for row in self._rows.values() if _keep_until(row) <= now]
            dead = WorkState.DEAD_LETTERED
            over.sort(key=lambda row: (row.item.state is dead, _keep_until(row), row.job_id))
            removed = [self._rows.pop(row.job_id) for row in over[:limit]]
            self._free_names(removed)
            return len(removed)

    def _free_names(self, removed: list[Row]) -> None:
        """
        Take id and key from the *removed* rows.

        An id goes to its newest row still there, and its fence with it.
        """
        free: dict[tuple[str, str], int] = {}
        for row in removed:
            key = (row.item.tenant, row.item.dedupe_key or "")
            if self._by_key.get(key) is row:
                del self._by_key[key]
            name = (row.item.tenant, row.item.id)
            if self._by_id[name] is row:
                free[name] = row.item.fence or 0
        for name in free:
            del self._by_id[name]
        for row in self._rows.values():  # in the order of acceptance: the newest comes last
            name = (row.item.tenant, row.item.id)
            if name in free:
                self._by_id[name] = row
        for name in free:
            if heir := self._by_id.get(name):
                fence = max(free[name], heir.item.fence or 0) or None
                if fence != heir.item.fence:
                    heir.item, heir.settled = replace(heir.item, fence=fence), None


def _keep_until(row: Row) -> datetime:
    """Return when the retention of *row* is over, as it stands."""
    seconds = None
    if row.item.state is WorkState.DEAD_LETTERED:
        seconds = row.policy.dead_letter_retention_seconds
    elif row.item.terminal:
        seconds = row.policy.retention_seconds
    if seconds is None:
        return _NEVER
    return row.moved_at + timedelta(seconds=seconds)
