"""The verb that looks at one item."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.core.management.base import CommandError

from django_workqueue.arguments import check_item
from django_workqueue.exceptions import WorkItemNotFoundError
from django_workqueue.items import WorkItem
from django_workqueue.management.console.text import (
    as_json,
    iso,
    moment,
    number_of,
    printable,
)
from django_workqueue.management.console.verb import (
    WRONG,
    Console,
    Verb,
    add_item,
    add_json,
)
from django_workqueue.models import AuditEntry, Failure
from django_workqueue.queues import DatabaseWorkQueue
from django_workqueue.reading import ItemReader, StoredText

#: The latest failures of an item that are shown, its latest entries in the audit, and
#: characters of each failure.
SHOWN_FAILURES: Final = 100
SHOWN_ENTRIES: Final = 20
SHOWN_MESSAGE: Final = 2_000


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sight:
    """
    What is shown of an item. `since` when it stands where it stands, `by` whose act and for
    what `reason`, where the place keeps that.
    """

    item: WorkItem
    since: datetime | None
    by: str
    reason: str
    failures: Sequence[Any]
    entries: Sequence[AuditEntry]


def _add_arguments(parser: ArgumentParser) -> None:
    add_item(parser, help="The item's id.")
    parser.add_argument("--payload", action="store_true", help="Show the payload too.")
    # In the place of Django's own, which tells of errors of the command; that one still
    # stands before the verb.
    parser.add_argument(
        "--traceback",
        action="store_true",
        dest="tracebacks",
        help="Show the traceback of each failure too.",
    )
    add_json(parser)


def _run(console: Console, options: dict[str, Any]) -> None:
    named = (options["item_id"], options["tenant"], options["job_id"])
    check_item(*named)
    try:
        sight = _look(console.queue, *named, tracebacks=options["tracebacks"])
    except WorkItemNotFoundError as error:
        raise CommandError(str(error), returncode=WRONG) from error
    if options["json"]:
        console.out(as_json(_as_object(sight, options)))
    else:
        for line in _as_text(sight, options):
            console.out(line)


def _look(
    queue: DatabaseWorkQueue,
    item_id: str,
    tenant: str,
    job_id: int | None,
    *,
    tracebacks: bool,
) -> _Sight:
    reader = ItemReader(queue.using)
    row = reader.row(item_id, tenant, job_id)
    [item] = reader.shown([row], queue.moves.now())
    # As text even where somebody wrote bytes.
    texts = {"text": StoredText("message")}
    if tracebacks:
        texts["trace"] = StoredText("traceback")
    failures = Failure.objects.using(queue.using).filter(item=row.pk).order_by("-number")
    failures = failures.defer("message", "traceback").annotate(**texts)
    audit = AuditEntry.objects.using(queue.using).filter(item=row.pk).order_by("-at", "-pk")
    entries = [*audit.defer("detail")[:SHOWN_ENTRIES]][::-1]
    since, by, reason = _standing(row)
    if since and not by:  # an operator's move is told of by the audit, with the same time
        by = next((entry.actor for entry in entries if entry.at == since), "")
    return _Sight(
        item=item,
        since=since,
        by=by,
        reason=reason,
        failures=[*failures[:SHOWN_FAILURES]][::-1],
        entries=entries,
    )


def _standing(row: Any) -> tuple[datetime | None, str, str]:
    """Since when an item stands in its place, by whom and why, as the place has it."""
    if finished := getattr(row, "finished", None):
        return finished.finished_at, finished.worker, finished.reason
    if letter := getattr(row, "dead_letter", None):
        return letter.dead_at, letter.settled_by, str(letter.get_reason_display())
    if waiting := getattr(row, "waiting", None):
        # That it is paused is its state, and no reason.
        cause = "" if waiting.due_at is None else str(waiting.get_cause_display())
        return waiting.since, waiting.settled_by, cause
    return None, "", ""


# For people.

_SHOWN: Final = (
    "id",
    "tenant",
    "job_id",
    "queue",
    "handler",
    "state",
    "since",
    "by",
    "reason",
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
#: Of these nothing is a fact too.
_ALWAYS: Final = ("attempts", "priority", "result")


def _facts(sight: _Sight) -> dict[str, Any]:
    own = {"since": sight.since, "by": sight.by or None, "reason": sight.reason or None}
    return {name: own[name] if name in own else getattr(sight.item, name) for name in _SHOWN}


def _as_text(sight: _Sight, options: dict[str, Any]) -> Iterator[str]:
    for name, value in _facts(sight).items():
        if value is None or (value in ("", False) and name not in _ALWAYS):
            continue
        if name == "result":
            value = json.dumps(value)
        told = moment(value) if isinstance(value, datetime) else str(value)
        yield f"{name.replace('_', ' '):<17} {printable(told)}"
    if options["payload"]:
        yield f"{'payload':<17} {json.dumps(sight.item.payload)}"
    if sight.failures:
        attempts = number_of(sight.item.attempts, "attempt")
        yield f"{'failures':<17} {attempts} ended without success"
    for failure in sight.failures:
        yield from _failure_lines(failure, options)
    if sight.entries:
        yield f"{'audit':<17} what operators did, the latest last"
    for entry in sight.entries:
        by = f" by {entry.actor}" if entry.actor else ""
        why = f": {entry.reason}" if entry.reason else ""
        yield printable(f"  {moment(entry.at)}, {entry.verb}{by}{why}")


def _failure_lines(failure: Any, options: dict[str, Any]) -> Iterator[str]:
    by = f", worker {printable(failure.worker)}" if failure.worker else ""
    yield f"  {failure.number}. {moment(failure.failed_at)}, {failure.kind}{by}"
    yield from _indented(_cut(failure.text))
    if options["tracebacks"] and failure.trace:
        yield from _indented(_cut(failure.trace, keep="tail"))


def _cut(text: str, *, keep: str = "head") -> str:
    """Cut *text*, a traceback at its head: how it ends tells more."""
    if len(text) <= SHOWN_MESSAGE:
        return text
    return (
        f"{text[:SHOWN_MESSAGE]} … [cut]" if keep == "head" else f"[cut] … {text[-SHOWN_MESSAGE:]}"
    )


def _indented(text: str) -> Iterator[str]:
    for line in text.removesuffix("\n").split("\n"):
        yield f"     {printable(line)}".rstrip()


# For machines.


def _as_object(sight: _Sight, options: dict[str, Any]) -> dict[str, Any]:
    shown = {
        name: iso(value) if isinstance(value, datetime) else value
        for name, value in _facts(sight).items()
    }
    if options["payload"]:
        shown["payload"] = sight.item.payload
    shown["failures"] = [_failure_object(failure, options) for failure in sight.failures]
    shown["audit"] = [
        {"at": iso(entry.at), "verb": entry.verb, "by": entry.actor, "reason": entry.reason}
        for entry in sight.entries
    ]
    return shown


def _failure_object(failure: Any, options: dict[str, Any]) -> dict[str, Any]:
    told = {
        "number": failure.number,
        "kind": failure.kind,
        "error_class": failure.error_class,
        "message": failure.text,
        "worker": failure.worker or None,
        "failed_at": iso(failure.failed_at),
    }
    return told | ({"traceback": failure.trace} if options["tracebacks"] else {})


SHOW: Final = Verb(
    help="Show an item as it stands, with its failures and what operators did with it.",
    description=(
        f"Of the failures the latest {SHOWN_FAILURES} are shown, of the audit the latest "
        f"{SHOWN_ENTRIES} entries; in text, {SHOWN_MESSAGE} characters of a message or a "
        "traceback, and control characters as escapes."
    ),
    add_arguments=_add_arguments,
    run=_run,
)
