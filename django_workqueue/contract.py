"""
The contract of a work queue. The docstrings here are the specification of each verb; the
suite in `django_workqueue.conformance` proves it of an implementation.

Everything but ids is keyword-only. Seconds are numbers of seconds, times are aware
datetimes by the store's clock: no verb decides anything by the caller's. Arguments that
can't be right raise `InvalidFieldError`, which names them. Trouble of the store raises
`QueueUnavailableError` from any verb: nothing of the call is stored then, or its outcome is
unknown because the connection was lost. `reap` and `prune` keep the batches they have done.

A verb on one item returns the item as it then stands; one on several returns a tuple.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, runtime_checkable

from asgiref.sync import sync_to_async

from django_workqueue.items import DEFAULT_QUEUE, QueueHold, QueueStats, WorkItem
from django_workqueue.policy import QueuePolicy

P = ParamSpec("P")
R = TypeVar("R")


@runtime_checkable
class WorkQueue(Protocol):
    """
    A durable queue of work that is claimed under a lease, fair between tenants.

    **Fence.** Each claim of an item has a number, greater than that of every earlier
    claim of it. A verb of a worker that passes its `fence` acts only on that very claim;
    without one (None) the worker's name and a lease that stands are enough.

    **Who holds it.** `heartbeat`, `complete`, `fail`, `pause` and `release` refuse in this order:
    `WorkItemNotFoundError` if the tenant has no such item; `LeaseLostError` ``expired`` if
    nobody holds it, ``taken`` if another worker or a later claim does; ``capped`` if this
    claim has reached its ``max_lease_seconds``; ``expired`` if its lease has lapsed, even
    if nobody took the item yet.

    **Repeats.** `complete`, `fail`, `pause` or `release` repeated with the same fence (because
    the answer was lost) counts once: it succeeds as long as no later claim exists and the
    item still stands where the first call put it. (Cancelled instead, a pause and a release
    are the same.)

    **Which acceptance.** An id may have been accepted more than once, one after the other.
    A verb that takes an id means the acceptance that holds it: the live one, else the last
    enqueued or requeued. The verbs of operators also take the *job_id* of another one.

    **Who did it.** Operators' verbs take *by* (who, up to 200 characters) and *reason* (why,
    up to 2,000); a durable store keeps both in its audit, in the same transaction.
    """

    @property
    def policy(self) -> QueuePolicy:
        """The policy of the default queue."""

    def enqueue(self, item: WorkItem) -> WorkItem:
        """
        Store *item* in the caller's transaction and return what is stored.

        If a live item of the tenant has its dedupe key, or else its id, that item is
        returned unchanged, and counted as a suppressed duplicate. A finished item's id and
        key are free again (so a call repeated that late is stored again): the new item starts
        afresh, but its fence goes on from the old one's; the old record stays. The queue's
        whole policy is stamped on the item.

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

    def pause(
        self, item_id: str, *, tenant: str, worker: str, fence: int | None = None
    ) -> WorkItem:
        """
        Put the item aside until a person lets it go on with `resume`; nothing is counted.

        Cancelled instead if that was asked for meanwhile. A paused item keeps its id and its
        dedupe key, and retention never takes it. Refusals: see "Who holds it" and "Repeats".
        """

    def resume(
        self,
        item_id: str,
        *,
        tenant: str,
        payload: Mapping[str, Any] | None = None,
        job_id: int | None = None,
        by: str | None = None,
        reason: str = "",
    ) -> WorkItem:
        """
        Queue a paused item again, due now, with at least one attempt left.

        ``max_attempts`` grows to ``attempts + 1`` if it was less. The item keeps its place in
        the order and its deployment; ``max_depth`` doesn't hold it up. A *payload* replaces the
        old one. Raise
        `InvalidTransitionError` if it isn't paused, `PayloadError`.
        """

    def cancel(
        self,
        item_id: str,
        *,
        tenant: str,
        job_id: int | None = None,
        by: str | None = None,
        reason: str = "",
    ) -> WorkItem:
        """
        Withdraw an item. A queued or paused one is cancelled at once.

        Of a claimed one it is asked: its holder hears the wish at its next `heartbeat`. A
        completion still wins; every other end of that claim then ends cancelled, counted as
        it would have been. Raise `InvalidTransitionError` for an item that has ended.
        """

    def requeue(
        self,
        item_id: str,
        *,
        tenant: str,
        payload: Mapping[str, Any] | None = None,
        job_id: int | None = None,
        by: str | None = None,
        reason: str = "",
    ) -> WorkItem:
        """
        Give a dead-lettered or cancelled item exactly one more attempt, due now.

        ``max_attempts`` becomes ``attempts + 1``; attempts, failures and fence are kept, a
        wish to cancel is cleared. The item takes its id and its dedupe key back from finished
        items. ``max_depth`` doesn't hold it up. A *payload* replaces the old one. Raise
        `LiveTwinError` if a live item has the id or the key now, `InvalidTransitionError` if
        the item stands elsewhere, `PayloadError`.
        """

    def discard(
        self, item_id: str, *, tenant: str, by: str, reason: str, job_id: int | None = None
    ) -> WorkItem:
        """
        Give a dead letter up: it is cancelled. *by* and *reason* must not be blank.

        Raise `InvalidTransitionError` if it isn't dead-lettered.
        """

    def hold(
        self,
        *,
        queue: str | None = None,
        tenant: str | None = None,
        by: str | None = None,
        reason: str = "",
    ) -> QueueHold:
        """
        Stop serving a *queue*, a *tenant* in all queues, or (both given) a tenant in a queue.

        Running items go on, and items are accepted as ever. A hold that is there already is
        returned unchanged. Raise `InvalidFieldError` if neither is named.
        """

    def unhold(
        self,
        *,
        queue: str | None = None,
        tenant: str | None = None,
        by: str | None = None,
        reason: str = "",
    ) -> QueueHold | None:
        """
        Lift the hold that was made with the same *queue* and *tenant*, and return it.

        None if there is none. Other holds of the queue or the tenant stay.
        """

    def holds(self) -> tuple[QueueHold, ...]:
        """Return all holds, by queue, then tenant; what names none comes first."""

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

    def prune(self, *, limit: int | None = None) -> int:
        """
        Delete items whose retention is over, at most *limit*; return how many.

        Completed and cancelled ones after the ``retention_seconds`` stamped on them, dead
        letters only if they have ``dead_letter_retention_seconds``; nothing else, ever. The id
        goes to the newest acceptance of it that is still there, and the fence with it. In
        batches, finished items before dead letters, each that are over the longest first.
        """

    def get(self, item_id: str, *, tenant: str, job_id: int | None = None) -> WorkItem:
        """Return the item as it stands. See "Which acceptance". Raise `WorkItemNotFoundError`."""

    def dead_letters(
        self, *, tenant: str, limit: int = 50, after: int | None = None
    ) -> tuple[WorkItem, ...]:
        """
        Return up to *limit* (1 … 1,000) dead letters of *tenant* over all queues, oldest
        burial first, then by `job_id`.

        *after* is the `job_id` of the last one of the page before; it may have left the dead
        letter since. One that never was a dead letter of *tenant*, or that retention has deleted
        since, is an `InvalidFieldError`: where it stood is not known, so begin again without it.
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
    apause = _twin(WorkQueue.pause)
    aresume = _twin(WorkQueue.resume)
    acancel = _twin(WorkQueue.cancel)
    arequeue = _twin(WorkQueue.requeue)
    adiscard = _twin(WorkQueue.discard)
    ahold = _twin(WorkQueue.hold)
    aunhold = _twin(WorkQueue.unhold)
    aholds = _twin(WorkQueue.holds)
    areap = _twin(WorkQueue.reap)
    aadopt = _twin(WorkQueue.adopt)
    aprune = _twin(WorkQueue.prune)
    aget = _twin(WorkQueue.get)
    adead_letters = _twin(WorkQueue.dead_letters)
    astats = _twin(WorkQueue.stats)
