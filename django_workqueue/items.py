"""
The values that the queue hands around: items, states, priorities and figures.

Pure: no database, no settings, no clock. An item checks its own fields when it is made;
the rules of a payload depend on a queue's policy, so `encode_payload` applies them when
the item is enqueued.
"""

from __future__ import annotations

import json
import math
import os
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from datetime import UTC, datetime
from enum import IntEnum, StrEnum
from typing import Any

from django_workqueue.exceptions import InvalidFieldError, PayloadError

MAX_ID_LENGTH = 200
MAX_TENANT_LENGTH = 200
MAX_QUEUE_LENGTH = 100
MAX_HANDLER_LENGTH = 200
MAX_KEY_LENGTH = 200
MAX_WORKER_LENGTH = 200
MAX_DEPLOYMENT_LENGTH = 100
MAX_PAYLOAD_DEPTH = 100
MAX_ATTEMPTS = 2**31 - 1
DEFAULT_QUEUE = "default"

_INT64 = 2**63


class WorkState(StrEnum):
    """Where an item stands. Exactly one at any time."""

    QUEUED = "queued"  # due now, or waiting for its time
    CLAIMED = "claimed"  # a worker holds a lease on it
    PAUSED = "paused"  # waits for a person; nobody holds it
    COMPLETED = "completed"  # its handler succeeded
    DEAD_LETTERED = "dead_lettered"  # given up; its failures say why
    CANCELLED = "cancelled"  # withdrawn

    @property
    def live(self) -> bool:
        """True while the item may still run: it keeps its id and its dedupe key."""
        return self in (WorkState.QUEUED, WorkState.CLAIMED, WorkState.PAUSED)

    @property
    def terminal(self) -> bool:
        """True once nothing happens to the item any more unless an operator acts."""
        return not self.live


class WorkPriority(IntEnum):
    """Named points on the scale -100 … 100 of django.tasks. Orders one tenant's own work."""

    LOW = -50
    NORMAL = 0
    HIGH = 50
    URGENT = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkItem:
    """
    One unit of work, as it stood when it was read. Immutable; the store holds the truth.

    To enqueue, give `tenant` and what the work needs; the store sets the rest. Wrong
    values raise `InvalidFieldError`, which names the field.
    """

    tenant: str
    id: str = field(default_factory=lambda: new_item_id())
    queue: str = DEFAULT_QUEUE
    handler: str = ""
    payload: Mapping[str, Any] = field(default_factory=dict, hash=False)
    priority: int = WorkPriority.NORMAL
    dedupe_key: str | None = None
    #: None: the DEPLOYMENT_ID of the process that enqueues; "": no pin whatever the setting.
    deployment_id: str | None = None
    #: None: the queue's policy decides when the item is enqueued.
    max_attempts: int | None = None
    timeout_seconds: float | None = None
    #: Aware. None: the store's time of acceptance.
    enqueued_at: datetime | None = None
    #: Aware; not claimable before it. Of a stored item that waits: when it becomes due.
    available_at: datetime | None = None
    state: WorkState = WorkState.QUEUED
    #: Executions that ended without success.
    attempts: int = 0
    #: One text per counted attempt, oldest first.
    failures: tuple[str, ...] = ()
    worker: str | None = None
    #: Number of the item's latest claim; None before the first. Grows by one per claim.
    fence: int | None = None
    first_claimed_at: datetime | None = None
    lease_expires_at: datetime | None = None
    #: Row id of this acceptance; the cursor of ``dead_letters(after=)``.
    job_id: int | None = None
    cancel_requested: bool = False
    result: Any = field(default=None, hash=False)

    def __post_init__(self) -> None:
        require_text("id", self.id, MAX_ID_LENGTH)
        require_text("tenant", self.tenant, MAX_TENANT_LENGTH)
        require_text("queue", self.queue, MAX_QUEUE_LENGTH)
        require_text("handler", self.handler, MAX_HANDLER_LENGTH, empty=True)
        if not isinstance(self.payload, Mapping):
            raise PayloadError("must be a mapping with text keys", field="payload")
        self._set("priority", int(require_integer("priority", self.priority, -100, 100)))
        self._set("dedupe_key", _text_or_none("dedupe_key", self.dedupe_key, MAX_KEY_LENGTH))
        if self.deployment_id is not None:
            require_text("deployment_id", self.deployment_id, MAX_DEPLOYMENT_LENGTH, empty=True)
        if self.max_attempts is not None:
            require_integer("max_attempts", self.max_attempts, 1, MAX_ATTEMPTS)
        if self.timeout_seconds is not None:
            require_seconds("timeout_seconds", self.timeout_seconds, positive=True)
        for name in ("enqueued_at", "available_at", "first_claimed_at", "lease_expires_at"):
            self._set(name, _utc_or_none(name, getattr(self, name)))
        self._check_claim()

    def _check_claim(self) -> None:
        try:
            self._set("state", WorkState(self.state))
        except ValueError:
            raise InvalidFieldError("names no state", field="state") from None
        require_integer("attempts", self.attempts, 0, MAX_ATTEMPTS)
        if isinstance(self.failures, str) or not isinstance(self.failures, Iterable):
            raise InvalidFieldError("must be a sequence of texts", field="failures")
        self._set("failures", tuple(self.failures))
        require_boolean("cancel_requested", self.cancel_requested)
        if self.job_id is not None:
            require_integer("job_id", self.job_id, 0, _INT64 - 1)
        self._set("worker", _text_or_none("worker", self.worker, MAX_WORKER_LENGTH))
        if self.fence is not None:
            require_integer("fence", self.fence, 0, _INT64 - 1)
        if self.held and self.worker is None:
            raise InvalidFieldError("a claimed item names its worker", field="worker")

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def held(self) -> bool:
        """True while a worker's claim stands (it says nothing of whether the worker lives)."""
        return self.state is WorkState.CLAIMED

    @property
    def live(self) -> bool:
        """True while the item may still run (queued, claimed or paused)."""
        return self.state.live

    @property
    def terminal(self) -> bool:
        """True once completed, dead-lettered or cancelled."""
        return self.state.terminal

    @property
    def attempt(self) -> int:
        """The number of the running, or of the successful, execution; else `attempts`."""
        running = self.state in (WorkState.CLAIMED, WorkState.COMPLETED)
        return self.attempts + 1 if running else self.attempts

    def lapsed_at(self, now: datetime) -> bool:
        """True if the claim's lease has run out at *now*; the expiry itself counts as out."""
        expires = self.lease_expires_at
        return self.held and expires is not None and expires <= now


