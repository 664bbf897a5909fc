"""The verb that lists the items of a state: where an operator finds their ids."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.db.models import OuterRef, Subquery
from django.db.models.functions import Left

from django_workqueue.items import (
    MAX_TENANT_LENGTH,
    WorkState,
    require_integer,
    require_text,
)
from django_workqueue.management.console import places
from django_workqueue.management.console.text import (
    as_json,
    first_line,
    iso,
    moment,
    table,
)
from django_workqueue.management.console.verb import Console, Verb, add_json, natural, require_known
from django_workqueue.models import Failure, QueueItem
from django_workqueue.moves import BATCH
from django_workqueue.overview import known_queues
from django_workqueue.queues import DatabaseWorkQueue
from django_workqueue.reading import StoredText

#: Characters that are shown of an error, and the most items of one list.
SHOWN_ERROR: Final = 200
MAX_LISTED: Final = 10_000


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "state", metavar="STATE", choices=[*_STATES], help=f"One of {', '.join(_STATES)}."
    )
    parser.add_argument("--queue", help="Only items of this queue.")
    parser.add_argument("--tenant", help="Only items of this tenant.")
    parser.add_argument(
        "--limit",
        type=natural,
        default=50,
        metavar="NUMBER",
        help="Show at most so many; default: %(default)s.",
    )
    add_json(parser)


def _run(console: Console, options: dict[str, Any]) -> None:
    known, listed = known_queues(console.queue), _STATES[options["state"]]
    if options["queue"] is not None:
        require_known(options["queue"], known)
    if options["tenant"] is not None:
        require_text("tenant", options["tenant"], MAX_TENANT_LENGTH)
    limit = require_integer("limit", options["limit"], 1, MAX_LISTED)
    wanted = places.Wanted(
        using=console.queue.using,
        queue=options["queue"],
        tenant=options["tenant"],
        most=limit + 1,
        queues=known,
    )
    rows, is_capped = listed.find(wanted)
    page = _Page(
        now=console.queue.moves.now(),
        items=_items(console.queue, rows[:limit]),
        more=len(rows) > limit,
        is_capped=is_capped,
    )
    if options["json"]:
        console.out(as_json(_as_object(options["state"], listed, page)))
    else:
        for line in _as_text(listed, page, wanted, options["state"]):
            console.out(line)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Item:
    """An item as it is listed: the `row` of its place, and what else is told of it."""

    row: Any
    id: str
    handler: str
    max_attempts: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Page:
    """What is listed, as of the store's time."""

    now: datetime
    items: Sequence[_Item]
    more: bool
    is_capped: bool


def _items(queue: DatabaseWorkQueue, rows: Sequence[Any]) -> list[_Item]:
    """The items of *rows*, with their latest error; a row without a body is the doctor's."""
    failures = Failure.objects.filter(item=OuterRef("pk")).order_by("-number")
    error = StoredText(Subquery(failures.values(start=Left("message", SHOWN_ERROR + 1))[:1]))
    bodies: dict[int, Any] = {}
    job_ids = [row.item_id for row in rows]
    for start in range(0, len(job_ids), BATCH):
        batch = QueueItem.objects.using(queue.using).filter(pk__in=job_ids[start : start + BATCH])
        names = ("pk", "item_id", "handler", "max_attempts")
        bodies.update((body["pk"], body) for body in batch.values(*names, error=error))
    return [
        _Item(
            row=row,
            id=body["item_id"],
            handler=body["handler"],
            max_attempts=body["max_attempts"],
            error=first_line(body["error"] or "", SHOWN_ERROR),
        )
        for row in rows
        if (body := bodies.get(row.item_id))
    ]


# For people.


def _as_text(listed: _Listed, page: _Page, wanted: places.Wanted, state: str) -> Iterator[str]:
    if page.items:
        headings = ("tenant", "id", "job id", "queue", "handler", "attempts", *listed.headings)
        yield table(headings, [_line(listed, page, item) for item in page.items])
    elif not page.is_capped:
        queue = "" if wanted.queue is None else f" of queue {wanted.queue!r}"
        tenant = "" if wanted.tenant is None else f" of tenant {wanted.tenant!r}"
        yield f"no item{queue}{tenant} is {state}"
    if page.more:
        yield "there are more: raise --limit"
    elif page.is_capped:
        yield f"there may be more: of a queue {places.LOOKED_AT:,} rows are looked at"


