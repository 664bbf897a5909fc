"""Workers of several deployments on one queue: who may take what, in whose turn, and all of it."""

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import partial
from math import ceil
from typing import Any

import pytest

from django_workqueue import QueuePolicy, WorkItem
from django_workqueue.doctor import examine
from django_workqueue.models import QueueItem
from django_workqueue.reading import ItemReader
from django_workqueue.testing import DatabaseTestQueue, make_queue
from tests.elsewhere import Elsewhere, crowd
from tests.test_rotation_under_load import most_passed_over

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

POSTGRES = "postgresql"
#: The deployments of workers and of pins; empty: none.
FLEETS = ("", "A", "B")
Claim = tuple[Any, int, WorkItem]  # the order of service: time, place in the batch


@pytest.fixture
def queue() -> Iterator[DatabaseTestQueue]:
    queue = make_queue(POSTGRES, QueuePolicy())
    yield queue
    assert examine(POSTGRES) == []


@pytest.fixture
def other() -> Iterator[Elsewhere]:
    with Elsewhere(POSTGRES) as other:
        yield other


def put(queue: DatabaseTestQueue, *items: tuple[str, str, int]) -> None:
    """Enqueue items of (tenant, pin, priority)."""
    queue.enqueue_many(
        WorkItem(tenant=tenant, deployment_id=pin, priority=priority)
        for tenant, pin, priority in items
    )