def stored_item(**fields: Any) -> WorkItem:
    """
    Build a `WorkItem` from a store's own row, without the checks of a new one.

    A store must be able to show a row that was put there by other means, however odd.
    """
    item = object.__new__(WorkItem)
    for name, value in (_STORED_DEFAULTS | fields).items():
        object.__setattr__(item, name, value)
    return item


# `payload`, `id` and `tenant` have no default here: a store knows them.
_STORED_DEFAULTS: dict[str, Any] = {
    spec.name: spec.default
    for spec in dataclass_fields(WorkItem)
    if spec.name not in ("id", "tenant", "payload")
}


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueStats:
    """
    Figures of one queue over all tenants.

    Counts are items; `reaped` and `duplicates_suppressed` only grow. `depth` includes
    scheduled items and those backing off; `due` are the ones claimable now, held queues
    and tenants included. `oldest_age_seconds` is the longest time since `enqueued_at`
    among queued items, 0.0 if there are none.

    Of up to 100,000 queued items everything is exact, and read at `as_of` (the store's
    time). Beyond, a store may tell the age as of an earlier `as_of`, or a lower bound of it,
    and count at most 100,000 items in `due` that have just become due.
    """

    depth: int = 0
    due: int = 0
    claimed: int = 0
    paused: int = 0
    dead_lettered: int = 0
    completed: int = 0
    cancelled: int = 0
    oldest_age_seconds: float = 0.0
    reaped: int = 0
    duplicates_suppressed: int = 0
    as_of: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueHold:
    """
    A queue, a tenant, or a tenant in a queue, that an operator has stopped serving.

    `queue` None: all queues; `tenant` None: all tenants; never both. `since` is the store's
    time. `by` and `reason` are the operator's, or empty.
    """

    queue: str | None = None
    tenant: str | None = None
    since: datetime
    by: str = ""
    reason: str = ""


def new_item_id() -> str:
    """Return a new id: a UUID that sorts by its time of making (RFC 9562, version 7)."""
    milliseconds = time.time_ns() // 1_000_000
    value = (milliseconds << 80) | int.from_bytes(os.urandom(10), "big")
    value = value & ~(0xF << 76) | (0x7 << 76)
    return str(uuid.UUID(int=value & ~(0x3 << 62) | (0x2 << 62)))


def encode_payload(payload: Any, max_bytes: int) -> str:
    """
    Return *payload* as compact JSON text, an object of at most *max_bytes* UTF-8 bytes.

    Raise `PayloadError`: not a mapping; NaN, infinity, NUL or a lone surrogate; a key that
    is no text; an integer beyond 64 bits; nesting beyond 100; a type JSON doesn't have.
    """
    if not isinstance(payload, Mapping):
        raise PayloadError("must be a mapping with text keys", field="payload")
    return _encode("payload", payload, max_bytes)


def encode_result(result: Any, max_bytes: int) -> str | None:
    """Return *result* as JSON text by the rules of `encode_payload`; any JSON value, or None."""
    return None if result is None else _encode("result", result, max_bytes)


def _encode(name: str, value: Any, max_bytes: int) -> str:
    text = json.dumps(
        _plain(name, value, 1), ensure_ascii=False, allow_nan=False, separators=(",", ":")
    )
    if (size := len(text.encode())) > max_bytes:
        raise PayloadError(f"{size} bytes of JSON are more than {max_bytes}", field=name)
    return text


