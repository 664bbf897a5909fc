"""
Reading items: from rows of the tables, and from what the moves return, to `WorkItem`.

A payload is read as text and decoded for itself: one that can't be decoded must not hide
the rest of its item, nor the items beside it. What may not be enqueued can't be decoded
either, however it came into the table: no handler and no reader has to expect it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, Final

from django.db import connections, transaction
from django.db.models import TextField
from django.db.models.expressions import Combinable
from django.db.models.functions import Cast

from django_workqueue.exceptions import PayloadError, WorkItemNotFoundError
from django_workqueue.failures import storable
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
            payload_text=StoredText("payload"),
            result_text=StoredText("finished__result"),
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
        # An attempt that ended after the row was read isn't told.
        return [_as_item(row, texts.get(row.pk, ())[: row.attempts], now) for row in rows]

    def failure_texts(self, job_ids: Sequence[int]) -> dict[int, tuple[str, ...]]:
        """The texts of all failures, oldest first, by job id."""
        texts: dict[int, list[str]] = {}
        for start in range(0, len(job_ids), BATCH):
            batch = job_ids[start : start + BATCH]
            failures = Failure.objects.using(self._using).filter(item_id__in=batch)
            rows = failures.order_by("item_id", "number")
            for job_id, message in rows.values_list("item_id", StoredText("message")):
                texts.setdefault(job_id, []).append(storable(message))
        return {job_id: tuple(messages) for job_id, messages in texts.items()}


@contextmanager
def planned(using: str, **options: str) -> Iterator[None]:
    """
    Have the planner of PostgreSQL keep to *options*, and undo them with the savepoint.

    Without statistics it would gather all rows there are before it stops at a limit; with
    a worker's options it would walk an index where reading the table is a tenth of the cost.
    """
    connection = connections[using]
    if connection.vendor != "postgresql":
        yield
        return
    with transaction.atomic(using=using):
        with connection.cursor() as cursor:
            for option, value in {"jit": "off", **options}.items():
                cursor.execute(f"set local {option} = {value}")
        yield
        transaction.set_rollback(True, using=using)


class StoredText(Cast):
    """
    The text of a column, or of an expression, as it is stored. Bytes that are no UTF-8 come
    as lone surrogates: SQLite keeps whatever it is given, and its driver then refuses the
    whole statement.
    """

    def __init__(self, column: str | Combinable) -> None:
        super().__init__(column, TextField())

    def as_sqlite(self, compiler: Any, connection: Any, **context: Any) -> Any:
        """Read bytes."""
        template = "CAST(%(expressions)s AS BLOB)"
        return self.as_sql(compiler, connection, template=template, **context)

    def get_db_converters(self, connection: Any) -> list[Any]:
        """Make text of them."""
        return [_as_text]


def _as_text(stored: Any, *context: Any) -> Any:
    return stored.decode(errors="surrogateescape") if isinstance(stored, bytes) else stored


def decode_payload(stored: str | bytes) -> dict[str, Any]:
    """
    Return the payload that a store kept as *stored*. Raise `PayloadError` if it can't be read.

    The error says nothing of the payload but what is wrong with it.
    """
    payload = decode_json("payload", stored)
    if not isinstance(payload, dict):
        raise PayloadError("is not a JSON object", field="payload")
    return payload


def decode_json(name: str, stored: str | bytes) -> Any:
    """
    Return the JSON value that a store kept as *stored*. Raise `PayloadError`, which names *name*,
    for all that `encode_payload` refuses but its size.
    """
    text = _as_text(stored)
    try:
        value = _DECODER.decode(text)
        text.encode()
    except (ValueError, RecursionError) as error:
        # Not the error itself: that of the encoding has the text in it.
        told = "contains what is no text" if isinstance(error, UnicodeError) else str(error)
        raise PayloadError(f"can't be decoded: {told}", field=name) from None
    # Interpreters differ in how deep they can read; what may be stored doesn't.
    openings = text.count("{") + text.count("[")
    if openings > MAX_PAYLOAD_DEPTH and nested_deeper(value, MAX_PAYLOAD_DEPTH):
        raise PayloadError(f"nested deeper than {MAX_PAYLOAD_DEPTH}", field=name)
    if _ODD_ESCAPE.search(text) and (problem := _problem_of_texts(value)):
        raise PayloadError(problem, field=name)
    return value


#: An escaped NUL or surrogate; or a backslash with such letters behind it.
_ODD_ESCAPE: Final = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")
_NUL: Final = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def _problem_of_texts(value: Any) -> str:
    """What makes a text in *value* one that can't be stored again; empty: nothing."""
    written = json.dumps(value, ensure_ascii=False)
    try:
        written.encode()
    except UnicodeEncodeError:
        return "contains a lone surrogate"
    return "contains NUL" if _NUL.search(written) else ""


def _integer(digits: str) -> int:
    # Interpreters differ in how many digits they can read.
    if len(digits) > 20 or not -(2**63) <= (number := int(digits)) < 2**63:
        raise ValueError("an integer beyond 64 bits")
    return number


def _number(digits: str) -> float:
    if not math.isfinite(number := float(digits)):
        raise ValueError("a number beyond all floats")
    return number


def _constant(name: str) -> None:
    raise ValueError("NaN and infinity are not JSON")


_DECODER: Final = json.JSONDecoder(
    parse_int=_integer, parse_float=_number, parse_constant=_constant
)


def _payload_or_nothing(stored: str | bytes) -> dict[str, Any]:
    """What can't be decoded must not hide the item, whose failure says why."""
    try:
        return decode_payload(stored)
    except PayloadError:
        return {}


def _result_or_nothing(stored: str | bytes | None) -> Any:
    try:
        return decode_json("result", stored or "null")
    except PayloadError:
        return None


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
    if not row.state:
        raise WorkItemNotFoundError(
            f"item {row.item_id!r} is in no place (see workqueue doctor)",
            item_id=row.item_id,
            tenant=row.tenant,
        )
    lease, waiting = getattr(row, "lease", None), getattr(row, "waiting", None)
    due_at = waiting.due_at if waiting else None
    return stored_item(
        id=row.item_id,
        tenant=row.tenant,
        queue=row.queue,
        handler=row.handler,
        payload=_payload_or_nothing(row.payload_text),
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
        result=_result_or_nothing(row.result_text),
    )
