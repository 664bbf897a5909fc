"""
The proof that no foreign keys are needed: every item is in exactly one place, and what is
kept twice agrees. Reads whole tables: for tests, and for an operator in doubt.

`find` only reads; `repair` mends what can be mended safely.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
    Min,
    OuterRef,
    Q,
    Sum,
    Value,
    When,
)
from django.db.models.functions import Coalesce

from django_workqueue.doctor.findings import Finding, Kind
from django_workqueue.items import WorkState
from django_workqueue.models import (
    Counter,
    DeadLetter,
    Failure,
    Finished,
    Lease,
    QueueItem,
    Ready,
    Waiting,
)

#: How many findings of one kind are named.
NAMED: Final = 20
#: What each place keeps of the body; `rank` is minus the priority.
KEPT: Final[dict[type[Any], tuple[str, ...]]] = {
    Ready: ("queue", "deployment_id", "tenant"),
    Waiting: ("queue", "deployment_id", "tenant"),
    Lease: ("queue", "deployment_id", "tenant"),
    DeadLetter: ("queue", "deployment_id", "tenant"),
    Finished: ("queue", "tenant"),
}
RANKED: Final = (Ready, Waiting, Lease)
#: What may be left of an item that is gone.
LEFT: Final[tuple[type[Any], ...]] = (*KEPT, Failure)


def missing_tables(using: str) -> list[str]:
    """Return the tables that the database *using* lacks, because it wasn't migrated."""
    models = apps.get_app_config("django_workqueue").get_models()
    there = connections[using].introspection.table_names()
    return sorted({model._meta.db_table for model in models}.difference(there))


def examine(using: str) -> list[str]:
    """Return what is wrong in the database *using*, a sentence each; nothing if all is well."""
    return [str(finding) for finding in find(using)]


def find(using: str) -> list[Finding]:
    """Return what is wrong in the database *using*, the first `NAMED` findings of each kind."""
    with one_picture(using):
        return [
            *_misplaced_items(using),
            *rows_without_a_body(using),
            *rows_unlike_their_body(using),
            *live_items_without_their_names(using),
            *ids_without_a_holder(using),
            *attempts_without_a_failure(using),
            *fences_behind(using),
            *_wrong_counters(using),
        ]


@contextmanager
def one_picture(using: str) -> Iterator[None]:
    """Answer all questions from one picture, or work going on would look like damage."""
    connection = connections[using]
    with _only_reading(connection), transaction.atomic(using=using):
        # Within a transaction of the caller's it is too late for that.
        if connection.vendor == "postgresql" and len(connection.savepoint_ids) == 0:
            with connection.cursor() as cursor:
                cursor.execute("set transaction isolation level repeatable read")
        yield


def _misplaced_items(using: str) -> Iterator[Finding]:
    several = items_not_in_one_place(using, Kind.SEVERAL_PLACES)
    lost = list(items_not_in_one_place(using, Kind.NO_PLACE))
    # A ready row is found by its whole key: what it lacks to be found is told as a row that is
    # unlike its item.
    rows = Ready.objects.using(using).filter(item_id__in=[finding.job_id for finding in lost])
    unlike = {*rows.values_list("item_id", flat=True)} if lost else ()
    yield from several
    yield from (finding for finding in lost if finding.job_id not in unlike)


@contextmanager
def _only_reading(connection: Any) -> Iterator[None]:
    """Have a transaction on SQLite leave the write lock to others, whatever OPTIONS say."""
    if connection.vendor != "sqlite":
        yield
        return
    mode, connection.transaction_mode = connection.transaction_mode, "DEFERRED"
    try:
        yield
    finally:
        connection.transaction_mode = mode


def items_not_in_one_place(
    using: str, kind: Kind, after: int = 0, limit: int = NAMED
) -> Iterator[Finding]:
    """Find items in no place, or in several, as *kind* says."""
    bits = {1 << number: place for number, place in enumerate(KEPT)}
    places = sum(
        (
            Case(
                When(Exists(place.objects.filter(item_id=OuterRef("pk"), **_key(place))), then=bit),
                default=0,
                output_field=IntegerField(),
            )
            for bit, place in bits.items()
        ),
        start=Value(0),
    )
    items = QueueItem.objects.using(using).filter(pk__gt=after).annotate(places=places)
    if kind is Kind.NO_PLACE:
        items = items.filter(places=0)
    else:
        items = items.exclude(places__in=[0, *bits])
    for found in items.order_by("pk").values(*_NAMES, "places")[:limit]:
        within = [place.__name__ for bit, place in bits.items() if found["places"] & bit]
        told = f"is in {len(within)} places: {', '.join(within)}"
        yield _of_item(kind, found, told if within else "is in no place")


def _key(place: type[Any]) -> dict[str, Any]:
    # Only by its whole key is a ready row found by index.
    if place is not Ready:
        return {}
    key: dict[str, Any] = {name: OuterRef(name) for name in KEPT[Ready]}
    return key | {"rank": OuterRef("priority") * -1}


_NAMES: Final = ("pk", "queue", "tenant", "item_id")
_LIVE: Final = [state.value for state in WorkState if state.live]


def _of_item(kind: Kind, found: dict[str, Any], problem: str) -> Finding:
    return Finding(
        kind=kind,
        problem=problem,
        queue=found["queue"],
        tenant=found["tenant"],
        item_id=found["item_id"],
        job_id=found["pk"],
        cursor=found["pk"],
    )


def rows_without_a_body(using: str, limit: int = NAMED) -> Iterator[Finding]:
    """Find rows of places, and failures, whose item is gone."""
    for place in LEFT:
        body = QueueItem.objects.filter(pk=OuterRef("item_id"))
        yield from strays(using, place, ~Exists(body), limit=limit)


