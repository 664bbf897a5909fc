"""``manage.py workqueue``: an operator's work from the shell."""

from __future__ import annotations

import sys
from argparse import SUPPRESS
from typing import Any, Final

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import (
    BaseCommand,
    CommandError,
    CommandParser,
    DjangoHelpFormatter,
)
from django.db import Error, connections

from django_workqueue.doctor import missing_tables
from django_workqueue.exceptions import InvalidFieldError, QueueUnavailableError
from django_workqueue.management.console import listing, moving, showing, status, upkeep
from django_workqueue.management.console.output import BROKEN_PIPE, StandardOutput
from django_workqueue.management.console.verb import UNUSABLE, Console, Verb, usage_error
from django_workqueue.queues import get_queue

VERBS: Final[dict[str, Verb]] = {
    "status": status.STATUS,
    "list": listing.LIST,
    "show": showing.SHOW,
    "requeue": moving.REQUEUE,
    "resume": moving.RESUME,
    "cancel": moving.CANCEL,
    "discard": moving.DISCARD,
    "hold": upkeep.HOLD,
    "unhold": upkeep.UNHOLD,
    "holds": upkeep.HOLDS,
    "prune": upkeep.PRUNE,
    "doctor": upkeep.DOCTOR,
}


class Command(BaseCommand):
    """Finds the verb, and says in a line what keeps it from working."""

    help = (
        "Looks after the work queue. Exit codes: 0 done, and all is well; 1 not so, or something "
        "was skipped; 2 the command can't work."
    )
    # At 3 a.m. an unrelated mistake in the project mustn't keep anyone from looking, and a
    # database that can't be reached is told in a line.
    requires_system_checks = []
    requires_migrations_checks = False

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the verbs. Each takes Django's common options too, wherever they stand."""
        verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
        for name, verb in VERBS.items():
            own = verbs.add_parser(
                name,
                help=verb.help,
                description=f"{verb.help} {verb.description}".strip(),
                parents=[_common_options()],
                formatter_class=DjangoHelpFormatter,
                conflict_handler="resolve",  # for a verb's own option of a common one's name
            )
            own.add_argument("--database", help="Alias of the database; default: the queue's own.")
            verb.add_arguments(own)

    def run_from_argv(self, argv: list[str]) -> None:
        """Run as a process, whose output may end early."""
        self.stdout = output = StandardOutput()
        try:
            super().run_from_argv(argv)
        except BrokenPipeError:  # of what isn't written by a verb: the help
            output.silence()
        finally:
            output.flush()
        if output.is_broken:
            sys.exit(BROKEN_PIPE)

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the verb."""
        try:
            console = Console(
                queue=get_queue(_alias(options["database"])),
                stdout=self.stdout,
                stderr=self.stderr,
                style=self.style,
            )
            VERBS[options["verb"]].run(console, options)
        except InvalidFieldError as error:
            raise usage_error(error) from error
        except ImproperlyConfigured as error:
            raise CommandError(str(error), returncode=UNUSABLE) from error
        except (Error, QueueUnavailableError) as error:
            for connection in connections.all(initialized_only=True):
                if not connection.in_atomic_block:  # whoever calls this again gets a new one
                    connection.close_if_unusable_or_obsolete()
            cause = str(error).strip().partition("\n")[0]
            raise CommandError(
                f"the database of the queue can't be used: {cause}", returncode=UNUSABLE
            ) from error


def _alias(named: str | None) -> str:
    """Return the alias of a database that has the queue's tables."""
    alias = get_queue().using if named is None else named
    if alias not in connections:
        option = "WORKQUEUE['DATABASE']" if named is None else "--database"
        told = f"there is no database {alias!r}; there are {', '.join(map(repr, connections))}"
        raise CommandError(f"{option}: {told}", returncode=UNUSABLE)
    if missing_tables(alias):
        raise CommandError(
            f"Tables are missing in {alias!r}: run manage.py migrate.", returncode=UNUSABLE
        )
    return alias


def _common_options() -> CommandParser:
    parser = BaseCommand().create_parser("", "", add_help=False)
    for action in parser._actions:
        action.default = SUPPRESS  # or it would undo what stands before the verb
    return parser
