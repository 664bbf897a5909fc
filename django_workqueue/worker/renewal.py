"""
Renewal of the leases that a worker's processes hold, from outside of their interpreters: a
handler that keeps its interpreter busy can't lose its lease.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial

from django_workqueue.models import Lease
from django_workqueue.queues import DatabaseWorkQueue
from django_workqueue.worker.children import Child, Crew, HeldLease, News
from django_workqueue.worker.duty import DutyThread
from django_workqueue.worker.options import WorkerOptions
from django_workqueue.worker.reasons import CAPPED, EXPIRED, TAKEN


class Renewal(DutyThread):
    """
    Renews the leases of the processes that get on, each in every third of its length.

    One that nobody renews lapses: that of a process that is stopped or silent, that of a
    handler far beyond its time limit, and any at its cap.
    """

    def __init__(self, options: WorkerOptions, crew: Crew) -> None:
        super().__init__("renewal", options.alias, crew)
        self._worker = options.name
        self._moves = DatabaseWorkQueue(options.alias).moves
        # When it looks again, by the monotonic clock.
        self._next = float("inf")

    def expect(self, leases: Iterable[HeldLease]) -> None:
        """Take note of new leases: look at them in time. From any thread."""
        if any(lease.look_at < self._next for lease in leases):
            self.nudge()

    def turn(self) -> float | None:
        began = time.monotonic()
        due = []
        for child in self._crew.children():
            # A copy in one step: the main thread goes on changing it.
            leases = [lease for lease in [*child.leases.values()] if lease.look_at <= began]
            alive = bool(leases) and child.responsive()
            for lease in leases:
                if lease.overdue_at <= began:
                    self._post(partial(self._crew.overdue, child, lease))
                elif lease.capped_at <= began:
                    lost = [(lease.item, lease.fence, CAPPED)]
                    self._post(partial(self._crew.tell, child, News(at=began, lost=lost)))
                elif alive:
                    due.append((child, lease))
                else:
                    lease.look_again(began + lease.seconds / 6)
        if due:
            self._renew(due, began)
        held = [lease for child in self._crew.children() for lease in [*child.leases.values()]]
        self._next = min((lease.look_at for lease in held), default=float("inf"))
        return max(0.0, self._next - time.monotonic()) if held else None

    def _renew(self, due: Sequence[tuple[Child, HeldLease]], began: float) -> None:
        claims = [(lease.item, lease.fence) for _, lease in due]
        renewed = self._moves.renew(self._worker, claims, wait=False)
        answered = time.monotonic()
        missing = {lease.item for _, lease in due} - renewed.keys()
        lost = self._why(missing, {lease.item: lease for _, lease in due}) if missing else {}
        for child in {child for child, _ in due}:
            news = News(at=began)
            for owner, lease in due:
                if owner is not child:
                    continue
                if lease.item in renewed:
                    lease.capped_at = answered + renewed[lease.item].renewable_for
                # Not before the answer: after trouble of the database it is asked again soon.
                lease.look_again(began + lease.seconds / (3 if lease.item in renewed else 6))
                if lease.item in lost:
                    news.lost.append((lease.item, lease.fence, lost[lease.item]))
                elif lease.item in renewed:
                    news.renewed.append((lease.item, lease.fence))
                    if renewed[lease.item].cancel_requested and not lease.cancel_told:
                        lease.cancel_told = True
                        news.cancelled.append((lease.item, lease.fence))
            self._post(partial(self._crew.tell, child, news))

    def _why(self, missing: Iterable[int], asked: dict[int, HeldLease]) -> dict[int, str]:
        """Say why leases could not be renewed; those only locked by somebody are left out."""
        now = self._moves.now()
        mine = Lease.objects.using(self._alias).filter(worker=self._worker)
        rows = mine.filter(item_id__in=[*missing]).only("fence", "expires_at", "renewable_until")
        standing = {(row.pk, row.fence): row for row in rows}
        reasons = {}
        for item in missing:
            row = standing.get((item, asked[item].fence))
            if row is None:
                reasons[item] = TAKEN
            elif row.renewable_until <= now:
                reasons[item] = CAPPED
            elif row.expires_at <= now:
                reasons[item] = EXPIRED
        return reasons