def fill(queue: DatabaseTestQueue, number: int, tenants: int) -> None:
    """Every tenant has items of all pins, of several priorities."""
    put(
        queue,
        *((f"t{n % tenants:03}", FLEETS[n // tenants % 3], n * 7 % 5 - 2) for n in range(number)),
    )


def may_take(fleet: str, item: WorkItem) -> bool:
    return item.deployment_id in (None, fleet)


def drain(queue: DatabaseTestQueue, fleets: list[str], limits: list[int]) -> list[list[Claim]]:
    """Let a worker of each of the fleets claim until it finds nothing; what each was served."""
    together = threading.Barrier(len(fleets))

    def claim_all(number: int) -> list[Claim]:
        fleet, limit = fleets[number], limits[number % len(limits)]
        served: list[Claim] = []
        together.wait(30)
        while batch := queue.claim_many(worker=f"w{number}", limit=limit, deployment_id=fleet):
            served += [(item.first_claimed_at, place, item) for place, item in enumerate(batch)]
        return served

    with crowd(POSTGRES, len(fleets)) as workers:
        runs = [each.start(partial(claim_all, n)) for n, each in enumerate(workers)]
        return [run.result(120) for run in runs]


class TestTogether:
    MIXES = (
        ["", "", "", "A", "A", "A", "B", "B"],
        ["A"] * 4 + ["B"] * 4,
        ["", "A", "A", "A", "A", "A", "A", "A"],
    )

    @pytest.mark.parametrize("fleets", MIXES, ids=["all", "without unpinned", "one unpinned"])
    @pytest.mark.parametrize(("tenants", "limits"), [(1, [10]), (20, [1, 7, 25]), (200, [10])])
    def test_each_item_is_claimed_once_by_a_worker_that_may_and_none_is_left(
        self, queue, fleets, tenants, limits
    ):
        number = 1500
        fill(queue, number, tenants)
        runs = drain(queue, fleets, limits)
        for fleet, served in zip(fleets, runs, strict=True):
            assert all(may_take(fleet, item) for _, _, item in served)
        claims = Counter(item.job_id for served in runs for _, _, item in served)
        takers = {pin for pin in FLEETS if not pin or pin in fleets}
        expected = sum(FLEETS[n // tenants % 3] in takers for n in range(number))
        assert len(claims) == sum(claims.values())
        # Who found nothing stopped while others still held locks; afterwards nothing is left.
        left = [queue.claim_many(worker="late", limit=number, deployment_id=f) for f in {*fleets}]
        assert not any(left)
        assert len(claims) == expected

    def test_a_worker_that_finds_nothing_has_nothing(self, queue, other):
        """With locks of another fleet's open claim around."""
        put(queue, ("a", "", 0), ("a", "", 0), ("a", "A", 9), ("b", "B", 0), ("b", "A", 0))
        other.begin()
        first = other.call(partial(queue.claim_many, worker="x", limit=2, deployment_id="A"))
        assert [(item.tenant, item.deployment_id) for item in first] == [("a", "A"), ("b", "A")]
        with Elsewhere(POSTGRES) as third:
            claim = partial(queue.claim, worker="y")
            assert third.call(partial(claim, deployment_id="B")) is not None
            assert third.call(partial(claim, deployment_id="B")) is not None
            assert third.call(claim) is not None
            assert third.call(claim) is None
        other.commit()
        assert queue.claim(worker="z", deployment_id="B") is None

    @pytest.mark.parametrize("limit", [1, 5])
    def test_a_pinned_claim_locks_only_what_it_takes(self, queue, other, limit):
        put(queue, ("a", "", 5), ("a", "", -5), *[("a", "A", 9)] * limit)
        other.begin()
        taken = other.call(partial(queue.claim_many, worker="x", limit=limit, deployment_id="A"))
        assert {item.deployment_id for item in taken} == {"A"}
        with Elsewhere(POSTGRES) as third:
            best = third.call(partial(queue.claim, worker="y"))
            rest = third.call(partial(queue.claim, worker="y"))
        other.commit()
        assert (best.priority, rest.priority) == (5, -5)


class TestSerially:
    def test_the_better_row_of_the_two_lanes_comes_first(self, queue):
        fill(queue, 90, 3)
        waiting = defaultdict(list)
        for item in self.everything(queue):
            if item.deployment_id in (None, "A"):
                waiting[item.tenant].append((-item.priority, item.job_id))
        served = defaultdict(list)
        for limit in (1, 1, 4, 10, 3, 50):
            for item in queue.claim_many(worker="w", limit=limit, deployment_id="A"):
                served[item.tenant].append((-item.priority, item.job_id))
        assert served == {tenant: sorted(rows) for tenant, rows in waiting.items()}

    def everything(self, queue: DatabaseTestQueue) -> list[WorkItem]:
        keys = [*QueueItem.objects.using(POSTGRES).values_list("pk", flat=True)]
        reader = ItemReader(POSTGRES)
        return reader.shown(reader.rows(keys), queue.moves.now())

    @pytest.mark.parametrize("limit", [1, 3])
    def test_each_fleet_has_a_rotation_of_its_own(self, queue, limit):
        put(queue, *((tenant, "", 0) for tenant in "abcde" * 9))
        put(queue, *((tenant, pin, 0) for tenant in "ace" for pin in "AB" for _ in range(3)))
        rotations: dict[str, list[str]] = {fleet: [] for fleet in FLEETS}
        for fleet in ("", "A", "A", "B", "", "A", "B", "B", ""):
            for item in queue.claim_many(worker="w", limit=limit, deployment_id=fleet):
                rotations[fleet].append(item.tenant)
        for served in rotations.values():
            assert "".join(served) == ("abcde" * 3)[: 3 * limit]

    def test_a_tenant_with_work_for_one_fleet_alone_is_in_its_rotation_alone(self, queue):
        put(queue, *[("a", "A", 0), ("b", "B", 0), ("c", "", 0)] * 3)
        for fleet, tenants in (("A", "acac"), ("B", "bcb"), ("", ""), ("A", "a"), ("B", "b")):
            served = [
                item.tenant
                for _ in tenants
                for item in queue.claim_many(worker="w", limit=1, deployment_id=fleet)
            ]
            assert "".join(served) == tenants
        assert queue.stats().depth == 0

    def test_memory_serves_mixed_fleets_alike(self, queue):
        twin = make_queue("memory")
        for n in range(240):
            item = WorkItem(
                tenant=f"t{n * 5 % 7}",
                id=str(n),
                deployment_id=FLEETS[n % 3],
                priority=n * 11 % 5 - 2,
            )
            twin.enqueue(item)
            queue.enqueue(item)
        for n in range(80):
            options = {"limit": (1, 2, 9)[n % 3], "deployment_id": FLEETS[n // 2 % 3]}
            expected, taken = (
                [item.id for item in each.claim_many(worker="w", **options)]
                for each in (twin, queue)
            )
            assert taken == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "tenants", "limit"), [(6000, 7, 10), (1500, 50, 1), (6000, 100, 10)]
)
def test_no_tenant_is_passed_over_beyond_the_bound_in_its_fleet(
    queue, number: int, tenants: int, limit: int, record_property
) -> None:
    """
    Each fleet has its rotation; its bound is the one of its own claimers. Judged while the
    fleet's tenants all have work: pins of its own last as long as its claims do.
    """
    put(
        queue,
        *((f"t{n % tenants:03}", ("A", "B")[n // tenants % 2], 0) for n in range(number)),
        *((f"t{n % tenants:03}", "", 0) for n in range(number // 2)),
    )
    fleets = ["A"] * 4 + ["B"] * 4
    runs = drain(queue, fleets, [limit])
    for fleet in ("A", "B"):
        claims = [run for run, of in zip(runs, fleets, strict=True) if of == fleet]
        in_order = sorted(
            (at, place, item.job_id, item.tenant) for run in claims for at, place, item in run
        )
        services = [(tenant, job) for _, _, job, tenant in in_order]
        measured = most_passed_over(services)
        bound = 2 * len(claims) * ceil(limit / min(limit, tenants))
        record_property(f"passed_over_{fleet}", f"{measured} of at most {bound}")
        print(f"{fleet}, {tenants} tenants, {limit}: passed over {measured} of at most {bound}")
        assert measured <= bound
    assert sum(len(run) for run in runs) == number + number // 2
