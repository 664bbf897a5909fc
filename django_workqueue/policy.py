"""
A queue's policy, and the rules that follow from it: which moves are legal, and what
becomes of an attempt that ended without success. Pure: no clock, no settings.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Final

from django_workqueue.exceptions import InvalidTransitionError
from django_workqueue.items import (
    MAX_ATTEMPTS,
    WorkItem,
    WorkState,
    require_integer,
    require_seconds,
)

# 2^60 seconds exceed every cap; a larger exponent would only overflow.
MAX_BACKOFF_EXPONENT: Final = 60

#: What an attempt that nobody reported is recorded as.
LEASE_LAPSED = "lease lapsed: the worker did not finish or renew in time"
WORKER_RESTARTED = "worker restarted"
WORKER_DIED = "worker process died"
WORKER_SHUTDOWN = "interrupted by worker shutdown"


_OPTIONAL = ("timeout_seconds", "retention_seconds", "dead_letter_retention_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class QueuePolicy:
    """
    How a queue treats its items. All durations are seconds.

    The whole policy except `max_depth` and `max_payload_bytes` is stamped on an item when
    it is enqueued: later changes don't touch accepted items. Wrong values raise
    `InvalidFieldError`, which names the field.
    """

    #: Length of a claim, and of each renewal.
    lease_seconds: float = 60.0
    #: Executions before the dead letter. 1 means at most once.
    max_attempts: int = 5
    #: Wait after the first failure; it doubles with each further one.
    backoff_seconds: float = 1.0
    backoff_cap_seconds: float = 300.0
    #: The longest time that one claim can be renewed for.
    max_lease_seconds: float = 3600.0
    #: Limit of one execution; None: none.
    timeout_seconds: float | None = None
    #: How long completed and cancelled items are kept; None: for ever, 0: not at all.
    retention_seconds: float | None = 86_400.0
    #: The same for dead letters. They are kept until an operator acts, unless set.
    dead_letter_retention_seconds: float | None = None
    #: Most items that may wait in the queue; None: no limit.
    max_depth: int | None = None
    #: Largest payload, and largest result, in bytes of JSON.
    max_payload_bytes: int = 262_144

    def __post_init__(self) -> None:
        require_integer("max_attempts", self.max_attempts, 1, MAX_ATTEMPTS)
        require_integer("max_payload_bytes", self.max_payload_bytes, 2, 2**30)
        if self.max_depth is not None:
            require_integer("max_depth", self.max_depth, 1, 2**62)
        for spec in fields(self):
            value = getattr(self, spec.name)
            if spec.name.endswith("_seconds") and not (value is None and spec.name in _OPTIONAL):
                positive = spec.name in ("lease_seconds", "max_lease_seconds", "timeout_seconds")
                seconds = require_seconds(spec.name, value, positive=positive)
                object.__setattr__(self, spec.name, seconds)

    def for_item(self, item: WorkItem) -> QueuePolicy:
        """Return the policy to stamp on *item*: this one with the item's own wishes."""
        return replace(
            self,
            max_attempts=item.max_attempts or self.max_attempts,
            timeout_seconds=item.timeout_seconds or self.timeout_seconds,
        )

    def lease_for(self, asked_seconds: float | None) -> float:
        """Return the length of a claim in seconds: as asked, else the policy's, never past the
        cap."""
        return min(asked_seconds or self.lease_seconds, self.max_lease_seconds)

    def backoff(self, attempts: int) -> float:
        """
        Return the wait in seconds after the failure number *attempts* (that one counted).

        ``min(backoff_seconds * 2**(attempts - 1), backoff_cap_seconds)``, without jitter;
        0 before the first failure.
        """
        if attempts <= 0:
            return 0.0
        return doubled_wait(attempts, self.backoff_seconds, self.backoff_cap_seconds)

    def exhausted(self, attempts: int) -> bool:
        """True if no execution is left after *attempts* counted ones."""
        return attempts >= self.max_attempts


def doubled_wait(attempts: int, base_seconds: float, cap_seconds: float) -> float:
    """Return *base_seconds*, doubled with each of *attempts* after the first, up to the cap."""
    return min(base_seconds * 2.0 ** min(attempts - 1, MAX_BACKOFF_EXPONENT), cap_seconds)


def after_attempt(
    *, attempts: int, max_attempts: int, retryable: bool, cancel_requested: bool
) -> WorkState:
    """
    Return where an item goes whose attempt ended without success.

    *attempts* includes the one that just ended. A wish to cancel wins over everything but
    a completion; then the dead letter, if the attempt can't be repeated or was the last.
    """
    if cancel_requested:
        return WorkState.CANCELLED
    if not retryable or attempts >= max_attempts:
        return WorkState.DEAD_LETTERED
    return WorkState.QUEUED


_S = WorkState
#: Every legal move: state -> verb -> the states that it may lead to.
MOVES: Final[dict[WorkState, dict[str, frozenset[WorkState]]]] = {
    _S.QUEUED: {
        "claim": frozenset({_S.CLAIMED}),
        "cancel": frozenset({_S.CANCELLED}),
    },
    _S.CLAIMED: {
        "heartbeat": frozenset({_S.CLAIMED}),
        "complete": frozenset({_S.COMPLETED}),
        "fail": frozenset({_S.QUEUED, _S.DEAD_LETTERED, _S.CANCELLED}),
        "release": frozenset({_S.QUEUED, _S.CANCELLED}),
        "pause": frozenset({_S.PAUSED, _S.CANCELLED}),
        "reap": frozenset({_S.QUEUED, _S.DEAD_LETTERED, _S.CANCELLED}),
        "adopt": frozenset({_S.QUEUED, _S.DEAD_LETTERED, _S.CANCELLED}),
        "cancel": frozenset({_S.CLAIMED}),
    },
    _S.PAUSED: {
        "resume": frozenset({_S.QUEUED}),
        "cancel": frozenset({_S.CANCELLED}),
    },
    _S.DEAD_LETTERED: {
        "requeue": frozenset({_S.QUEUED}),
        "discard": frozenset({_S.CANCELLED}),
    },
    _S.CANCELLED: {"requeue": frozenset({_S.QUEUED})},
    _S.COMPLETED: {},
}


def check_move(item_id: str, state: WorkState, verb: str, to: WorkState) -> None:
    """Raise `InvalidTransitionError` unless *verb* may lead from *state* to *to*."""
    if to not in MOVES[state].get(verb, ()):
        raise InvalidTransitionError(item_id=item_id, state=state, verb=verb)
