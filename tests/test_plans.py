"""
The claim stays a walk along one index, whatever the planner believes of the tables.

With 10,000 tenants and 1,000,000 ready rows, planned with fresh statistics, with those of
empty tables, and once for all while the tables were empty.
"""

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction

from django_workqueue import sql
from django_workqueue.testing import make_queue

# Not transactional: that would empty the tables after each test.
pytestmark = [pytest.mark.slow, pytest.mark.django_db(databases="__all__")]

POSTGRES = "postgresql"
ROWS, TENANTS, LIMIT = 1_000_000, 10_000, 50
#: Pages touched per claimed item: a descent of the ready index and its row (6), the row
#: again to delete it (2), the body by its index (4), the lease and its two indexes' pages
#: (3 to 6); rounded up for pages that split and for visibility checks.
BUFFERS_PER_ITEM = 20
#: The rows that CTEs' own bounds drop ("n < limit"), a few per statement, never per row.
FILTERED_ROWS = 10

PARAMETERS = {
    "skew": timedelta(0),
    "queue": "default",
    "limit": LIMIT,
    "lease_seconds": None,
    "worker": "w",
    "boot": "",
    "process": 0,
}


def parameters(pinned: bool) -> dict[str, Any]:
    return PARAMETERS | {"deployment_id": "blue" if pinned else ""}


@pytest.fixture(scope="module")
def million(django_db_setup, django_db_blocker) -> Iterator[Any]:
    """A connection to the full tables, on which the claims were prepared when they were empty."""
    with django_db_blocker.unblock():
        make_queue(POSTGRES)
        connection = connections[POSTGRES]
        with connection.cursor() as cursor:
            cursor.execute("vacuum analyze")
            for option, value in sql.WORKER_OPTIONS.items():
                cursor.execute(f"set {option} = {value}")
            for pinned in (False, True):
                prepare(cursor, pinned)
            fill(cursor)
        yield connection
        make_queue(POSTGRES)
        connection.close()


def prepare(cursor: Any, pinned: bool) -> None:
    text, names = sql.CLAIM_MANY[pinned], list(parameters(pinned))
    for number, name in enumerate(names, 1):
        text = text.replace(f"%({name})s", f"${number}")
    types = "interval, text, int, float8, text, text, int, text"
    cursor.execute(f"prepare {named(pinned)} ({types}) as {text.replace('%%', '%')}")
    for _ in range(7):  # planned by now, once for all
        cursor.execute(f"execute {named(pinned)} ({arguments(pinned)})")


def named(pinned: bool) -> str:
    return f"claim_pinned_{pinned}".lower()


def arguments(pinned: bool) -> str:
    return f"'0', 'default', {LIMIT}, null, 'w', '', 0, '{'blue' if pinned else ''}'"


def fill(cursor: Any) -> None:
    cursor.execute(
        """
        insert into django_workqueue_queueitem (
               tenant, item_id, queue, deployment_id, handler, payload, priority, max_attempts,
               lease_seconds, max_lease_seconds, backoff_seconds, backoff_cap_seconds,
               retention_seconds, enqueued_at, available_at, created_at, id_freed, key_freed)
        select 't' || (n %% %s), 'i' || n, 'default', case when n %% 50 = 0 then 'blue' else '' end,
               '', '{}', n %% 3, 5, 60, 3600, 1, 300, 86400, now(), now(), now(), false, false
          from generate_series(1, %s) n
        """,
        [TENANTS, ROWS],
    )
    cursor.execute(
        """
        insert into django_workqueue_ready (
               queue, deployment_id, tenant, rank, item, fence, attempts, released_by)
        select queue, deployment_id, tenant, -priority, id, 0, 0, ''
          from django_workqueue_queueitem
        """
    )
    cursor.execute(
        "insert into django_workqueue_counter (queue, ready) values ('default', %s)", [ROWS]
    )


def explained(connection: Any, statement: str, given: dict[str, Any] | None) -> dict[str, Any]:
    """Run *statement* and return its plan; what it claimed is taken back."""
    with transaction.atomic(using=POSTGRES), connection.cursor() as cursor:
        cursor.execute(f"explain (analyze, buffers, format json) {statement}", given)
        [[answer]] = cursor.fetchall()
        transaction.set_rollback(True, using=POSTGRES)
    [plan] = json.loads(answer) if isinstance(answer, str) else answer
    tree: dict[str, Any] = plan["Plan"]
    return tree


def nodes(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


def check(plan: dict[str, Any]) -> None:
    assert plan["Actual Rows"] == LIMIT
    buffers = plan["Shared Hit Blocks"] + plan["Shared Read Blocks"]
    filtered = sum(
        node.get(key, 0) * node["Actual Loops"]
        for node in nodes(plan)
        for key in ("Rows Removed by Filter", "Rows Removed by Index Recheck")
    )
    print(f"buffers per item {buffers / LIMIT:.1f}, rows removed by filters {filtered:.0f}")
    assert buffers <= BUFFERS_PER_ITEM * LIMIT
    assert filtered <= FILTERED_ROWS
    scans = {node.get("Relation Name") for node in nodes(plan) if node["Node Type"] == "Seq Scan"}
    assert scans <= {None}


@pytest.mark.parametrize("pinned", [False, True])
def test_a_claim_planned_while_the_tables_were_empty_stays_cheap(million, pinned) -> None:
    check(explained(million, f"execute {named(pinned)} ({arguments(pinned)})", None))


@pytest.mark.parametrize("pinned", [False, True])
def test_a_claim_planned_with_the_statistics_of_empty_tables_stays_cheap(million, pinned) -> None:
    with million.cursor() as cursor:
        cursor.execute(
            "update pg_class set reltuples = 0, relpages = 0"
            " where relname like 'django_workqueue_%'"
        )
        cursor.execute("delete from pg_statistic where starelid::regclass::text like 'django_w%'")
    check(explained(million, sql.CLAIM_MANY[pinned], parameters(pinned)))


@pytest.mark.parametrize("pinned", [False, True])
def test_a_claim_planned_with_fresh_statistics_stays_cheap(million, pinned) -> None:
    with million.cursor() as cursor:
        cursor.execute("analyze")
    check(explained(million, sql.CLAIM_MANY[pinned], parameters(pinned)))
