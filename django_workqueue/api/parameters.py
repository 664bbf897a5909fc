"""What callers may ask for, and what is refused by the name of the parameter."""

from __future__ import annotations

from io import BytesIO
from typing import Any, ClassVar, Final

from django.conf import settings
from django.http import QueryDict
from drf_spectacular.utils import extend_schema_field
from rest_framework import serializers, status
from rest_framework.exceptions import APIException, ParseError
from rest_framework.negotiation import BaseContentNegotiation, DefaultContentNegotiation
from rest_framework.parsers import JSONParser

from django_workqueue.api.words import STATUSES, status_of
from django_workqueue.arguments import MAX_REASON_LENGTH
from django_workqueue.items import (
    MAX_DEPLOYMENT_LENGTH,
    MAX_HANDLER_LENGTH,
    MAX_ID_LENGTH,
    MAX_KEY_LENGTH,
    MAX_PAYLOAD_DEPTH,
    MAX_QUEUE_LENGTH,
    MAX_TENANT_LENGTH,
    MAX_WORKER_LENGTH,
    nested_deeper,
)
from django_workqueue.jobs.search import MAX_FINGERPRINT_LENGTH, TIMES

MAX_LIMIT: Final = 1_000
DEFAULT_LIMIT: Final = 20
MAX_DEPTH: Final = 2 * MAX_PAYLOAD_DEPTH
MAX_TENANTS: Final = 500
#: By what is sorted by, the statuses that have that time; empty: all.
SORTABLE: Final[dict[str, list[str]]] = {
    "created_at": [],
    **{name: [status_of(state) for state in states] for name, states in TIMES.items()},
}
ORDERS: Final = ("asc", "desc")
#: Most jobs that one call requeues.
MAX_BULK: Final = 1_000
#: Jobs of a tenant up to which they are counted.
MAX_COUNTED: Final = 10_000


class TooLargeError(APIException):
    """A body beyond ``DATA_UPLOAD_MAX_MEMORY_SIZE``."""

    status_code = status.HTTP_413_REQUEST_ENTITY_TOO_LARGE
    default_detail = "the body is too large"


class BodyParser(JSONParser):
    """JSON, within Django's own limit of a body, and not nested deeper than Python reads."""

    def parse(self, stream: Any, media_type: Any = None, parser_context: Any = None) -> Any:
        """Return the decoded body. Raise `ParseError` or `TooLargeError`."""
        limit = settings.DATA_UPLOAD_MAX_MEMORY_SIZE
        body = stream.read() if limit is None else stream.read(limit + 1)
        if limit is not None and len(body) > limit:
            raise TooLargeError
        try:
            value = super().parse(BytesIO(body), media_type, parser_context)
        except RecursionError:
            raise ParseError("JSON parse error - nested too deeply") from None
        # Far below what Python can write again, and beyond what a payload may be.
        if nested_deeper(value, MAX_DEPTH):
            raise ParseError("JSON parse error - nested too deeply")
        return value


class JsonAlways(BaseContentNegotiation):
    """Answers are JSON, whatever is asked for: then a browser and an alert see what it is."""

    def select_parser(self, request: Any, parsers: Any) -> Any:
        """By the type of the body."""
        return DefaultContentNegotiation().select_parser(request, parsers)

    def select_renderer(self, request: Any, renderers: Any, format_suffix: Any = None) -> Any:
        """The first."""
        return renderers[0], renderers[0].media_type


class Parameters(serializers.Serializer[Any]):
    """Parameters: one that isn't known, or is given twice, is a mistake and not a wish."""

    #: What the schema says beside what the fields do.
    constraints: ClassVar[dict[str, Any]] = {}

    def to_internal_value(self, data: Any) -> Any:
        """Return the values. Raise `ValidationError`, which names each that is refused."""
        if not isinstance(data, dict):
            raise serializers.ValidationError({"body": ["must be a JSON object"]})
        unknown = {name: ["there is no such parameter"] for name in data if name not in self.fields}
        if unknown:
            raise serializers.ValidationError(unknown)
        if isinstance(data, QueryDict):
            twice = [name for name in data if len(data.getlist(name)) > 1]
            errors = {
                name: ["is given more than once"]
                for name in twice
                if not isinstance(self.fields[name], serializers.MultipleChoiceField)
            }
            if errors:
                raise serializers.ValidationError(errors)
            # As of a body: of a form, what is empty would count as not given.
            data = {
                name: data.getlist(name)
                if isinstance(self.fields[name], serializers.MultipleChoiceField)
                else data[name]
                for name in data
            }
        return super().to_internal_value(data)


class Text(serializers.CharField):
    """Text. In a body a number is none: which of its spellings would be meant?"""

    def to_internal_value(self, data: Any) -> Any:
        """Refuse what isn't text."""
        if not isinstance(data, str):
            self.fail("invalid")
        return super().to_internal_value(data)


class Number(serializers.IntegerField):
    """A whole number of a body, not the text of one."""

    def to_internal_value(self, data: Any) -> Any:
        """Refuse what isn't a number."""
        if not isinstance(data, int | float) or isinstance(data, bool):
            self.fail("invalid")
        return super().to_internal_value(data)


