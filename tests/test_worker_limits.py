"""Attempts with a time limit, and attempts that are told to stop."""

import signal

import pytest

from django_workqueue import QueuePolicy, WorkItem, WorkState
from django_workqueue.models import Failure
from django_workqueue.policy import LEASE_LAPSED, WORKER_DIED
from django_workqueue.worker.children import STOP_GRACE
from django_workqueue.worker.options import CANCEL_GRACE
from tests.workerapp.models import Trace
from tests.workers import eventually, kill

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")
POSTGRESQL = pytest.mark.parametrize("backend", ["postgresql"])
#: Seconds by which a busy machine may be late.
TOLERANCE = 8.0


def failures(it, id):
    rows = Failure.objects.using(it.alias).filter(item_id=it.item(id).job_id)
    return list(rows.order_by("number"))


def lasted(failure, seconds):
    """Check that an attempt failed so many seconds after its claim."""
    took = (failure.failed_at - failure.claimed_at).total_seconds()
    assert seconds <= took < seconds + TOLERANCE
    return True


def fill(it, *ids):
    """Have items run at once, and then end; return their processes."""
    for id in ids:
        it.enqueue("wait", id)
    pids = [it.started(id) for id in ids]
    for id in ids:
        it.file(id).touch()
    it.completed(*ids)
    return pids


@POSTGRESQL
def test_an_attempt_ends_at_its_time_limit_and_is_retried_while_attempts_are_left(backend, scene):
    it = scene(backend, QueuePolicy(max_attempts=2, timeout_seconds=1.0, backoff_seconds=0))
    # Two of them swallow the word to stop, and return as if nothing had been.
    handlers = ("wait_politely", "wait_async", "deaf_async", "polite_at_first")
    for handler in handlers:
        it.enqueue(handler, handler)
    assert it.drain("--processes", "1") == 0
    for handler in handlers[:3]:
        assert it.item(handler).failures == ("exceeded its time limit of 1 s",) * 2
        assert (it.state(handler), len(it.traces("started", handler))) == ("dead_lettered", 2)
        assert not it.traces("ran", handler)
    assert it.state("polite_at_first") is WorkState.COMPLETED
    assert it.item("polite_at_first").failures == ("exceeded its time limit of 1 s",)
    ended = [failure for handler in handlers for failure in failures(it, handler)]
    assert all(failure.kind == "timeout" and lasted(failure, 1) for failure in ended)


@POSTGRESQL
def test_a_handler_that_ignores_its_time_limit_costs_its_process(backend, scene):
    # Without a renewal throughout the grace, the leases would lapse.
    policy = QueuePolicy(lease_seconds=2, max_attempts=1, timeout_seconds=1.0, backoff_seconds=0)
    it = scene(backend, policy)
    it.queue.enqueue_many(WorkItem(tenant="t", handler="nothing", priority=1) for _ in range(60))
    deaf = {"sync": "wait", "async": "deaf_async_for_ever", "again": "deaf_at_first"}
    for id, handler in deaf.items():
        it.enqueue(handler, id, max_attempts=2 if id == "again" else 1)
    held = ("held-1", "held-2")
    for id in held:
        it.enqueue("leave_trace", id, priority=-1)
    it.environment["WORKQUEUE_TEST_PREFETCH_PATIENCE"] = "3600"
    worker = it.start("--processes", "1", "--concurrency", "3", "--stop-timeout", "0.5")
    victim = it.started("sync")
    eventually(lambda: it.leases().count() == 5)
    it.completed("again", *held)
    for id in deaf:
        assert it.item(id).failures == ("exceeded its time limit of 1 s",)
        assert failures(it, id)[0].kind == "timeout"
        assert lasted(failures(it, id)[0], 1 + STOP_GRACE)
        assert not [trace for trace in it.traces("ran", id) if trace.pid == victim]
    assert {it.state(id) for id in ("sync", "async")} == {WorkState.DEAD_LETTERED}
    # Not charged for what ran before them in their process.
    for id in held:
        assert (it.item(id).fence, it.item(id).attempts) == (2, 0)
        assert it.traces("ran", id)[0].pid != victim
    # Others in the process would have had their time, and no more than that.
    failed, retried = failures(it, "again")[0].failed_at, it.traces("started", "again")[1]
    least = 0.5 + CANCEL_GRACE
    assert least < (retried.at - failed).total_seconds() < least + 2 * TOLERANCE
    assert worker.children() == [retried.pid]
    assert victim != retried.pid
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0


