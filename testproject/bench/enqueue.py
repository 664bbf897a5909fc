"""`enqueue`: items accepted one by one, in turn with a bare insert of one row and its commit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from django.db import connections

from bench.clients import Work
from bench.database import ALIAS
from bench.inserts import BareInsert
from bench.outcome import queue_problems
from bench.rounds import Bench, Figures, Scenario, compare
from bench.sizes import Size
from bench.tables import clear, work_items
from django_workqueue import get_queue


class Producer:
    """A producer on Django's own connection, as views and commands of a project have it."""

    name = "enqueue"

    def prepare(self, size: Size) -> None:
        clear()

    @contextmanager
    def client(self, size: Size, number: int) -> Iterator[Work]:
        connection = connections[ALIAS]
        connection.ensure_connection()
        try:
            yield Work(connection.connection, self.turns(size, number))
        finally:
            connection.close()

    def turns(self, size: Size, number: int) -> Iterator[int]:
        """Enqueue one item a turn."""
        queue = get_queue(ALIAS)
        for item in work_items(size, size.share(number)):
            queue.enqueue(item)
            yield 1

    def problems(self, size: Size) -> list[str]:
        return queue_problems(ALIAS, size.items, "queued", claims=0)


def run(bench: Bench, size: Size) -> Figures:
    """Measure it in turn with the bare insert."""
    return compare(bench, size, Producer(), BareInsert("insert", single=True))


SCENARIO: Final = Scenario(
    help="enqueue one by one, against a bare insert and commit",
    defaults=Size(items=6_000),
    most_in_batch=1,
    run=run,
)
