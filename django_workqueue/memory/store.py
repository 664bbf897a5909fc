"""What the verbs stand on: the rows, who holds which name, and how a row moves."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, Final, Protocol

from django_workqueue.exceptions import WorkItemNotFoundError
from django_workqueue.items import QueueHold, WorkItem, WorkState, encode_payload
from django_workqueue.policy import QueuePolicy, check_move


class Clock(Protocol):
    """Tells a `MemoryWorkQueue` the time, so that tests can move it."""

    def now(self) -> datetime:
        """Return the present as an aware datetime."""


class SystemClock:
    """The machine's clock, in UTC."""

    def now(self) -> datetime:
        return datetime.now(UTC)


@dataclass(slots=True)
class Row:
    """One acceptance: the item as it stands, and what an item doesn't show."""

    job_id: int
    item: WorkItem
    policy: QueuePolicy
    due_at: datetime
    #: Time of the last move: of an item that has ended, when it did.
    moved_at: datetime
    #: Of the latest claim: the length that a renewal gives, and how long it can be renewed.
    lease: timedelta = timedelta(0)
    renewable_until: datetime | None = None
    #: Time and job id of the last burial; stays when the item leaves the dead letter.
    burial: tuple[datetime, int] | None = None
    #: Verb, worker and fence of the settlement after which nothing has happened yet.
    settled: tuple[str, str, int | None] | None = None

    def due(self, now: datetime) -> bool:
        return self.item.state is WorkState.QUEUED and self.due_at <= now

    def age(self, now: datetime) -> float:
        return max(0.0, (now - (self.item.enqueued_at or now)).total_seconds())

    def shown(self, now: datetime) -> WorkItem:
        """Return the item as a copy through which nobody can change the store."""
        waits = self.item.state is WorkState.QUEUED and self.due_at > now
        return replace(
            self.item,
            payload=deepcopy(self.item.payload),
            result=deepcopy(self.item.result),
            available_at=self.due_at if waits else self.item.available_at,
        )


Name = tuple[str, str]  # a tenant, and an id or a dedupe key

_UNHELD: Final[dict[str, Any]] = {
    "worker": None,
    "first_claimed_at": None,
    "lease_expires_at": None,
    "cancel_requested": False,
}


class Store:
    """The rows of a `MemoryWorkQueue`. All but `policy` is touched in a `_moment` only."""

    def __init__(self, policy: QueuePolicy | None = None, clock: Clock | None = None) -> None:
        self.policy = policy or QueuePolicy()
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._job_ids = count(1)  # in the order of acceptance, none twice
        self._rows: dict[int, Row] = {}
        # The acceptance that holds the id or the key: the live one, else the last enqueued
        # or requeued.
        self._by_id: dict[Name, Row] = {}
        self._by_key: dict[Name, Row] = {}
        # The tenant served last, by queue and worker deployment.
        self._served: dict[tuple[str, str], str] = {}
        # By queue and tenant; None: all of them.
        self._holds: dict[tuple[str | None, str | None], QueueHold] = {}
        self._reaped: Counter[str] = Counter()
        self._suppressed: Counter[str] = Counter()

    @contextmanager
    def _moment(self) -> Iterator[datetime]:
        """Hold the store for one verb, and give the time at which it happens."""
        with self._lock:
            yield self._clock.now()

    def _row(self, item_id: str, tenant: str, job_id: int | None = None) -> Row:
        """Return the acceptance that holds the id, or the one that is *job_id*."""
        row = self._by_id.get((tenant, item_id)) if job_id is None else self._rows.get(job_id)
        if row is None or (row.item.tenant, row.item.id) != (tenant, item_id):
            raise WorkItemNotFoundError(item_id=item_id, tenant=tenant)
        return row

    def _of_queue(self, queue: str) -> Iterator[Row]:
        return (row for row in self._rows.values() if row.item.queue == queue)

    def _private(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Return *payload* as a copy of plain JSON types. Raise `PayloadError`."""
        copy: dict[str, Any] = json.loads(encode_payload(payload, self.policy.max_payload_bytes))
        return copy

    def _move(self, row: Row, verb: str, to: WorkState, now: datetime, **changes: Any) -> None:
        """Move *row*: with the claim, its lease and the wish to cancel it end."""
        check_move(row.item.id, row.item.state, verb, to)
        kept = {} if to is WorkState.CLAIMED else _UNHELD
        row.item = replace(row.item, state=to, **kept, **changes)
        row.moved_at = now
        row.settled = None
        if to is WorkState.DEAD_LETTERED:
            row.burial = (now, row.job_id)


def live_twin(item: WorkItem, by_id: Mapping[Name, Row], by_key: Mapping[Name, Row]) -> Row | None:
    """Return the live row that has *item*'s dedupe key, or else its id."""
    holders = (
        by_key.get((item.tenant, item.dedupe_key)) if item.dedupe_key is not None else None,
        by_id.get((item.tenant, item.id)),
    )
    return next((row for row in holders if row and row.item.live), None)
