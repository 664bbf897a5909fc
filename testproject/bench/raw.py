"""
`raw`: claim and complete in bare SQL, without rotation and counters: what the machine can do.

The statements name only the columns that they need; the bare tables fill in the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from django.db import connections

from bench.clients import Work
from bench.database import ALIAS, connect
from bench.outcome import bare_problems
from bench.rounds import Bench, Figures, Scenario, compare
from bench.sizes import QUEUE, Size
from bench.tables import fill, restore
from django_workqueue.sql import WORKER_OPTIONS

DEFAULTS: Final = Size(items=100_000, batch=50, processes=2)
#: More than workers claim and settle in one statement.
MOST_IN_BATCH: Final = 200

CLAIM: Final = """
with gone as (
  delete from bench_ready
   where ctid = any(array(
           select ctid
             from bench_ready
            where queue = %(queue)s::text
            order by queue, deployment_id, tenant, rank, item
            limit %(limit)s::int
              for update skip locked))
  returning queue, deployment_id, tenant, rank, item, fence, attempts
), claimed as materialized (
  select gone.*, body.*, clock_timestamp() as now
    from gone
   cross join lateral (
      select item_id, handler, payload::text as payload, max_attempts, lease_seconds,
             max_lease_seconds
        from bench_queueitem
       where id = gone.item
       limit 1) body
), leased as (
  insert into bench_lease (
         item, queue, deployment_id, tenant, rank, fence, attempts, max_attempts,
         lease_seconds, worker, claimed_at, expires_at, renewable_until)
  select item, queue, deployment_id, tenant, rank, fence + 1, attempts, max_attempts,
         lease_seconds, %(worker)s::text, now, now + interval '1 second' * lease_seconds,
         now + interval '1 second' * max_lease_seconds
    from claimed
)
select item, tenant, item_id, handler, payload, fence + 1 as fence
  from claimed
"""

COMPLETE: Final = """
with gone as (
  delete from bench_lease
   where item = any(%(items)s::bigint[])
     and worker = %(worker)s::text
     and expires_at > statement_timestamp()
  returning item, queue, tenant, fence, attempts, worker, claimed_at
)
insert into bench_finished (
       item, queue, tenant, state, fence, attempts, worker, claimed_at, finished_at, keep_until)
select item, queue, tenant, 'completed', fence, attempts, worker, claimed_at,
       clock_timestamp(), clock_timestamp() + interval '1 day'
  from gone
"""


class Raw:
    """The two statements, one commit for the end of a batch and the claim of the next."""

    name = "raw"

    def prepare(self, size: Size) -> None:
        restore(bare=True)

    @contextmanager
    def client(self, size: Size, number: int) -> Iterator[Work]:
        with connect(connections.settings[ALIAS], WORKER_OPTIONS) as connection:
            connection.prepare_threshold = 0
            yield Work(connection, self._turns(connection, size.batch, f"bench-{number}"))

    def _turns(self, connection: psycopg.Connection[Any], batch: int, worker: str) -> Iterator[int]:
        held: list[int] = []
        while True:
            done = 0
            with connection.transaction():
                if held:
                    ended = connection.execute(COMPLETE, {"items": held, "worker": worker})
                    done = ended.rowcount
                rows = connection.execute(
                    CLAIM, {"queue": QUEUE, "limit": batch, "worker": worker}
                ).fetchall()
            yield done
            if not rows:
                return
            held = sorted(row[0] for row in rows)

    def problems(self, size: Size) -> list[str]:
        return bare_problems(queueitem=size.items, ready=0, lease=0, finished=size.items)


def run(bench: Bench, size: Size) -> Figures:
    """Measure it alone."""
    fill(size)
    return compare(bench, size, Raw())


SCENARIO: Final = Scenario(
    help="claim and complete in bare SQL without rotation",
    defaults=DEFAULTS,
    most_in_batch=MOST_IN_BATCH,
    run=run,
)
