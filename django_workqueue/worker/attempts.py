"""
One attempt at one item: run its handler, and say how the claim is to be settled.

Also what a handler may have done to the database connections it was given: whatever it
was, the next item finds them sound.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import select
import time
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from asgiref.sync import ThreadSensitiveContext, sync_to_async
from django.db import Error, connections, reset_queries, transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from django_workqueue.exceptions import ClaimLostError, LeaseLostError
from django_workqueue.failures import FailureKind, describe
from django_workqueue.handlers import Context, Handler, Pause, Reject, Retry
from django_workqueue.items import WorkItem, encode_result
from django_workqueue.moves import Completion, EndedAttempt, Release
from django_workqueue.policy import WORKER_DIED, WORKER_SHUTDOWN
from django_workqueue.worker.options import exceeded
from django_workqueue.worker.reasons import CANCELLED, RETIRED, SETTLING_REASONS, TIMEOUT

if TYPE_CHECKING:
    from django_workqueue.queues import DatabaseWorkQueue

logger: Final = logging.getLogger("django_workqueue")

Settlement = Completion | EndedAttempt | Release

#: Seconds until an item is tried again for whose handler no transaction could be begun.
NO_TRANSACTION_DELAY: Final = 2.0
_MARKER: Final = "workqueue_attempt"


class UnfinishedTransactionError(Exception):
    """A handler ended with a transaction open, or broke or ended the one it was given."""


@dataclass(eq=False, slots=True)
class Held:
    """An item that this process holds. Times are of the monotonic clock, in seconds."""

    item: WorkItem
    handler: Handler
    _: KW_ONLY
    lease_seconds: float
    #: When the lease was last known to have its whole length before it.
    confirmed: float
    job_id: int = field(init=False)
    fence: int = field(init=False)
    context: Context = field(init=False)
    taken: float = field(default_factory=time.monotonic)
    started: float | None = None
    ended: float | None = None
    #: Why it was told to stop; empty: it was not.
    stopped: str = ""
    task: asyncio.Task[Any] | None = None
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.job_id, self.fence = claim_of(self.item)
        self.context = Context(self.item)

    @property
    def lost(self) -> bool:
        """True once nothing may be settled any more."""
        return bool(self.stopped) and self.stopped not in SETTLING_REASONS

    def lapsed(self, now: float) -> bool:
        """True if the lease has surely run out: it wasn't confirmed within its own length."""
        return now >= self.confirmed + self.lease_seconds


def claim_of(item: WorkItem) -> tuple[int, int]:
    """Return the job id and the fence of a claimed item."""
    assert item.job_id is not None
    assert item.fence is not None
    return item.job_id, item.fence


def run_sync(queue: DatabaseWorkQueue, held: Held) -> Settlement | None:
    """Run a sync handler in this thread. None: nothing is left to settle."""
    _tidy_connections()
    try:
        if held.handler.atomic:
            return _run_atomic(queue, held)
        result = held.handler(held.item.payload, held.context)
        _refuse_open_transactions()
        return _completed(queue, held, result)
    except BaseException as error:  # SystemExit too ends the attempt, not the process
        return _ended(held, error)
    finally:
        _tidy_connections()


async def run_async(queue: DatabaseWorkQueue, held: Held) -> Settlement | None:
    """
    Run an async handler on this loop; its sync ORM calls have a thread of their own.

    Only the handler is cancelled by cancelling `held.task`, not what comes after it.
    """
    async with ThreadSensitiveContext():
        held.task = asyncio.create_task(_guarded(held))
        if held.stopped:
            cancel(held)
        try:
            result, error = await held.task
        except asyncio.CancelledError as cancelled:  # before its first step
            result, error = None, cancelled
        try:
            await sync_to_async(_refuse_open_transactions)()
            return _completed(queue, held, result) if error is None else _ended(held, error)
        except BaseException as problem:
            return _ended(held, error or problem)
        finally:
            # The thread ends here, so no connection may stay open in it.
            await sync_to_async(_drop_connections)()


