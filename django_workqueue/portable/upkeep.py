"""What keeps the tables small."""

from __future__ import annotations

from typing import Any

from django.db.models import Sum

from django_workqueue.items import WorkState
from django_workqueue.models import (
    COUNTED,
    Counter,
    DeadLetter,
    Failure,
    Finished,
    QueueItem,
)
from django_workqueue.portable.base import Base


class Upkeep(Base):
    """Folds counters, and forgets what is over."""

    def fold_counters(self) -> None:
        with self._writing():
            sums = list(
                self._all(Counter)
                .order_by()
                .values("queue")
                .annotate(**{f"sum_{name}": Sum(name) for name in COUNTED})
            )
            self._all(Counter).all().delete()
            self._all(Counter).bulk_create(
                Counter(queue=row["queue"], **{name: row[f"sum_{name}"] for name in COUNTED})
                for row in sums
            )

    def prune(self, limit: int) -> int:
        gone = 0
        with self._writing() as now:
            for place in (Finished, DeadLetter):
                over = self._all(place).filter(keep_until__lte=now)
                oldest = over.order_by("keep_until", "item_id").values("item_id", "fence")
                for row in list(oldest[: limit - gone]):
                    self._forget(place, row["item_id"], row["fence"])
                    gone += 1
        return gone

    def _forget(self, place: Any, item: int, fence: int) -> None:
        """Delete an item; its id and its fence go to the newest other acceptance."""
        bodies = self._all(QueueItem)
        row = self._all(place).defer("result") if place is Finished else self._all(place)
        kept = row.get(pk=item)
        state = kept.state if place is Finished else WorkState.DEAD_LETTERED.value
        self._count(kept.queue, **{state: -1})
        body = bodies.only("tenant", "item_id", "id_freed").filter(pk=item).first()
        for rows in (
            self._all(place).filter(pk=item),
            self._all(Failure).filter(item_id=item),
            bodies.filter(pk=item),
        ):
            rows._raw_delete(self._alias)
        if body is None or body.id_freed:
            return
        older = bodies.filter(tenant=body.tenant, item_id=body.item_id).order_by("-pk")
        heir = older.values_list("pk", flat=True).first()
        if heir is not None:
            bodies.filter(pk=heir).update(id_freed=False)
            # What the heir was settled under is forgotten: nothing repeats that any more.
            lower = {"pk": heir, "fence__lt": fence}
            self._all(Finished).filter(**lower).update(fence=fence, claimed_at=None)
            self._all(DeadLetter).filter(**lower).update(fence=fence, settled_by="")
