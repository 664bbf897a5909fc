"""What a verb of ``manage.py workqueue`` is made of."""

from __future__ import annotations

import getpass
import os
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.core.management.base import CommandError, OutputWrapper
from django.core.management.color import Style

from django_workqueue.exceptions import InvalidFieldError
from django_workqueue.overview import no_queue
from django_workqueue.queues import DatabaseWorkQueue

#: Exit codes: something is as it shouldn't be, or was skipped; and the command couldn't work.
WRONG: Final = 1
UNUSABLE: Final = 2

_ARGUMENTS: Final = {"item_id": "ITEM_ID"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Console:
    """Where a verb runs: the queue, and where it writes. `out` is for what was asked."""

    queue: DatabaseWorkQueue
    stdout: OutputWrapper
    stderr: OutputWrapper
    style: Style

    def out(self, text: str) -> None:
        """Write lines to standard output."""
        self.stdout.write(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verb:
    """A subcommand. `description` follows `help` where its own help is shown."""

    help: str
    description: str = ""
    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Console, dict[str, Any]], None]


def usage_error(error: InvalidFieldError) -> CommandError:
    """Say *error* of a verb's argument by the name of its option."""
    name, dot, rest = error.field.partition(".")
    option = _ARGUMENTS.get(name) or "--" + name.replace("_", "-")
    told = str(error).removeprefix(error.field) if error.field else f": {error}"
    return CommandError(f"{option}{dot}{rest}{told}", returncode=UNUSABLE)


def add_item(parser: ArgumentParser, **item_id: Any) -> None:
    """Add what names an item."""
    parser.add_argument("item_id", metavar="ITEM_ID", **item_id)
    parser.add_argument("--tenant", required=True, help="The tenant whose item it is.")
    parser.add_argument(
        "--job-id",
        type=natural,
        metavar="NUMBER",
        help="The acceptance with this job id; default: the one that holds the id, the latest.",
    )


def add_json(parser: ArgumentParser) -> None:
    """Add the option for machines."""
    parser.add_argument("--json", action="store_true", help="Print one JSON object.")


def add_actor(parser: ArgumentParser, *, reason_required: bool = False) -> None:
    """Add who acts and why, which the audit keeps."""
    parser.add_argument(
        "--reason", required=reason_required, default="", help="Why; kept in the audit."
    )
    parser.add_argument(
        "--by", help="Who does it; kept in the audit. Default: the name of the system's user."
    )


def actor(options: dict[str, Any]) -> str:
    """Return who acts: as told, else the system's user."""
    by: str | None = options["by"]
    return _system_user() if by is None else by


def reason(options: dict[str, Any]) -> str:
    """Return why, as told; a blank says nothing."""
    told: str = options["reason"]
    return told if told.strip() else ""


def _system_user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # a container's user need not have a name
        return f"uid {os.getuid()}"


def seconds(text: str) -> float:
    """Read an option's seconds."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise ArgumentTypeError(f"must be a number of seconds, 0 or more, not {text!r}")
    return value


def natural(text: str) -> int:
    """Read an option's whole number, 0 or more."""
    # More digits than any column has would only make Python complain of their number.
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise ArgumentTypeError(f"must be a whole number, 0 or more, not {text!r}")
    return int(text)


def require_known(name: str, known: Sequence[str]) -> None:
    """Refuse a queue that isn't *known*: a slip of the pen would look like health."""
    if name not in known:
        raise CommandError(f"--queue: {no_queue(name, known)}", returncode=UNUSABLE)
