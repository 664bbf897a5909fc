"""Accepting items."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final

from django.db import connections

from django_workqueue.models import (
    QueueItem,
    Ready,
    Waiting,
)
from django_workqueue.moves import (
    FOLDED_EVERY,
    Acceptance,
    Stored,
)
from django_workqueue.portable.base import chunks
from django_workqueue.portable.upkeep import Upkeep

# Where SQLite keeps the highest id that a table ever had.
_LATEST_ID: Final = "select seq from sqlite_sequence where name = %s"


class Accepting(Upkeep):
    """Stores what is new."""

    def reserve(self, number: int) -> list[int]:
        # Valid while the caller's transaction keeps the write lock.
        with self._writing(), connections[self._alias].cursor() as cursor:
            cursor.execute(_LATEST_ID, [QueueItem._meta.db_table])
            latest = cursor.fetchone()
        start = latest[0] + 1 if latest else 1
        return [*range(start, start + number)]

    def accept(self, items: Sequence[Acceptance]) -> dict[int, Stored]:
        with self._writing() as now:
            taken = self._taken(items)
            free = [
                place
                for place, item in enumerate(items)
                if (item.tenant, item.item_id) not in taken
                and (item.tenant, None, item.dedupe_key) not in taken
            ]
            bodies = self._all(QueueItem).bulk_create(_body(items[place], now) for place in free)
            due = [
                (body, items[place])
                for place, body in zip(free, bodies, strict=True)
                if body.available_at <= now
            ]
            later = [
                (body, items[place])
                for place, body in zip(free, bodies, strict=True)
                if body.available_at > now
            ]
            self._all(Ready).bulk_create(Ready(**_place(*each)) for each in due)
            self._all(Waiting).bulk_create(
                Waiting(
                    **_place(body, item), due_at=body.available_at, since=now, cause="scheduled"
                )
                for body, item in later
            )
            for queue in {items[place].queue for place in free}:
                self._count(
                    queue,
                    ready=sum(item.queue == queue for _, item in due),
                    waiting=sum(item.queue == queue for _, item in later),
                )
            if any(body.pk % FOLDED_EVERY == 0 for body in bodies):
                self.fold_counters()
            return {
                place: Stored(
                    job_id=body.pk, enqueued_at=body.enqueued_at, available_at=body.available_at
                )
                for place, body in zip(free, bodies, strict=True)
            }

    def _taken(self, items: Sequence[Acceptance]) -> set[tuple[Any, ...]]:
        """Return (tenant, id) and (tenant, None, key) of all holders in the way of *items*."""
        ids, keys = defaultdict(list), defaultdict(list)
        for item in items:
            ids[item.tenant].append(item.item_id)
            if item.dedupe_key is not None:
                keys[item.tenant].append(item.dedupe_key)
        taken: set[tuple[Any, ...]] = set()
        for tenant, wanted in ids.items():
            for chunk in chunks(wanted):
                holders = self._all(QueueItem).filter(tenant=tenant, id_freed=False)
                found = holders.filter(item_id__in=chunk).values_list("item_id", flat=True)
                taken.update((tenant, item_id) for item_id in found)
        for tenant, wanted in keys.items():
            for chunk in chunks(wanted):
                holders = self._all(QueueItem).filter(tenant=tenant, key_freed=False)
                found = holders.filter(dedupe_key__in=chunk).values_list("dedupe_key", flat=True)
                taken.update((tenant, None, key) for key in found)
        return taken

    def count_suppressed(self, queue: str, number: int) -> None:
        if self._count(queue, duplicates_suppressed=number) % FOLDED_EVERY == 0:
            self.fold_counters()


def _body(item: Acceptance, now: datetime) -> QueueItem:
    return QueueItem(
        id=item.id,
        tenant=item.tenant,
        item_id=item.item_id,
        queue=item.queue,
        deployment_id=item.deployment_id,
        handler=item.handler,
        payload=json.loads(item.payload),
        priority=item.priority,
        dedupe_key=item.dedupe_key,
        max_attempts=item.max_attempts,
        lease_seconds=item.lease_seconds,
        max_lease_seconds=item.max_lease_seconds,
        timeout_seconds=item.timeout_seconds,
        backoff_seconds=item.backoff_seconds,
        backoff_cap_seconds=item.backoff_cap_seconds,
        retention_seconds=item.retention_seconds,
        dead_letter_retention_seconds=item.dead_letter_retention_seconds,
        enqueued_at=item.enqueued_at or now,
        available_at=item.available_at or now,
        created_at=now,
    )


def _place(body: QueueItem, item: Acceptance) -> dict[str, Any]:
    return {
        "item_id": body.pk,
        "queue": body.queue,
        "deployment_id": body.deployment_id,
        "tenant": body.tenant,
        "rank": -body.priority,
        "fence": item.fence,
        "attempts": 0,
        "enqueued_at": body.enqueued_at,
    }
