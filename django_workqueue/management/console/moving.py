"""The verbs that move single items."""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from django.core.management.base import CommandError

from django_workqueue.arguments import check_item
from django_workqueue.exceptions import (
    InvalidFieldError,
    InvalidTransitionError,
    WorkItemNotFoundError,
)
from django_workqueue.items import WorkItem
from django_workqueue.management.console.text import as_json, number_of, printable
from django_workqueue.management.console.verb import (
    UNUSABLE,
    WRONG,
    Console,
    Verb,
    actor,
    add_actor,
    add_item,
    add_json,
    reason,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    """
    What became of one item: how it stands after the move, or why it was `skipped`. How it stood
    before only the move itself could tell: others may have moved it since anybody looked.
    """

    item_id: str
    after: WorkItem | None = None
    skipped: str = ""

    def __str__(self) -> str:
        told = f"now {_standing(self.after)}" if self.after else self.skipped
        return printable(f"{self.item_id}: {told}")

    def as_object(self) -> dict[str, Any]:
        names = ("job_id", "state", "attempts", "max_attempts", "cancel_requested")
        return {
            "id": self.item_id,
            "done": self.after is not None,
            "skipped": self.skipped,
            "after": self.after and {name: getattr(self.after, name) for name in names},
        }


def _standing(item: WorkItem) -> str:
    asked = " (asked to cancel)" if item.cancel_requested else ""
    attempts = f"attempts {item.attempts}/{item.max_attempts}"
    return f"{item.state}{asked}, {attempts}, job id {item.job_id}"


def _add_move_arguments(
    parser: ArgumentParser, *, with_payload: bool = False, reason_required: bool = False
) -> None:
    add_item(parser, nargs="+", help="Ids of items; each is moved, or skipped, for itself.")
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
        "reason": reason(options),
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
            outcomes.append(_try(item_id, move))
            if not options["json"]:
                console.out(str(outcomes[-1]))
    finally:  # also what was done before the database went away
        if options["json"]:
            console.out(as_json({"items": [outcome.as_object() for outcome in outcomes]}))
    if skipped := sum(outcome.after is None for outcome in outcomes):
        raise CommandError(
            f"{verb}: {skipped} of {number_of(len(outcomes), 'item')} skipped", returncode=WRONG
        )


def _try(item_id: str, move: Callable[[str], WorkItem]) -> _Outcome:
    try:
        return _Outcome(item_id=item_id, after=move(item_id))
    except (WorkItemNotFoundError, InvalidTransitionError) as error:
        return _Outcome(item_id=item_id, skipped=f"skipped: {error}")


def _payload(text: str) -> Any:
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise CommandError(f"--payload: {error}", returncode=UNUSABLE) from error
    try:
        return json.loads(text, object_pairs_hook=_object)
    except InvalidFieldError:
        raise
    except (ValueError, RecursionError) as error:
        raise CommandError(f"--payload: is not JSON: {error}", returncode=UNUSABLE) from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # Of a key that is there twice JSON would keep the last, and nobody knows which was meant.
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise InvalidFieldError(f"has the key {key!r} twice", field="payload")
        made[key] = value
    return made


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