@POSTGRESQL
def test_what_runs_beside_a_handler_that_ignores_its_time_limit_may_end_and_else_has_died(
    backend, scene
):
    it = scene(backend, QueuePolicy(backoff_seconds=0))
    cut = {"sync": "wait", "polite": "wait_politely", "async": "wait_async"}
    for id, handler in cut.items():
        it.enqueue(handler, id)
    it.enqueue("wait", "ends")
    it.enqueue("wait", "late", timeout_seconds=1.0)
    worker = it.start("--processes", "1", "--stop-timeout", "2")
    victim = it.started("late")
    eventually(lambda: failures(it, "late"))
    it.enqueue("leave_trace", "next")  # not for this process any more
    it.file("ends").touch()
    it.file("late").touch()  # a success too late
    it.completed("ends")
    assert (it.item("ends").attempts, it.started("ends")) == (0, victim)
    for id in cut:
        assert it.started(id, times=2) != victim
        [died] = failures(it, id)
        assert (died.kind, died.message) == ("died", WORKER_DIED)
        # After the stop timeout of two seconds, which began with that failure.
        late = (died.failed_at - failures(it, "late")[0].failed_at).total_seconds()
        assert 1.5 < late < 2 + CANCEL_GRACE + TOLERANCE
        it.file(id).touch()
    it.completed(*cut, "late", "next")
    assert (it.item("late").fence, it.item("late").attempts) == (2, 1)
    assert [trace.pid == victim for trace in it.traces("ran", "late")] == [True, False]
    assert it.traces("ran", "next")[0].pid != victim
    assert victim not in worker.children()


@POSTGRESQL
def test_a_handler_that_ignores_its_cap_is_overtaken_and_costs_its_process(backend, scene):
    without_cap = scene(backend)
    it = scene(backend, QueuePolicy(lease_seconds=1.5, max_lease_seconds=2, backoff_seconds=0))
    handlers = {
        "deaf": "deaf_at_first",
        "late": "deaf_at_first",
        "polite": "wait_politely",
        "async": "wait_async",
    }
    # Each in a process of its own, which can't take its item back while the handler runs.
    options = ("--processes", "4", "--concurrency", "1", "--stop-timeout", "0.5")
    worker = it.start(*options)
    assert len({*fill(without_cap, "1", "2", "3", "4")}) == 4
    for id, handler in handlers.items():
        it.enqueue(handler, id)
        it.started(id)
    first = {id: it.traces("started", id)[0].pid for id in handlers}
    assert {*first.values()} == {*worker.children()}
    # Reaped, and run again elsewhere.
    it.completed("deaf", "late")
    for id in ("polite", "async"):
        it.started(id, times=2)
        it.file(id).touch()
    it.completed("polite", "async")
    for id in ("deaf", "late"):
        assert it.started(id, times=2) not in (first["deaf"], first["late"])
    # A success too late.
    it.file("late").touch()
    eventually(lambda: len(it.traces("ran", "late")) == 2)
    eventually(lambda: worker.log.count("fence=1 reason=capped") == 3)
    for id in handlers:
        assert (it.item(id).fence, it.item(id).failures) == (2, (LEASE_LAPSED,))
        assert failures(it, id)[0].kind == "lapsed"
        assert lasted(failures(it, id)[0], 2)
    for id in ("polite", "async"):
        assert len(it.traces("ran", id)) == 1
    # The process of the one that goes on is replaced, and no other.
    eventually(lambda: first["deaf"] not in worker.children() and len(worker.children()) == 4)
    pids = fill(without_cap, "5", "6", "7", "8")
    [successor] = {*pids} - {*first.values()}
    began = it.traces("started", "deaf")[0].at
    replaced = Trace.objects.using(it.alias).filter(pid=successor).earliest("pk").at
    least = 2 + STOP_GRACE + 0.5 + CANCEL_GRACE
    assert least - 0.5 < (replaced - began).total_seconds() < least + 2 * TOLERANCE
    assert worker.log.count("handler does not stop: replacing process") == 1
    assert [trace.fence for trace in it.traces("ran", "deaf")] == [2]


@POSTGRESQL
def test_a_handler_hears_that_its_item_is_to_be_cancelled(backend, scene):
    it = scene(backend, QueuePolicy(lease_seconds=1))
    it.start("--processes", "1")
    for handler in ("wait_politely", "wait_async"):
        it.enqueue(handler, handler)
        it.started(handler)
    it.leases().update(cancel_requested=True)
    for handler in ("wait_politely", "wait_async"):
        eventually(lambda handler=handler: it.state(handler) is WorkState.CANCELLED)
        assert it.item(handler).attempts == 0


@pytest.mark.parametrize("handler", ["deaf_at_first", "deaf_async_at_first"])
def test_an_item_is_not_run_again_in_the_process_in_which_its_handler_goes_on(handler, scene):
    policy = QueuePolicy(lease_seconds=1.5, max_lease_seconds=2, backoff_seconds=0, max_attempts=3)
    it = scene("postgresql", policy)
    it.enqueue(handler, "one")
    worker = it.start("--processes", "1", "--stop-timeout", "0.5")
    first = it.started("one")
    it.completed("one")
    assert it.started("one", times=2) != first
    assert it.item("one").failures == (LEASE_LAPSED,)
    eventually(lambda: first not in worker.children())
    assert len(it.traces("started", "one")) == 2


def test_a_process_that_was_told_to_end_is_ended_although_its_interpreter_is_held(scene):
    it = scene("postgresql", QueuePolicy(timeout_seconds=1))
    it.enqueue("seize_interpreter", "one")
    worker = it.start("--processes", "1", "--stop-timeout", "0.5")
    first = it.started("one")
    kill(first, signal.SIGTERM)
    it.file("one").touch()
    eventually(lambda: first not in worker.children())
