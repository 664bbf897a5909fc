"""
A page of dead letters is a walk along an index, however many there are, whatever the planner
believes. A tenant has 100,000, and as many others have 100,000 more.
"""

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connections

from django_workqueue.queues import DatabaseWorkQueue
from django_workqueue.testing import make_queue
from tests.test_plans import POSTGRES, buffers, explaining, rows_read, statistics

# Not transactional: that would empty the tables after each test.
pytestmark = [pytest.mark.slow, pytest.mark.django_db(databases="__all__")]

LETTERS, LIMIT = 100_000, 50
#: So many are buried at the same moment, as by the reaper.
TOGETHER = 200
#: Of a page's letter: its row, its body, a look for it in the other places, its failure.
ROWS_PER_LETTER, BUFFERS_PER_LETTER = 4, 40


@pytest.fixture(scope="module")
def connection(django_db_setup, django_db_blocker) -> Iterator[Any]:
    with django_db_blocker.unblock():
        make_queue(POSTGRES)
        connection = connections[POSTGRES]
        with connection.cursor() as cursor:
            cursor.execute("vacuum analyze")
            fill(cursor)
        yield connection
        make_queue(POSTGRES)
        connection.close()


def fill(cursor: Any) -> None:
    cursor.execute(
        """
        insert into django_workqueue_queueitem (
               tenant, item_id, queue, deployment_id, handler, payload, priority, max_attempts,
               lease_seconds, max_lease_seconds, backoff_seconds, backoff_cap_seconds,
               retention_seconds, enqueued_at, available_at, created_at, id_freed, key_freed)
        select case when n %% 2 = 0 then 'big' else 't' || n end, 'i' || n, 'default',
               '', '', '{}', 0, 5, 60, 3600, 1, 300, 86400, now(), now(), now(), false, false
          from generate_series(1, %s) n
        """,
        [2 * LETTERS],
    )
    cursor.execute(
        """
        insert into django_workqueue_deadletter (
               item, tenant, queue, deployment_id, fence, attempts, dead_at, settled_by,
               reason, error_class, fingerprint)
        select id, tenant, queue, '', 1, 1, now() - interval '1 minute' * (id / %s), 'w',
               'rejected', '', ''
          from django_workqueue_queueitem
        """,
        [2 * TOGETHER],
    )
    cursor.execute(
        """
        insert into django_workqueue_failure (
               item, number, fence, kind, outcome, error_class, message, traceback,
               fingerprint, worker, claimed_at, failed_at)
        select item, 1, 1, 'error', 'dead_lettered', '', 'boom', '', '', 'w', now(), dead_at
          from django_workqueue_deadletter
        """
    )


@statistics
@pytest.mark.parametrize("page", ["first", "middle", "last"])
def test_a_page_of_dead_letters_reads_little_more_than_it_shows(connection, statistics, page):
    queue = DatabaseWorkQueue(POSTGRES)
    with connection.cursor() as cursor:
        statistics(cursor)
        cursor.execute(
            "select item from django_workqueue_deadletter where tenant = 'big'"
            " order by dead_at, item offset %s limit 1",
            [{"first": 0, "middle": LETTERS // 2, "last": LETTERS - LIMIT - 1}[page]],
        )
        [after] = cursor.fetchone()
    with explaining(connection) as plans:
        letters = queue.dead_letters(
            tenant="big", limit=LIMIT, after=None if page == "first" else after
        )
    assert len(letters) == LIMIT
    read = sum(rows_read(plan) for plan in plans.values())
    pages = sum(buffers(plan) for plan in plans.values())
    print(f"{len(plans)} statements, rows read {read:.0f}, pages {pages}")
    # Those that were buried at the same moment are sorted.
    assert read <= ROWS_PER_LETTER * (LIMIT + 2 * TOGETHER)
    assert pages <= BUFFERS_PER_LETTER * (LIMIT + 2 * TOGETHER)
