"""What is looked for, in which order, and where a page of it ends."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

from django_workqueue.exceptions import InvalidFieldError, WorkQueueError
from django_workqueue.items import (
    FIRST_YEAR,
    LAST_YEAR,
    MAX_DEPLOYMENT_LENGTH,
    MAX_HANDLER_LENGTH,
    MAX_ID_LENGTH,
    MAX_KEY_LENGTH,
    MAX_QUEUE_LENGTH,
    MAX_TENANT_LENGTH,
    MAX_WORKER_LENGTH,
    WorkState,
    require_integer,
    require_text,
)

MAX_FINGERPRINT_LENGTH: Final = 16
#: Job ids are positive and have 63 bits.
MAX_JOB_ID: Final = 2**63 - 1

#: A place in the order: a job id, or a time and a job id.
Key = tuple[int] | tuple[datetime, int]

_ENDED: Final = {
    WorkState.DEAD_LETTERED: "dead_at",
    WorkState.COMPLETED: "finished_at",
    WorkState.CANCELLED: "finished_at",
}
#: By what is sorted by, the states whose place holds that time, and as what.
TIMES: Final = {
    "updated_at": {WorkState.CLAIMED: "claimed_at", WorkState.PAUSED: "since", **_ENDED},
    "completed_at": _ENDED,
}
_TEXTS: Final = {
    "queue": MAX_QUEUE_LENGTH,
    "tenant": MAX_TENANT_LENGTH,
    "item_id": MAX_ID_LENGTH,
    "handler": MAX_HANDLER_LENGTH,
    "deployment_id": MAX_DEPLOYMENT_LENGTH,
    "worker": MAX_WORKER_LENGTH,
    "dedupe_key": MAX_KEY_LENGTH,
    "fingerprint": MAX_FINGERPRINT_LENGTH,
}


class SearchTooBroadError(WorkQueueError):
    """A search would look at too much; the message says what to narrow. Nothing was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """
    What is looked for; None, or no state: any. Wrong values raise `InvalidFieldError`.

    `worker` is who holds the claim now; `fingerprint` that of the error a dead letter was given
    up for; `dedupe_key` finds the item that holds the key;
    `deployment_id` empty: pinned to none. `created_after` is in, `created_before` is not.
    By `created_at` is by job id. The other times are those of a place: they need one state.
    """

    states: frozenset[WorkState] = frozenset()
    queue: str | None = None
    tenant: str | None = None
    item_id: str | None = None
    handler: str | None = None
    deployment_id: str | None = None
    worker: str | None = None
    dedupe_key: str | None = None
    fingerprint: str | None = None
    created_after: datetime | None = None
    created_before: datetime | None = None
    sort_by: Literal["created_at", "updated_at", "completed_at"] = "created_at"
    descending: bool = True

    def __post_init__(self) -> None:
        if not self.states <= {*WorkState}:
            raise InvalidFieldError("names no state", field="states")
        for name, limit in _TEXTS.items():
            if (text := getattr(self, name)) is not None:
                require_text(name, text, limit, empty=name in ("handler", "deployment_id"))
        for name in ("created_after", "created_before"):
            if (moment := getattr(self, name)) is not None:
                _require_moment(name, moment)
        if self.sort_by != "created_at":
            self._check_sort()

    def _check_sort(self) -> None:
        times = TIMES.get(self.sort_by)
        if times is None:
            raise InvalidFieldError("names no order", field="sort_by")
        if len(self.states) != 1 or not self.states <= times.keys():
            states = ", ".join(times)
            raise InvalidFieldError(
                f"{self.sort_by} goes only with one state, of {states}", field="sort_by"
            )

    @property
    def time(self) -> str | None:
        """The column of its place that the one state is sorted by; None: by job id."""
        if self.sort_by == "created_at":
            return None
        [state] = self.states
        return TIMES[self.sort_by][state]

    @property
    def of_bodies(self) -> dict[str, Any]:
        """What a body must have, as a filter; a place has the same where it has the column."""
        wanted = {
            "queue": self.queue,
            "tenant": self.tenant,
            "item_id": self.item_id,
            "handler": self.handler,
            "deployment_id": self.deployment_id,
            "dedupe_key": self.dedupe_key,
            "key_freed": None if self.dedupe_key is None else False,
            "created_at__gte": self.created_after,
            "created_at__lt": self.created_before,
        }
        return {name: value for name, value in wanted.items() if value is not None}

    @property
    def is_counted(self) -> bool:
        """True if the counters of queues tell how many there are."""
        of_places = (self.worker, self.fingerprint)
        return of_places == (None, None) and self.of_bodies.keys() <= {"queue"}


def _require_moment(name: str, moment: datetime) -> None:
    if not isinstance(moment, datetime) or moment.utcoffset() is None:
        raise InvalidFieldError("must be an aware datetime", field=name)
    if not FIRST_YEAR < moment.year < LAST_YEAR:
        raise InvalidFieldError(
            f"must lie between the years {FIRST_YEAR} and {LAST_YEAR}", field=name
        )


def cursor_of(search: Search, key: Key) -> str:
    """Return *key* as text that means something in this order alone."""
    told = [each.isoformat() if isinstance(each, datetime) else each for each in key]
    text = json.dumps([search.sort_by, search.descending, *told], separators=(",", ":"))
    return urlsafe_b64encode(text.encode()).decode()


def key_of(search: Search, cursor: str) -> Key:
    """Return the key that `cursor_of` made *cursor* of. Raise `InvalidFieldError`."""
    try:
        _, _, *key = json.loads(urlsafe_b64decode(cursor))
        found: Key = (_as_utc(key[0]), key[1]) if search.time else (key[0],)
        require_integer("cursor", found[-1], 0, MAX_JOB_ID)
        # Whatever else can be read as the same isn't a text that we gave.
        genuine = cursor_of(search, found) == cursor
    except (ValueError, TypeError, IndexError, RecursionError):
        genuine = False
    if not genuine:
        raise InvalidFieldError("is none, or belongs to another order", field="cursor")
    return found


def _as_utc(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    _require_moment("cursor", moment)
    return moment.astimezone(UTC)
