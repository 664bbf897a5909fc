"""``manage.py workqueue``: an operator's work from the shell."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import connections

from django_workqueue.doctor import examine, missing_tables
from django_workqueue.queues import get_queue


class Command(BaseCommand):
    """Subcommands; ``doctor`` proves that every item is in exactly one place."""

    help = "Looks after the work queue."
    requires_migrations_checks = True

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the subcommands."""
        verbs = parser.add_subparsers(dest="verb", required=True)
        doctor = verbs.add_parser(
            "doctor", help="Check that every item is in exactly one place (reads whole tables)."
        )
        doctor.add_argument("--database", help="Alias of the database; default: the queue's own.")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the subcommand. Exits with 1 if it finds something wrong."""
        alias = get_queue(options["database"]).using
        if alias not in connections:
            raise CommandError(f"--database: there is no database {alias!r}")
        if missing_tables(alias):
            raise CommandError(f"Tables are missing in {alias!r}: run manage.py migrate.")
        findings = examine(alias)
        for finding in findings:
            self.stderr.write(self.style.ERROR(finding))
        if findings:
            raise CommandError(f"workqueue doctor: {len(findings)} findings", returncode=1)
        self.stdout.write(self.style.SUCCESS("workqueue doctor: every item is in one place"))
