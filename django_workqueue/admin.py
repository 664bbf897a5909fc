"""
The tables in the admin, to read. Nothing is added, changed or deleted here.

A list stays cheap however large its table: it is ordered by an index, searched by indexed
columns, and counted no further than the paginator's cap.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.core.paginator import Paginator
from django.db.models import OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Left
from django.http import HttpRequest
from django.urls import reverse
from django.utils.functional import cached_property
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext_lazy as _

from django_workqueue.exceptions import PayloadError
from django_workqueue.failures import storable
from django_workqueue.models import (
    DeadLetter,
    Failure,
    Finished,
    Lease,
    QueueItem,
    Waiting,
    WorkerProcess,
)
from django_workqueue.queues import get_queue
from django_workqueue.reading import StoredText, decode_json

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin

#: Characters of an error that a list shows.
ERROR_LENGTH = 200
MAX_JOB_ID = 2**63 - 1
#: Failures that the page of an item names, the oldest.
SHOWN_FAILURES = 100
#: Spaces at which a search for a tenant and an item id is split, the last ones.
MAX_SPACES = 10
#: Bytes of a payload, or a result, that a page shows.
MAX_SHOWN_JSON = 1_048_576


class CappedPaginator(Paginator):  # type: ignore[type-arg]
    """Counts no further than `cap`, and pages no further either."""

    cap = 10_000

    @cached_property
    def _found(self) -> int:
        rows: Any = self.object_list
        return int(rows.order_by().values("pk")[: self.cap + 1].count())

    @cached_property
    def count(self) -> int:
        """Return the number of rows that can be paged to."""
        return min(self._found, self.cap)

    @property
    def is_capped(self) -> bool:
        """True if there are more."""
        return self._found > self.cap


class ReadOnlyAdmin(_ModelAdmin):
    """A table to look at."""

    actions = None
    list_per_page = 50
    paginator = CappedPaginator
    show_full_result_count = False
    # Few columns have an index that could sort by them.
    sortable_by = ()
    #: Fields that come first on the page of a row.
    leading: Sequence[str] = ()
    #: Fields that only who may view payloads sees.
    guarded: Sequence[str] = ()
    #: What is read with a row; of all that, the fields that are loaded only where they are shown.
    related: Sequence[str] = ()
    deferred: Sequence[str] = ()

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        rows: QuerySet[Any] = super().get_queryset(request).using(get_queue().using)
        # With `related` empty, `select_related` would follow every relation.
        rows = rows.select_related(*self.related) if self.related else rows
        return rows.defer(*self.deferred)

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        if term := search_term.strip():
            queryset = queryset.filter(self.found_by(term))
        return queryset, False

    def found_by(self, term: str) -> Q:
        """Return the condition that the search for *term* means."""
        raise NotImplementedError

    def get_object(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        # An address may name any number; SQLite can't be asked for one beyond its integers.
        with suppress(OverflowError):
            return super().get_object(request, *args, **kwargs)
        return None

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        # Any column could be filtered by in the address: slow, and a way to guess payloads.
        return False

    def get_fields(self, request: HttpRequest, obj: Any = None) -> list[Any]:
        hidden = set(self.exclude or ())
        if not request.user.has_perm("django_workqueue.view_payload"):
            hidden.update(self.guarded)
        columns = (field.name for field in self.model._meta.concrete_fields)
        ordered = dict.fromkeys((*self.leading, *columns, *self.readonly_fields))
        return [name for name in ordered if name not in hidden]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


class PlaceAdmin(ReadOnlyAdmin):
    """A place of items: a row per item that stands there."""

    related: Sequence[str] = ("item",)
    deferred: Sequence[str] = ("item__payload",)
    search_fields = ("pk",)
    search_help_text = _("Job id")
    ordering = ("-pk",)

    def found_by(self, term: str) -> Q:
        return _job_id(term)

    @admin.display(description=_("job id"))
    def job(self, row: Any) -> int:
        return int(row.pk)

    @admin.display(description=_("item id"))
    def name(self, row: Any) -> str:
        return str(row.item.item_id)


def _job_id(term: str, column: str = "pk") -> Q:
    # Python refuses to read a very long number.
    if term.isdecimal() and len(term) < 20 and (number := int(term)) <= MAX_JOB_ID:
        return Q(**{column: number})
    return Q(pk__in=())


@admin.register(QueueItem)
class QueueItemAdmin(ReadOnlyAdmin):
    """Items, each with the place where it stands."""

    list_display = (
        "id",
        "item_id",
        "tenant",
        "state",
        "attempts",
        "enqueued_at",
        "priority",
        "queue",
        "handler",
    )
    readonly_fields = ("state", "fence", "attempts", "failures", "content")
    leading = ("id", "tenant", "item_id", *readonly_fields)
    exclude = ("payload",)
    guarded = ("content",)
    deferred = ("payload", "finished__result", "finished__reason")
    search_fields = ("pk",)
    search_help_text = _("Job id, or tenant, or tenant and item id; all of it, not a part")
    ordering = ("-pk",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        items: Any = super().get_queryset(request)
        stated: QuerySet[Any] = items.with_state().defer(*self.deferred)
        return stated

    def found_by(self, term: str) -> Q:
        if term.isdecimal():
            return _job_id(term)
        found = Q()
        for names in _tenants_and_ids(term):
            # Two partial indexes share the rows, so each half names its own.
            found |= Q(**names, id_freed=False) | Q(**names, id_freed=True)
        return found

    @admin.display(description=_("state"))
    def state(self, item: Any) -> str:
        return str(item.state)

    @admin.display(description=_("claims"))
    def fence(self, item: Any) -> int:
        return item.fence or 0

    @admin.display(description=_("failed attempts"))
    def attempts(self, item: Any) -> int:
        return item.attempts or 0

    @admin.display(description=_("failures"))
    def failures(self, item: QueueItem) -> str:
        rows = Failure.objects.using(item._state.db).filter(item=item.pk).order_by("number")
        lines = (
            (
                reverse("admin:django_workqueue_failure_change", args=[row.pk]),
                row.number,
                row.message,
            )
            for row in rows.only("number", "message")[:SHOWN_FAILURES]
        )
        return format_html_join("", '<p><a href="{}">{}</a>: {}</p>', lines)

    @admin.display(description=_("payload"))
    def content(self, item: QueueItem) -> str:
        return _json(item, "payload")


def _tenants_and_ids(term: str) -> Iterator[dict[str, str]]:
    """What *term* may name: a tenant, or one and an item id, both of which may have spaces."""
    yield {"tenant": term}
    spaces = [place for place, character in enumerate(term) if character == " "]
    for place in spaces[-MAX_SPACES:]:
        if term[:place] and term[place + 1 :]:
            yield {"tenant": term[:place], "item_id": term[place + 1 :]}


def _json(row: Any, column: str) -> str:
    """A JSON column, read as text: what can't be decoded must not hide its row."""
    rows = type(row).objects.using(row._state.db).filter(pk=row.pk)
    text = rows.values_list(StoredText(column), flat=True).get()
    if text is None:
        return "-"
    with suppress(PayloadError):
        text = json.dumps(decode_json(column, text), ensure_ascii=False, indent=2)
    return format_html("<pre>{}</pre>", storable(text, limit=MAX_SHOWN_JSON))


