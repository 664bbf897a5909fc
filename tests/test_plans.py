"""
What is asked often stays a walk along an index, whatever the planner believes.

With 10,000 tenants and 1,000,000 ready rows, a tenant with 100,000 more, and as many rows
scheduled and finished: planned with fresh statistics, with those of empty tables, and once
for all while the tables were empty.
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Final

import pytest
from django.db import connections

from django_workqueue import QueuePolicy, WorkItem
from django_workqueue.figures import EXACT_UP_TO, Figures
from django_workqueue.models import Counter, Hold, Sample
from django_workqueue.moves import PROMOTED_PER_CLAIM, PRUNE_BATCH
from django_workqueue.queues import DatabaseWorkQueue
from django_workqueue.sql import WORKER_OPTIONS, claiming, upkeep
from django_workqueue.testing import make_queue

# Not transactional: that would empty the tables after each test.
pytestmark = [pytest.mark.slow, pytest.mark.django_db(databases="__all__")]

POSTGRES = "postgresql"
ROWS, TENANTS, LIMIT = 1_000_000, 10_000, 50
#: It comes before all others in the rotation.
BIG, ROWS_OF_BIG = "big", 100_000
#: Pages touched per claimed item: a descent of the ready index and its row (6), the row
#: again to delete it (2), the body by its index (4), the lease and its two indexes' pages
#: (3 to 6); rounded up for pages that split and for visibility checks.
BUFFERS_PER_ITEM = 20
#: While there are holds, a step looks for the tenant first, in each lane, and for a hold.
BUFFERS_PER_STEP = 12
#: Per pruned item: its row and that's index entries, the body with its four, its id's older
#: acceptances, its failures with their two.
BUFFERS_PER_PRUNED = 30
#: Stored rows read in vain: a few per statement, never per row.
FILTERED_ROWS = 10
FEW_ROWS, FEW_BUFFERS = 500, 100
#: Tables that stay small, or are empty here, and may be read as a whole.
SMALL: Final = {f"django_workqueue_{name}" for name in ("hold", "turn", "counter", "deadletter")}

PARAMETERS: Final = {
    "skew": timedelta(0),
    "queue": "default",
    "limit": LIMIT,
    "lease_seconds": None,
    "worker": "w",
    "boot": "",
    "process": 0,
}
TYPES: Final = {
    "skew": "interval",
    "queue": "text",
    "limit": "int",
    "lease_seconds": "float8",
    "worker": "text",
    "boot": "text",
    "process": "int",
    "deployment_id": "text",
}
Plan = dict[str, Any]


def parameters(pinned: bool) -> dict[str, Any]:
    return PARAMETERS | {"deployment_id": "blue" if pinned else ""}


PROMOTION: Final = {"skew": timedelta(days=60), "queue": "default", "limit": PROMOTED_PER_CLAIM}
PRUNING: Final = {"skew": timedelta(days=60), "limit": PRUNE_BATCH}
#: By name, what workers and upkeep prepare while the tables may be empty.
PREPARED: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "promote": (claiming.PROMOTE, PROMOTION),
    "prune_finished": (upkeep.PRUNE["finished"], PRUNING),
    "prune_dead": (upkeep.PRUNE["dead"], PRUNING),
    **{
        f"claim_pinned_{pinned}_holds_{holds}".lower(): (statement, parameters(pinned))
        for (pinned, holds), statement in claiming.CLAIM_MANY.items()
    },
}


@pytest.fixture(scope="module")
def full(django_db_setup, django_db_blocker) -> Iterator[tuple[Any, dict[str, Plan]]]:
    """A worker's connection to the full tables, and the plans it made when they were empty."""
    with django_db_blocker.unblock():
        make_queue(POSTGRES)
        connection = connections[POSTGRES]
        with connection.cursor() as cursor:
            cursor.execute("vacuum analyze")
            set_tables(cursor, "set (autovacuum_enabled = off)")
            for option, value in WORKER_OPTIONS.items():
                cursor.execute(f"set {option} = {value}")
            for name, (text, given) in PREPARED.items():
                prepare(cursor, name, text, given)
            fill(cursor)
        # Before any test gathers statistics: then the server would plan again.
        yield connection, early_plans(connection)
        with connection.cursor() as cursor:
            set_tables(cursor, "reset (autovacuum_enabled)")
        make_queue(POSTGRES)
        connection.close()


