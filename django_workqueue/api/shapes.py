"""
What objects look like in answers. The serializers say which fields there are, for the schema
too; the functions beside them take the values from rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, Final

from django.db.models import OuterRef, Subquery
from django.db.models.functions import Left
from django.utils.module_loading import import_string
from rest_framework import serializers

from django_workqueue.api.words import STATUSES, status_of
from django_workqueue.conf import get_settings
from django_workqueue.exceptions import PayloadError
from django_workqueue.failures import storable
from django_workqueue.items import QueueHold, WorkState
from django_workqueue.models import Failure, QueueItem, WorkerProcess
from django_workqueue.overview import ErrorGroup
from django_workqueue.reading import StoredText, decode_json
from django_workqueue.tenants import TenantFigures

WORKER_STATES: Final = ("running", "draining")

#: Characters that a list tells of an error. A job's own page has all of it.
SHOWN_ERROR: Final = 2_000


class JobSerializer(serializers.Serializer[Any]):
    """A job in a list."""

    id = serializers.CharField(help_text="Number as text: it may be beyond 2^53.")
    item_id = serializers.CharField()
    tenant = serializers.CharField()
    queue = serializers.CharField()
    handler = serializers.CharField(help_text="Empty: the handler of the queue.")
    status = serializers.ChoiceField(choices=[*STATUSES])
    priority = serializers.IntegerField()
    attempt = serializers.IntegerField(help_text="Executions so far, with one that runs.")
    attempts = serializers.IntegerField(help_text="Executions that ended without success.")
    max_attempts = serializers.IntegerField()
    fence = serializers.IntegerField(help_text="Claims so far.")
    dedupe_key = serializers.CharField(allow_null=True)
    deployment_id = serializers.CharField(allow_null=True)
    worker = serializers.CharField(allow_null=True, help_text="Who has it, or completed it.")
    cancel_requested = serializers.BooleanField(help_text="It runs, and was asked to stop.")
    lease_expires_at = serializers.DateTimeField(allow_null=True)
    available_at = serializers.DateTimeField()
    created_at = serializers.DateTimeField()
    updated_at = serializers.DateTimeField(
        allow_null=True, help_text="Since when it stands so; null while it can be claimed."
    )
    completed_at = serializers.DateTimeField(
        allow_null=True, help_text="When it was completed, cancelled or given up."
    )
    error = serializers.CharField(allow_null=True, help_text="Of the last failed execution.")


class FailureSerializer(serializers.Serializer[Any]):
    """An execution that ended without success."""

    number = serializers.IntegerField()
    kind = serializers.CharField()
    error = serializers.CharField()
    error_class = serializers.CharField(allow_blank=True)
    worker = serializers.CharField(allow_blank=True)
    claimed_at = serializers.DateTimeField(allow_null=True)
    failed_at = serializers.DateTimeField()
    traceback = serializers.CharField(
        required=False, allow_blank=True, help_text="Only with the right to see payloads."
    )


class JobDetailSerializer(JobSerializer):
    """A job by itself."""

    failures = FailureSerializer(many=True)
    payload = serializers.JSONField(
        required=False, help_text="Only with the right to see payloads. Null: it can't be read."
    )
    result = serializers.JSONField(required=False, help_text="Only with the right to see payloads.")


class UnknownHandlerSerializer(serializers.Serializer[Any]):
    """Jobs that wait because no worker knew their handler."""

    queue = serializers.CharField()
    handler = serializers.CharField(allow_blank=True)
    count = serializers.IntegerField()
    count_is_capped = serializers.BooleanField(help_text="There are more.")
    oldest_age_seconds = serializers.FloatField()


class StatsSerializer(serializers.Serializer[Any]):
    """The figures of all queues, or of one; of a tenant some of them."""

    counts = serializers.DictField(
        child=serializers.IntegerField(), help_text="By status; one that doesn't occur is left out."
    )
    counts_are_capped = serializers.ListField(
        required=False, child=serializers.CharField(), help_text="Statuses with more than counted."
    )
    oldest_queued_age_seconds = serializers.FloatField(
        allow_null=True, help_text="Null: nothing is queued."
    )
    due = serializers.IntegerField(required=False, help_text="Queued, and could run now.")
    reaped = serializers.IntegerField(required=False, help_text="Claims that lapsed, ever.")
    duplicates_suppressed = serializers.IntegerField(
        required=False, help_text="Enqueued again while they were live, ever."
    )
    as_of = serializers.DateTimeField()
    workers = serializers.IntegerField(required=False, help_text="Those that are alive.")
    workers_gone = serializers.IntegerField(
        required=False, help_text="Those that ended without saying so, of late."
    )
    unserved_queues = serializers.ListField(
        required=False, child=serializers.CharField(), help_text="With work, but without a worker."
    )
    unknown_handlers = UnknownHandlerSerializer(many=True, required=False)


class WorkersGoneSerializer(serializers.Serializer[Any]):
    """The workers that ended without saying so, and were not cleared away yet."""

    gone = serializers.IntegerField()
    last_gone_at = serializers.DateTimeField(allow_null=True)


class WorkerSerializer(serializers.Serializer[Any]):
    """A running worker."""

    name = serializers.CharField()
    host = serializers.CharField()
    pid = serializers.IntegerField()
    boot = serializers.CharField()
    state = serializers.ChoiceField(choices=[*WORKER_STATES])
    version = serializers.CharField(allow_blank=True)
    queues = serializers.ListField(child=serializers.CharField())
    deployment_id = serializers.CharField(allow_null=True)
    settings = serializers.DictField()
    running = serializers.IntegerField(help_text="Jobs that it has.")
    started_at = serializers.DateTimeField()
    seen_at = serializers.DateTimeField()


class HoldSerializer(serializers.Serializer[Any]):
    """A queue, a tenant, or a tenant's share of a queue that is not served."""

    queue = serializers.CharField(allow_null=True)
    tenant = serializers.CharField(allow_null=True)
    since = serializers.DateTimeField()
    by = serializers.CharField(allow_blank=True)
    reason = serializers.CharField(allow_blank=True)


