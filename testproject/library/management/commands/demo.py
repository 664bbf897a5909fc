"""`manage.py demo`: the queue works through the standard library and loses a worker on the way."""

import json
import os
import signal
import sys
import tempfile
import time
from argparse import ArgumentTypeError
from pathlib import Path
from typing import Any

from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.core.management.color import no_style
from django.db import OperationalError, connection

from django_workqueue import get_queue
from library.handlers import report
from library.outcome import dead_letters, largest_modules, problems, redelivered
from library.progress import ProgressBar
from library.run import Run
from library.source import poison, standard_library
from library.workers import Kill, Workers

PROCESSES = 2
# So long without an item that ends: something is broken.
PATIENCE_SECONDS = 60
LOOK_SECONDS = 0.1
LOG_LINES = 40


class Command(BaseCommand):
    """Enqueues, has it worked off, kills a worker process, and counts what came of it."""

    help = (
        "Report on every module of the standard library, one item each, with two worker "
        "processes, one of which is killed. The exit code is 0 only if nothing was lost."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--limit", type=_positive, help="take so many modules, evenly chosen (default: all)"
        )

    def handle(self, *args: Any, **options: Any) -> None:
        if os.environ.get("NO_COLOR"):
            self.style = no_style()
        # Told to end, the demo stops its workers as it does after Ctrl-C.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            self._demonstrate(options["limit"])
        except KeyboardInterrupt:
            self.stderr.write("\nStopped. What is left waits in the queue; the next run takes it.")
            sys.exit(130)

    def _demonstrate(self, limit: int | None) -> None:
        started = time.monotonic()
        log = _new_log()
        try:
            call_command("migrate", verbosity=0)
        except OperationalError as error:
            raise CommandError(f"The database doesn't answer: {error}") from None
        run = self._enqueue(limit)
        self.stdout.write(f"{PROCESSES} worker processes take them; their log: {log}")
        kill = self._work(run, Workers(run, PROCESSES, log), log)
        figures = run.figures()
        wrong = list(problems(run, figures, kill))
        self._tell(run, kill)
        self._judge(wrong, time.monotonic() - started, log)
        self.stdout.write(f"demo: {json.dumps(figures)}")
        if wrong:
            sys.exit(1)

    def _tell(self, run: Run, kill: Kill | None) -> None:
        for part in (largest_modules(run), dead_letters(run), redelivered(run, kill)):
            self.stdout.write(f"\n{self.style.MIGRATE_HEADING(next(part))}")
            for line in part:
                self.stdout.write(line)

    def _judge(self, wrong: list[str], seconds: float, log: Path) -> None:
        if not wrong:
            text = f"\nNothing was lost: one report or dead letter each ({seconds:.1f} s)"
            self.stdout.write(self.style.SUCCESS(text))
            return
        self.stdout.write(self.style.ERROR(f"\nSomething is wrong ({seconds:.1f} s)"))
        for problem in wrong:
            self.stdout.write(self.style.ERROR(f"  {problem}"))
        self.stdout.write(_end_of(log))

    def _enqueue(self, limit: int | None) -> Run:
        modules = standard_library()
        if not modules:
            raise CommandError("This Python has no source files of its standard library.")
        if limit and limit < len(modules):
            modules = [modules[place * len(modules) // limit] for place in range(limit)]
        spoilt = poison()
        left = get_queue().stats(queue=report.queue).depth
        run = Run([*modules, *spoilt])
        name = connection.settings_dict["NAME"]
        self.stdout.write(f"Database: {connection.display_name}, {name}")
        version = ".".join(map(str, sys.version_info[:3]))
        tenants = len({module.package for module in modules})
        self.stdout.write(
            f"Enqueued: {len(modules):,} modules of Python {version}, whose {tenants} packages "
            f"are the tenants, and {len(spoilt)} that can't succeed"
        )
        if left:
            self.stdout.write(
                f"An earlier run left {left:,} items in the queue, which are taken too"
            )
        return run

    def _work(self, run: Run, workers: Workers, log: Path) -> Kill | None:
        """Show how the workers get on; in the middle kill one of their processes."""
        total = run.items.count()
        bar = ProgressBar(self.stdout, total)
        kill, done, moved = None, 0, time.monotonic()
        with workers:
            while workers.running:
                if workers.told_to_stop:
                    raise KeyboardInterrupt
                completed, dead = run.completed.count(), run.dead_letters.count()
                if completed + dead != done:
                    done, moved = completed + dead, time.monotonic()
                elif time.monotonic() - moved > PATIENCE_SECONDS:
                    bar.end()
                    raise CommandError(
                        f"Nothing has ended for {PATIENCE_SECONDS} s.\n{_end_of(log)}"
                    )
                bar.show(done, dead)
                if kill is None and 2 * done >= total and (kill := workers.kill_one()):
                    bar.say(f"  Worker process {kill.pid} is killed (SIGKILL), holding {kill.load}")
                time.sleep(LOOK_SECONDS)
        bar.show(run.completed.count() + run.dead_letters.count(), run.dead_letters.count())
        bar.end()
        return kill


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise ArgumentTypeError("must be 1 or more")
    return number


def _new_log() -> Path:
    handle, path = tempfile.mkstemp(prefix="workqueue-demo-", suffix=".log")
    os.close(handle)
    return Path(path)


def _end_of(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join(["The end of the workers' log:", *(f"  {line}" for line in lines)])
