"""
The moves of items between places: what each is told, and what it answers.

A move tells what it did and never raises because an item stood elsewhere: who asks in
whose name, and what to answer, is decided in `queues`. `managers` makes the moves on
PostgreSQL, `portable` on SQLite.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, Protocol

from django_workqueue.failures import FailureKind, FailureText
from django_workqueue.items import WorkState

#: How many due items one claim promotes at most.
PROMOTED_PER_CLAIM: Final = 1000
#: Waiting items without a handler that are looked at in one recall.
RECALL_BATCH: Final = 1000
#: Claims per statement: matching the fences is quadratic.
BATCH: Final = 200
#: Items that are pruned in one transaction.
PRUNE_BATCH: Final = 500
#: Every so many acceptances the counters are folded, also where no worker's upkeep does it.
FOLDED_EVERY: Final = 200
#: How many turns stay behind the newest one.
TURNS_KEPT: Final = 100

Claim = tuple[int, int]  # (job id, fence)
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """
    An item to accept. `fence` is the latest claim number of its id; times None: now; `id`
    None: the next job id.
    """

    tenant: str
    item_id: str
    queue: str
    deployment_id: str
    handler: str
    payload: str
    priority: int
    dedupe_key: str | None
    fence: int
    max_attempts: int
    lease_seconds: float
    max_lease_seconds: float
    timeout_seconds: float | None
    backoff_seconds: float
    backoff_cap_seconds: float
    retention_seconds: float | None
    dead_letter_retention_seconds: float | None
    enqueued_at: datetime | None
    available_at: datetime | None
    id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What became of an accepted item."""

    job_id: int
    enqueued_at: datetime
    available_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRequest:
    """Who claims what. `boot` and `process` tell a worker's own processes apart."""

    queue: str
    worker: str
    limit: int
    deployment_id: str = ""
    lease_seconds: float | None = None
    boot: str = ""
    process: int = 0
    #: From `Promotion`: the walk must look for held tenants.
    has_held_tenants: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """
    A renewed lease, and whether its work should stop.

    `renewable_for`: seconds until the claim reaches its ``max_lease_seconds``.
    """

    expires_at: datetime
    cancel_requested: bool
    renewable_for: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A claim to end as completed; `result` is JSON text."""

    item: int
    fence: int
    result: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """
    A claim to give back unspent, due after `delay` seconds; or, of the cause ``paused``, to
    put aside until a person lets it go on.
    """

    item: int
    fence: int
    delay: float = 0.0
    cause: str = "released"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedAttempt:
    """A claim to end as a counted failure; `delay` None: the item's own backoff."""

    item: int
    fence: int
    kind: FailureKind
    text: FailureText
    retryable: bool = True
    delay: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Promotion:
    """What was `promoted`; whether the queue is `held`, or tenants with work in it may be."""

    promoted: int
    held: bool = False
    has_held_tenants: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """What was `recalled`; `seen`: up to where in their order was looked, None: to the end."""

    recalled: int
    seen: datetime | None


class Moves(Protocol):
    """
    The moves between places, each atomic, on one database.

    Settling (`complete`, `release`, `fail`) needs the very claim, the worker's name and a
    lease that stands; it returns the new state of each item that it settled, by job id.
    The moves of operators are in `operating`.
    """

    def now(self) -> datetime:
        """Return the store's time."""

    def reserve(self, number: int) -> list[int]:
        """Return *number* job ids that no other acceptance will have, in growing order."""

    def accept(self, items: Sequence[Acceptance]) -> dict[int, Stored]:
        """Store the items whose id and key are free; by position in *items*."""

    def promote(self, queue: str, limit: int = PROMOTED_PER_CLAIM) -> Promotion:
        """Make up to *limit* waiting items ready whose time has come; say what is held."""

    def recall(
        self,
        queue: str,
        lanes: Sequence[str],
        handlers: Sequence[str],
        after: datetime | None = None,
        limit: int = RECALL_BATCH,
    ) -> Recall:
        """
        Make ready what waits of cause ``unknown_handler``, is for one of *handlers* and is
        pinned to one of *lanes*. It looks at about *limit* rows, the oldest by `since`, or
        the oldest *after* what an earlier recall had `seen`.
        """

    def claim(self, request: ClaimRequest) -> list[Row]:
        """
        Lease the next ready items in order of service; fewer than asked if one runs short.

        Held tenants are passed over if the request says that there are any; whether the
        queue itself is held is the caller's to ask.
        """

    def serves(self, queue: str, deployment_id: str) -> bool:
        """True if a claim would find something ready, holds considered."""

    def renew(self, worker: str, claims: Sequence[Claim], *, wait: bool) -> dict[int, Renewal]:
        """Renew leases that stand, by job id; not *wait*: pass over those locked by others."""

    def complete(self, worker: str, settlements: Sequence[Completion]) -> dict[int, WorkState]:
        """End claims as completed."""

    def release(self, worker: str, settlements: Sequence[Release]) -> dict[int, WorkState]:
        """Give claims back unspent."""

    def fail(self, worker: str, settlements: Sequence[EndedAttempt]) -> dict[int, WorkState]:
        """End claims as counted failures."""

    def reap(self, limit: int) -> dict[int, WorkState]:
        """End up to *limit* lapsed claims, the longest lapsed first."""

    def adopt(self, worker: str, spare: Sequence[str] = ()) -> dict[int, WorkState]:
        """End all claims of *worker* except those of the boots to *spare*."""

    def count_suppressed(self, queue: str, number: int) -> None:
        """Count suppressed duplicates."""

    def fold_counters(self) -> None:
        """Sum the appended deltas of each queue into one row."""

    def prune(self, limit: int) -> int:
        """
        Delete up to *limit* items whose retention is over, with their failures; return how
        many. Fewer than *limit* doesn't mean that none is left; 0 does, but for locked ones.
        """

    def trim_turns(self, queue: str, deployment_id: str, newest: int) -> None:
        """Delete turns far behind the *newest* one."""
