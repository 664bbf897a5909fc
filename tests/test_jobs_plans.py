"""
Whatever is looked for among a million jobs, a page reads so much and no more.

600,000 have ended and are the oldest; then 300,000 are ready, 50,000 scheduled, 40,000 dead
letters, and 9,000 paused and 1,000 claimed are the youngest. A tenant has a fifth of them, a
thousand tenants the others.
"""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import pytest
from django.db import connections

from django_workqueue import WorkState
from django_workqueue.jobs import Jobs, Page, Search, finding
from django_workqueue.jobs.finding import LOOKED_AT, PROBED
from django_workqueue.testing import make_queue
from tests.test_plans import (
    POSTGRES,
    analyze,
    buffers,
    explaining,
    forget_statistics,
    know_only_the_sizes,
    stored,
)

# Not transactional: that would empty the tables after each test.
pytestmark = [pytest.mark.slow, pytest.mark.django_db(databases="__all__")]

ROWS, LIMIT = 1_000_000, 20
#: The last job of each block, by place.
ENDED, READY, SCHEDULED, DEAD, PAUSED = 600_000, 900_000, 950_000, 990_000, 999_000
#: Of the oldest, one in a hundred was cancelled; of all, one in twenty thousand is rare.
BEGAN: Final = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture(scope="module")
def connection(django_db_setup, django_db_blocker) -> Iterator[Any]:
    with django_db_blocker.unblock():
        make_queue(POSTGRES)
        connection = connections[POSTGRES]
        with connection.cursor() as cursor:
            fill(cursor)
            # As a table of that age is: what all see is marked as such.
            cursor.execute("vacuum analyze")
        yield connection
        make_queue(POSTGRES)
        connection.close()


def fill(cursor: Any) -> None:
    cursor.execute(
        """
        insert into django_workqueue_queueitem (
               id, tenant, item_id, queue, deployment_id, handler, payload, priority, dedupe_key,
               max_attempts, lease_seconds, max_lease_seconds, backoff_seconds,
               backoff_cap_seconds, retention_seconds, enqueued_at, available_at, created_at,
               id_freed, key_freed)
        select n, case when n %% 5 = 1 then 'big' else 't' || n %% 1000 end,
               case when n %% 100 = 3 then 'again' else 'i' || n end,
               'q' || n / 1000 %% 5, case when n %% 50 = 0 then 'blue' else '' end,
               case when n %% 20000 = 7 then 'rare' else 'h' || n / 7 %% 20 end,
               format('{"text": "%%s"}', repeat('x', 200))::json, n %% 3,
               case when n %% 10 = 0 then 'k' || n end, 5, 60, 3600, 1, 300, 86400,
               %s + interval '1 second' * n, now(), %s + interval '1 second' * n,
               n %% 100 = 3 and n <= %s - 1000, false
          from generate_series(1, %s) n
        """,
        [BEGAN, BEGAN, ROWS, ROWS],
    )
    for place, columns, values, first, last in (
        (
            "finished",
            "state, claimed_at, finished_at, keep_until, worker, reason",
            "case when id %% 100 = 99 then 'cancelled' else 'completed' end, created_at,"
            " created_at + interval '1 minute', created_at, 'w', ''",
            0,
            ENDED,
        ),
        ("ready", "deployment_id, rank, settled_by, enqueued_at", READY_VALUES, ENDED, READY),
        (
            "waiting",
            "deployment_id, rank, settled_by, enqueued_at, due_at, since, cause",
            f"{READY_VALUES}, created_at, created_at, 'scheduled'",
            READY,
            SCHEDULED,
        ),
        (
            "deadletter",
            "deployment_id, dead_at, settled_by, reason, error_class, fingerprint",
            "deployment_id, created_at + interval '1 minute' * (id %% 50), 'w', 'rejected', '', ''",
            SCHEDULED,
            DEAD,
        ),
        (
            "waiting",
            "deployment_id, rank, settled_by, enqueued_at, due_at, since, cause",
            f"{READY_VALUES}, null, created_at, 'paused'",
            DEAD,
            PAUSED,
        ),
        (
            "lease",
            "deployment_id, rank, enqueued_at, max_attempts, lease_seconds, worker, boot,"
            " process, claimed_at, expires_at, renewable_until, cancel_requested",
            "deployment_id, -priority, enqueued_at, 5, 60, 'w' || id %% 20, '', 0, created_at,"
            " created_at, created_at, false",
            PAUSED,
            ROWS,
        ),
    ):
        cursor.execute(
            f"insert into django_workqueue_{place}"
            f" (item, queue, tenant, fence, attempts, {columns})"
            f" select id, queue, tenant, 1, 1, {values.replace('%%', '%')}"
            f" from django_workqueue_queueitem where id > {first} and id <= {last}"
        )
    cursor.execute(
        """
        insert into django_workqueue_counter (
               queue, completed, cancelled, ready, waiting, dead_lettered, paused, claimed)
        select queue, count(*) filter (where id <= %(ended)s and id %% 100 <> 99),
               count(*) filter (where id <= %(ended)s and id %% 100 = 99),
               count(*) filter (where id > %(ended)s and id <= %(ready)s),
               count(*) filter (where id > %(ready)s and id <= %(scheduled)s),
               count(*) filter (where id > %(scheduled)s and id <= %(dead)s),
               count(*) filter (where id > %(dead)s and id <= %(paused)s),
               count(*) filter (where id > %(paused)s)
          from django_workqueue_queueitem
         group by queue
        """,
        {
            "ended": ENDED,
            "ready": READY,
            "scheduled": SCHEDULED,
            "dead": DEAD,
            "paused": PAUSED,
        },
    )