@pytest.fixture(scope="module")
def million(full) -> Any:
    """A worker's connection to the full tables."""
    return full[0]


@pytest.fixture(scope="module")
def early(full) -> dict[str, Plan]:
    """What was planned while the tables were empty, and runs now that they are full."""
    return full[1]


@pytest.fixture
def ordinary(million) -> Iterator[Any]:
    """The same connection with the options of everybody's."""
    with million.cursor() as cursor:
        for option in WORKER_OPTIONS:
            cursor.execute(f"reset {option}")
        yield million
        for option, value in WORKER_OPTIONS.items():
            cursor.execute(f"set {option} = {value}")


def set_tables(cursor: Any, what: str) -> None:
    """Statistics come when a test asks for them, and not while it looks."""
    for model in ("queueitem", "ready", "waiting", "lease", "finished", "failure", "counter"):
        cursor.execute(f"alter table django_workqueue_{model} {what}")


def prepare(cursor: Any, name: str, text: str, given: dict[str, Any]) -> None:
    for number, parameter in enumerate(given, 1):
        text = text.replace(f"%({parameter})s", f"${number}")
    types = ", ".join(TYPES[parameter] for parameter in given)
    cursor.execute(f"prepare {name} ({types}) as {text.replace('%%', '%')}")
    for _ in range(7):  # planned by now, once for all
        cursor.execute(executed(name), given)


def early_plans(connection: Any) -> dict[str, Plan]:
    plans = {
        name: explained(connection, executed(name), given)
        for name, (_, given) in PREPARED.items()
        if not name.endswith("holds_true")
    }
    for name in ("promote", "prune_finished"):
        given = PREPARED[name][1] | {"skew": timedelta(days=-1)}
        plans[f"{name}, nothing due"] = explained(connection, executed(name), given)
    for held_name, (tenants, _) in HELD.items():
        with held(tenants):
            for pinned in (False, True):
                name = f"claim_pinned_{pinned}_holds_true".lower()
                plan = explained(connection, executed(name), parameters(pinned))
                plans[f"{name}, {held_name}"] = plan
    return plans


def executed(name: str) -> str:
    given = PREPARED[name][1]
    return f"execute {name} ({', '.join(f'%({parameter})s' for parameter in given)})"


