"""`workqueue doctor` finds each way in which the tables can disagree."""

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connections

from django_workqueue import QueuePolicy, WorkItem
from django_workqueue.doctor import examine
from django_workqueue.testing import make_queue

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

#: What a careless hand does to the tables, and what the doctor then says.
DAMAGE = {
    "delete from django_workqueue_lease": "is in 0 places",
    "delete from django_workqueue_finished": "is in 0 places",
    "insert into django_workqueue_deadletter (item, tenant, queue, deployment_id, fence, attempts,"
    " dead_at, reason, error_class, fingerprint) select item, tenant, queue, '', 1, 0, finished_at,"
    " 'exhausted', '', '' from django_workqueue_finished": "is in 2 places",
    "update django_workqueue_lease set tenant = 'other'": "Lease of item",
    "update django_workqueue_queueitem set priority = 7": "Ready of item",
    "update django_workqueue_queueitem set id_freed = true": "its id or key is free",
    "delete from django_workqueue_failure": "counts 1 attempts, but has 0 failures",
    "update django_workqueue_failure set fence = 99": "but a failure of fence 99",
    "delete from django_workqueue_counter": "queue 'default' counts None",
    "update django_workqueue_counter set ready = ready + 1": "queue 'default' counts",
}


@pytest.fixture(params=["sqlite", "postgresql"])
def alias(request: pytest.FixtureRequest) -> str:
    """A database with an item in every place."""
    queue = make_queue(request.param, QueuePolicy(max_attempts=1, backoff_seconds=0))
    for name in ("completed", "dead", "held", "ready"):
        queue.enqueue(WorkItem(tenant="acme", id=name))
    queue.enqueue(
        WorkItem(tenant="acme", id="waits", available_at=queue.moves.now().replace(year=9000))
    )
    for verb in ("complete", "fail"):
        item = queue.claim(worker="w")
        options = {"error": "broken"} if verb == "fail" else {}
        getattr(queue, verb)(item.id, tenant="acme", worker="w", **options)
    queue.claim(worker="w")
    return queue.using


def test_a_sound_queue_has_no_findings(alias, capsys):
    assert examine(alias) == []
    call_command("workqueue", "doctor", database=alias)
    assert "every item is in one place" in capsys.readouterr().out


@pytest.mark.parametrize("damage", DAMAGE)
def test_it_names_the_damage_and_exits_with_one(alias, damage, capsys):
    with connections[alias].cursor() as cursor:
        cursor.execute(damage)
    findings = examine(alias)
    assert any(DAMAGE[damage] in finding for finding in findings), findings
    with pytest.raises(CommandError) as failed:
        call_command("workqueue", "doctor", database=alias)
    assert failed.value.returncode == 1
    assert DAMAGE[damage] in capsys.readouterr().err