def cancel(held: Held) -> None:
    """Cancel the task of a handler, once: a second time could cut its cleaning up. From the
    loop's thread."""
    if held.task is not None and not held.cancelled:
        held.cancelled = True
        held.task.cancel()


async def _guarded(held: Held) -> tuple[Any, BaseException | None]:
    # A task that let SystemExit out would end the loop with it.
    try:
        return await held.handler(held.item.payload, held.context), None
    except BaseException as error:
        return None, error


def _run_atomic(queue: DatabaseWorkQueue, held: Held) -> Settlement | None:
    """Run the handler and complete its item in one transaction."""
    committed: list[bool] = []
    begun = False
    try:
        with transaction.atomic(using=queue.using):
            transaction.on_commit(lambda: committed.append(True), using=queue.using)
            _mark(queue.using)
            begun = True
            result = held.handler(held.item.payload, held.context)
            _check_mark(queue.using)
            _refuse_open_transactions(but=queue.using)
            _complete(queue, held, result)
    except BaseException as error:
        if isinstance(error, LeaseLostError) and error.item_id == held.item.id:
            log_lost(held, error.reason)
        elif isinstance(error, Error) and not begun:
            logger.warning("no transaction for a handler: %s", str(error).strip())
            return Release(item=held.job_id, fence=held.fence, delay=NO_TRANSACTION_DELAY)
        elif committed:
            # From a project's own on_commit hook: work and completion are stored together.
            logger.exception("hook after commit failed: item=%s", held.job_id)
        else:
            raise
    else:
        log_success(held)
    return None


def _complete(queue: DatabaseWorkQueue, held: Held, result: Any) -> None:
    if held.stopped == TIMEOUT or held.lost:
        raise ClaimLostError(reason=held.stopped)
    item = held.item
    queue.complete(
        item.id, tenant=item.tenant, worker=item.worker or "", fence=held.fence, result=result
    )


def _mark(alias: str) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SAVEPOINT {_MARKER}")


def _check_mark(alias: str) -> None:
    """Raise if the transaction is not the one that was marked, or can't be committed."""
    try:
        if connections[alias].savepoint_ids:
            raise Error("a block inside of it was not left")
        with connections[alias].cursor() as cursor:
            cursor.execute(f"RELEASE SAVEPOINT {_MARKER}")
    except Error as error:
        raise UnfinishedTransactionError(
            "the handler ended or broke the transaction it was to share with its completion"
        ) from error


def _completed(queue: DatabaseWorkQueue, held: Held, result: Any) -> Settlement | None:
    if held.lost or held.stopped == TIMEOUT:
        return _ended(held, ClaimLostError(reason=held.stopped))
    limit = queue.policy_for(held.item.queue).max_payload_bytes
    text = encode_result(result, limit)
    return Completion(item=held.job_id, fence=held.fence, result=text)


def _ended(held: Held, error: BaseException) -> Settlement | None:
    """Say what becomes of an attempt that ended with *error*."""
    if held.lost:
        log_lost(held, held.stopped)
    interrupted = isinstance(error, ClaimLostError | asyncio.CancelledError)
    if held.lost or held.stopped == TIMEOUT or (held.stopped and interrupted):
        return cut(held)
    if isinstance(error, Pause):
        logger.info(
            "paused: queue=%s tenant=%s item=%s reason=%s",
            held.item.queue,
            held.item.tenant,
            held.item.id,
            describe(error).message,
        )
        return Release(item=held.job_id, fence=held.fence, cause="paused")
    if isinstance(error, Reject):
        return failed(held, error, retryable=False)
    if isinstance(error, Retry):
        return failed(held, error, delay=error.delay_seconds)
    return failed(held, error)


