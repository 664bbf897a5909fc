"""
Reading items: from rows of the tables, and from what the moves return, to `WorkItem`.

A payload is read as text and decoded for itself: one that can't be decoded must not hide
the rest of its item, nor the items beside it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from django.db.models import TextField
from django.db.models.functions import Cast

from django_workqueue.exceptions import PayloadError, WorkItemNotFoundError
from django_workqueue.items import (
    MAX_PAYLOAD_DEPTH,
    WorkItem,
    WorkState,
    nested_deeper,
    stored_item,
)
from django_workqueue.models import Failure, QueueItem
from django_workqueue.moves import BATCH, Acceptance, Row, Stored


class ItemReader:
    """Reads items of one database, each with its place in one statement."""

    def __init__(self, using: str) -> None:
        self._using = using

    def items(self) -> Any:
        """All items with their places, payload and result as text."""
        items = QueueItem.objects.using(self._using).with_state()
        return items.defer("payload", "finished__result").annotate(
            payload_text=Cast("payload", TextField()),
            result_text=Cast("finished__result", TextField()),
        )

    def row(self, item_id: str, tenant: str, job_id: int | None = None) -> Any:
        """The acceptance that holds the id, or *job_id* of it. Raise `WorkItemNotFoundError`."""
        named = self.items().filter(tenant=tenant, item_id=item_id)
        for row in named.filter(id_freed=False) if job_id is None else named.filter(pk=job_id):
            return row
        raise WorkItemNotFoundError(item_id=item_id, tenant=tenant)

    def rows(self, job_ids: Sequence[int]) -> list[Any]:
        """Read items with their places, in the order of *job_ids*."""
        rows = {}
        for start in range(0, len(job_ids), BATCH):
            batch = self.items().filter(pk__in=job_ids[start : start + BATCH])
            rows.update({row.pk: row for row in batch})
        return [rows[job_id] for job_id in job_ids if job_id in rows]

    def shown(self, rows: Sequence[Any], now: datetime) -> list[WorkItem]:
        """The rows as items, as they stand at *now*."""
        texts = self.failure_texts([row.pk for row in rows if row.attempts])
        return [_as_item(row, texts.get(row.pk, ()), now) for row in rows]

    def failure_texts(self, job_ids: Sequence[int]) -> dict[int, tuple[str, ...]]:
        """The texts of all failures, oldest first, by job id."""
        texts: dict[int, list[str]] = {}
        for start in range(0, len(job_ids), BATCH):
            batch = job_ids[start : start + BATCH]
            failures = Failure.objects.using(self._using).filter(item_id__in=batch)
            for failure in failures.only("item_id", "message").order_by("item_id", "number"):
                texts.setdefault(failure.item_id, []).append(failure.message)
        return {job_id: tuple(messages) for job_id, messages in texts.items()}


def decode_payload(text: str) -> dict[str, Any]:
    """Return the payload that a store kept as *text*. Raise `PayloadError` if it can't be."""
    try:
        payload = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PayloadError(f"can't be decoded: {error}", field="payload") from error
    if not isinstance(payload, dict):
        raise PayloadError("is not a JSON object", field="payload")
    # Interpreters differ in how deep they can read; what may be stored doesn't.
    openings = text.count("{") + text.count("[")
    if openings > MAX_PAYLOAD_DEPTH and nested_deeper(payload, MAX_PAYLOAD_DEPTH):
        raise PayloadError(f"nested deeper than {MAX_PAYLOAD_DEPTH}", field="payload")
    return payload


def _readable(decode: Callable[[str], Any], text: str, otherwise: Any) -> Any:
    """Decode *text*; what can't be decoded must not hide the item, whose failure says why."""
    try:
        return decode(text)
    except (PayloadError, ValueError, RecursionError):
        return otherwise


def accepted_item(wanted: Acceptance, stored: Stored) -> WorkItem:
    """The item that was just accepted."""
    return stored_item(
        id=wanted.item_id,
        tenant=wanted.tenant,
        queue=wanted.queue,
        handler=wanted.handler,
        payload=json.loads(wanted.payload),
        priority=wanted.priority,
        dedupe_key=wanted.dedupe_key,
        deployment_id=wanted.deployment_id or None,
        max_attempts=wanted.max_attempts,
        timeout_seconds=wanted.timeout_seconds,
        enqueued_at=stored.enqueued_at,
        available_at=stored.available_at,
        fence=wanted.fence or None,
        job_id=stored.job_id,
    )


def claimed_item(row: Row, payload: dict[str, Any], failures: tuple[str, ...]) -> WorkItem:
    """The item that was just claimed."""
    return stored_item(
        id=row["item_id"],
        tenant=row["tenant"],
        queue=row["queue"],
        handler=row["handler"],
        payload=payload,
        priority=row["priority"],
        dedupe_key=row["dedupe_key"],
        deployment_id=row["deployment_id"] or None,
        max_attempts=row["max_attempts"],
        timeout_seconds=row["timeout_seconds"],
        enqueued_at=row["enqueued_at"],
        available_at=row["available_at"],
        state=WorkState.CLAIMED,
        attempts=row["attempts"],
        failures=failures,
        worker=row["worker"],
        fence=row["fence"],
        first_claimed_at=row["claimed_at"],
        lease_expires_at=row["expires_at"],
        job_id=row["item"],
    )


def _as_item(row: Any, failures: tuple[str, ...], now: datetime) -> WorkItem:
    lease, waiting = getattr(row, "lease", None), getattr(row, "waiting", None)
    due_at = waiting.due_at if waiting else None
    return stored_item(
        id=row.item_id,
        tenant=row.tenant,
        queue=row.queue,
        handler=row.handler,
        payload=_readable(decode_payload, row.payload_text, {}),
        priority=row.priority,
        dedupe_key=row.dedupe_key,
        deployment_id=row.deployment_id or None,
        max_attempts=row.max_attempts,
        timeout_seconds=row.timeout_seconds,
        enqueued_at=row.enqueued_at,
        available_at=due_at if due_at and due_at > now else row.available_at,
        state=WorkState(row.state),
        attempts=row.attempts or 0,
        failures=failures,
        worker=lease.worker if lease else None,
        fence=row.fence or None,
        first_claimed_at=lease.claimed_at if lease else None,
        lease_expires_at=lease.expires_at if lease else None,
        job_id=row.pk,
        cancel_requested=lease.cancel_requested if lease else False,
        result=_readable(json.loads, row.result_text or "null", None),
    )
