"""The tenants that have work, page by page."""

import pytest
from django.db import connections

from django_workqueue import QueuePolicy, WorkItem
from django_workqueue import tenants as module
from django_workqueue.models import Ready
from django_workqueue.tenants import TenantFigures, Tenants
from django_workqueue.testing import make_queue

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


@pytest.fixture(params=["sqlite", "postgresql"])
def queue(request):
    return make_queue(request.param, QueuePolicy(max_attempts=1))


def everyone(queue, limit):
    tenants, names, after, more = Tenants(queue.using), [], "", True
    while more:
        page, more = tenants.page(after=after, limit=limit)
        assert len(page) <= limit
        names += page
        after = page[-1].name if page else after
    return names


def test_each_tenant_is_told_once_with_what_it_has_in_all_queues(queue):
    for name, more in (("b", {}), ("b", {"queue": "mail"}), ("é", {"deployment_id": "v2"})):
        queue.enqueue(WorkItem(tenant=name, **more))
    queue.enqueue(WorkItem(tenant="b", queue="other", deployment_id="v1"))
    for _ in range(2):
        queue.enqueue(WorkItem(tenant="dead", queue="x"))
        item = queue.claim(worker="w", queue="x")
        queue.fail(item.id, tenant="dead", worker="w", error="no")
    queue.enqueue(WorkItem(tenant="a", queue="x"))
    queue.claim(worker="w", queue="x")
    queue.enqueue(WorkItem(tenant="done", queue="x"))
    item = queue.claim(worker="w", queue="x")
    queue.complete(item.id, tenant="done", worker="w")
    told = [
        TenantFigures(name="a", running=1),
        TenantFigures(name="b", ready=3),
        TenantFigures(name="dead", failed=2),
        TenantFigures(name="é", ready=1),
    ]
    for limit in (1, 2, 3, 4, 100):
        assert everyone(queue, limit) == told


def test_nobody_is_told_of_an_empty_queue(queue):
    assert Tenants(queue.using).page() == ([], False)


def test_what_a_tenant_has_is_counted_to_a_cap_and_said_to_be(queue, monkeypatch):
    monkeypatch.setattr(module, "COUNTED_UP_TO", 3)
    for tenant, number in (("few", 2), ("many", 5)):
        queue.enqueue_many(WorkItem(tenant=tenant) for _ in range(number))
    few, many = Tenants(queue.using).page()[0]
    assert (few.ready, few.is_capped) == (2, False)
    assert (many.ready, many.is_capped) == (3, True)


@pytest.mark.slow
def test_a_page_costs_a_step_per_tenant_and_not_per_item():
    queue = make_queue("postgresql")
    Ready.objects.using(queue.using).bulk_create(
        (
            Ready(
                queue="default",
                deployment_id="",
                tenant=f"tenant-{n % 20:02}",
                rank=0,
                item_id=n + 1,
                fence=0,
                attempts=0,
                enqueued_at=queue.moves.now(),
            )
            for n in range(200_000)
        ),
        batch_size=5_000,
    )
    with connections[queue.using].cursor() as cursor:
        cursor.execute("vacuum analyze django_workqueue_ready")
        statement = module._HOP.format(
            table="django_workqueue_ready", lane="queue = %s and deployment_id = %s and"
        )
        given = ["default", "", "", "default", "", 6, "default", "", module.COUNTED_UP_TO]
        cursor.execute(f"explain (analyze, buffers, format json) {statement}", given)
        [plan] = cursor.fetchone()[0]
    top = plan["Plan"]
    assert top["Actual Rows"] == 6
    # Of each: a hop, and at most a thousand entries of the index.
    assert top["Shared Hit Blocks"] + top["Shared Read Blocks"] < 6 * 40
    Ready.objects.using(queue.using).all().delete()