def cut(held: Held) -> Settlement | None:
    """Settle an attempt that was cut short, by why it was."""
    if held.lost:
        return None
    if held.stopped == TIMEOUT:
        return failed(held, exceeded(held.item.timeout_seconds), FailureKind.TIMEOUT)
    if held.stopped == CANCELLED:
        return Release(item=held.job_id, fence=held.fence)
    if held.stopped == RETIRED:
        return failed(held, WORKER_DIED, FailureKind.DIED, delay=0.0)
    return failed(held, WORKER_SHUTDOWN, FailureKind.SHUTDOWN, delay=0.0)


def failed(
    held: Held,
    error: str | BaseException,
    kind: FailureKind = FailureKind.ERROR,
    *,
    retryable: bool = True,
    delay: float | None = None,
) -> EndedAttempt:
    """Settle a counted attempt that ended without success."""
    return EndedAttempt(
        item=held.job_id,
        fence=held.fence,
        kind=kind,
        text=describe(error),
        retryable=retryable,
        delay=delay,
    )


def log_success(held: Held) -> None:
    """Tell that an item is completed, now that this is stored."""
    ended = time.monotonic() if held.ended is None else held.ended
    logger.debug(
        "attempt succeeded: queue=%s tenant=%s item=%s attempt=%s seconds=%.3f",
        held.item.queue,
        held.item.tenant,
        held.item.id,
        held.item.attempt,
        ended - (held.started or held.taken),
    )


def log_lost(held: Held, reason: str) -> None:
    """Tell that an attempt's end doesn't count, because its claim is gone."""
    logger.warning(
        "claim lost: queue=%s tenant=%s item=%s fence=%s reason=%s",
        held.item.queue,
        held.item.tenant,
        held.item.id,
        held.fence,
        reason,
    )


# Connections.


def _refuse_open_transactions(but: str | None = None) -> None:
    """Raise if the handler left a transaction open: its work there is about to be undone."""
    for connection in connections.all(initialized_only=True):
        if connection.alias == but or not connection.settings_dict["AUTOCOMMIT"]:
            continue
        if _is(connection) is _OPEN:
            raise UnfinishedTransactionError(
                f"the handler left a transaction open on database {connection.alias!r}: "
                "it was rolled back"
            )


_SOUND, _OPEN, _BROKEN = "sound", "in a transaction", "broken"


def _is(connection: BaseDatabaseWrapper) -> str:
    """Say in what state a handler left a connection."""
    raw: Any = connection.connection
    if connection.in_atomic_block:
        return _OPEN
    if raw is None:
        return _SOUND
    try:
        if connection.vendor == "postgresql":
            state = _PSYCOPG_STATES.get(raw.info.transaction_status.name, _BROKEN)
            return _BROKEN if state is _SOUND and _has_spoken(raw.fileno()) else state
        if connection.vendor == "sqlite":
            return _OPEN if raw.in_transaction else _SOUND
    except Exception:  # the driver's own, of a connection that was closed behind Django's back
        return _BROKEN
    return _SOUND


_PSYCOPG_STATES: Final = {"IDLE": _SOUND, "INTRANS": _OPEN, "INERROR": _OPEN, "ACTIVE": _OPEN}


def _has_spoken(descriptor: int) -> bool:
    """True if the server has said something unasked: most likely that it ended the session."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _tidy_connections() -> None:
    """Leave no trace of a handler on this thread's connections, nor one that is too old."""
    reset_queries()
    for connection in connections.all(initialized_only=True):
        try:
            # After an error the session may be one of a server that is read-only now.
            if _is(connection) is _SOUND and not connection.errors_occurred:
                connection.close_if_unusable_or_obsolete()
                continue
        except Exception:
            logger.debug("connection can't be closed: database=%s", connection.alias)
        _drop(connection)


def _drop_connections() -> None:
    for connection in connections.all(initialized_only=True):
        _drop(connection)


def _drop(connection: BaseDatabaseWrapper) -> None:
    # The wrapper goes too: inside a block that nobody will leave, it could not reconnect.
    with contextlib.suppress(Exception):
        connection.in_atomic_block = False
        connection.close()
    del connections[connection.alias]
