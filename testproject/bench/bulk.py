"""`bulk`: `enqueue_many`, in turn with a bare insert of as many rows in one statement."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from bench.database import ALIAS
from bench.enqueue import Producer
from bench.inserts import BareInsert
from bench.rounds import Bench, Figures, Scenario, compare
from bench.sizes import OPTIONS, Size
from bench.tables import work_items
from django_workqueue import get_queue


class BulkProducer(Producer):
    """A producer of many items at once."""

    name = "bulk"

    def turns(self, size: Size, number: int) -> Iterator[int]:
        """Enqueue one batch a turn."""
        queue = get_queue(ALIAS)
        for batch in size.batches(number):
            yield len(queue.enqueue_many(work_items(size, batch)))


def run(bench: Bench, size: Size) -> Figures:
    """Measure it in turn with the bare insert."""
    return compare(bench, size, BulkProducer(), BareInsert("insert_many", single=False))


SCENARIO: Final = Scenario(
    help="enqueue_many, against a bare insert of as many rows",
    defaults=Size(items=50_000, batch=10_000),
    most_in_batch=OPTIONS["batch"].most,
    run=run,
)
