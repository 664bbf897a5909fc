"""
The rows that a round begins with, and the bare tables that the queue is compared with.

The bare tables have the shape of the queue's own, whatever that is at present.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from django.db import connections

from bench.database import ALIAS
from bench.sizes import HANDLER, QUEUE, Size
from django_workqueue import WorkItem, get_queue
from django_workqueue.testing import empty

_OWN: Final = "django_workqueue"
_BARE: Final = "bench"
#: The places of an item that was accepted, claimed and completed.
_PLACES: Final = ("queueitem", "ready", "lease", "finished")
#: The tables in which accepting items leaves rows.
_FILLED: Final = ("queueitem", "ready", "counter")
_FILL_BATCH: Final = 10_000

_STORAGE: Final = """
select array_to_string(reloptions, ', ') from pg_class where oid = %s::regclass
"""
#: What a bare table holds in columns that the bare statements don't name.
_BLANKS: Final = {
    "timestamp with time zone": "now()",
    "boolean": "false",
    "json": "'{}'",
    "jsonb": "'{}'",
    **dict.fromkeys(("smallint", "integer", "bigint", "double precision"), "0"),
}
_COLUMNS_TO_BLANK: Final = """
select attname, format_type(atttypid, null)
  from pg_attribute
 where attrelid = %s::regclass
   and attnum > 0
   and attnotnull
   and not (attisdropped or atthasdef or attidentity <> '')
"""


def execute(statement: str, parameters: Iterable[Any] = ()) -> list[tuple[Any, ...]]:
    """Run a statement in the benchmark's database; return its rows."""
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(statement, tuple(parameters) or None)
        return cursor.fetchall() if cursor.description else []


def create_bare_tables() -> None:
    """Make the bare tables, with the same columns, indexes and parameters."""
    for place in _PLACES:
        execute(f"create table {_BARE}_{place} (like {_OWN}_{place} including all)")
        [(storage,)] = execute(_STORAGE, [f"{_OWN}_{place}"])
        if storage:
            execute(f"alter table {_BARE}_{place} set ({storage})")
        for column, kind in execute(_COLUMNS_TO_BLANK, [f"{_BARE}_{place}"]):
            blank = _BLANKS.get(kind, "''")
            execute(f"alter table {_BARE}_{place} alter column {column} set default {blank}")


def work_items(size: Size, numbers: Iterable[int]) -> Iterator[WorkItem]:
    """Return the items of these numbers."""
    payload = size.payload()
    for number in numbers:
        yield WorkItem(tenant=size.tenant(number), queue=QUEUE, handler=HANDLER, payload=payload)


def fill(size: Size) -> None:
    """Accept the items of a round, and keep a copy of all rows for `restore`."""
    clear()
    queue = get_queue(ALIAS)
    for start in range(0, size.items, _FILL_BATCH):
        numbers = range(start, min(start + _FILL_BATCH, size.items))
        queue.enqueue_many(work_items(size, numbers))
    for place in _FILLED:
        execute(f"drop table if exists kept_{place}")
        execute(f"create unlogged table kept_{place} as table {_OWN}_{place}")


def clear() -> None:
    """Empty the queue's tables and the bare ones."""
    empty(ALIAS)
    execute(f"truncate {', '.join(f'{_BARE}_{place}' for place in _PLACES)}")


def restore(*, bare: bool = False) -> None:
    """Put the rows that `fill` kept into the queue's tables, or the bare ones, and nothing else."""
    clear()
    prefix = _BARE if bare else _OWN
    places = [place for place in _FILLED if place in _PLACES or not bare]
    for place in places:
        execute(f"insert into {prefix}_{place} select * from kept_{place}")
        execute(f"vacuum analyze {prefix}_{place}")
