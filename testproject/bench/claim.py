"""`claim`: claim and complete through the queue's moves, as workers do it, in turn with `raw`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from django.db import connections, transaction

from bench.clients import Work
from bench.database import ALIAS
from bench.outcome import queue_problems
from bench.raw import DEFAULTS, MOST_IN_BATCH, Raw
from bench.rounds import Bench, Figures, Scenario, compare
from bench.sizes import QUEUE, Size
from bench.tables import fill, restore
from django_workqueue.models import Lease
from django_workqueue.moves import ClaimRequest, Completion
from django_workqueue.worker.connection import own_connection


class Claim:
    """The moves on a worker's connection, one commit for the end of a batch and the next claim."""

    name = "claim"

    def prepare(self, size: Size) -> None:
        restore()

    @contextmanager
    def client(self, size: Size, number: int) -> Iterator[Work]:
        own_connection(ALIAS, f"bench {number}")
        connection = connections[ALIAS]
        connection.ensure_connection()
        try:
            yield Work(connection.connection, self._turns(size.batch, f"bench-{number}"))
        finally:
            connection.close()

    def _turns(self, batch: int, worker: str) -> Iterator[int]:
        moves = Lease.claims.db_manager(ALIAS).moves()
        request = ClaimRequest(queue=QUEUE, worker=worker, limit=batch)
        held: list[Completion] = []
        while True:
            with transaction.atomic(using=ALIAS):
                done = len(moves.complete(worker, held))
                moves.promote(QUEUE)
                rows = moves.claim(request)
            yield done
            if not rows:
                return
            held = [Completion(item=row["item"], fence=row["fence"]) for row in rows]

    def problems(self, size: Size) -> list[str]:
        return queue_problems(ALIAS, size.items, "completed", claims=1)


def run(bench: Bench, size: Size) -> Figures:
    """Measure it in turn with the bare statements."""
    fill(size)
    return compare(bench, size, Claim(), Raw())


SCENARIO: Final = Scenario(
    help="claim and complete as workers do it, against raw",
    defaults=DEFAULTS,
    most_in_batch=MOST_IN_BATCH,
    run=run,
)
