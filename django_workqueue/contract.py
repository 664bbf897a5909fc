"""
The contract of a work queue. The docstrings here are the specification of each verb; the
suite in `django_workqueue.conformance` proves it of an implementation.

Everything but ids is keyword-only. Seconds are numbers of seconds, times are aware
datetimes by the store's clock: no verb decides anything by the caller's. Arguments that
can't be right raise `InvalidFieldError`, which names them. Trouble of the store raises
`QueueUnavailableError` from any verb, and nothing of the call is stored.

A verb on one item returns the item as it then stands; one on several returns a tuple.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

from asgiref.sync import sync_to_async

from django_workqueue.exceptions import InvalidFieldError
from django_workqueue.items import (
    DEFAULT_QUEUE,
    MAX_DEPLOYMENT_LENGTH,
    MAX_ID_LENGTH,
    MAX_QUEUE_LENGTH,
    MAX_TENANT_LENGTH,
    MAX_WORKER_LENGTH,
    QueueStats,
    WorkItem,
    require_boolean,
    require_integer,
    require_seconds,
    require_text,
)
from django_workqueue.policy import QueuePolicy

P = ParamSpec("P")
R = TypeVar("R")

#: Most items that one call of `claim_many`, and one page of `dead_letters`, may ask for.
MAX_CLAIM_LIMIT = 10_000
MAX_PAGE_LIMIT = 1_000

_MAX_INTEGER = 2**63 - 1


@runtime_checkable
class WorkQueue(Protocol):
    """
    A durable queue of work that is claimed under a lease, fair between tenants.

    **Fence.** Each claim of an item has a number, greater than that of every earlier
    claim of it. A verb of a worker that passes its `fence` acts only on that very claim;
    without one (None) the worker's name and a lease that stands are enough.

    **Who holds it.** `heartbeat`, `complete`, `fail` and `release` refuse in this order:
    `WorkItemNotFoundError` if the tenant has no such item; `LeaseLostError` ``expired`` if
    nobody holds it, ``taken`` if another worker or a later claim does; ``capped`` if this
    claim has reached its ``max_lease_seconds``; ``expired`` if its lease has lapsed, even
    if nobody took the item yet.

    **Repeats.** `complete`, `fail` or `release` repeated with the same fence (because the
    answer was lost) counts once: it succeeds as long as no later claim exists and the item
    still stands where the first call put it.
    """

    @property
    def policy(self) -> QueuePolicy:
        """The policy of the default queue."""

    def enqueue(self, item: WorkItem) -> WorkItem:
        """
        Store *item* in the caller's transaction and return what is stored.

        If a live item of the tenant has its dedupe key, or else its id, that item is
        returned unchanged, and counted as a suppressed duplicate. A finished item's id and
        key are free again: the new item starts afresh, but its fence goes on from the old
        one's; the old record stays. The queue's whole policy is stamped on the item.

        Raise `QueueFullError` if the queue then held more than ``max_depth`` waiting items
        (what others have not committed yet isn't counted, so producers at the same moment
        can exceed it by what they bring),
        `PayloadError` for a payload that JSON or the policy doesn't allow.
        """

    def enqueue_many(self, items: Iterable[WorkItem]) -> tuple[WorkItem, ...]:
        """
        Store *items*, all or none, as `enqueue` would one after the other.

        Return what is stored, in their order; of two with one key or id in the same call,
        the second is a duplicate of the first.
        """

    def claim(
        self,
        *,
        worker: str,
        queue: str = DEFAULT_QUEUE,
        lease_seconds: float | None = None,
        deployment_id: str | None = None,
    ) -> WorkItem | None:
        """
        Lease the next due item of *queue* to *worker*; None if nothing is due.

        Next is: the tenant whose turn it is, then that tenant's highest priority, then its
        oldest acceptance. Due means due now. The lease lasts *lease_seconds*, else what is
        stamped on the item, and never longer than the item's ``max_lease_seconds``. With a
        *deployment_id*, items pinned to it are taken too, without one only unpinned items.
        Never takes over a lapsed claim: only `reap` and `adopt` free one.
        """

    def claim_many(
        self,
        *,
        worker: str,
        limit: int,
        queue: str = DEFAULT_QUEUE,
        lease_seconds: float | None = None,
        deployment_id: str | None = None,
    ) -> tuple[WorkItem, ...]:
        """
        Lease up to *limit* (1 … 10,000) due items, in the order in which `claim` would have
        served them.

        Fewer only if nothing more is due. See `claim`.
        """

    def heartbeat(
        self, item_id: str, *, tenant: str, worker: str, fence: int | None = None
    ) -> WorkItem:
        """
        Renew the lease: to now + the claim's own length, never shortened, never past the
        claim's start + ``max_lease_seconds``.

        The returned item's `cancel_requested` says whether the work should stop. Refusals:
        see "Who holds it".
        """

    def complete(
        self,
        item_id: str,
        *,
        tenant: str,
        worker: str,
        fence: int | None = None,
        result: Any = None,
    ) -> WorkItem:
        """
        End the item as completed, with a JSON *result*. Frees its id and dedupe key.

        Refusals: see "Who holds it" and "Repeats"; `PayloadError` for a result that JSON or
        the policy's ``max_payload_bytes`` doesn't allow (then the claim stands).
        """

    def fail(
        self,
        item_id: str,
        *,
        tenant: str,
        worker: str,
        error: str | BaseException,
        retryable: bool = True,
        delay_seconds: float | None = None,
        fence: int | None = None,
    ) -> WorkItem:
        """
        Count an attempt that ended without success, with its *error*.

        The item is queued again, due after *delay_seconds* or else the policy's backoff; or
        dead-lettered if it was the last attempt or not *retryable*; or cancelled if that
        was asked for meanwhile. The error is never refused: what can't be stored of it is
        escaped, what is longer than 64 KiB is cut. Refusals: see "Who holds it", "Repeats".
        """

    def release(
        self,
        item_id: str,
        *,
        tenant: str,
        worker: str,
        delay_seconds: float = 0,
        fence: int | None = None,
    ) -> WorkItem:
        """
        Give the item back unspent: nothing is counted, and it keeps its place in the order.

        Due again after *delay_seconds*; cancelled if that was asked for meanwhile.
        Refusals: see "Who holds it" and "Repeats".
        """

    def reap(self, *, limit: int | None = None) -> tuple[WorkItem, ...]:
        """
        End every lapsed claim of all queues and tenants, at most *limit*, the longest lapsed
        first, as `fail` would: with the text "lease lapsed…" and backoff. Counted as reaped.

        In batches: those that were reaped before trouble of the store stay so.
        """

    def adopt(self, *, worker: str) -> tuple[WorkItem, ...]:
        """
        End every claim that *worker* holds, lapsed or not: counted, with the text "worker
        restarted", but without backoff. For a worker that comes back under its old name.
        Returned in the order in which the leases would have lapsed.
        """

    def get(self, item_id: str, *, tenant: str) -> WorkItem:
        """
        Return the acceptance that holds the id: the live one, else the last enqueued or
        requeued. So do all verbs that take an id. Raise `WorkItemNotFoundError`.
        """

    def dead_letters(
        self, *, tenant: str, limit: int = 50, after: int | None = None
    ) -> tuple[WorkItem, ...]:
        """
        Return up to *limit* (1 … 1,000) dead letters of *tenant* over all queues, oldest
        burial first, then by `job_id`.

        *after* is the `job_id` of the last one of the page before; it may have left the dead
        letter since. One that never was a dead letter of *tenant* is an `InvalidFieldError`.
        """

    def stats(self, *, queue: str = DEFAULT_QUEUE) -> QueueStats:
        """Return the figures of *queue* over all tenants. See `QueueStats`."""


def _twin(
    verb: Callable[Concatenate[Any, P], R],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, R]]:
    name = verb.__name__

    @functools.wraps(verb)
    async def twin(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        return cast(R, await sync_to_async(getattr(self, name))(*args, **kwargs))

    twin.__name__ = f"a{name}"
    twin.__qualname__ = f"AsyncVerbs.a{name}"
    twin.__doc__ = f"Do `{name}()` in the thread, and the transaction, of async ORM calls."
    return cast(Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], twin)


class AsyncVerbs:
    """
    Gives every verb its async twin, named with an ``a`` in front.

    The twins run where Django's own async ORM methods run, so that ``aenqueue`` joins a
    transaction opened there.
    """

    aenqueue = _twin(WorkQueue.enqueue)
    aenqueue_many = _twin(WorkQueue.enqueue_many)
    aclaim = _twin(WorkQueue.claim)
    aclaim_many = _twin(WorkQueue.claim_many)
    aheartbeat = _twin(WorkQueue.heartbeat)
    acomplete = _twin(WorkQueue.complete)
    afail = _twin(WorkQueue.fail)
    arelease = _twin(WorkQueue.release)
    areap = _twin(WorkQueue.reap)
    aadopt = _twin(WorkQueue.adopt)
    aget = _twin(WorkQueue.get)
    adead_letters = _twin(WorkQueue.dead_letters)
    astats = _twin(WorkQueue.stats)


def check_queue(queue: str) -> None:
    """Refuse a queue name that none can have."""
    require_text("queue", queue, MAX_QUEUE_LENGTH)


def check_worker(worker: str) -> None:
    """Refuse a worker's name that none can have; a blank one would name nobody."""
    if not require_text("worker", worker, MAX_WORKER_LENGTH).strip():
        raise InvalidFieldError("must not be blank", field="worker")


