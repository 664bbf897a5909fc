"""
The database queue: the contract over the moves of `managers`.

What is decided here: which policy is stamped, what a payload may be, whether a twin is
alive, who holds a claim and what a late caller is told, and that trouble of the database
becomes `QueueUnavailableError`.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, TypeVar

from django.db import (
    DataError,
    Error,
    IntegrityError,
    ProgrammingError,
    connections,
    router,
    transaction,
)
from django.db.models import Q

from django_workqueue import arguments, contract
from django_workqueue.accepting import TRIES, Intake
from django_workqueue.conf import get_settings
from django_workqueue.contract import AsyncVerbs
from django_workqueue.exceptions import (
    InvalidFieldError,
    PayloadError,
    QueueFullError,
    QueueUnavailableError,
)
from django_workqueue.failures import FailureKind, describe
from django_workqueue.figures import Figures
from django_workqueue.holding import Holder
from django_workqueue.items import (
    DEFAULT_QUEUE,
    QueueHold,
    QueueStats,
    WorkItem,
    WorkState,
    encode_payload,
    encode_result,
    require_seconds,
)
from django_workqueue.models import Failure, Lease, QueueItem
from django_workqueue.moves import (
    BATCH,
    Acceptance,
    ClaimRequest,
    Completion,
    EndedAttempt,
    Moves,
    Release,
    Row,
)
from django_workqueue.operating import Operator, Wish
from django_workqueue.policy import QueuePolicy
from django_workqueue.reading import ItemReader, claimed_item, decode_payload

T = TypeVar("T")

_UNDEFINED_TABLE: Final = "42P01"
_DEADLOCK: Final = "40P01"
#: Items that are deleted in one transaction.
PRUNE_BATCH: Final = 500


class DatabaseWorkQueue(AsyncVerbs):
    """
    The work queue in the database of the models, PostgreSQL or SQLite.

    Verbs run on the caller's Django connection, in the caller's transaction if one is
    open. *using* is the database's alias; by default the one of the DATABASE setting, else
    the one the router writes `QueueItem` to. *policy* replaces the policies of the
    settings. *skew* moves the store's clock, for tests.
    """

    def __init__(
        self,
        using: str | None = None,
        *,
        policy: QueuePolicy | None = None,
        skew: timedelta = timedelta(0),
    ) -> None:
        self._using = using
        self._policy = policy
        self._skew = skew

    @property
    def using(self) -> str:
        """The alias of the database."""
        return self._using or get_settings().database or router.db_for_write(QueueItem)

    @property
    def policy(self) -> QueuePolicy:
        return self.policy_for(DEFAULT_QUEUE)

    def policy_for(self, queue: str) -> QueuePolicy:
        """Return the policy that is stamped on items of *queue*."""
        return self._policy or get_settings().policy_for(queue)

    @property
    def moves(self) -> Moves:
        """The moves between places, on which the verbs and the workers stand."""
        return Lease.claims.db_manager(self.using).moves(self._skew)

    @property
    def _reader(self) -> ItemReader:
        return ItemReader(self.using)

    def _shown(self, rows: Sequence[Any]) -> list[WorkItem]:
        return self._reader.shown(rows, self.moves.now())

    # Accepting.

    def enqueue(self, item: WorkItem) -> WorkItem:
        return self.enqueue_many([item])[0]

    def enqueue_many(self, items: Iterable[WorkItem]) -> tuple[WorkItem, ...]:
        wanted = [self._acceptance(item) for item in arguments.check_offered(items)]
        if not wanted:
            return ()
        for _ in range(TRIES):
            try:
                with self._store("enqueue", wanted[0].queue):
                    return tuple(self._accept_within_bounds(wanted))
            except QueueUnavailableError as trouble:
                # Two producers met crosswise and one was undone. In a transaction of the
                # caller's there is more to repeat than this call.
                if not _is_deadlock(trouble) or connections[self.using].in_atomic_block:
                    raise
        raise QueueUnavailableError(queue=wanted[0].queue, operation="enqueue")

    def _accept_within_bounds(self, wanted: list[Acceptance]) -> list[WorkItem]:
        intake = Intake(self.using, self.moves, wanted)
        bounds = {each.queue: self.policy_for(each.queue).max_depth for each in wanted}
        if len(wanted) == 1 and not any(bounds.values()):
            # One statement, so no transaction of ours around it.
            return intake.accept()
        with self._atomic():
            items = intake.accept()
            for queue in bounds:
                if new := intake.new[queue]:
                    self._refuse_overflow(queue, new, bounds[queue])
            return items

    def _refuse_overflow(self, queue: str, new: int, limit: int | None) -> None:
        depth = Figures(self.using, self.moves).depth(queue)
        if limit is not None and depth > limit:
            raise QueueFullError(queue=queue, depth=depth - new, limit=limit)

    def _acceptance(self, item: WorkItem) -> Acceptance:
        policy = self.policy_for(item.queue).for_item(item)
        pin = get_settings().deployment_id if item.deployment_id is None else item.deployment_id
        return Acceptance(
            tenant=item.tenant,
            item_id=item.id,
            queue=item.queue,
            deployment_id=pin or "",
            handler=item.handler,
            payload=encode_payload(item.payload, policy.max_payload_bytes),
            priority=int(item.priority),
            dedupe_key=item.dedupe_key,
            fence=0,
            max_attempts=policy.max_attempts,
            lease_seconds=policy.lease_seconds,
            max_lease_seconds=policy.max_lease_seconds,
            timeout_seconds=policy.timeout_seconds,
            backoff_seconds=policy.backoff_seconds,
            backoff_cap_seconds=policy.backoff_cap_seconds,
            retention_seconds=policy.retention_seconds,
            dead_letter_retention_seconds=policy.dead_letter_retention_seconds,
            enqueued_at=item.enqueued_at,
            available_at=item.available_at,
        )

    # Claiming and holding.

    def claim(
        self,
        *,
        worker: str,
        queue: str = DEFAULT_QUEUE,
        lease_seconds: float | None = None,
        deployment_id: str | None = None,
    ) -> WorkItem | None:
        items = self.claim_many(
            worker=worker,
            limit=1,
            queue=queue,
            lease_seconds=lease_seconds,
            deployment_id=deployment_id,
        )
        return items[0] if items else None

    def claim_many(
        self,
        *,
        worker: str,
        limit: int,
        queue: str = DEFAULT_QUEUE,
        lease_seconds: float | None = None,
        deployment_id: str | None = None,
    ) -> tuple[WorkItem, ...]:
        arguments.check_claim(
            worker=worker,
            queue=queue,
            limit=limit,
            lease_seconds=lease_seconds,
            deployment_id=deployment_id,
        )
        request = ClaimRequest(
            queue=queue,
            worker=worker,
            limit=limit,
            lease_seconds=lease_seconds,
            deployment_id=deployment_id or "",
        )
        return tuple(self.claim_for(request))

    def claim_for(self, request: ClaimRequest) -> list[WorkItem]:
        """Claim as `claim_many` does, for a worker that tells its boot and process."""
        claimed: list[WorkItem] = []
        with self._store("claim", request.queue), self._atomic():
            promotion = self.moves.promote(request.queue)
            if promotion.held:
                return []
            request = replace(request, has_held_tenants=promotion.has_held_tenants)
            while len(claimed) < request.limit:
                # A tenant that ran short leaves a batch short; so does a bad payload.
                rest = replace(request, limit=min(BATCH, request.limit - len(claimed)))
                rows = self.moves.claim(rest)
                claimed += self._decoded(rows)
                if _ran_dry(rows, rest.limit):
                    break
        return claimed

    def _decoded(self, rows: Sequence[Row]) -> list[WorkItem]:
        """Read claimed rows; end those whose payload can't be read, so that they go away."""
        texts = self._reader.failure_texts([row["item"] for row in rows if row["attempts"]])
        items = []
        for row in rows:
            try:
                payload = decode_payload(row["payload"])
            except PayloadError as error:
                self._end_undecodable(row, error)
            else:
                items.append(claimed_item(row, payload, texts.get(row["item"], ())))
        return items

    def _end_undecodable(self, row: Row, error: PayloadError) -> None:
        ended = EndedAttempt(
            item=row["item"],
            fence=row["fence"],
            kind=FailureKind.UNDECODABLE,
            text=describe(error),
            retryable=False,
        )
        self.moves.fail(row["worker"], [ended])

    def heartbeat(
        self, item_id: str, *, tenant: str, worker: str, fence: int | None = None
    ) -> WorkItem:
        holder = self._holder(item_id, tenant, worker, fence)
        with self._store("heartbeat"):
            return self._shown([holder.renew()])[0]

    # Settling.

    def complete(
        self,
        item_id: str,
        *,
        tenant: str,
        worker: str,
        fence: int | None = None,
        result: Any = None,
    ) -> WorkItem:
        def settle(row: Any, held: int) -> dict[int, WorkState]:
            text = encode_result(result, self.policy_for(row.queue).max_payload_bytes)
            completion = Completion(item=row.pk, fence=held, result=text)
            return self.moves.complete(worker, [completion])

        return self._settle("complete", item_id, tenant, worker, fence, settle)

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
        arguments.check_failure(retryable=retryable, delay_seconds=delay_seconds)
        text = describe(error)

        def settle(row: Any, held: int) -> dict[int, WorkState]:
            ended = EndedAttempt(
                item=row.pk,
                fence=held,
                kind=FailureKind.ERROR,
                text=text,
                retryable=retryable,
                delay=delay_seconds,
            )
            return self.moves.fail(worker, [ended])

        return self._settle("fail", item_id, tenant, worker, fence, settle)

    def release(
        self,
        item_id: str,
        *,
        tenant: str,
        worker: str,
        delay_seconds: float = 0,
        fence: int | None = None,
    ) -> WorkItem:
        require_seconds("delay_seconds", delay_seconds)

        def settle(row: Any, held: int) -> dict[int, WorkState]:
            return self.moves.release(
                worker, [Release(item=row.pk, fence=held, delay=delay_seconds)]
            )

        return self._settle("release", item_id, tenant, worker, fence, settle)

    def pause(
        self, item_id: str, *, tenant: str, worker: str, fence: int | None = None
    ) -> WorkItem:
        def settle(row: Any, held: int) -> dict[int, WorkState]:
            return self.moves.release(worker, [Release(item=row.pk, fence=held, cause="paused")])

        return self._settle("pause", item_id, tenant, worker, fence, settle)

    def _settle(
        self,
        verb: str,
        item_id: str,
        tenant: str,
        worker: str,
        fence: int | None,
        settle: Callable[[Any, int], dict[int, WorkState]],
    ) -> WorkItem:
        holder = self._holder(item_id, tenant, worker, fence)
        with self._store(verb):
            return self._shown([holder.settle(verb, settle)])[0]

    def _holder(self, item_id: str, tenant: str, worker: str, fence: int | None) -> Holder:
        arguments.check_holder(item_id, tenant=tenant, worker=worker, fence=fence)
        return Holder(
            self.using, self.moves, item_id=item_id, tenant=tenant, worker=worker, fence=fence
        )

    def reap(self, *, limit: int | None = None) -> tuple[WorkItem, ...]:
        arguments.check_limit(limit)
        moved: list[int] = []
        with self._store("reap"):
            while limit is None or len(moved) < limit:
                batch = self.moves.reap(BATCH if limit is None else min(BATCH, limit - len(moved)))
                if not batch:
                    break
                moved += batch
            return tuple(self._shown(self._reader.rows(moved)))

    def adopt(self, *, worker: str) -> tuple[WorkItem, ...]:
        arguments.check_worker(worker)
        with self._store("adopt"):
            return tuple(self._shown(self._reader.rows([*self.moves.adopt(worker)])))

    # Operators.

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
        wish = self._wish("resume", item_id, tenant, job_id, by, reason, payload)
        with self._store("resume"):
            return self._operator.resume(wish)

    def cancel(
        self,
        item_id: str,
        *,
        tenant: str,
        job_id: int | None = None,
        by: str | None = None,
        reason: str = "",
    ) -> WorkItem:
        wish = self._wish("cancel", item_id, tenant, job_id, by, reason)
        with self._store("cancel"):
            return self._operator.cancel(wish)

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
        wish = self._wish("requeue", item_id, tenant, job_id, by, reason, payload)
        with self._store("requeue"):
            return self._operator.requeue(wish)

    def discard(
        self, item_id: str, *, tenant: str, by: str, reason: str, job_id: int | None = None
    ) -> WorkItem:
        arguments.check_discard(by, reason)
        wish = self._wish("discard", item_id, tenant, job_id, by, reason)
        with self._store("discard"):
            return self._operator.discard(wish)

    def hold(
        self,
        *,
        queue: str | None = None,
        tenant: str | None = None,
        by: str | None = None,
        reason: str = "",
    ) -> QueueHold:
        arguments.check_hold(queue, tenant)
        arguments.check_actor(by, reason)
        with self._store("hold", queue or ""):
            return self._operator.hold(queue or "", tenant or "", by or "", reason)

    def unhold(
        self,
        *,
        queue: str | None = None,
        tenant: str | None = None,
        by: str | None = None,
        reason: str = "",
    ) -> QueueHold | None:
        arguments.check_hold(queue, tenant)
        arguments.check_actor(by, reason)
        with self._store("unhold", queue or ""):
            return self._operator.unhold(queue or "", tenant or "", by or "", reason)

    def holds(self) -> tuple[QueueHold, ...]:
        with self._store("holds"):
            return self._operator.holds()

    @property
    def _operator(self) -> Operator:
        return Operator(self.using, self.moves)

    def _wish(
        self,
        verb: str,
        item_id: str,
        tenant: str,
        job_id: int | None,
        by: str | None,
        reason: str,
        payload: Mapping[str, Any] | None = None,
    ) -> Wish:
        arguments.check_item(item_id, tenant, job_id)
        arguments.check_actor(by, reason)
        text = None
        if payload is not None:
            text = encode_payload(payload, self.policy.max_payload_bytes)
        return Wish(
            verb=verb,
            item_id=item_id,
            tenant=tenant,
            job_id=job_id,
            payload=text,
            by=by or "",
            reason=reason,
        )

    def prune(self, *, limit: int | None = None) -> int:
        arguments.check_limit(limit)
        gone = 0
        with self._store("prune"):
            while limit is None or gone < limit:
                batch = PRUNE_BATCH if limit is None else min(PRUNE_BATCH, limit - gone)
                pruned = self.moves.prune(batch)
                if not pruned:
                    break
                gone += pruned
        return gone

    # Reading.

    def get(self, item_id: str, *, tenant: str, job_id: int | None = None) -> WorkItem:
        arguments.check_item(item_id, tenant, job_id)
        with self._store("get"):
            return self._shown([self._reader.row(item_id, tenant, job_id)])[0]

    def dead_letters(
        self, *, tenant: str, limit: int = 50, after: int | None = None
    ) -> tuple[WorkItem, ...]:
        arguments.check_page(tenant=tenant, limit=limit, after=after)
        with self._store("dead_letters"):
            letters = self._reader.items().filter(dead_letter__tenant=tenant)
            if after is not None:
                burials = self._all(Failure).filter(
                    item_id=after, item__tenant=tenant, outcome=WorkState.DEAD_LETTERED
                )
                last = burials.order_by("-number").first()
                if last is None:
                    raise InvalidFieldError(f"{after} never was a dead letter", field="after")
                later = Q(dead_letter__dead_at=last.failed_at, pk__gt=after)
                letters = letters.filter(later | Q(dead_letter__dead_at__gt=last.failed_at))
            page = letters.order_by("dead_letter__dead_at", "pk")[:limit]
            return tuple(self._shown(list(page)))

    def stats(self, *, queue: str = DEFAULT_QUEUE) -> QueueStats:
        arguments.check_queue(queue)
        with self._store("stats", queue):
            return Figures(self.using, self.moves).stats(queue)

    def _all(self, model: Any) -> Any:
        return model._base_manager.using(self.using)

    # The store and its troubles.

    def _atomic(self) -> Any:
        return transaction.atomic(using=self.using)

    @contextmanager
    def _store(self, operation: str, queue: str = "") -> Iterator[None]:
        """Turn trouble of the database into `QueueUnavailableError`."""
        try:
            yield
        except (IntegrityError, DataError):
            raise
        except Error as error:
            if isinstance(error, ProgrammingError) and _sqlstate(error) != _UNDEFINED_TABLE:
                raise
            connection = connections[self.using]
            if not connection.in_atomic_block:
                connection.close_if_unusable_or_obsolete()
            cause = str(error).strip().partition("\n")[0]
            raise QueueUnavailableError(
                f"{operation}: the store is unavailable: {cause}", queue=queue, operation=operation
            ) from error


def _ran_dry(rows: Sequence[Row], limit: int) -> bool:
    """True if a claim of *limit* items found every tenant's work at an end."""
    served = Tally(row["tenant"] for row in rows)
    return not rows or max(served.values()) < limit // len(served)


def _sqlstate(error: Error) -> str:
    return getattr(error.__cause__, "sqlstate", None) or ""


def _is_deadlock(trouble: QueueUnavailableError) -> bool:
    return isinstance(trouble.__cause__, Error) and _sqlstate(trouble.__cause__) == _DEADLOCK


def get_queue(using: str | None = None) -> DatabaseWorkQueue:
    """
    Return the work queue in the database *using*.

    By default the DATABASE of the WORKQUEUE setting, else where the router writes items.
    """
    return DatabaseWorkQueue(using)


if TYPE_CHECKING:
    _satisfies: contract.WorkQueue = DatabaseWorkQueue()
