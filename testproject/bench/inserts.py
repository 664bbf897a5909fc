"""Inserts into the bare table of items: what storing a row costs, and nothing that queues it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import psycopg
from django.db import connections

from bench.clients import Work
from bench.database import ALIAS, connect
from bench.outcome import bare_problems
from bench.sizes import HANDLER, QUEUE, Size
from bench.tables import clear

_COLUMNS: Final = """
insert into bench_queueitem (
       tenant, item_id, queue, handler, payload, max_attempts, lease_seconds, max_lease_seconds,
       backoff_seconds, backoff_cap_seconds, retention_seconds)
"""
_VALUES: Final = """
       %(queue)s::text, %(handler)s::text, %(payload)s::json, 5, 60, 3600, 1, 300, 86400
"""
ONE: Final = f"{_COLUMNS} values (%(tenant)s::text, %(item_id)s::text, {_VALUES})"
MANY: Final = f"""{_COLUMNS}
select tenant, item_id, {_VALUES}
  from unnest(%(tenant)s::text[], %(item_id)s::text[]) as given (tenant, item_id)
"""


@dataclass(frozen=True, slots=True)
class BareInsert:
    """Rows inserted with plain psycopg, a commit for each batch (or row, if *single*)."""

    name: str
    single: bool

    def prepare(self, size: Size) -> None:
        clear()

    @contextmanager
    def client(self, size: Size, number: int) -> Iterator[Work]:
        with connect(connections.settings[ALIAS]) as connection:
            turns = self._one_by_one if self.single else self._in_bulk
            yield Work(connection, turns(connection, size, number))

    def _one_by_one(
        self, connection: psycopg.Connection[Any], size: Size, number: int
    ) -> Iterator[int]:
        common = _common(size)
        for item in size.share(number):
            given = {"tenant": size.tenant(item), "item_id": _item_id(item)}
            yield connection.execute(ONE, common | given).rowcount

    def _in_bulk(
        self, connection: psycopg.Connection[Any], size: Size, number: int
    ) -> Iterator[int]:
        common = _common(size)
        for batch in size.batches(number):
            given = {
                "tenant": [size.tenant(item) for item in batch],
                "item_id": [_item_id(item) for item in batch],
            }
            yield connection.execute(MANY, common | given).rowcount

    def problems(self, size: Size) -> list[str]:
        return bare_problems(queueitem=size.items)


def _common(size: Size) -> dict[str, str]:
    return {"queue": QUEUE, "handler": HANDLER, "payload": json.dumps(size.payload())}


def _item_id(item: int) -> str:
    # As long as the ids that the queue makes, and growing as they do.
    return f"{item:036}"