def check_item(item_id: str, tenant: str) -> None:
    """Refuse an id or a tenant that no item can have."""
    require_text("item_id", item_id, MAX_ID_LENGTH)
    require_text("tenant", tenant, MAX_TENANT_LENGTH)


def check_claim(
    *,
    worker: str,
    queue: str,
    limit: int,
    lease_seconds: float | None,
    deployment_id: str | None,
) -> None:
    """Refuse arguments with which nothing could be claimed."""
    check_worker(worker)
    check_queue(queue)
    require_integer("limit", limit, 1, MAX_CLAIM_LIMIT)
    if lease_seconds is not None:
        require_seconds("lease_seconds", lease_seconds, positive=True)
    if deployment_id is not None:
        require_text("deployment_id", deployment_id, MAX_DEPLOYMENT_LENGTH, empty=True)


def check_holder(item_id: str, *, tenant: str, worker: str, fence: int | None) -> None:
    """Refuse arguments that can't name a claim."""
    check_item(item_id, tenant)
    check_worker(worker)
    if fence is not None:
        require_integer("fence", fence, 0, _MAX_INTEGER)


def check_offered(items: Iterable[WorkItem]) -> list[WorkItem]:
    """Return *items* as a list. Refuse what isn't a `WorkItem`."""
    if not isinstance(items, Iterable):
        raise InvalidFieldError("must be a series of WorkItems", field="items")
    offered = list(items)
    for item in offered:
        if not isinstance(item, WorkItem):
            raise InvalidFieldError(f"must be a WorkItem, not {type(item).__name__}", field="item")
    return offered


def check_failure(*, retryable: bool, delay_seconds: float | None) -> None:
    """Refuse what can't say how a failure goes on."""
    require_boolean("retryable", retryable)
    if delay_seconds is not None:
        require_seconds("delay_seconds", delay_seconds)


def check_reap(limit: int | None) -> None:
    """Refuse a limit below one."""
    if limit is not None:
        require_integer("limit", limit, 1, _MAX_INTEGER)


def check_page(*, tenant: str, limit: int, after: int | None) -> None:
    """Refuse arguments that can't name a page of dead letters."""
    require_text("tenant", tenant, MAX_TENANT_LENGTH)
    require_integer("limit", limit, 1, MAX_PAGE_LIMIT)
    if after is not None:
        require_integer("after", after, 0, _MAX_INTEGER)
