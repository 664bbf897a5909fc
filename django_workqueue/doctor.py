"""
The proof that no foreign keys are needed: every item is in exactly one place, and what is
kept twice agrees. Reads whole tables: for tests, and for an operator in doubt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from django.apps import apps
from django.db import connections, transaction
from django.db.models import (
    Case,
    Count,
    Exists,
    F,
    IntegerField,
    Max,
    OuterRef,
    Q,
    Sum,
    Value,
    When,
)

from django_workqueue.models import (
    Counter,
    DeadLetter,
    Finished,
    Lease,
    QueueItem,
    Ready,
    Waiting,
)

#: How many rows of one kind are named.
NAMED: Final = 20
# What each place keeps of the body; `rank` is minus the priority.
_KEPT: Final[dict[type[Any], tuple[str, ...]]] = {
    Ready: ("queue", "deployment_id", "tenant"),
    Waiting: ("queue", "deployment_id", "tenant"),
    Lease: ("queue", "deployment_id", "tenant"),
    DeadLetter: ("queue", "deployment_id", "tenant"),
    Finished: ("queue", "tenant"),
}
_RANKED: Final = (Ready, Waiting, Lease)


def missing_tables(using: str) -> list[str]:
    """Return the tables that the database *using* lacks, because it wasn't migrated."""
    models = apps.get_app_config("django_workqueue").get_models()
    there = connections[using].introspection.table_names()
    return sorted({model._meta.db_table for model in models}.difference(there))


def examine(using: str) -> list[str]:
    """Return what is wrong in the database *using*, a sentence each; nothing if all is well."""
    connection = connections[using]
    with transaction.atomic(using=using):
        if connection.vendor == "postgresql" and len(connection.savepoint_ids) == 0:
            # One picture for all questions, or work going on would look like damage.
            with connection.cursor() as cursor:
                cursor.execute("set transaction isolation level repeatable read, read only")
        return [
            *_items_not_in_one_place(using),
            *_places_unlike_their_body(using),
            *_live_items_without_their_names(using),
            *_attempts_without_a_failure(using),
            *_fences_behind(using),
            *_wrong_counters(using),
        ]


def _items_not_in_one_place(using: str) -> Iterator[str]:
    number = sum(
        (
            Case(
                When(Exists(place.objects.filter(item_id=OuterRef("pk"), **_key(place))), then=1),
                default=0,
                output_field=IntegerField(),
            )
            for place in _KEPT
        ),
        start=Value(0),
    )
    items = QueueItem.objects.using(using).annotate(places=number).exclude(places=1)
    for pk, places in items.values_list("pk", "places")[:NAMED]:
        yield f"item {pk} is in {places} places"


def _key(place: type[Any]) -> dict[str, Any]:
    # Only by its whole key is a ready row found by index.
    if place is not Ready:
        return {}
    key: dict[str, Any] = {name: OuterRef(name) for name in _KEPT[Ready]}
    return key | {"rank": OuterRef("priority") * -1}


def _places_unlike_their_body(using: str) -> Iterator[str]:
    for place, kept in _KEPT.items():
        same: dict[str, Any] = {name: OuterRef(name) for name in kept}
        if place in _RANKED:
            same["priority"] = OuterRef("rank") * -1
        body = QueueItem.objects.using(using).filter(pk=OuterRef("item_id"), **same)
        strays = place.objects.using(using).filter(~Exists(body))
        for pk in strays.values_list("item_id", flat=True)[:NAMED]:
            yield f"{place.__name__} of item {pk} has no body like it"


def _live_items_without_their_names(using: str) -> Iterator[str]:
    live = (
        QueueItem.objects.using(using)
        .with_state()
        .filter(state__in=["queued", "claimed", "paused"])
        .filter(Q(id_freed=True) | Q(key_freed=True, dedupe_key__isnull=False))
    )
    for pk in live.values_list("pk", flat=True)[:NAMED]:
        yield f"item {pk} is live, but its id or key is free"


def _attempts_without_a_failure(using: str) -> Iterator[str]:
    items = (
        QueueItem.objects.using(using)
        .with_state()
        .annotate(counted=Count("failures"))
        .exclude(counted=F("attempts"))
        .exclude(attempts=None)
    )
    for pk, attempts, counted in items.values_list("pk", "attempts", "counted")[:NAMED]:
        yield f"item {pk} counts {attempts} attempts, but has {counted} failures"


def _fences_behind(using: str) -> Iterator[str]:
    items = (
        QueueItem.objects.using(using)
        .with_state()
        .annotate(latest=Max("failures__fence"))
        .filter(latest__gt=F("fence"))
    )
    for pk, fence, latest in items.values_list("pk", "fence", "latest")[:NAMED]:
        yield f"item {pk} has fence {fence}, but a failure of fence {latest}"


def _wrong_counters(using: str) -> Iterator[str]:
    counted: dict[tuple[str, str], int] = {}
    for name, rows in _places_to_count(using).items():
        for queue, number in rows.order_by().values_list("queue").annotate(number=Count("*")):
            counted[queue, name] = number
    for name in _places_to_count(using):
        sums = Counter.objects.using(using).order_by().values_list("queue").annotate(told=Sum(name))
        told = dict(sums)
        for queue in {*told, *(queue for queue, of in counted if of == name)}:
            true = counted.get((queue, name), 0)
            if (told.get(queue) or 0) != true:
                yield f"queue {queue!r} counts {told.get(queue)} {name}, but has {true}"


def _places_to_count(using: str) -> dict[str, Any]:
    waiting, finished = Waiting.objects.using(using), Finished.objects.using(using)
    return {
        "ready": Ready.objects.using(using).all(),
        "waiting": waiting.exclude(cause="paused"),
        "paused": waiting.filter(cause="paused"),
        "claimed": Lease.objects.using(using).all(),
        "dead_lettered": DeadLetter.objects.using(using).all(),
        "completed": finished.filter(state="completed"),
        "cancelled": finished.filter(state="cancelled"),
    }
