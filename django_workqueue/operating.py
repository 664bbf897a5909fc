"""
The moves that operators make: an item is let go on, given another attempt or ended, and
queues and tenants are held.

They are rare, so they are plain ORM calls on both databases. The body's row is their
mutex: it is locked first, and what is so is looked at again in a new statement, of all
places at once. A worker's move doesn't take that lock: it is met at the row of the place,
which whoever deletes it has. Each move writes its line into the audit.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

from django.db import IntegrityError, transaction

from django_workqueue.exceptions import (
    InvalidTransitionError,
    LiveTwinError,
    QueueUnavailableError,
)
from django_workqueue.failures import storable
from django_workqueue.items import QueueHold, WorkItem, WorkState
from django_workqueue.models import (
    AuditEntry,
    Counter,
    DeadLetter,
    Finished,
    Hold,
    Lease,
    QueueItem,
    Ready,
    Waiting,
)
from django_workqueue.moves import Moves
from django_workqueue.policy import check_move
from django_workqueue.reading import ItemReader

#: How often it looks again in vain, because others move the item.
TRIES: Final = 10
#: Characters kept of a payload that was replaced; no policy allows larger ones by default.
MAX_KEPT_PAYLOAD: Final = 1_048_576


_told: ContextVar[Mapping[str, str] | None] = ContextVar("django_workqueue_audit", default=None)


def audit_detail() -> dict[str, Any]:
    """Return what the audit is to keep of what happens now, beside what the move tells."""
    return dict(_told.get() or {})


@contextlib.contextmanager
def audited(**detail: str) -> Iterator[None]:
    """Have the audit keep *detail* too, of what this thread or task does meanwhile."""
    token = _told.set(audit_detail() | detail)
    try:
        yield
    finally:
        _told.reset(token)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What an operator wants of an item: *verb* on the acceptance, by whom and why."""

    verb: str
    item_id: str
    tenant: str
    job_id: int | None = None
    #: JSON text of a new payload.
    payload: str | None = None
    by: str = ""
    reason: str = ""