def _line(listed: _Listed, page: _Page, item: _Item) -> tuple[str, ...]:
    row = item.row
    return (
        row.tenant,
        item.id,
        str(row.item_id),
        row.queue,
        item.handler or "–",
        f"{row.attempts}/{item.max_attempts}",
        *listed.cells(page, item),
    )


def _of_dead_letter(page: _Page, item: _Item) -> tuple[str, ...]:
    return moment(item.row.dead_at), item.error


def _of_paused(page: _Page, item: _Item) -> tuple[str, ...]:
    return moment(item.row.since), item.row.settled_by


def _of_claimed(page: _Page, item: _Item) -> tuple[str, ...]:
    lapsed = ", lease lapsed" if item.row.expires_at <= page.now else ""
    asked = ", asked to cancel" if item.row.cancel_requested else ""
    return moment(item.row.claimed_at), f"{item.row.worker}{lapsed}{asked}"


def _of_queued(page: _Page, item: _Item) -> tuple[str, ...]:
    due, notes, due_at = "now", [], getattr(item.row, "due_at", None)
    if due_at is not None and due_at > page.now:
        due = moment(due_at)
        notes.append(item.row.get_cause_display())
    if item.row.deployment_id:
        notes.append(f"pinned to {item.row.deployment_id}")
    if item.error:
        notes.append(f"last failure: {item.error}")
    return due, ", ".join(notes)


# For machines.


def _as_object(state: str, listed: _Listed, page: _Page) -> dict[str, Any]:
    return {
        "state": state,
        "items": [_item_object(listed, page, item) for item in page.items],
        "more": page.more,
        "is_capped": page.is_capped,
    }


def _item_object(listed: _Listed, page: _Page, item: _Item) -> dict[str, Any]:
    row = item.row
    facts = {name: getattr(row, name, None) for name in listed.facts}
    told = {
        "tenant": row.tenant,
        "id": item.id,
        "job_id": row.item_id,
        "queue": row.queue,
        "handler": item.handler,
        "attempts": row.attempts,
        "max_attempts": item.max_attempts,
        "error": item.error or None,
    }
    for name, value in facts.items():
        told[name] = iso(value) if isinstance(value, datetime) else value
    return told


@dataclass(frozen=True, slots=True, kw_only=True)
class _Listed:
    """A state: how its rows are found, and what is told of them in text and to machines."""

    find: Callable[[places.Wanted], places.Found]
    headings: Sequence[str]
    cells: Callable[[_Page, _Item], tuple[str, ...]]
    facts: Sequence[str]


_STATES: Final = {
    WorkState.DEAD_LETTERED.value: _Listed(
        find=places.dead_letters,
        headings=("dead since", "last failure"),
        cells=_of_dead_letter,
        facts=("dead_at", "reason", "error_class"),
    ),
    WorkState.PAUSED.value: _Listed(
        find=places.paused,
        headings=("paused since", "by"),
        cells=_of_paused,
        facts=("since", "settled_by"),
    ),
    WorkState.CLAIMED.value: _Listed(
        find=places.claimed,
        headings=("claimed since", "worker"),
        cells=_of_claimed,
        facts=("claimed_at", "worker", "fence", "expires_at", "cancel_requested"),
    ),
    WorkState.QUEUED.value: _Listed(
        find=places.queued,
        headings=("due", ""),
        cells=_of_queued,
        facts=("enqueued_at", "due_at", "cause", "deployment_id"),
    ),
}

LIST: Final = Verb(
    help="List the items of a state, with their ids.",
    description=(
        "Dead letters: the latest first. Claimed and paused items: those first that have been so "
        "the longest. Queued ones: first what can be claimed, by queue and tenant in the order "
        "of service, then what is due later. Costs the same however long the backlog is; what "
        "has no index is looked for among so many rows, and the last line says so."
    ),
    add_arguments=_add_arguments,
    run=_run,
)