READY_VALUES: Final = "deployment_id, -priority, '', enqueued_at"

STATES: Final = [{"states": frozenset({state})} for state in WorkState]
ENDED_OR_NOT: Final = [
    {"states": frozenset({WorkState.QUEUED, WorkState.CLAIMED, WorkState.PAUSED})},
    {"states": frozenset({WorkState.COMPLETED, WorkState.CANCELLED, WorkState.DEAD_LETTERED})},
]
TIMED: Final = [
    {"states": frozenset({state}), "sort_by": "updated_at"}
    for state in WorkState
    if state is not WorkState.QUEUED
]
OTHERS: Final[dict[str, list[dict[str, Any]]]] = {
    "queue": [{"queue": "q3"}],
    "tenant": [{"tenant": "t7"}, {"tenant": "big"}, {"tenant": "nobody"}],
    "handler": [{"handler": "h3"}, {"handler": "rare"}, {"handler": "none"}],
}
ALONE: Final = [
    {},
    *STATES,
    *ENDED_OR_NOT,
    *TIMED,
    *OTHERS["queue"],
    *OTHERS["tenant"],
    *OTHERS["handler"],
    {"item_id": "i500000"},
    {"item_id": "again"},
    {"tenant": "t3", "item_id": "again"},
    {"dedupe_key": "k500000"},
    {"tenant": "t0", "dedupe_key": "k500000"},
    {"deployment_id": ""},
    {"deployment_id": "blue"},
    {"worker": "w7"},
    {"created_after": BEGAN + timedelta(seconds=500_000)},
    {"created_before": BEGAN + timedelta(seconds=500_000)},
    {
        "created_after": BEGAN + timedelta(seconds=500_000),
        "created_before": BEGAN + timedelta(seconds=500_100),
    },
]
PAIRS: Final = [state | other for others in OTHERS.values() for other in others for state in STATES]
SEARCHES: Final = [*ALONE, *PAIRS]


def name(given: dict[str, Any]) -> str:
    told = given | {"states": "+".join(sorted(given.get("states", ())))}
    return " ".join(f"{key}={value}" for key, value in told.items() if value) or "anything"


#: Where little is looked at, all that a page reads, bodies and places of its rows included.
NARROW: Final = {"LOOKED_AT": 1_000, "PROBED": 500, "READY": 1_000, "GATHERED": 100}
FEW_ROWS, FEW_BUFFERS = 10_000, 20_000
#: As it is: the end of what is looked at is found twice, then it is read, with other tables.
MOST_ROWS, MOST_BUFFERS = 3 * LOOKED_AT + 2 * PROBED, 6 * PROBED


