"""What there is beside single jobs: figures, workers, tenants and holds."""

from __future__ import annotations

from typing import Any, Final

from django.db.models import Count, Min
from rest_framework.exceptions import NotFound
from rest_framework.request import Request
from rest_framework.response import Response

from django_workqueue.api import access, parameters, shapes, wholes
from django_workqueue.api.base import OperatorViewSet
from django_workqueue.api.schema import document, operation
from django_workqueue.api.words import status_of
from django_workqueue.exceptions import InvalidFieldError
from django_workqueue.items import QueueStats, WorkState
from django_workqueue.jobs import Jobs, Search
from django_workqueue.models import Lease, QueueItem
from django_workqueue.operating import audited
from django_workqueue.overview import UnknownHandler, error_groups, known_queues, look, no_queue
from django_workqueue.tenants import Tenants

_COUNTS: Final = {
    WorkState.QUEUED: "depth",
    WorkState.CLAIMED: "claimed",
    WorkState.PAUSED: "paused",
    WorkState.COMPLETED: "completed",
    WorkState.DEAD_LETTERED: "dead_lettered",
    WorkState.CANCELLED: "cancelled",
}


class StatsViewSet(OperatorViewSet):
    """The figures of the queue."""

    @operation("queue_stats", wholes.StatsSerializer, "too_broad", asks=parameters.StatsFilter)
    def list(self, request: Request) -> Response:
        """
        Return how many jobs there are in each state, and what to alert on.

        With a tenant its jobs are counted, up to a cap; what isn't kept by tenant is left out.
        """
        asked = self.asked(parameters.StatsFilter)
        names = _queues(self.queue, asked.get("queue"))
        if tenant := asked.get("tenant"):
            return _stats(_of_tenant(tenant, asked.get("queue")))
        seen = look(self.queue, names)
        figures = [each.stats for each in seen.queues]
        return _stats(
            {
                **_counted(figures),
                "as_of": min([seen.as_of, *(each.as_of for each in figures)]),
                "workers": len(seen.workers.alive),
                "workers_gone": seen.workers.gone,
                "unserved_queues": [each.name for each in seen.queues if each.unserved],
                "unknown_handlers": [_unknown(each) for each in seen.unknown_handlers],
            }
        )


def _stats(figures: dict[str, Any]) -> Response:
    return Response(shapes.shown("stats", shapes.StatsSerializer, figures))


def _unknown(each: UnknownHandler) -> dict[str, Any]:
    return {
        "queue": each.queue,
        "handler": each.handler,
        "count": each.number,
        "count_is_capped": each.is_capped,
        "oldest_age_seconds": each.oldest_age_seconds,
    }


def _counted(figures: list[QueueStats]) -> dict[str, Any]:
    sums = {
        status_of(state): sum(getattr(each, name) for each in figures)
        for state, name in _COUNTS.items()
    }
    depth = sums[status_of(WorkState.QUEUED)]
    oldest = max((each.oldest_age_seconds for each in figures), default=0.0)
    return {
        "counts": {status: number for status, number in sums.items() if number},
        "oldest_queued_age_seconds": oldest if depth else None,
        "due": sum(each.due for each in figures),
        "reaped": sum(each.reaped for each in figures),
        "duplicates_suppressed": sum(each.duplicates_suppressed for each in figures),
    }


def _of_tenant(tenant: str, queue: str | None) -> dict[str, Any]:
    jobs, oldest = Jobs(), None
    counts, capped, now = {}, [], jobs.moves.now()
    for state in WorkState:
        search = Search(states=frozenset({state}), tenant=tenant, queue=queue, descending=False)
        found, is_capped = jobs.ids(search, most=parameters.MAX_COUNTED)
        if found or is_capped:
            counts[status_of(state)] = len(found)
        if is_capped:
            capped.append(status_of(state))
        if state is WorkState.QUEUED and found:
            bodies = QueueItem.objects.using(jobs.using).filter(pk__in=found)
            oldest = bodies.aggregate(oldest=Min("enqueued_at"))["oldest"]
    age = None if oldest is None else max(0.0, (now - oldest).total_seconds())
    return {
        "counts": counts,
        "counts_are_capped": capped,
        "oldest_queued_age_seconds": age,
        "as_of": now,
    }


