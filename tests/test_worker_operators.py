"""What operators do while `manage.py runworkers` works: pause, cancel, hold, retention."""

import signal

import pytest

from django_workqueue import QueuePolicy, WorkItem, WorkState
from django_workqueue.models import QueueItem, Sample, WorkerProcess
from tests.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")
BOTH = pytest.mark.parametrize("backend", ["sqlite", "postgresql"])


@BOTH
def test_a_handler_that_pauses_puts_its_item_aside_until_it_is_resumed(backend, scene):
    it = scene(backend)
    first = it.enqueue("pause_once", "asks")
    it.enqueue("pause_async", "async")
    it.enqueue("pause_atomic", "atomic")
    assert it.drain() == 0
    for id in ("asks", "async", "atomic"):
        assert (it.state(id), it.item(id).attempts) == (WorkState.PAUSED, 0)
    assert it.traces("undone", "atomic") == []
    it.queue.resume("asks", tenant="t", payload={**first.payload, "answer": 42})
    assert it.drain() == 0
    assert (it.state("asks"), it.item("asks").result) == (WorkState.COMPLETED, 42)
    assert len(it.traces("ran", "asks")) == 2


@BOTH
def test_a_running_handler_hears_that_its_item_is_to_be_cancelled(backend, scene):
    it = scene(backend, QueuePolicy(lease_seconds=1.5))
    for id in ("polite", "deaf"):
        it.enqueue("wait_politely" if id == "polite" else "wait", id)
    it.enqueue("wait_async", "async")
    worker = it.start("--stop-timeout", "1")
    for id in ("polite", "deaf", "async"):
        it.started(id)
        assert it.queue.cancel(id, tenant="t").cancel_requested
    for id in ("polite", "async"):
        eventually(lambda id=id: it.state(id) is WorkState.CANCELLED)
        assert (it.item(id).attempts, it.traces("ran", id)) == (0, [])
    it.file("deaf").touch()
    it.completed("deaf")  # a completion wins
    assert len(worker.children()) == 1


@BOTH
def test_held_work_is_not_served_and_does_not_keep_a_worker_from_ending(backend, scene):
    it = scene(backend)
    for tenant in ("a", "b", "c"):
        it.queue.enqueue(WorkItem(tenant=tenant, id="x", handler="nothing"))
    it.queue.enqueue(WorkItem(tenant="b", id="later", handler="nothing", queue="other"))
    it.queue.hold(tenant="b")
    it.queue.hold(queue="other")
    assert it.drain("--queues", "default,other") == 0
    states = {tenant: it.queue.get("x", tenant=tenant).state for tenant in ("a", "b", "c")}
    assert states == {"a": "completed", "b": "queued", "c": "completed"}
    it.queue.unhold(tenant="b")
    assert it.drain("--queues", "default,other") == 0
    assert it.queue.get("x", tenant="b").state is WorkState.COMPLETED
    assert it.queue.get("later", tenant="b").state is WorkState.QUEUED


@BOTH
def test_a_worker_that_waits_begins_with_held_work_once_it_is_let_go(backend, scene):
    it = scene(backend)
    it.queue.hold(tenant="t", queue="default")
    it.enqueue("nothing", "x")
    worker = it.start()
    eventually(worker.children)
    it.queue.enqueue(WorkItem(tenant="other", id="y", handler="nothing"))
    eventually(lambda: it.queue.get("y", tenant="other").state is WorkState.COMPLETED)
    assert it.state("x") is WorkState.QUEUED
    it.queue.unhold(tenant="t", queue="default")
    it.completed("x")


@BOTH
def test_a_worker_forgets_what_was_kept_long_enough_and_takes_samples(backend, scene):
    it = scene(backend, QueuePolicy(retention_seconds=0, max_attempts=1))
    it.enqueue("nothing", "done")
    it.enqueue("reject", "dead")
    settings = {
        "WORKER": {"poll_seconds": 0.1, "reap_seconds": 0.2, "retention_sweep_seconds": 0.2}
    }
    it.start(settings=settings)
    bodies = QueueItem.objects.using(it.alias)
    eventually(lambda: [*bodies.values_list("item_id", flat=True)] == ["dead"])
    eventually(lambda: it.state("dead") is WorkState.DEAD_LETTERED)
    eventually(Sample.objects.using(it.alias).filter(queue="default").exists)


@BOTH
def test_a_worker_tells_of_others_that_go_by_other_settings(backend, scene):
    it = scene(backend)
    mine = {"QUEUES": {"default": {}, "mail": {}}}
    others = {"QUEUES": {"default": {"lease_seconds": 40}, "mail": {"max_attempts": 3}}}
    first = it.start("--name", "first", settings=mine)
    eventually(lambda: "process started" in first.log)
    second = it.start("--name", "second", settings=mine)
    eventually(lambda: "process started" in second.log)
    assert "other settings" not in second.log
    third = it.start("--name", "third", settings=others)
    eventually(lambda: "process started" in third.log)
    for name in ("first", "second"):
        assert f"worker with other settings: name={name} queues=default, mail" in third.log


def test_two_services_of_one_name_would_end_each_other_so_the_second_is_refused(scene):
    it = scene("postgresql")
    first = it.start("--name", "shop", "--queues", "mail")
    eventually(lambda: "process started" in first.log)
    second = it.start("--name", "shop", "--queues", "video")
    assert second.wait() == 1
    assert "serves other queues, mail" in second.log
    assert "would serve video" in second.log
    # Of its own later start with a queue more it is none.
    third = it.start("--name", "shop", "--queues", "mail,video")
    assert first.wait() == 0
    assert "draining: reason=a newer start has the same name" in first.log
    # And one that ends stands in nobody's way.
    it.enqueue("wait", "one", queue="mail")
    it.started("one")
    third.send(signal.SIGTERM)
    shown = WorkerProcess.objects.using(it.alias).filter(state="draining")
    eventually(shown.exists)
    fourth = it.start("--name", "shop", "--queues", "other", "--until-empty")
    assert fourth.wait() == 0
    it.file("one").touch()