READ: Final = ("Actual Rows", "Rows Removed by Filter", "Rows Removed by Index Recheck")


def reads_it_all(given: dict[str, Any]) -> bool:
    """True for the order of a place that has no index of it. The server's time bounds these."""
    return "sort_by" in given and WorkState.DEAD_LETTERED not in given["states"]


def pages(given: dict[str, Any], descending: bool) -> Iterator[tuple[str, Any]]:
    """The first page and one deep in, as calls."""
    search = Search(**given, descending=descending)
    jobs = Jobs(POSTGRES)
    yield "first", lambda: jobs.page(search, limit=LIMIT)
    cursor = jobs.page(search, limit=1_000, number=10).next_cursor
    if cursor is not None:
        yield "deep", lambda: jobs.after(search, cursor, limit=LIMIT)


latest_and_oldest = pytest.mark.parametrize("descending", [True, False], ids=["latest", "oldest"])


@pytest.mark.parametrize(
    ("statistics", "descending"),
    [(forget_statistics, True), (know_only_the_sizes, False), (analyze, True)],
    ids=["forgotten, latest", "only sizes, oldest", "fresh, latest"],
)
@pytest.mark.parametrize("given", [each for each in SEARCHES if not reads_it_all(each)], ids=name)
def test_a_page_reads_no_more_than_it_is_to(connection, monkeypatch, given, descending, statistics):
    for limit, number in NARROW.items():
        monkeypatch.setattr(finding, limit, number)
    with connection.cursor() as cursor:
        statistics(cursor)
    for which, read in pages(given, descending):
        with explaining(connection) as plans:
            read()
        rows, touched = cost(plans)
        print(f"{name(given)}, {which}: rows read {rows:.0f}, pages {touched}")
        assert rows <= FEW_ROWS
        assert touched <= FEW_BUFFERS


@latest_and_oldest
@pytest.mark.parametrize("given", SEARCHES, ids=name)
def test_nor_does_it_as_it_is(connection, given, descending):
    with connection.cursor() as cursor:
        analyze(cursor)
    order = "latest" if descending else "oldest"
    for which, read in pages(given, descending):
        with explaining(connection) as plans:
            page: Page = read()
        rows, touched = cost(plans)
        fastest = min(timed(read) for _ in range(3))
        told = f"{len(page.rows)}{'…' if page.next_cursor else ''} of {page.total}"
        print(
            f"| {name(given)} | {which}, {order} | {told} | {rows:.0f} | {touched}"
            f" | {fastest:.0f} ms |"
        )
        most = MOST_ROWS
        if WorkState.QUEUED in given.get("states", ()):
            most += READY - ENDED  # all that is ready, while it is no more than that
        elif reads_it_all(given):
            most += ENDED
        assert rows <= most
        assert touched <= MOST_BUFFERS


def test_more_that_is_ready_than_is_read_as_a_whole_is_looked_for_by_bodies(
    connection, monkeypatch
):
    monkeypatch.setattr(finding, "READY", READY - ENDED - 1)
    with connection.cursor() as cursor:
        analyze(cursor)
    jobs, search = Jobs(POSTGRES), Search(states=frozenset({WorkState.QUEUED}))
    with explaining(connection) as plans:
        page = jobs.page(search, limit=LIMIT)
    assert cost(plans)[0] <= MOST_ROWS
    for _ in range(ROWS // PROBED):
        if page.rows:
            break
        page = jobs.after(search, page.next_cursor, limit=LIMIT)
    assert [row.pk for row in page.rows] == [*range(SCHEDULED, SCHEDULED - LIMIT, -1)]


def cost(plans: dict[str, Any]) -> tuple[float, int]:
    """The rows and the pages that were read; the rows that were read in vain too."""
    rows = sum(
        sum(node.get(key, 0) for key in READ) * node["Actual Loops"]
        for plan in plans.values()
        for node in stored(plan, "")
    )
    return rows, sum(buffers(plan) for plan in plans.values())


def timed(read: Any) -> float:
    began = time.perf_counter()
    read()
    return 1000 * (time.perf_counter() - began)