@admin.register(Lease)
class LeaseAdmin(PlaceAdmin):
    """What is being worked on."""

    list_display = (
        "job",
        "name",
        "tenant",
        "worker",
        "process",
        "claimed_at",
        "expires_at",
        "fence",
        "queue",
    )


@admin.register(Waiting)
class WaitingAdmin(PlaceAdmin):
    """What is due later, or paused."""

    list_display = ("job", "name", "tenant", "cause", "due_at", "attempts", "queue")


@admin.register(DeadLetter)
class DeadLetterAdmin(PlaceAdmin):
    """What was given up, latest first."""

    list_display = ("job", "name", "tenant", "last_error", "attempts", "dead_at", "queue")
    search_help_text = _("Job id, or all of a tenant's name")
    ordering = ("-dead_at",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        failures = Failure.objects.filter(item=OuterRef("pk")).order_by("-number")
        last = Subquery(failures.values(start=Left("message", ERROR_LENGTH))[:1])
        letters: QuerySet[Any] = super().get_queryset(request).annotate(last_error=last)
        return letters

    def found_by(self, term: str) -> Q:
        return _job_id(term) if term.isdecimal() else Q(tenant=term)

    @admin.display(description=_("last error"))
    def last_error(self, letter: Any) -> str:
        return str(letter.last_error or "")


@admin.register(Finished)
class FinishedAdmin(PlaceAdmin):
    """What was completed or cancelled."""

    list_display = ("job", "name", "tenant", "state", "attempts", "finished_at", "worker", "queue")
    readonly_fields = ("result_text",)
    exclude = ("result",)
    guarded = ("result_text",)
    deferred = ("item__payload", "result", "reason")

    @admin.display(description=_("result"))
    def result_text(self, row: Finished) -> str:
        return _json(row, "result")


@admin.register(Failure)
class FailureAdmin(ReadOnlyAdmin):
    """Every attempt that ended without success, latest first."""

    list_display = ("job", "name", "number", "kind", "error", "failed_at", "worker")
    related = ("item",)
    guarded = ("traceback",)
    deferred = ("item__payload", "message", "traceback")
    search_fields = ("item",)
    search_help_text = _("Job id")
    ordering = ("-failed_at",)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        start = Left("message", ERROR_LENGTH)
        failures: QuerySet[Any] = super().get_queryset(request).annotate(start=start)
        return failures

    def found_by(self, term: str) -> Q:
        return _job_id(term, "item")

    @admin.display(description=_("job id"))
    def job(self, failure: Failure) -> int:
        return failure.item_id

    @admin.display(description=_("item id"))
    def name(self, failure: Failure) -> str:
        return str(failure.item.item_id)

    @admin.display(description=_("error"))
    def error(self, failure: Any) -> str:
        return str(failure.start)


@admin.register(WorkerProcess)
class WorkerProcessAdmin(ReadOnlyAdmin):
    """The workers that said they are there."""

    list_display = (
        "name",
        "host",
        "pid",
        "state",
        "queues",
        "deployment_id",
        "started_at",
        "seen_at",
    )
    search_fields = ("name",)
    search_help_text = _("All of a worker's name")
    ordering = ("-started_at",)

    def found_by(self, term: str) -> Q:
        return Q(name=term)
