"""The database queue: accepting and reading, and all verbs together."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from django.db.models import Q

from django_workqueue import arguments, contract
from django_workqueue.accepting import Intake
from django_workqueue.conf import get_settings
from django_workqueue.contract import AsyncVerbs
from django_workqueue.exceptions import (
    InvalidFieldError,
    QueueFullError,
)
from django_workqueue.figures import Figures
from django_workqueue.items import (
    DEFAULT_QUEUE,
    QueueStats,
    WorkItem,
    WorkState,
    encode_payload,
)
from django_workqueue.models import Failure
from django_workqueue.moves import (
    Acceptance,
)
from django_workqueue.queues.operators import OperatorVerbs
from django_workqueue.queues.workers import WorkerVerbs
from django_workqueue.reading import planned

#: Whatever the planner believes, a page is read along the index of burials.
_A_WALK: Final = {"enable_seqscan": "off", "enable_bitmapscan": "off", "enable_sort": "off"}


class DatabaseWorkQueue(WorkerVerbs, OperatorVerbs, AsyncVerbs):
    """
    The work queue in the database of the models, PostgreSQL or SQLite.

    Verbs run on the caller's Django connection, in the caller's transaction if one is
    open. *using* is the database's alias; by default the one of the DATABASE setting, else
    the one the router writes `QueueItem` to. *policy* replaces the policies of the
    settings. *skew* moves the store's clock, for tests.
    """

    def enqueue(self, item: WorkItem) -> WorkItem:
        return self.enqueue_many([item])[0]

    def enqueue_many(self, items: Iterable[WorkItem]) -> tuple[WorkItem, ...]:
        wanted = [self._acceptance(item) for item in arguments.check_offered(items)]
        if not wanted:
            return ()
        accept = partial(self._accept_within_bounds, wanted)
        return tuple(self._repeated("enqueue", accept, wanted[0].queue))

    def _accept_within_bounds(self, wanted: list[Acceptance]) -> list[WorkItem]:
        intake = Intake(self.using, self.moves, wanted)
        bounds = {each.queue: self.policy_for(each.queue).max_depth for each in wanted}
        if len(wanted) == 1 and not any(bounds.values()):
            # One statement, so no transaction of ours around it.
            return intake.accept()
        with self._atomic():
            items = intake.accept()
            for queue, new in intake.new.items():
                if (limit := bounds[queue]) is not None:
                    self._refuse_overflow(queue, new, limit)
            return items

    def _refuse_overflow(self, queue: str, new: int, limit: int) -> None:
        depth = Figures(self.using, self.moves).depth(queue)
        if depth > limit:
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

    def get(self, item_id: str, *, tenant: str, job_id: int | None = None) -> WorkItem:
        arguments.check_item(item_id, tenant, job_id)
        read = partial(self._reader.row, item_id, tenant, job_id)
        with self._store("get"):
            [item] = self._shown([read()])
            if len(item.failures) < item.attempts:  # deleted meanwhile, or some are missing
                [item] = self._shown([read()])
            return item

    def dead_letters(
        self, *, tenant: str, limit: int = 50, after: int | None = None
    ) -> tuple[WorkItem, ...]:
        arguments.check_page(tenant=tenant, limit=limit, after=after)
        with self._store("dead_letters"), planned(self.using, **_A_WALK):
            letters = self._reader.items().filter(dead_letter__tenant=tenant)
            if after is not None:
                burials = self._all(Failure).filter(
                    item_id=after, item__tenant=tenant, outcome=WorkState.DEAD_LETTERED
                )
                last = burials.order_by("-number").first()
                if last is None:
                    raise InvalidFieldError(
                        f"{after} never was a dead letter, or it was deleted since", field="after"
                    )
                later = Q(dead_letter__dead_at=last.failed_at, pk__gt=after)
                # The first alone bounds the index.
                letters = letters.filter(dead_letter__dead_at__gte=last.failed_at)
                letters = letters.filter(later | Q(dead_letter__dead_at__gt=last.failed_at))
            page = letters.order_by("dead_letter__dead_at", "pk")[:limit]
            return tuple(self._shown(list(page)))

    def stats(self, *, queue: str = DEFAULT_QUEUE) -> QueueStats:
        arguments.check_queue(queue)
        with self._store("stats", queue):
            return Figures(self.using, self.moves).stats(queue)

    def _all(self, model: Any) -> Any:
        return model._base_manager.using(self.using)


def get_queue(using: str | None = None) -> DatabaseWorkQueue:
    """
    Return the work queue in the database *using*.

    By default the DATABASE of the WORKQUEUE setting, else where the router writes items.
    """
    return DatabaseWorkQueue(using)


if TYPE_CHECKING:
    _satisfies: contract.WorkQueue = DatabaseWorkQueue()