def _plain(path: str, value: Any, depth: int) -> Any:
    """Copy *value* into plain JSON types, refusing what a store can't give back unchanged."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _plain_text(path, value)
    if isinstance(value, int):
        if not -_INT64 <= value < _INT64:
            raise PayloadError("an integer beyond 64 bits", field=path)
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise PayloadError("NaN and infinity are not JSON", field=path)
        return float(value)
    if depth > MAX_PAYLOAD_DEPTH and isinstance(value, Mapping | list | tuple):
        raise PayloadError(f"nested deeper than {MAX_PAYLOAD_DEPTH}", field=path.split(".")[0])
    if isinstance(value, Mapping):
        return {
            # A key in the path is cut: a long one would be copied for each of its children.
            _plain_key(path, key): _plain(f"{path}.{key[:50]}", entry, depth + 1)
            for key, entry in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(path, entry, depth + 1) for entry in value]
    raise PayloadError(f"{type(value).__name__} is not a JSON type", field=path)


def nested_deeper(value: Any, limit: int) -> bool:
    """True if *value*, of plain JSON types, has objects or lists in more than *limit* levels."""
    level = [value]
    for _ in range(limit + 1):
        level = [inside for each in level for inside in _inside(each)]
    return bool(level)


def _inside(value: Any) -> list[Any]:
    """A container's values; of a level that has none, a single mark stands for the level."""
    if isinstance(value, dict):
        return list(value.values()) or [None]
    return (value or [None]) if isinstance(value, list) else []


def _plain_key(path: str, key: Any) -> str:
    if not isinstance(key, str):
        raise PayloadError(f"a key is {type(key).__name__}, not text", field=path)
    return _plain_text(path, key)


def _plain_text(path: str, text: str) -> str:
    if problem := _text_problem(text):
        raise PayloadError(problem, field=path)
    return str(text)


def _text_problem(text: str) -> str:
    if "\x00" in text:
        return "contains NUL"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "contains a lone surrogate"
    return ""


def require_text(name: str, value: Any, limit: int, *, empty: bool = False) -> str:
    """Return *value* if it is text of at most *limit* characters, else raise naming *name*."""
    if not isinstance(value, str):
        raise InvalidFieldError(f"must be text, not {type(value).__name__}", field=name)
    if not value and not empty:
        raise InvalidFieldError("must not be empty", field=name)
    if len(value) > limit:
        raise InvalidFieldError(f"{len(value)} characters are more than {limit}", field=name)
    if problem := _text_problem(value):
        raise InvalidFieldError(problem, field=name)
    return value


def require_integer(name: str, value: Any, low: int, high: int) -> int:
    """Return *value* if it is a whole number in [low, high], else raise naming *name*."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise InvalidFieldError(f"must be an integer, not {type(value).__name__}", field=name)
    if not low <= value <= high:  # not shown: Python refuses to print a very long integer
        raise InvalidFieldError(f"must be between {low} and {high}", field=name)
    return value


def require_boolean(name: str, value: Any) -> bool:
    """Return *value* if it is True or False, else raise naming *name*."""
    if not isinstance(value, bool):
        raise InvalidFieldError(f"must be True or False, not {type(value).__name__}", field=name)
    return value


#: A hundred years: longer spans are mistakes, and databases can't add every float to a time.
MAX_SECONDS = 100 * 366 * 86_400


def require_seconds(name: str, value: Any, *, positive: bool = False) -> float:
    """Return *value* as seconds if it is a finite number, >= 0 (or > 0), else raise."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise InvalidFieldError(
            f"must be a number of seconds, not {type(value).__name__}", field=name
        )
    # Stores keep times to the microsecond.
    if not (0 <= value <= MAX_SECONDS) or (positive and value < 1e-6):
        floor = "a microsecond or more" if positive else "0 or more"
        raise InvalidFieldError(f"must be {floor}, at most {MAX_SECONDS} seconds", field=name)
    return float(value)


def _text_or_none(name: str, value: Any, limit: int) -> str | None:
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    return require_text(name, value, limit)


#: A day is left at each end of what a datetime can be: every zone can then show it.
FIRST_YEAR, LAST_YEAR = 2, 9998


def _utc_or_none(name: str, value: Any) -> datetime | None:
    if value is None:
        return None
    if not isinstance(value, datetime) or value.utcoffset() is None:
        kind = "a naive one" if isinstance(value, datetime) else type(value).__name__
        raise InvalidFieldError(f"must be an aware datetime, not {kind}", field=name)
    try:
        moment = value.astimezone(UTC)
    except OverflowError:
        moment = None
    if moment is None or not FIRST_YEAR <= moment.year <= LAST_YEAR:
        raise InvalidFieldError(f"must lie in the years {FIRST_YEAR} to {LAST_YEAR}", field=name)
    return moment
