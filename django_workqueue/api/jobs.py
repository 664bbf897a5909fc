"""Jobs: to find, to read, and to move."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from rest_framework.decorators import action
from rest_framework.exceptions import PermissionDenied
from rest_framework.request import Request
from rest_framework.response import Response

from django_workqueue.api import access, parameters, problems, shapes, wholes
from django_workqueue.api.base import OperatorViewSet
from django_workqueue.api.schema import operation
from django_workqueue.api.words import STATUSES
from django_workqueue.exceptions import WorkItemNotFoundError
from django_workqueue.jobs import Jobs, Page, Search
from django_workqueue.operating import audited

#: More than any job id has; Python refuses to read very long numbers.
MAX_DIGITS: Final = 40

#: Looks at so many rows each that a bulk call takes to find what it is to requeue.
PASSES: Final = 10

_NAMES: Final = (
    "queue",
    "tenant",
    "item_id",
    "handler",
    "deployment_id",
    "worker",
    "dedupe_key",
    "fingerprint",
    "created_after",
    "created_before",
)


class JobViewSet(OperatorViewSet):
    """One job, or a list of them."""

    lookup_field = "job_id"
    lookup_value_regex = "[^/]+"
    permissions = {
        "requeue": access.REQUEUE,
        "requeue_many": access.REQUEUE,
        "resume": access.REQUEUE,
        "cancel": access.CANCEL,
        "discard": access.DISCARD,
    }
    bulk = frozenset({"requeue_many"})

    @operation("queue_jobs_list", wholes.JobPageSerializer, "too_broad", asks=parameters.Listing)
    def list(self, request: Request) -> Response:
        """
        List jobs, the latest first.

        Filters narrow it together. A page is counted, up to 10,000 jobs; a cursor goes on from
        where the last answer ended, however far, and counts nothing.
        """
        asked = self.asked(parameters.Listing)
        jobs, limit, number = Jobs(), asked["limit"], None
        if cursor := asked.get("cursor"):
            page = jobs.after(search_of(asked), cursor, limit=limit)
        else:
            number = asked.get("page", 1)
            page = jobs.page(search_of(asked), limit=limit, number=number)
        data = shapes.jobs(page.rows, jobs.using, jobs.moves.now())
        return Response({"data": data, "meta": _meta(page, number, limit)})

    @operation("queue_jobs_retrieve", shapes.JobDetailSerializer, "not_found")
    def retrieve(self, request: Request, job_id: str) -> Response:
        """
        Return one job, with every failure.

        Its payload, its result and tracebacks are there only for who may see payloads.
        """
        self.asked(parameters.Parameters)
        return self._answer(_found(job_id))

    @action(detail=True, methods=["post"])
    @operation(
        "queue_jobs_requeue",
        shapes.JobDetailSerializer,
        "not_found",
        "wrong_state",
        "live_twin",
        asks=parameters.Requeue,
    )
    def requeue(self, request: Request, job_id: str) -> Response:
        """
        Give a job that failed or was cancelled one more execution.

        With a payload it runs with that instead, which needs the permission to edit payloads.
        """
        return self._move("requeue", job_id, self._edited())

    @action(detail=True, methods=["post"])
    @operation(
        "queue_jobs_resume",
        shapes.JobDetailSerializer,
        "not_found",
        "wrong_state",
        "live_twin",
        asks=parameters.Requeue,
    )
    def resume(self, request: Request, job_id: str) -> Response:
        """Let a paused job go on."""
        return self._move("resume", job_id, self._edited())

    @action(detail=True, methods=["post"])
    @operation(
        "queue_jobs_cancel",
        shapes.JobDetailSerializer,
        "not_found",
        "wrong_state",
        asks=parameters.Reason,
    )
    def cancel(self, request: Request, job_id: str) -> Response:
        """Cancel a job; one that runs is asked to stop."""
        return self._move("cancel", job_id, self.told(parameters.Reason))

    @action(detail=True, methods=["post"])
    @operation(
        "queue_jobs_discard",
        shapes.JobDetailSerializer,
        "not_found",
        "wrong_state",
        asks=parameters.RequiredReason,
    )
    def discard(self, request: Request, job_id: str) -> Response:
        """Give a failed job up for good, and say why."""
        return self._move("discard", job_id, self.told(parameters.RequiredReason))

    @action(detail=False, methods=["post"], url_path="requeue")
    @operation(
        "queue_jobs_requeue_many",
        wholes.BulkOutcomeSerializer,
        "too_broad",
        "wrong_count",
        asks=parameters.BulkRequeue,
    )
    def requeue_many(self, request: Request) -> Response:
        """
        Give each of the failed or cancelled jobs that a filter finds one more execution.

        Nothing is done unless the filter finds just as many as the caller expects.
        """
        told = self.told(parameters.BulkRequeue)
        jobs, search, expected = Jobs(), search_of(told["filter"]), told["expected_count"]
        found, is_capped = jobs.ids(search, most=parameters.MAX_BULK, passes=PASSES)
        if is_capped or len(found) != expected:
            raise problems.WrongCountError(expected, len(found), is_capped=is_capped)
        if told["dry_run"]:
            return Response({"dry_run": True, "found": len(found), "done": [], "skipped": {}})
        with audited(request_id=self.request_id):
            outcome = self.queue.requeue_many(
                found, by=access.actor(request), reason=told["reason"]
            )
        skipped = {why: _as_texts(ids) for why, ids in outcome.skipped.items()}
        done = _as_texts(outcome.done)
        return Response({"dry_run": False, "found": len(found), "done": done, "skipped": skipped})

    def _edited(self) -> dict[str, Any]:
        told = self.told(parameters.Requeue)
        if "payload" in told and not access.has_permission(self.request, access.EDIT_PAYLOAD):
            raise PermissionDenied("a new payload needs the permission to edit payloads")
        return told

    def _move(self, verb: str, job_id: str, told: dict[str, Any]) -> Response:
        """Make a move of one job, and return the job as it then stands."""
        row, move = _found(job_id), getattr(self.queue, verb)
        with audited(request_id=self.request_id):
            by = access.actor(self.request)
            move(row.item_id, tenant=row.tenant, job_id=row.pk, by=by, **told)
        return self._answer(_found(job_id))

    def _answer(self, row: Any) -> Response:
        queue = self.queue
        payload = access.has_permission(self.request, access.VIEW_PAYLOAD)
        return Response(shapes.job(row, queue.using, queue.moves.now(), payload=payload))


def search_of(asked: Mapping[str, Any]) -> Search:
    """Return what the parameters ask for."""
    return Search(
        states=frozenset(STATUSES[name] for name in asked.get("status", ())),
        sort_by=asked.get("sort_by", "created_at"),
        descending=asked.get("sort_order", "desc") == "desc",
        **{name: asked[name] for name in _NAMES if name in asked},
    )


def _found(job_id: str) -> Any:
    if not (job_id.isascii() and job_id.isdigit() and len(job_id) <= MAX_DIGITS):
        raise WorkItemNotFoundError("no job can have that id")
    return Jobs().one(int(job_id))


def _meta(page: Page, number: int | None, limit: int) -> dict[str, Any]:
    return {
        "page": number,
        "limit": limit,
        "total_pages": None if page.total is None else -(-page.total // limit),
        "total_count": page.total,
        "total_is_capped": page.is_capped,
        "next_cursor": page.next_cursor,
    }


def _as_texts(job_ids: Any) -> Any:
    return [str(job_id) for job_id in job_ids]
