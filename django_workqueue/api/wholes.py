"""What whole answers look like, for the schema: lists with what is told of them, and figures."""

from __future__ import annotations

from typing import Any, Final

from rest_framework import serializers

from django_workqueue.api import shapes
from django_workqueue.api.words import STATUSES

_UNLESS_OF_TENANT: Final = "Left out with a `tenant`."


def _many(kind: type[serializers.Serializer[Any]]) -> Any:
    # Typed so: within a serializer, `data` is a word of the framework's, too.
    return kind(many=True)


class PageMetaSerializer(serializers.Serializer[Any]):
    """Which part of the jobs it is."""

    page = serializers.IntegerField(allow_null=True, help_text="Null with a cursor.")
    limit = serializers.IntegerField()
    total_pages = serializers.IntegerField(allow_null=True, help_text="Null with a cursor.")
    total_count = serializers.IntegerField(
        allow_null=True, help_text="How many jobs there are, up to 10,000. Null with a cursor."
    )
    total_is_capped = serializers.BooleanField(help_text="There may be more than `total_count`.")
    next_cursor = serializers.CharField(
        allow_null=True, help_text="The `cursor` of what follows. Null: there is no more."
    )


class JobPageSerializer(serializers.Serializer[Any]):
    """A part of the jobs that were asked for."""

    data = _many(shapes.JobSerializer)
    meta = PageMetaSerializer()


class BulkOutcomeSerializer(serializers.Serializer[Any]):
    """What became of the jobs that a filter found."""

    dry_run = serializers.BooleanField()
    found = serializers.IntegerField()
    done = serializers.ListField(
        child=serializers.CharField(), help_text="The ids of the jobs that were requeued."
    )
    skipped = serializers.DictField(
        child=serializers.ListField(child=serializers.CharField()),
        help_text="The ids of the jobs that were left as they are, by the reason.",
    )


class UnknownHandlerSerializer(serializers.Serializer[Any]):
    """A handler for which jobs wait, and that no living worker knows."""

    queue = serializers.CharField()
    handler = serializers.CharField(allow_blank=True)
    count = serializers.IntegerField()
    count_is_capped = serializers.BooleanField(help_text="There may be more than `count`.")
    oldest_age_seconds = serializers.FloatField()


class StatsSerializer(serializers.Serializer[Any]):
    """The figures of the queue, or of one tenant in it."""

    counts = serializers.DictField(
        child=serializers.IntegerField(), help_text="Jobs by their status; none of it: left out."
    )
    counts_are_capped = serializers.ListField(
        child=serializers.ChoiceField(choices=[*STATUSES]),
        required=False,
        help_text="Only with a `tenant`: the statuses of which there are more than counted.",
    )
    oldest_queued_age_seconds = serializers.FloatField(
        allow_null=True, help_text="How long the oldest queued job has waited. Null: there is none."
    )
    as_of = serializers.DateTimeField()
    due = serializers.IntegerField(required=False, help_text=_UNLESS_OF_TENANT)
    reaped = serializers.IntegerField(required=False, help_text=_UNLESS_OF_TENANT)
    duplicates_suppressed = serializers.IntegerField(required=False, help_text=_UNLESS_OF_TENANT)
    workers = serializers.IntegerField(required=False, help_text=_UNLESS_OF_TENANT)
    workers_gone = serializers.IntegerField(required=False, help_text=_UNLESS_OF_TENANT)
    unserved_queues = serializers.ListField(
        child=serializers.CharField(), required=False, help_text=_UNLESS_OF_TENANT
    )
    unknown_handlers = UnknownHandlerSerializer(
        many=True, required=False, help_text=_UNLESS_OF_TENANT
    )


class WorkersMetaSerializer(serializers.Serializer[Any]):
    """What is told of workers that show no presence any more."""

    gone = serializers.IntegerField()
    last_gone_at = serializers.DateTimeField(allow_null=True)


class WorkerListSerializer(serializers.Serializer[Any]):
    """The workers that are alive."""

    data = _many(shapes.WorkerSerializer)
    meta = WorkersMetaSerializer()


class TenantsMetaSerializer(serializers.Serializer[Any]):
    """Which part of the tenants it is."""

    limit = serializers.IntegerField()
    next_after = serializers.CharField(
        allow_null=True, help_text="The `after` of what follows. Null: there is no more."
    )


class TenantListSerializer(serializers.Serializer[Any]):
    """A part of the tenants, by name."""

    data = _many(shapes.TenantSerializer)
    meta = TenantsMetaSerializer()


class ErrorsMetaSerializer(serializers.Serializer[Any]):
    """Whether all failed jobs were looked at."""

    is_capped = serializers.BooleanField(help_text="Only the latest failed jobs were looked at.")


class ErrorListSerializer(serializers.Serializer[Any]):
    """Errors for which jobs failed."""

    data = _many(shapes.ErrorSerializer)
    meta = ErrorsMetaSerializer()


class HoldListSerializer(serializers.Serializer[Any]):
    """All holds."""

    data = _many(shapes.HoldSerializer)
