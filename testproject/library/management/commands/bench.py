"""`manage.py bench`: what the queue costs on PostgreSQL, against what the machine can do."""

import json
import os
import platform
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import django
import psycopg
from bench import BenchError
from bench.database import ALIAS, connect, own_database
from bench.observer import Observer
from bench.rounds import Bench, Figures
from bench.scenarios import SCENARIOS
from bench.sizes import OPTIONS, Size, flag, size_of
from bench.tables import create_bare_tables
from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandError, CommandParser


class Command(BaseCommand):
    """Measures in a database that it makes for itself, checks what came out, and drops it."""

    help = (
        "Measure scenarios in a PostgreSQL database that is made for this run and dropped, on "
        "the server that DATABASE_URL names or else on one of its own. One line of JSON each."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        told = "; ".join(f"{name}: {scenario.help}" for name, scenario in SCENARIOS.items())
        parser.add_argument(
            "scenarios", nargs="+", choices=SCENARIOS, metavar="SCENARIO", help=told
        )
        for name, option in OPTIONS.items():
            values = [str(getattr(each.defaults, name)) for each in SCENARIOS.values()]
            default = ", ".join(dict.fromkeys(values))
            meaning = f"{option.meaning} (default: {default}, by scenario)"
            if len(set(values)) == 1:
                meaning = f"{option.meaning} (default: {default})"
            parser.add_argument(flag(name), type=int, metavar="N", help=meaning)
        parser.add_argument("--human", action="store_true", help="words instead of JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        human = options["human"]
        try:
            sizes = {name: _size(name, options) for name in options["scenarios"]}
            with _ending_tidily(), self._bench() as bench:
                for name, size in sizes.items():
                    self._say(f"{name}: {SCENARIOS[name].help}, {size.items:,} items a round")
                    figures = _labels(name, size) | SCENARIOS[name].run(bench, size)
                    figures["environment"] = _environment(bench)
                    self.stdout.write(_in_words(figures) if human else json.dumps(figures))
                    self.stdout.flush()
        except BenchError as error:
            raise CommandError(str(error)) from None
        except KeyboardInterrupt:
            raise CommandError("Stopped; the database of this run is gone.") from None

    @contextmanager
    def _bench(self) -> Iterator[Bench]:
        self._say("Making a database")
        with own_database() as (settings, server), connect(server) as connection:
            call_command("migrate", database=ALIAS, verbosity=0)
            create_bare_tables()
            yield Bench(settings, Observer(connection, settings["NAME"]), self._say)

    def _say(self, text: str) -> None:
        self.stderr.write(text, style_func=str)


def _size(name: str, options: dict[str, Any]) -> Size:
    scenario = SCENARIOS[name]
    return size_of(name, scenario.defaults, options, most_in_batch=scenario.most_in_batch)


def _labels(name: str, size: Size) -> Figures:
    labels = {"scenario": name} | asdict(size)
    del labels["rounds"]  # as many as there are values
    return labels


def _environment(bench: Bench) -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "django": django.get_version(),
        "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__})",
        "postgresql": bench.observer.version,
        "cores": os.cpu_count(),
    }


def _in_words(figures: Figures) -> str:
    lines = [f"{figures['scenario']}: {_speed(figures)}"]
    if under := figures["baseline"]:
        lines.append(f"  {under['name']}: {_speed(under)}")
        lines.append(f"  ratio: {figures['ratio']}")
    return "\n".join(lines)


def _speed(figures: Figures) -> str:
    return (
        f"{figures['items_per_s']:,.0f} items/s; a turn {figures['p50_ms']} ms (p50), "
        f"{figures['p95_ms']} (p95), {figures['p99_ms']} (p99); per item "
        f"{figures['commits_per_item']} commits, {figures['wal_bytes_per_item']} bytes of WAL, "
        f"{figures['cpu_ms_per_item']} ms of the clients' CPU and "
        f"{figures['server_cpu_ms_per_item']} of the server's; {figures['peak_mib']} MiB a client"
    )


@contextmanager
def _ending_tidily() -> Iterator[None]:
    """Told to end, the command drops its database as it does after Ctrl-C."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