class Flag(serializers.BooleanField):
    """True or false of a body, not a word for it."""

    def to_internal_value(self, data: Any) -> Any:
        """Refuse what is neither."""
        if not isinstance(data, bool):
            self.fail("invalid", input=data)
        return data


def _text(limit: int, **more: Any) -> Text:
    # A serializer refuses `required` beside a default.
    optional: dict[str, Any] = {} if "default" in more else {"required": False}
    return Text(max_length=limit, trim_whitespace=False, **optional, **more)


class Moment(serializers.DateTimeField):
    """A time with its zone: without one it would be another wherever the project stands."""

    default_error_messages: ClassVar[dict[str, Any]] = {"naive": "must have a zone, as Z or +02:00"}

    def enforce_timezone(self, value: Any) -> Any:
        """Refuse a time without a zone."""
        if value.utcoffset() is None:
            self.fail("naive")
        return super().enforce_timezone(value)


class JobFilter(Parameters):
    """Which jobs."""

    constraints = {"minProperties": 1}

    status = serializers.MultipleChoiceField(
        choices=[*STATUSES],
        allow_empty=False,
        required=False,
        help_text="Repeat it for any of several.",
    )
    queue = _text(MAX_QUEUE_LENGTH)
    tenant = _text(MAX_TENANT_LENGTH)
    item_id = _text(MAX_ID_LENGTH)
    handler = _text(
        MAX_HANDLER_LENGTH, allow_blank=True, help_text="Empty: those for their queue's own."
    )
    deployment_id = _text(
        MAX_DEPLOYMENT_LENGTH, allow_blank=True, help_text="Empty: those pinned to none."
    )
    worker = _text(MAX_WORKER_LENGTH, help_text="Who runs it now.")
    dedupe_key = _text(MAX_KEY_LENGTH, help_text="Of the job that holds it.")
    fingerprint = _text(MAX_FINGERPRINT_LENGTH, help_text="Of the last error; only of failed jobs.")
    created_after = Moment(required=False, help_text="At or after.")
    created_before = Moment(required=False, help_text="Before.")


class Listing(JobFilter):
    """Which jobs, in which order, and which part of them."""

    limit = serializers.IntegerField(min_value=1, max_value=MAX_LIMIT, default=DEFAULT_LIMIT)
    page = serializers.IntegerField(
        min_value=1, required=False, help_text="page times limit is 10,000 at most."
    )
    cursor = serializers.CharField(
        required=False, max_length=1_000, help_text="A next_cursor, instead of a page."
    )
    sort_by = serializers.ChoiceField(
        choices=[*SORTABLE],
        default="created_at",
        help_text="All but created_at go only with one status, of those that have that time.",
    )
    sort_order = serializers.ChoiceField(
        choices=[*ORDERS], default="desc", help_text="The latest first, unless it is asc."
    )

    def validate(self, attrs: Any) -> Any:
        """A page or a cursor, not both."""
        if "page" in attrs and "cursor" in attrs:
            raise serializers.ValidationError({"cursor": ["can't go with page"]})
        sortable, status = SORTABLE[attrs["sort_by"]], attrs.get("status", ())
        if sortable and not (len(status) == 1 and {*status} <= {*sortable}):
            told = f"goes only with one status, of {', '.join(sortable)}"
            raise serializers.ValidationError({"sort_by": [told]})
        return attrs


class StatsFilter(Parameters):
    """Whose figures."""

    queue = _text(MAX_QUEUE_LENGTH)
    tenant = _text(MAX_TENANT_LENGTH)


class Reason(Parameters):
    """Why; the audit keeps it."""

    reason = _text(MAX_REASON_LENGTH, allow_blank=True, default="")


class RequiredReason(Parameters):
    """Why; the audit keeps it."""

    reason = Text(max_length=MAX_REASON_LENGTH)


@extend_schema_field({"type": "object", "additionalProperties": {}})
class Payload(serializers.JSONField):
    """A payload: an object, which the queue itself checks."""


class Requeue(Reason):
    """Why, and what to go on with."""

    payload = Payload(
        required=False, help_text="A new payload, an object. Needs the right to edit payloads."
    )


class BulkRequeue(Reason):
    """Which jobs, and how many the caller has seen there."""

    filter = JobFilter(help_text="As that of a listing; it must not be empty.")
    expected_count = Number(
        min_value=0, max_value=MAX_BULK, help_text="What the filter must find, no more and no less."
    )
    dry_run = Flag(default=False, help_text="Only find.")

    def validate_filter(self, value: Any) -> Any:
        """All jobs there are must not be a slip of the pen."""
        if not value:
            raise serializers.ValidationError("name what is to be requeued")
        return value


class TenantListing(Parameters):
    """Which part of the tenants."""

    limit = serializers.IntegerField(min_value=1, max_value=MAX_TENANTS, default=100)
    after = _text(MAX_TENANT_LENGTH, allow_blank=True, default="", help_text="A next_after.")


class HoldWish(Reason):
    """What is to be held, or served again; and why."""

    constraints = {"anyOf": [{"required": ["queue"]}, {"required": ["tenant"]}]}

    queue = _text(MAX_QUEUE_LENGTH)
    tenant = _text(MAX_TENANT_LENGTH)