def fill(cursor: Any) -> None:
    cursor.execute(
        """
        insert into django_workqueue_queueitem (
               tenant, item_id, queue, deployment_id, handler, payload, priority, max_attempts,
               lease_seconds, max_lease_seconds, backoff_seconds, backoff_cap_seconds,
               retention_seconds, enqueued_at, available_at, created_at, id_freed, key_freed)
        select case when n > %s then %s else 't' || (n %% %s) end, 'i' || n, 'default',
               case when n %% 50 = 0 then 'blue' else '' end, '', '{}', n %% 3,
               5, 60, 3600, 1, 300, 86400, now(), now(), now(), false, false
          from generate_series(1, %s) n
        """,
        [ROWS, BIG, TENANTS, ROWS + ROWS_OF_BIG],
    )
    cursor.execute(
        """
        insert into django_workqueue_ready (
               queue, deployment_id, tenant, rank, item, fence, attempts, settled_by, enqueued_at)
        select queue, deployment_id, tenant, -priority, id, 0, 0, '', enqueued_at
          from django_workqueue_queueitem
        """
    )
    # Of the same bodies, which no statement here minds.
    cursor.execute(
        """
        insert into django_workqueue_waiting (
               item, queue, deployment_id, tenant, rank, fence, attempts, settled_by,
               enqueued_at, due_at, since, cause)
        select id + 10000000, queue, deployment_id, tenant, -priority, 0, 0, '',
               enqueued_at, enqueued_at + interval '1 minute' * (1 + id %% 40000), now(),
               'scheduled'
          from django_workqueue_queueitem
         limit %s
        """,
        [ROWS],
    )
    cursor.execute(
        """
        insert into django_workqueue_finished (
               item, queue, tenant, state, fence, attempts, worker, claimed_at,
               finished_at, keep_until, result, reason)
        select id, queue, tenant, 'completed', 1, 1, 'w', now(), now(),
               now() + interval '1 second' * (id %% 40000), null, ''
          from django_workqueue_queueitem
         limit %s
        """,
        [ROWS],
    )
    cursor.execute(
        """
        insert into django_workqueue_failure (
               item, number, fence, kind, outcome, error_class, message, traceback,
               fingerprint, worker, claimed_at, failed_at)
        select item, 1, 1, 'error', 'queued', '', 'boom', '', '', 'w', now(), now()
          from django_workqueue_finished
         limit %s
        """,
        [ROWS // 2],
    )
    cursor.execute(
        "insert into django_workqueue_counter (queue, ready, waiting, completed)"
        " values ('default', %s, %s, %s)",
        [ROWS + ROWS_OF_BIG, ROWS, ROWS],
    )


def forget_statistics(cursor: Any) -> None:
    """As if nobody had looked at the tables since they were empty."""
    cursor.execute(
        "update pg_class set reltuples = 0, relpages = 0 where relname like 'django_workqueue_%'"
    )
    cursor.execute("delete from pg_statistic where starelid::regclass::text like 'django_w%'")


def analyze(cursor: Any) -> None:
    cursor.execute("analyze")


def know_only_the_sizes(cursor: Any) -> None:
    """As after an ANALYZE that was rolled back, or before the first after pg_upgrade."""
    analyze(cursor)
    cursor.execute("delete from pg_statistic where starelid::regclass::text like 'django_w%'")


statistics = pytest.mark.parametrize(
    "statistics", [forget_statistics, know_only_the_sizes, analyze]
)


def explained(connection: Any, statement: str, given: Any) -> Plan:
    """Run *statement* and return its plan; what it did is taken back."""
    # Not Django's cursor, around which a test may have laid `explaining`.
    raw = connection.connection
    with raw.transaction(force_rollback=True), raw.cursor() as cursor:
        cursor.execute(f"explain (analyze, buffers, format json) {statement}", given)
        [[answer]] = cursor.fetchall()
    [plan] = json.loads(answer) if isinstance(answer, str) else answer
    tree: Plan = plan["Plan"]
    return tree


@contextmanager
def explaining(connection: Any) -> Iterator[dict[str, Plan]]:
    """Collect the plan of every statement that the block sends, by its text, as it is sent."""
    plans: dict[str, Plan] = {}

    def explain(
        execute: Callable[..., Any], text: str, given: Any, many: bool, context: Any
    ) -> Any:
        if text.split()[0].lower() in ("select", "with", "insert", "update", "delete"):
            plans[text] = explained(connection, text, given)
        return execute(text, given, many, context)

    with connection.execute_wrapper(explain):
        yield plans


def nodes(plan: Plan) -> Iterator[Plan]:
    yield plan
    for child in plan.get("Plans", []):
        yield from nodes(child)


def buffers(plan: Plan) -> int:
    return int(plan["Shared Hit Blocks"] + plan["Shared Read Blocks"])


def stored(plan: Plan, table: str) -> Iterator[Plan]:
    """The scans of stored tables whose names hold *table*, and of their indexes."""
    for node in nodes(plan):
        name = node.get("Relation Name", table if "Index Name" in node else None)
        if node["Node Type"].endswith("Scan") and name is not None and table in name:
            yield node


def filtered(plan: Plan, table: str = "") -> float:
    """The stored rows that were read in vain, but for those of small tables."""
    return sum(
        node.get(key, 0) * node["Actual Loops"]
        for node in stored(plan, table)
        if node.get("Relation Name") not in SMALL
        for key in ("Rows Removed by Filter", "Rows Removed by Index Recheck")
    )


def rows_read(plan: Plan, table: str = "") -> float:
    """The stored rows and index entries that were read, those read in vain too."""
    read = sum(node["Actual Rows"] * node["Actual Loops"] for node in stored(plan, table))
    return read + filtered(plan, table)


def check(plan: Plan, *, number: int = LIMIT, each: int = BUFFERS_PER_ITEM, steps: int = 0) -> None:
    """So many rows came, for so many pages each, and nothing was read in vain."""
    print(f"pages per row {buffers(plan) / number:.1f}, rows read in vain {filtered(plan):.0f}")
    assert buffers(plan) <= each * number + BUFFERS_PER_STEP * steps
    assert filtered(plan) <= FILTERED_ROWS
    scans = {node.get("Relation Name") for node in nodes(plan) if node["Node Type"] == "Seq Scan"}
    assert scans <= {None, *SMALL}


def check_claim(plan: Plan, *, held: int = 0, lanes: int = 1) -> None:
    assert plan["Actual Rows"] == LIMIT
    check(plan, steps=lanes * (LIMIT + held) if held else 0)


@contextmanager
def held(tenants: list[str]) -> Iterator[None]:
    holds = Hold._base_manager.using(POSTGRES)
    holds.bulk_create(Hold(tenant=tenant) for tenant in tenants)
    yield
    holds.all().delete()


def held_of_the_first(number: int) -> int:
    """How many of the tenants held are passed until *number* others are served."""
    names = sorted(f"t{n}" for n in range(TENANTS))
    served = [place for place, name in enumerate(names) if not is_held(name)]
    return served[number - 1] + 1 - number


def is_held(tenant: str) -> bool:
    return int(tenant[1:]) % 2 == 0


#: Held tenants, and how many of them a claim passes.
HELD: Final[dict[str, tuple[list[str], int]]] = {
    "one with 100,000 rows": ([BIG], 1),
    "half of 10,000": (
        [name for n in range(TENANTS) if is_held(name := f"t{n}")],
        held_of_the_first(LIMIT - 1),
    ),
}
some_held = pytest.mark.parametrize("held_name", HELD)
pinned = pytest.mark.parametrize("pinned", [False, True])


class TestClaims:
    @pinned
    def test_one_planned_while_the_tables_were_empty_stays_cheap(self, early, pinned):
        check_claim(early[f"claim_pinned_{pinned}_holds_false".lower()])

    @pinned
    @statistics
    def test_one_planned_now_stays_cheap(self, million, pinned, statistics):
        with million.cursor() as cursor:
            statistics(cursor)
        statement = claiming.CLAIM_MANY[pinned, False]
        check_claim(explained(million, statement, parameters(pinned)))

    @pinned
    @pytest.mark.parametrize("statistics", [forget_statistics, analyze])
    def test_one_on_everybodys_connection_stays_cheap(self, ordinary, pinned, statistics):
        with ordinary.cursor() as cursor:
            statistics(cursor)
        statement = claiming.CLAIM_MANY[pinned, False]
        check_claim(explained(ordinary, statement, parameters(pinned)))

    def test_what_became_due_is_promoted_without_reading_the_rest(self, early):
        plan = early["promote"]
        assert rows_read(plan, "waiting") <= 2 * PROMOTED_PER_CLAIM
        check(plan, number=PROMOTED_PER_CLAIM)

    def test_nothing_due_costs_nothing(self, early):
        plan = early["promote, nothing due"]
        assert rows_read(plan, "waiting") == 0
        # Of this table: what tests held and let go lies about in the one of holds.
        assert sum(buffers(node) for node in stored(plan, "waiting")) <= FEW_BUFFERS


class TestHolds:
    @some_held
    @pinned
    def test_a_held_tenant_costs_a_step(self, early, held_name, pinned):
        name = f"claim_pinned_{pinned}_holds_true".lower()
        self.check(early[f"{name}, {held_name}"], held_name, pinned)

    @some_held
    @pinned
    @statistics
    def test_also_as_it_is_planned_now(self, ordinary, held_name, pinned, statistics):
        with held(HELD[held_name][0]):
            with ordinary.cursor() as cursor:
                statistics(cursor)
            statement = claiming.CLAIM_MANY[pinned, True]
            plan = explained(ordinary, statement, parameters(pinned))
        self.check(plan, held_name, pinned)

    def check(self, plan: Plan, held_name: str, pinned: bool) -> None:
        passed = HELD[held_name][1]
        check_claim(plan, held=passed, lanes=1 + pinned)
        # In each lane the next tenant's name and its best row; the row to delete.
        steps = LIMIT + passed
        assert rows_read(plan, "ready") <= 2 * (1 + pinned) * steps + LIMIT + FILTERED_ROWS


class TestPruning:
    @pytest.mark.parametrize("place", ["finished", "dead"])
    def test_a_batch_planned_while_the_tables_were_empty_stays_cheap(self, early, place):
        check(early[f"prune_{place}"], number=PRUNE_BATCH, each=BUFFERS_PER_PRUNED)

    @pytest.mark.parametrize("place", ["finished", "dead"])
    @statistics
    def test_a_batch_planned_again_stays_cheap(self, million, place, statistics):
        with million.cursor() as cursor:
            statistics(cursor)
        plan = explained(million, executed(f"prune_{place}"), PRUNING)
        check(plan, number=PRUNE_BATCH, each=BUFFERS_PER_PRUNED)

    @statistics
    def test_a_batch_on_everybodys_connection_stays_cheap(self, ordinary, statistics):
        with ordinary.cursor() as cursor:
            statistics(cursor)
        plan = explained(ordinary, upkeep.PRUNE["finished"], PRUNING)
        check(plan, number=PRUNE_BATCH, each=BUFFERS_PER_PRUNED)

    def test_nothing_to_prune_costs_nothing(self, early):
        assert buffers(early["prune_finished, nothing due"]) <= FEW_BUFFERS


class TestFigures:
    """On everybody's connection: nothing grows with the backlog."""

    @pytest.fixture
    def queue(self) -> DatabaseWorkQueue:
        return DatabaseWorkQueue(POSTGRES, policy=QueuePolicy(max_depth=10 * ROWS))

    @statistics
    @pytest.mark.parametrize("days", [-1, 60], ids=["none due", "all due"])
    def test_stats_without_a_sample_reads_so_many_rows_and_no_more(
        self, ordinary, queue, statistics, days
    ):
        queue._skew = timedelta(days=days)
        with ordinary.cursor() as cursor:
            statistics(cursor)
        with explaining(ordinary) as plans:
            stats = queue.stats()
        assert stats.depth == 2 * ROWS + ROWS_OF_BIG
        assert stats.due == ROWS + ROWS_OF_BIG + (EXACT_UP_TO if days == 60 else 0)
        most = max(rows_read(plan) for plan in plans.values())
        total = sum(rows_read(plan) for plan in plans.values())
        print(f"stats: {len(plans)} statements, rows read {total:.0f}, in one {most:.0f}")
        # What is ready, what waits and what is overdue: each so far and no further.
        assert most <= EXACT_UP_TO + FEW_ROWS
        assert total <= 3 * EXACT_UP_TO + FEW_ROWS

    @statistics
    def test_stats_with_a_sample_reads_a_few_rows(self, ordinary, queue, statistics):
        with ordinary.cursor() as cursor:
            statistics(cursor)
        minute = queue.moves.now().replace(second=0, microsecond=0)
        Sample.objects.using(POSTGRES).create(queue="default", at=minute, oldest_age_seconds=7)
        with explaining(ordinary) as plans:
            assert queue.stats().oldest_age_seconds == 7
        assert sum(rows_read(plan) for plan in plans.values()) <= FEW_ROWS
        assert sum(buffers(plan) for plan in plans.values()) <= FEW_BUFFERS

    @statistics
    def test_a_bounded_queue_looks_at_its_counts_alone(self, ordinary, queue, statistics):
        with ordinary.cursor() as cursor:
            statistics(cursor)
        with explaining(ordinary) as plans:
            queue.enqueue(WorkItem(tenant="t1"))
        assert len(plans) == 2  # the item is stored, and counted
        assert sum(rows_read(plan) for plan in plans.values()) <= FEW_ROWS
        assert sum(buffers(plan) for plan in plans.values()) <= FEW_BUFFERS

    @statistics
    def test_so_does_a_batch(self, ordinary, queue, statistics):
        with ordinary.cursor() as cursor:
            statistics(cursor)
        with explaining(ordinary) as plans:
            queue.enqueue_many(WorkItem(tenant="t1") for _ in range(1000))
        assert sum(rows_read(plan) for plan in plans.values()) <= FEW_ROWS
        assert sum(buffers(plan) for plan in plans.values()) <= 30 * 1000

    def test_the_depth_is_a_sum_over_the_counters(self, ordinary, queue):
        Counter.objects.using(POSTGRES).bulk_create(
            Counter(queue=f"q{n}", ready=1) for n in range(1000)
        )
        with explaining(ordinary) as plans:
            assert Figures(POSTGRES, queue.moves).depth("default") == 2 * ROWS + ROWS_OF_BIG
        [plan] = plans.values()
        assert buffers(plan) <= FEW_BUFFERS