def rows_unlike_their_body(using: str, limit: int = NAMED) -> Iterator[Finding]:
    """Find rows of places that differ from their item in what they keep of it."""
    for place in KEPT:
        yield from strays(using, place, unlike_body(place), limit=limit)


def unlike_body(place: type[Any]) -> Any:
    """The condition that a row of *place* has a body, but not one like it."""
    same: dict[str, Any] = {name: OuterRef(name) for name in KEPT[place]}
    if place in RANKED:
        same["priority"] = OuterRef("rank") * -1
    body = QueueItem.objects.filter(pk=OuterRef("item_id"))
    return Exists(body) & ~Exists(body.filter(**same))


def strays(
    using: str, place: type[Any], condition: Any, after: Any = None, limit: int = NAMED
) -> Iterator[Finding]:
    """Find rows of *place* by their body; *after* is the primary key of the last one before."""
    body = QueueItem.objects.filter(pk=OuterRef("item_id"))
    rows = place.objects.using(using).filter(condition).order_by("pk")
    if after is not None:
        rows = rows.filter(pk__gt=after)
    kept = (F("queue"), F("tenant")) if place in KEPT else (Value(""), Value(""))
    found = rows.annotate(
        name=body.values("item_id")[:1],
        within=kept[0],
        whose=Coalesce(body.values("tenant")[:1], kept[1]),
    )
    for row in found.values("pk", "item", "within", "whose", "name")[:limit]:
        gone = row["name"] is None
        told = "there is no item" if gone else "is unlike the item itself"
        within = f", queue {row['within']!r}" if row["within"] else ""
        yield Finding(
            kind=Kind.NO_BODY if gone else Kind.UNLIKE_BODY,
            problem=f"has a row in {place.__name__}{within}, but {told}",
            queue=row["within"],
            tenant=row["whose"],
            item_id=row["name"] or "",
            job_id=row["item"],
            cursor=row["pk"],
            place=place,
        )


def live_items_without_their_names(
    using: str, after: int = 0, limit: int = NAMED
) -> Iterator[Finding]:
    """Find live items whose id or key others could have."""
    live = _with_place(using, after).filter(state__in=_LIVE)
    freed = live.filter(Q(id_freed=True) | Q(key_freed=True, dedupe_key__isnull=False))
    for found in freed.values(*_NAMES)[:limit]:
        yield _of_item(Kind.NAMES_FREED, found, "is live, but its id or key is free")


def ids_without_a_holder(using: str, after: int = 0, limit: int = NAMED) -> Iterator[Finding]:
    """Find the newest items of ids that none of their items holds; of none that is live."""
    same_id = QueueItem.objects.filter(tenant=OuterRef("tenant"), item_id=OuterRef("item_id"))
    newest = (
        _with_place(using, after)
        .filter(~Exists(same_id.filter(id_freed=False)), id_freed=True)
        .filter(~Exists(same_id.filter(id_freed=True, pk__gt=OuterRef("pk"))))
        .exclude(state__in=_LIVE)
    )
    for found in newest.values(*_NAMES)[:limit]:
        yield _of_item(Kind.ID_UNHELD, found, "is the newest of its id, but no item holds that")


def attempts_without_a_failure(using: str, after: int = 0, limit: int = NAMED) -> Iterator[Finding]:
    """Find items whose attempts are not as many as their failures, or numbered otherwise."""
    items = _with_place(using, after).exclude(attempts=None)
    items = items.annotate(
        counted=Count("failures"), first=Min("failures__number"), last=Max("failures__number")
    )
    agreed = Q(counted=F("attempts")) & (Q(counted=0) | Q(first=1, last=F("attempts")))
    for found in items.exclude(agreed).values(*_NAMES, "attempts", "counted", "last")[:limit]:
        told = f"counts {found['attempts']} attempts, but has {found['counted']} failures"
        if found["counted"] == found["attempts"]:
            told += f", the last of them number {found['last']}"
        yield _of_item(Kind.ATTEMPTS, found, told)


def fences_behind(using: str, after: int = 0, limit: int = NAMED) -> Iterator[Finding]:
    """Find items with failures of claims that are yet to come."""
    items = _with_place(using, after).annotate(latest=Max("failures__fence"))
    behind = items.filter(latest__gt=F("fence"))
    for found in behind.values(*_NAMES, "fence", "latest")[:limit]:
        told = f"has fence {found['fence']}, but a failure of fence {found['latest']}"
        yield _of_item(Kind.FENCE, found, told)


def _with_place(using: str, after: int) -> Any:
    return QueueItem.objects.using(using).with_state().filter(pk__gt=after).order_by("pk")


def wrong_counters(using: str) -> list[Finding]:
    """Find figures that are not what is there."""
    with one_picture(using):
        return list(_wrong_counters(using))


def _wrong_counters(using: str) -> Iterator[Finding]:
    counted: dict[tuple[str, str], int] = {}
    for name, rows in _places_to_count(using).items():
        for queue, number in rows.order_by().values_list("queue").annotate(number=Count("*")):
            counted[queue, name] = number
    for name in _places_to_count(using):
        sums = Counter.objects.using(using).order_by().values_list("queue").annotate(told=Sum(name))
        told = dict(sums)
        for queue in sorted({*told, *(queue for queue, of in counted if of == name)}):
            true = counted.get((queue, name), 0)
            if (error := (told.get(queue) or 0) - true) != 0:
                yield Finding(
                    kind=Kind.COUNTER,
                    problem=f"counts {told.get(queue)} {name}, but has {true}",
                    queue=queue,
                    figure=name,
                    error=error,
                )


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