def shown(kind: str, serializer: type[serializers.Serializer[Any]], values: dict[str, Any]) -> Any:
    """Return *values* as an answer has them, after the project's `redact` has seen them."""
    return redacted(kind, dict(serializer(values).data))


def redacted(kind: str, told: dict[str, Any]) -> dict[str, Any]:
    """Return what the project's `redact` leaves of an object of that kind."""
    path = get_settings().api.redact
    if path is None:
        return told
    left: dict[str, Any] = import_string(path)(told, kind=kind)
    return left


def jobs(rows: Sequence[Any], using: str, now: datetime) -> list[Any]:
    """The rows as a list has them."""
    errors = _last_errors(using, [row.pk for row in rows if row.attempts])
    return [shown("job", JobSerializer, _job(row, now, errors.get(row.pk))) for row in rows]


def job(row: Any, using: str, now: datetime, *, payload: bool) -> Any:
    """The row by itself, with every failure; *payload*: with what users put in, too."""
    failures = Failure.objects.using(using).filter(item_id=row.pk, number__lte=row.attempts or 0)
    columns = {f"{name}_text": StoredText(name) for name in _FAILURE_TEXTS}
    failures = failures.defer(*_FAILURE_TEXTS).annotate(**columns).order_by("number")
    told = [_failure(each, payload=payload) for each in failures]
    values = _job(row, now, told[-1]["error"] if told else None) | {"failures": told}
    if payload:
        texts = (
            QueueItem.objects.using(using)
            .filter(pk=row.pk)
            .values_list(StoredText("payload"), StoredText("finished__result"))
        )
        stored = texts.first() or (None, None)
        values |= {"payload": _decoded(stored[0]), "result": _decoded(stored[1])}
    return shown("job", JobDetailSerializer, values)


def _decoded(text: Any) -> Any:
    try:
        return None if text is None else decode_json("payload", text)
    except PayloadError:
        return None


