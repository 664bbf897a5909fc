"""The verbs on single items: look at one, and move some."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from django.core.management.base import CommandError

from django_workqueue.arguments import check_item
from django_workqueue.exceptions import (
    InvalidTransitionError,
    WorkItemNotFoundError,
)
from django_workqueue.items import WorkItem
from django_workqueue.management.console.text import (
    as_json,
    iso,
    moment,
    number_of,
    printable,
)
from django_workqueue.management.console.verb import (
    UNUSABLE,
    WRONG,
    Console,
    Verb,
    actor,
    add_actor,
    add_json,
    natural,
)
from django_workqueue.models import Failure
from django_workqueue.queues import DatabaseWorkQueue
from django_workqueue.reading import ItemReader, StoredText

#: The latest failures of an item that are shown, and characters of each.
SHOWN_FAILURES: Final = 100
SHOWN_MESSAGE: Final = 2_000


def _add_named(parser: ArgumentParser, **item_id: Any) -> None:
    parser.add_argument("item_id", metavar="ITEM_ID", **item_id)
    parser.add_argument("--tenant", required=True, help="The tenant whose item it is.")
    parser.add_argument(
        "--job-id",
        type=natural,
        metavar="NUMBER",
        help="The acceptance with this job id; default: the one that holds the id, the latest.",
    )


def _refuse_if_misplaced(
    queue: DatabaseWorkQueue, item_id: str, tenant: str, job_id: int | None
) -> None:
    row = ItemReader(queue.using).row(item_id, tenant, job_id)
    if not row.state:
        raise InvalidTransitionError(f"item {item_id!r} is in no place: see workqueue doctor")


# Looking.


def _add_show_arguments(parser: ArgumentParser) -> None:
    _add_named(parser, help="The item's id.")
    parser.add_argument("--payload", action="store_true", help="Show the payload too.")
    add_json(parser)


def _show(console: Console, options: dict[str, Any]) -> None:
    queue, named = console.queue, (options["item_id"], options["tenant"], options["job_id"])
    try:
        item = _find(queue, *named)
    except (WorkItemNotFoundError, InvalidTransitionError) as error:
        raise CommandError(str(error), returncode=WRONG) from error
    rows = Failure.objects.using(queue.using).filter(item_id=item.job_id).order_by("-number")
    # As text even where somebody wrote bytes.
    rows = rows.defer("message", "traceback").annotate(text=StoredText("message"))
    failures = [*rows[:SHOWN_FAILURES]][::-1]
    if options["json"]:
        console.out(as_json(_as_object(item, failures, payload=options["payload"])))
    else:
        for line in _as_text(item, failures, payload=options["payload"]):
            console.out(line)


def _find(queue: DatabaseWorkQueue, item_id: str, tenant: str, job_id: int | None) -> WorkItem:
    check_item(item_id, tenant, job_id)
    _refuse_if_misplaced(queue, item_id, tenant, job_id)
    return queue.get(item_id, tenant=tenant, job_id=job_id)


_SHOWN: Final = (
    "id",
    "tenant",
    "job_id",
    "queue",
    "handler",
    "state",
    "attempts",
    "max_attempts",
    "priority",
    "dedupe_key",
    "deployment_id",
    "timeout_seconds",
    "enqueued_at",
    "available_at",
    "worker",
    "fence",
    "first_claimed_at",
    "lease_expires_at",
    "cancel_requested",
    "result",
)
_TIMES: Final = ("enqueued_at", "available_at", "first_claimed_at", "lease_expires_at")


def _as_object(item: WorkItem, failures: list[Any], *, payload: bool) -> dict[str, Any]:
    shown = {name: getattr(item, name) for name in _SHOWN}
    shown |= {name: iso(shown[name]) for name in _TIMES}
    if payload:
        shown["payload"] = item.payload
    shown["failures"] = [
        {
            "number": failure.number,
            "kind": failure.kind,
            "error_class": failure.error_class,
            "message": failure.text,
            "worker": failure.worker or None,
            "failed_at": iso(failure.failed_at),
        }
        for failure in failures
    ]
    return shown


def _as_text(item: WorkItem, failures: list[Any], *, payload: bool) -> Iterator[str]:
    for name in _SHOWN:
        value = getattr(item, name)
        if value in (None, "", False) and name not in ("attempts", "priority"):
            continue
        if name in _TIMES:
            value = moment(value)
        elif name == "result":
            value = json.dumps(value)
        yield f"{name.replace('_', ' '):<17} {printable(str(value))}"
    if payload:
        yield f"{'payload':<17} {json.dumps(item.payload)}"
    if failures:
        yield f"{'failures':<17} {number_of(item.attempts, 'attempt')} ended without success"
    for failure in failures:
        by = f", worker {printable(failure.worker)}" if failure.worker else ""
        yield f"  {failure.number}. {moment(failure.failed_at)}, {failure.kind}{by}"
        yield from _indented(failure.text)


def _indented(message: str) -> Iterator[str]:
    cut = message if len(message) <= SHOWN_MESSAGE else message[:SHOWN_MESSAGE] + " … [cut]"
    for line in cut.split("\n"):
        yield f"     {printable(line)}"


# Moving.


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """What became of one item: it moved, or `skipped` says why not."""

    item_id: str
    before: WorkItem | None = None
    after: WorkItem | None = None
    skipped: str = ""

    def __str__(self) -> str:
        told = self.skipped
        if self.before and self.after:
            told = (
                f"{_standing(self.before)} -> {_standing(self.after)}, job id {self.after.job_id}"
            )
        return printable(f"{self.item_id}: {told}")

    def as_object(self) -> dict[str, Any]:
        return {
            "id": self.item_id,
            "done": self.after is not None,
            "skipped": self.skipped,
            "before": self.before and _standing_object(self.before),
            "after": self.after and _standing_object(self.after),
        }


def _standing(item: WorkItem) -> str:
    asked = " (asked to cancel)" if item.cancel_requested else ""
    return f"{item.state}{asked}, attempts {item.attempts}/{item.max_attempts}"


def _standing_object(item: WorkItem) -> dict[str, Any]:
    names = ("job_id", "state", "attempts", "max_attempts", "cancel_requested")
    return {name: getattr(item, name) for name in names}


def _add_move_arguments(
    parser: ArgumentParser, *, with_payload: bool = False, reason_required: bool = False
) -> None:
    _add_named(parser, nargs="+", help="Ids of items; each is moved, or skipped, for itself.")
    if with_payload:
        parser.add_argument(
            "--payload",
            metavar="JSON|@FILE",
            help="A JSON object, or @ and the name of its file, to replace the payload by.",
        )
    add_actor(parser, reason_required=reason_required)
    add_json(parser)


def _move(verb: str, console: Console, options: dict[str, Any]) -> None:
    given: dict[str, Any] = {
        "tenant": options["tenant"],
        "job_id": options["job_id"],
        "by": actor(options),
        "reason": options["reason"],
    }
    if options.get("payload") is not None:
        given["payload"] = _payload(options["payload"])
    if len(options["item_id"]) > 1:
        for name in ("job_id", "payload"):
            if given.get(name) is not None:
                option = "--" + name.replace("_", "-")
                raise CommandError(f"{option} goes with one ITEM_ID only", returncode=UNUSABLE)
    item_ids = [*dict.fromkeys(options["item_id"])]
    for item_id in item_ids:  # before any is moved
        check_item(item_id, options["tenant"], options["job_id"])
    move = partial(getattr(console.queue, verb), **given)
    outcomes: list[_Outcome] = []
    try:
        for item_id in item_ids:
            outcomes.append(_try(console.queue, item_id, given, move))
            if not options["json"]:
                console.out(str(outcomes[-1]))
    finally:  # also what was done before the database went away
        if options["json"]:
            console.out(as_json({"items": [outcome.as_object() for outcome in outcomes]}))
    if skipped := sum(outcome.after is None for outcome in outcomes):
        raise CommandError(
            f"{verb}: {skipped} of {number_of(len(outcomes), 'item')} skipped", returncode=WRONG
        )


def _try(
    queue: DatabaseWorkQueue, item_id: str, given: dict[str, Any], move: Callable[[str], WorkItem]
) -> _Outcome:
    try:
        before = _find(queue, item_id, given["tenant"], given["job_id"])
        return _Outcome(item_id=item_id, before=before, after=move(item_id))
    except (WorkItemNotFoundError, InvalidTransitionError) as error:
        return _Outcome(item_id=item_id, skipped=f"skipped: {error}")


def _payload(text: str) -> Any:
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CommandError(f"--payload: {error}", returncode=UNUSABLE) from error
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"--payload: is not JSON: {error}", returncode=UNUSABLE) from error


SHOW: Final = Verb(
    help="Show an item as it stands, with its failures.",
    description=(
        f"Of the failures the latest {SHOWN_FAILURES} are shown; in text, the first "
        f"{SHOWN_MESSAGE} characters of each, and control characters as escapes."
    ),
    add_arguments=_add_show_arguments,
    run=_show,
)
_EACH: Final = "Prints a line per item; exits with 1 if any was skipped."
REQUEUE: Final = Verb(
    help="Give dead-lettered or cancelled items one more attempt.",
    description=_EACH,
    add_arguments=partial(_add_move_arguments, with_payload=True),
    run=partial(_move, "requeue"),
)
RESUME: Final = Verb(
    help="Let paused items go on.",
    description=_EACH,
    add_arguments=partial(_add_move_arguments, with_payload=True),
    run=partial(_move, "resume"),
)
CANCEL: Final = Verb(
    help="Withdraw items; of those that are claimed, ask their workers to stop.",
    description=_EACH,
    add_arguments=_add_move_arguments,
    run=partial(_move, "cancel"),
)
DISCARD: Final = Verb(
    help="Give dead letters up: they are cancelled, and the reason is kept.",
    description=_EACH,
    add_arguments=partial(_add_move_arguments, reason_required=True),
    run=partial(_move, "discard"),
)
