"""
Every error of the package, as one tree.

`WorkQueueError` is never raised itself. There is a class for each thing that a caller
may want to do something about. Each can be built from a message alone; the facts are
keyword arguments and stay readable as attributes. No message carries a payload or a
credential.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

if TYPE_CHECKING:
    from django_workqueue.items import WorkItem

LeaseLostReason = Literal["expired", "taken", "capped"]


class WorkQueueError(Exception):
    """Base of all errors of this package. `retryable`: the same call may succeed later."""

    retryable: ClassVar[bool] = False

    def __init__(self, message: str = "") -> None:
        super().__init__(message)


class InvalidFieldError(WorkQueueError, ValueError):
    """A value was refused; `field` names the argument or the field. Nothing was stored."""

    def __init__(self, message: str = "", *, field: str = "") -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.field = field


class PayloadError(InvalidFieldError):
    """A payload (or a result) can't be stored as JSON, or is too large. Nothing was stored."""


class QueueUnavailableError(WorkQueueError):
    """The store did not take or answer the call. Nothing of it was stored, or its outcome
    is unknown because the connection was lost: repeat it, with the same id or dedupe key.
    What the store refused, because its tables are damaged or full, needs an operator first."""

    retryable = True

    def __init__(self, message: str = "", *, queue: str = "", operation: str = "") -> None:
        super().__init__(message or f"{operation} on queue {queue!r}: the store is unavailable")
        self.queue = queue
        self.operation = operation


class QueueFullError(WorkQueueError):
    """The queue holds `limit` waiting items or more. Nothing was stored."""

    retryable = True

    def __init__(
        self, message: str = "", *, queue: str = "", depth: int = 0, limit: int = 0
    ) -> None:
        super().__init__(message or f"queue {queue!r} is full: depth {depth}, max_depth {limit}")
        self.queue = queue
        self.depth = depth
        self.limit = limit


class WorkItemNotFoundError(WorkQueueError):
    """The tenant has no such item. Another tenant's item gives the same answer."""

    def __init__(self, message: str = "", *, item_id: str = "", tenant: str = "") -> None:
        super().__init__(message or f"tenant {tenant!r} has no item {item_id!r}")
        self.item_id = item_id
        self.tenant = tenant


class LeaseLostError(WorkQueueError):
    """
    The caller does not hold the claim (any more). Nothing was written; don't retry.

    `reason` is ``expired`` (nobody holds the item, or the caller's lease has lapsed),
    ``taken`` (a later claim holds it; `holder` names its worker) or ``capped`` (the claim
    reached its ``max_lease_seconds``).
    """

    def __init__(
        self,
        message: str = "",
        *,
        item_id: str = "",
        worker: str = "",
        holder: str | None = None,
        reason: LeaseLostReason = "expired",
    ) -> None:
        held_by = f", held by {holder!r}" if holder else ""
        super().__init__(
            message or f"worker {worker!r} has lost item {item_id!r}: {reason}{held_by}"
        )
        self.item_id = item_id
        self.worker = worker
        self.holder = holder
        self.reason = reason


class InvalidTransitionError(WorkQueueError):
    """The item's state doesn't allow the verb. Nothing was changed."""

    def __init__(
        self, message: str = "", *, item_id: str = "", state: str = "", verb: str = ""
    ) -> None:
        super().__init__(message or f"item {item_id!r} is {state}: {verb} is not possible")
        self.item_id = item_id
        self.state = state
        self.verb = verb


class LiveTwinError(InvalidTransitionError):
    """A live item now holds the id or the dedupe key; `twin` is that item. Nothing was changed."""

    def __init__(
        self,
        message: str = "",
        *,
        item_id: str = "",
        state: str = "",
        verb: str = "requeue",
        twin: WorkItem | None = None,
    ) -> None:
        named = f" {twin.id!r}" if twin is not None else ""
        super().__init__(
            message or f"item {item_id!r} can't come back: live item{named} has its id or key",
            item_id=item_id,
            state=state,
            verb=verb,
        )
        self.twin = twin


class UnknownHandlerError(WorkQueueError):
    """No handler is registered under the name, and the queue has no catch-all handler."""

    def __init__(self, message: str = "", *, handler: str = "", queue: str = "") -> None:
        super().__init__(message or f"no handler {handler!r} for queue {queue!r} in this process")
        self.handler = handler
        self.queue = queue


class ClaimLostError(WorkQueueError):
    """Raised by ``context.check()`` inside a handler: stop, the result won't count."""

    def __init__(self, message: str = "", *, reason: str = "") -> None:
        super().__init__(message or f"stop working: {reason}")
        self.reason = reason