def _queues(queue: Any, name: str | None) -> list[str]:
    known = known_queues(queue)
    if name is None:
        return known
    if name not in known:
        raise InvalidFieldError(no_queue(name, known), field="queue")
    return [name]


class WorkerViewSet(OperatorViewSet):
    """The workers that are alive."""

    @operation("queue_workers_list", wholes.WorkerListSerializer)
    def list(self, request: Request) -> Response:
        """List the workers that showed their presence lately, and what each runs."""
        self.asked(parameters.Parameters)
        queue = self.queue
        workers = look(queue, []).workers
        leases = Lease._base_manager.using(queue.using).order_by()
        running = dict(leases.values_list("boot").annotate(number=Count("pk")))
        data = [shapes.worker(row, running.get(row.boot, 0)) for row in workers.alive]
        meta = shapes.WorkersGoneSerializer(workers).data
        return Response({"data": data, "meta": meta})


class TenantViewSet(OperatorViewSet):
    """The tenants that have work."""

    @operation(
        "queue_tenants_list",
        wholes.TenantListSerializer,
        "too_broad",
        asks=parameters.TenantListing,
    )
    def list(self, request: Request) -> Response:
        """List the tenants with something that can be claimed, runs or failed, by name."""
        asked = self.asked(parameters.TenantListing)
        page, more = Tenants().page(after=asked["after"], limit=asked["limit"])
        meta = {"limit": asked["limit"], "next_after": page[-1].name if more else None}
        return Response({"data": [shapes.tenant(each) for each in page], "meta": meta})


class DeadLetterViewSet(OperatorViewSet):
    """What failed for good, by its error."""

    @operation("queue_dead_letters_list", wholes.ErrorListSerializer, asks=parameters.StatsFilter)
    def list(self, request: Request) -> Response:
        """List the errors of the latest failed jobs, each with how many there are of it."""
        asked = self.asked(parameters.StatsFilter)
        if name := asked.get("queue"):
            _queues(self.queue, name)
        groups, is_capped = error_groups(self.queue, tenant=asked.get("tenant"), name=name)
        data = shapes.errors(groups, self.queue.using)
        return Response({"data": data, "meta": {"is_capped": is_capped}})


class HoldViewSet(OperatorViewSet):
    """What operators have stopped serving."""

    permissions = {"create": access.HOLD, "lift": access.HOLD}

    @operation("queue_holds_list", wholes.HoldListSerializer)
    def list(self, request: Request) -> Response:
        """
        List all holds.

        There are no pages of them.
        """
        self.asked(parameters.Parameters)
        return Response({"data": [shapes.hold(each) for each in self.queue.holds()]})

    @operation("queue_holds_create", shapes.HoldSerializer, asks=parameters.HoldWish)
    def create(self, request: Request) -> Response:
        """
        Hold a queue, a tenant, or a tenant's share of a queue.

        What is held already stays so: the answer is the hold that is there.
        """
        told = self.told(parameters.HoldWish)
        with audited(request_id=self.request_id):
            hold = self.queue.hold(**told, by=access.actor(request))
        return Response(shapes.hold(hold))

    @operation("queue_holds_lift", shapes.HoldSerializer, "not_found", asks=parameters.HoldWish)
    def lift(self, request: Request) -> Response:
        """
        Serve again what is held.

        Exactly the hold with these names is lifted, and it is the answer.
        """
        asked = self.asked(parameters.HoldWish)
        with audited(request_id=self.request_id):
            hold = self.queue.unhold(**asked, by=access.actor(request))
        if hold is None:
            raise NotFound("nothing of that name is held")
        return Response(shapes.hold(hold))


class SchemaViewSet(OperatorViewSet):
    """What can be asked for."""

    @operation("queue_schema", {"type": "object", "additionalProperties": {}})
    def list(self, request: Request) -> Response:
        """Return this document, in OpenAPI."""
        self.asked(parameters.Parameters)
        return Response(document(request.path.removesuffix("schema")))
