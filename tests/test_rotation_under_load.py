"""Eight claimers at once: each item exactly once, and nobody is passed over too often."""

import threading
from collections import Counter, defaultdict
from math import ceil

import pytest

from django_workqueue import QueuePolicy, WorkItem
from django_workqueue.doctor import examine
from django_workqueue.testing import DatabaseTestQueue, make_queue
from tests.elsewhere import crowd

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True, databases="__all__"),
]

POSTGRES = "postgresql"
ITEMS = 50_000
CLAIMERS = 8
Services = list[tuple[str, int]]  # tenant and job id, in the order of service


def fill(queue: DatabaseTestQueue, tenants: int) -> None:
    for start in range(0, ITEMS, 10_000):
        queue.enqueue_many(
            WorkItem(tenant=f"t{n % tenants:04}", id=str(n)) for n in range(start, start + 10_000)
        )


def drain(queue: DatabaseTestQueue, limit: int) -> tuple[Services, list[int], int]:
    """Let all claimers claim until nothing is due; the services, batch sizes, and empties."""
    together = threading.Barrier(CLAIMERS)

    def claim_all(worker: str) -> tuple[list[tuple[object, int, str, int]], list[int]]:
        served, sizes = [], []
        together.wait(30)
        while batch := queue.claim_many(worker=worker, limit=limit):
            sizes.append(len(batch))
            served += [
                (item.first_claimed_at, place, item.tenant, item.job_id)
                for place, item in enumerate(batch)
            ]
        return served, sizes

    with crowd(POSTGRES, CLAIMERS) as others:
        runs = [each.start(lambda n=n: claim_all(f"w{n}")) for n, each in enumerate(others)]
        results = [run.result(240) for run in runs]
    in_order = sorted(service for served, _ in results for service in served)
    sizes = [size for _, sizes in results for size in sizes]
    return [(tenant, job) for _, _, tenant, job in in_order], sizes, len(results)


def most_passed_over(services: Services, sample: int = 150) -> int:
    """The most services of any one tenant between two services of another."""
    places = defaultdict(list)
    for place, (tenant, _) in enumerate(services):
        places[tenant].append(place)
    most = 0
    for tenant in sorted(places)[:sample]:
        for here, there in zip([-1, *places[tenant]], places[tenant], strict=False):
            between = Counter(other for other, _ in services[here + 1 : there])
            most = max(most, *between.values(), 0)
    return most


@pytest.mark.parametrize(("tenants", "limit"), [(1, 50), (7, 10), (1000, 10), (1000, 50)])
def test_each_item_is_served_once_and_no_tenant_is_passed_over_beyond_the_bound(
    tenants: int, limit: int, record_property
) -> None:
    queue = make_queue(POSTGRES, QueuePolicy())
    fill(queue, tenants)
    services, sizes, claimers = drain(queue, limit)
    assert len(services) == ITEMS
    assert len({job for _, job in services}) == ITEMS
    # A claim came back empty only once nothing unlocked was left, and full until then.
    assert claimers == CLAIMERS
    assert sum(size < limit for size in sizes) <= CLAIMERS
    bound = 2 * CLAIMERS * ceil(limit / min(limit, tenants))
    measured = most_passed_over(services) if tenants > 1 else 0
    record_property("passed_over", f"{measured} of at most {bound}")
    print(f"{tenants} tenants, batches of {limit}: passed over {measured} of at most {bound}")
    assert measured <= bound
    assert examine(POSTGRES) == []
