"""
A durable work queue for Django, for work whose owner can die.

Work is claimed under a lease, tenants are served in rotation, late workers are fenced
off, and what can't succeed ends in a dead letter that carries every failure.
"""

from typing import TYPE_CHECKING, Any

from django_workqueue.contract import WorkQueue
from django_workqueue.exceptions import (
    ClaimLostError,
    InvalidFieldError,
    InvalidTransitionError,
    LeaseLostError,
    LiveTwinError,
    PayloadError,
    QueueFullError,
    QueueUnavailableError,
    UnknownHandlerError,
    WorkItemNotFoundError,
    WorkQueueError,
)
from django_workqueue.handlers import Context, Pause, Reject, Retry, current_context, handler
from django_workqueue.items import QueueStats, WorkItem, WorkPriority, WorkState
from django_workqueue.memory import MemoryWorkQueue
from django_workqueue.policy import QueuePolicy

if TYPE_CHECKING:
    from django_workqueue.queues import get_queue

__version__ = "0.1.0"

__all__ = [
    "ClaimLostError",
    "Context",
    "InvalidFieldError",
    "InvalidTransitionError",
    "LeaseLostError",
    "LiveTwinError",
    "MemoryWorkQueue",
    "Pause",
    "PayloadError",
    "QueueFullError",
    "QueuePolicy",
    "QueueStats",
    "QueueUnavailableError",
    "Reject",
    "Retry",
    "UnknownHandlerError",
    "WorkItem",
    "WorkItemNotFoundError",
    "WorkPriority",
    "WorkQueue",
    "WorkQueueError",
    "WorkState",
    "current_context",
    "get_queue",
    "handler",
]


def __getattr__(name: str) -> Any:
    # The database queue needs the models, and this package is imported before they load.
    if name == "get_queue":
        from django_workqueue.queues import get_queue

        return get_queue
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
