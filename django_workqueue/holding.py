"""
Who holds an item: settling by the holder of a claim, what a late caller is told, and how a
settlement that is only repeated is known for one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django_workqueue.exceptions import LeaseLostError, PayloadError, WorkItemNotFoundError
from django_workqueue.failures import FailureKind
from django_workqueue.items import WorkState
from django_workqueue.models import Failure
from django_workqueue.moves import Moves
from django_workqueue.reading import ItemReader


class Holder:
    """One who says that it holds the item *item_id*, as *worker* and under *fence*."""

    def __init__(
        self,
        using: str,
        moves: Moves,
        *,
        item_id: str,
        tenant: str,
        worker: str,
        fence: int | None,
    ) -> None:
        self._using = using
        self._moves = moves
        self._reader = ItemReader(using)
        self._item_id = item_id
        self._tenant = tenant
        self._worker = worker
        self._fence = fence

    def renew(self) -> Any:
        """Renew the lease; the item's row after it."""
        row, held = self._look()
        claims = [] if held is None else [(row.pk, held)]
        renewed = self._moves.renew(self._worker, claims, wait=True)
        # The very acceptance: its id may be another's by now.
        for after in self._reader.rows([row.pk]):
            if renewed:
                return after
            raise self._refusal(after)
        raise WorkItemNotFoundError(item_id=self._item_id, tenant=self._tenant)

    def settle(self, verb: str, settle: Callable[[Any, int], dict[int, WorkState]]) -> Any:
        """
        End the claim by *settle*, which is told the item's row and the claim's fence; the
        row after it. A repetition of what *verb* did earlier is answered as that was.
        """
        row, held = self._look()
        try:
            settled = held is not None and settle(row, held)
        except PayloadError:
            if row.lease.expires_at <= self._moves.now():
                raise self._refusal(row) from None
            raise
        # As it stands now: the claim may have ended while the settlement waited for it.
        for after in self._reader.rows([row.pk]):
            if settled or self._is_repeat(verb, after):
                return after
            raise self._refusal(after)
        raise WorkItemNotFoundError(item_id=self._item_id, tenant=self._tenant)

    def _look(self) -> tuple[Any, int | None]:
        """The item's row, and the fence if the claim is there; its lease is not judged."""
        row = self._reader.row(self._item_id, self._tenant)
        lease = getattr(row, "lease", None)
        if lease is None or lease.worker != self._worker or self._fence not in (None, lease.fence):
            return row, None
        return row, lease.fence

    def _is_repeat(self, verb: str, row: Any) -> bool:
        """True if the item still stands where this very settlement put it earlier."""
        if self._fence is None or row.fence != self._fence or row.state == WorkState.CLAIMED:
            return False
        if self._settler(row) != self._worker:
            return False
        if verb == "complete":
            return bool(row.state == WorkState.COMPLETED)
        failure = Failure.objects.using(self._using).filter(item_id=row.pk, fence=row.fence).first()
        if verb == "fail":
            told = failure and (failure.kind, failure.outcome)
            return bool(told == (FailureKind.ERROR, row.state))
        given_back = WorkState.PAUSED if verb == "pause" else WorkState.QUEUED
        return failure is None and row.state in (given_back, WorkState.CANCELLED)

    def _settler(self, row: Any) -> str:
        """The worker that put the item where it stands by ending its claim; else empty."""
        if row.state in (WorkState.COMPLETED, WorkState.CANCELLED):
            return str(row.finished.worker) if row.finished.claimed_at else ""
        if row.state == WorkState.DEAD_LETTERED:
            return str(row.dead_letter.settled_by)
        return row.settled_by or ""

    def _refusal(self, row: Any) -> LeaseLostError:
        """Say why the worker may not act on the item, in the contract's order."""
        lease = getattr(row, "lease", None)
        names = {"item_id": row.item_id, "worker": self._worker}
        if lease is None:
            return LeaseLostError(**names, reason="expired")
        if lease.worker != self._worker or self._fence not in (None, lease.fence):
            return LeaseLostError(**names, reason="taken", holder=lease.worker)
        if lease.renewable_until <= self._moves.now():
            return LeaseLostError(**names, reason="capped", holder=self._worker)
        return LeaseLostError(**names, reason="expired")