def _job(row: Any, now: datetime, error: str | None) -> dict[str, Any]:
    state, lease = WorkState(row.state), getattr(row, "lease", None)
    attempts = row.attempts or 0
    waiting, finished = getattr(row, "waiting", None), getattr(row, "finished", None)
    dead = getattr(row, "dead_letter", None)
    due_at = waiting.due_at if waiting else None
    ended_at = finished.finished_at if finished else dead.dead_at if dead else None
    since = waiting.since if waiting else lease.claimed_at if lease else ended_at
    runs_or_ran = state in (WorkState.CLAIMED, WorkState.COMPLETED)
    holder = lease.worker if lease else finished.worker if finished else ""
    return {
        "id": str(row.pk),
        "item_id": storable(row.item_id),
        "tenant": storable(row.tenant),
        "queue": storable(row.queue),
        "handler": storable(row.handler),
        "status": status_of(state),
        "priority": row.priority,
        "attempt": attempts + runs_or_ran,
        "attempts": attempts,
        "max_attempts": row.max_attempts,
        "fence": row.fence or 0,
        "dedupe_key": None if row.dedupe_key is None else storable(row.dedupe_key),
        "deployment_id": storable(row.deployment_id) or None,
        "worker": storable(holder) or None,
        "cancel_requested": bool(lease and lease.cancel_requested),
        "lease_expires_at": lease.expires_at if lease else None,
        "available_at": due_at if due_at and due_at > now else row.available_at,
        "created_at": row.created_at,
        "updated_at": since,
        "completed_at": ended_at,
        "error": error,
    }


#: Read as they are stored: what is no text must not hide the job.
_FAILURE_TEXTS: Final = ("message", "traceback", "error_class", "worker")


def _failure(row: Any, *, payload: bool) -> dict[str, Any]:
    told = {
        "number": row.number,
        "kind": row.kind,
        "error": storable(row.message_text),
        "error_class": storable(row.error_class_text),
        "worker": storable(row.worker_text),
        "claimed_at": row.claimed_at,
        "failed_at": row.failed_at,
    }
    return told | {"traceback": storable(row.traceback_text)} if payload else told


def _last_errors(using: str, job_ids: Sequence[int]) -> dict[int, str]:
    failures = Failure.objects.filter(item=OuterRef("pk")).order_by("-number")
    last = StoredText(Subquery(failures.values(start=Left("message", SHOWN_ERROR))[:1]))
    rows = QueueItem.objects.using(using).filter(pk__in=job_ids).values_list("pk", last)
    return {pk: storable(message) for pk, message in rows if message is not None}


def worker(row: WorkerProcess, running: int) -> Any:
    """A worker's row; *running*: the jobs that it has."""
    values = {
        "name": row.name,
        "host": row.host,
        "pid": row.pid,
        "boot": row.boot,
        "state": row.state,
        "version": row.version,
        "queues": row.queues,
        "deployment_id": row.deployment_id or None,
        "settings": row.settings,
        "running": running,
        "started_at": row.started_at,
        "seen_at": row.seen_at,
    }
    return shown("worker", WorkerSerializer, values)


class ErrorSerializer(serializers.Serializer[Any]):
    """An error for which jobs failed."""

    fingerprint = serializers.CharField(allow_blank=True)
    error_class = serializers.CharField(allow_blank=True)
    error = serializers.CharField(allow_null=True, help_text="As the latest of them has it.")
    count = serializers.IntegerField()
    queues = serializers.ListField(child=serializers.CharField())
    first_failed_at = serializers.DateTimeField()
    last_failed_at = serializers.DateTimeField()
    example = serializers.CharField(help_text="The id of the latest job.")


def errors(groups: Sequence[ErrorGroup], using: str) -> list[Any]:
    """Errors, each with the jobs that failed for it."""
    texts = _last_errors(using, [group.example for group in groups])
    return [
        shown(
            "error",
            ErrorSerializer,
            {
                "fingerprint": group.fingerprint,
                "error_class": storable(group.error_class),
                "error": texts.get(group.example),
                "count": group.count,
                "queues": sorted(map(storable, group.queues)),
                "first_failed_at": group.first_dead_at,
                "last_failed_at": group.last_dead_at,
                "example": str(group.example),
            },
        )
        for group in groups
    ]


class TenantSerializer(serializers.Serializer[Any]):
    """What a tenant has."""

    tenant = serializers.CharField()
    ready = serializers.IntegerField(help_text="Can be claimed now.")
    running = serializers.IntegerField()
    failed = serializers.IntegerField()
    is_capped = serializers.BooleanField(help_text="Of some there may be more.")


def tenant(figures: TenantFigures) -> Any:
    """A tenant and its figures."""
    values = asdict(figures)
    return shown("tenant", TenantSerializer, {"tenant": storable(values.pop("name")), **values})


def hold(value: QueueHold) -> Any:
    """A hold."""
    return shown("hold", HoldSerializer, asdict(value))
