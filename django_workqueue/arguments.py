"""
The arguments of the verbs: what can't be right is refused before a store is asked, by every
store with the same words. Each refusal is an `InvalidFieldError` that names the argument.
"""

from __future__ import annotations

from collections.abc import Iterable

from django_workqueue.exceptions import InvalidFieldError
from django_workqueue.items import (
    MAX_DEPLOYMENT_LENGTH,
    MAX_ID_LENGTH,
    MAX_QUEUE_LENGTH,
    MAX_TENANT_LENGTH,
    MAX_WORKER_LENGTH,
    WorkItem,
    require_boolean,
    require_integer,
    require_seconds,
    require_text,
)

#: Most items that one call of `claim_many`, and one page of `dead_letters`, may ask for.
MAX_CLAIM_LIMIT = 10_000
MAX_PAGE_LIMIT = 1_000
#: Of who acts, and why.
MAX_ACTOR_LENGTH = 200
MAX_REASON_LENGTH = 2_000

_MAX_INTEGER = 2**63 - 1


def check_queue(queue: str) -> None:
    """Refuse a queue name that none can have."""
    require_text("queue", queue, MAX_QUEUE_LENGTH)


def check_worker(worker: str) -> None:
    """Refuse a worker's name that none can have; a blank one would name nobody."""
    if not require_text("worker", worker, MAX_WORKER_LENGTH).strip():
        raise InvalidFieldError("must not be blank", field="worker")


def check_item(item_id: str, tenant: str, job_id: int | None = None) -> None:
    """Refuse an id, a tenant or a job id that no item can have."""
    require_text("item_id", item_id, MAX_ID_LENGTH)
    require_text("tenant", tenant, MAX_TENANT_LENGTH)
    if job_id is not None:
        require_integer("job_id", job_id, 0, _MAX_INTEGER)


def check_actor(by: str | None, reason: str) -> None:
    """Refuse a name or a reason that can't be kept."""
    if by is not None:
        require_text("by", by, MAX_ACTOR_LENGTH, empty=True)
    require_text("reason", reason, MAX_REASON_LENGTH, empty=True)


def check_discard(by: str, reason: str) -> None:
    """Refuse to give a dead letter up without saying who does, and why."""
    for name, text, limit in (
        ("by", by, MAX_ACTOR_LENGTH),
        ("reason", reason, MAX_REASON_LENGTH),
    ):
        if not require_text(name, text, limit).strip():
            raise InvalidFieldError("must not be blank", field=name)


def check_hold(queue: str | None, tenant: str | None) -> None:
    """Refuse a hold of nothing."""
    if queue is None and tenant is None:
        raise InvalidFieldError("name a queue, a tenant or both", field="queue")
    if queue is not None:
        check_queue(queue)
    if tenant is not None:
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


def check_limit(limit: int | None) -> None:
    """Refuse a limit below one."""
    if limit is not None:
        require_integer("limit", limit, 1, _MAX_INTEGER)


def check_page(*, tenant: str, limit: int, after: int | None) -> None:
    """Refuse arguments that can't name a page of dead letters."""
    require_text("tenant", tenant, MAX_TENANT_LENGTH)
    require_integer("limit", limit, 1, MAX_PAGE_LIMIT)
    if after is not None:
        require_integer("after", after, 0, _MAX_INTEGER)