class Operator:
    """Makes the moves of operators on the database *using*."""

    def __init__(self, using: str, moves: Moves) -> None:
        self._using = using
        self._moves = moves
        self._reader = ItemReader(using)
        self._bodies = QueueItem.bodies.db_manager(using)

    # Items.

    def resume(self, wish: Wish) -> WorkItem:
        """Queue a paused item again."""

        def move(row: Any, now: datetime) -> bool:
            check_move(row.item_id, row.state, "resume", WorkState.QUEUED)
            if not self._leave(row):
                return False
            self._queue_again(row, wish, max(row.max_attempts, row.attempts + 1), row.fence)
            return True

        return self._carry_out(wish, move)

    def cancel(self, wish: Wish) -> WorkItem:
        """Cancel an item that nobody holds, or ask for it."""

        def move(row: Any, now: datetime) -> bool:
            if row.state == WorkState.CLAIMED:
                # Not a renewal: the row may have been settled meanwhile, and claimed again.
                claim = self._all(Lease).filter(item_id=row.pk, fence=row.fence)
                return bool(claim.update(cancel_requested=True))
            check_move(row.item_id, row.state, "cancel", WorkState.CANCELLED)
            return self._cancel(row, wish, now)

        return self._carry_out(wish, move)

    def discard(self, wish: Wish) -> WorkItem:
        """Cancel a dead letter."""

        def move(row: Any, now: datetime) -> bool:
            check_move(row.item_id, row.state, "discard", WorkState.CANCELLED)
            return self._cancel(row, wish, now)

        return self._carry_out(wish, move)

    def requeue(self, wish: Wish) -> WorkItem:
        """Give an item that has ended one more attempt, with its id and its key."""

        def move(row: Any, now: datetime) -> bool:
            check_move(row.item_id, row.state, "requeue", WorkState.QUEUED)
            rivals = self._reader.rows(row.rivals)
            rivals.sort(key=lambda rival: rival.dedupe_key != row.dedupe_key)  # the key first
            for rival in rivals:
                if not rival.state:
                    raise self._misplaced(rival, wish)
                if WorkState(rival.state).live:
                    [twin] = self._reader.shown([rival], now)
                    raise LiveTwinError(item_id=row.item_id, state=row.state, twin=twin)
            if not self._leave(row):
                return False
            before = [rival for rival in rivals if rival.item_id == row.item_id]
            same_key = [each for each in rivals if each.dedupe_key == row.dedupe_key]
            self._bodies.set_freed(
                True,
                ids=[rival.pk for rival in before],
                keys=[rival.pk for rival in same_key if row.dedupe_key is not None],
            )
            fence = max(each.fence for each in (row, *before))
            self._queue_again(row, wish, row.attempts + 1, fence)
            return True

        return self._carry_out(wish, move)

    def _carry_out(self, wish: Wish, move: Callable[[Any, datetime], bool]) -> WorkItem:
        """Make *move* on the item under its lock; again if others moved it meanwhile."""
        for _ in range(TRIES):
            with contextlib.suppress(IntegrityError), self._bodies.changing():
                row = self._locked(wish)
                now = self._moves.now()
                if row is not None and move(row, now):
                    self._record(wish, row, now)
                    return self._reader.shown(self._reader.rows([row.pk]), now)[0]
        raise QueueUnavailableError(
            f"{wish.verb}: others move item {wish.item_id!r} too fast", operation=wish.verb
        )

    def _locked(self, wish: Wish) -> Any:
        """
        Lock the acceptance and who has its names, its `rivals`; None if that is not who had
        them before. One that takes a name later is met by the unique index.
        """
        row = self._reader.row(wish.item_id, wish.tenant, wish.job_id)
        locked = self._bodies.lock([row.pk, *self._rivals(row)])
        row = self._reader.row(wish.item_id, wish.tenant, wish.job_id)
        row.rivals = self._rivals(row)
        if not {row.pk, *row.rivals}.issubset(locked):
            return None
        if not row.state:
            raise self._misplaced(row, wish)
        return row

    def _misplaced(self, row: Any, wish: Wish) -> InvalidTransitionError:
        return InvalidTransitionError(
            item_id=row.item_id, state="in no place (see workqueue doctor)", verb=wish.verb
        )

    def _rivals(self, row: Any) -> list[int]:
        """The other bodies that hold the id or the key of *row*."""
        holders = self._bodies.holders([(row.tenant, row.item_id, row.dedupe_key)])
        return [pk for pk in holders if pk != row.pk]

    # Between places.

    def _leave(self, row: Any) -> bool:
        """Delete the row of the item's place; False if it isn't there any more."""
        place, figure = _place(row)
        # Of the fence that was seen: claimed and given back meanwhile, it is another's row.
        if not place.using(self._using).filter(fence=row.fence).delete()[0]:
            return False
        self._count(row.queue, **{figure: -1})
        return True

    def _queue_again(self, row: Any, wish: Wish, max_attempts: int, fence: int) -> None:
        changes: dict[str, Any] = {
            "max_attempts": max_attempts,
            "id_freed": False,
            "key_freed": False,
        }
        if wish.payload is not None:
            changes["payload"] = json.loads(wish.payload)
        self._bodies.filter(pk=row.pk).update(**changes)
        self._all(Ready).create(
            queue=row.queue,
            deployment_id=row.deployment_id,
            tenant=row.tenant,
            rank=-row.priority,
            item_id=row.pk,
            fence=fence,
            attempts=row.attempts,
            enqueued_at=row.enqueued_at,
        )
        self._count(row.queue, ready=1)

    def _cancel(self, row: Any, wish: Wish, now: datetime) -> bool:
        if not self._leave(row):
            return False
        kept = row.retention_seconds
        self._all(Finished).create(
            item_id=row.pk,
            queue=row.queue,
            tenant=row.tenant,
            state=WorkState.CANCELLED.value,
            fence=row.fence,
            attempts=row.attempts,
            finished_at=now,
            keep_until=None if kept is None else now + timedelta(seconds=kept),
            reason=wish.reason,
        )
        self._count(row.queue, cancelled=1)
        return True

    def _count(self, queue: str, **deltas: int) -> None:
        self._all(Counter).create(queue=queue, **deltas)

    def _record(self, wish: Wish, row: Any, now: datetime) -> None:
        detail = audit_detail() | {"job_id": row.pk, "state": row.state}
        if wish.payload is not None:  # as text: it may be one that can't be decoded
            detail["payload"] = storable(row.payload_text, limit=MAX_KEPT_PAYLOAD)
        self._all(AuditEntry).create(
            at=now,
            actor=wish.by,
            verb=wish.verb,
            queue=row.queue,
            tenant=row.tenant,
            item=row.pk,
            item_id=row.item_id,
            reason=wish.reason,
            detail=detail,
        )

    # Queues and tenants.

    def hold(self, queue: str, tenant: str, by: str, reason: str) -> QueueHold:
        """Hold what is named; empty: all. One that is there already stays as it is."""
        now = self._moves.now()
        with transaction.atomic(using=self._using):
            hold, created = self._all(Hold).get_or_create(
                queue=queue, tenant=tenant, defaults={"since": now, "actor": by, "reason": reason}
            )
            if created:
                self._record_hold("hold", hold, by, reason, now)
        return _as_value(hold)

    def unhold(self, queue: str, tenant: str, by: str, reason: str) -> QueueHold | None:
        """Lift a hold; None if there is none."""
        with transaction.atomic(using=self._using):
            named = self._all(Hold).filter(queue=queue, tenant=tenant)
            for hold in named:
                if named.filter(pk=hold.pk).delete()[0]:
                    self._record_hold("unhold", hold, by, reason, self._moves.now())
                    return _as_value(hold)
        return None

    def holds(self) -> tuple[QueueHold, ...]:
        """All holds, by queue and tenant."""
        return tuple(_as_value(hold) for hold in self._all(Hold).order_by("queue", "tenant"))

    def _record_hold(self, verb: str, hold: Hold, by: str, reason: str, now: datetime) -> None:
        self._all(AuditEntry).create(
            at=now,
            actor=by,
            verb=verb,
            queue=hold.queue,
            tenant=hold.tenant,
            reason=reason,
            detail=audit_detail(),
        )

    def _all(self, model: Any) -> Any:
        return model._base_manager.using(self._using)


def _place(row: Any) -> tuple[Any, str]:
    """Where an item stands as it was read: the row of its place, and the figure it counts in."""
    if row.state == WorkState.PAUSED:
        return Waiting.objects.filter(item_id=row.pk, cause=Waiting.Cause.PAUSED), "paused"
    if row.state == WorkState.DEAD_LETTERED:
        return DeadLetter.objects.filter(item_id=row.pk), "dead_lettered"
    if row.state == WorkState.CANCELLED:
        return Finished.objects.filter(item_id=row.pk, state=row.state), "cancelled"
    if hasattr(row, "waiting"):
        return Waiting.objects.filter(item_id=row.pk, due_at__isnull=False), "waiting"
    ready = Ready.objects.filter(
        queue=row.queue,
        deployment_id=row.deployment_id,
        tenant=row.tenant,
        rank=-row.priority,
        item_id=row.pk,
    )
    return ready, "ready"


def _as_value(hold: Hold) -> QueueHold:
    return QueueHold(
        queue=hold.queue or None,
        tenant=hold.tenant or None,
        since=hold.since,
        by=hold.actor,
        reason=hold.reason,
    )
