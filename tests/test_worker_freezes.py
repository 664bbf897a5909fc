"""Processes that stand still, and processes whose interpreter is held."""

import signal

import pytest

from django_workqueue import QueuePolicy, WorkState
from django_workqueue.models import Failure
from django_workqueue.policy import LEASE_LAPSED
from django_workqueue.worker.options import SILENCE
from tests.workers import eventually, kill

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")
POSTGRESQL = pytest.mark.parametrize("backend", ["postgresql"])


@POSTGRESQL
def test_a_stopped_process_loses_its_leases_and_is_refused_whatever_it_writes(backend, scene):
    it = scene(backend, QueuePolicy(lease_seconds=1, backoff_seconds=0))
    ends = ("complete", "fail", "reject", "retry", "pause")
    for end in ends:
        it.enqueue("end_late", end, payload={"how": end})
    it.enqueue("end_late_atomic", "atomic", payload={"how": "complete"})
    ids = (*ends, "atomic")
    # Of one worker, so that nothing but the fence tells its processes apart.
    worker = it.start("--processes", "2", "--concurrency", "8")
    for id in ids:
        eventually(lambda id=id: it.file(f"{id}.1").exists())
    [victim] = {int(it.file(f"{id}.1").read_text()) for id in ids}
    kill(victim, signal.SIGSTOP)
    for id in ids:
        eventually(lambda id=id: it.file(f"{id}.2").exists())
        it.file(id).touch()
    kill(victim, signal.SIGCONT)
    eventually(lambda: worker.log.count("claim lost") == len(ids))
    for id in ids:
        assert (it.state(id), it.item(id).fence) == (WorkState.CLAIMED, 2)
        # Each was ended, and of an atomic one nothing is left.
        assert len(it.traces("ran", id)) == (id != "atomic")
        it.file(f"{id}.again").touch()
    it.completed(*ids)
    for id in ids:
        assert (it.item(id).fence, it.item(id).failures) == (2, (LEASE_LAPSED,))


@POSTGRESQL
def test_a_stopped_process_begins_nothing_that_it_only_held_and_works_on(backend, scene):
    it = scene(backend, QueuePolicy(lease_seconds=1, backoff_seconds=0))
    ids = ("begun", "held-1", "held-2")
    worker = it.prefetched(1, *ids)
    [victim] = worker.children()
    kill(victim, signal.SIGSTOP)
    for id in ids:
        it.file(id).touch()
    other = it.start("--processes", "1")
    it.completed(*ids)
    other.send(signal.SIGTERM)
    assert other.wait() == 0
    kill(victim, signal.SIGCONT)
    it.enqueue("leave_trace", "next")
    it.completed("next")
    assert [trace.pid for trace in it.traces("ran", "next")] == [victim]
    for id in ids[1:]:
        assert victim not in [trace.pid for trace in it.traces("started", id)]


@POSTGRESQL
@pytest.mark.parametrize("handler", ["hold_interpreter", "raise_to_a_power"])
def test_a_calculation_that_holds_the_interpreter_for_some_leases_costs_its_process_none(
    handler, backend, scene
):
    it = scene(backend, QueuePolicy(lease_seconds=1))
    worker = it.start("--processes", "1", "--concurrency", "2")
    it.enqueue("wait", "beside")
    it.started("beside")
    it.start("--processes", "1", "--concurrency", "1")  # would take what lapses
    # Longer than the lease and the silence together: only the processor's time speaks for it.
    seconds = SILENCE + 1.5
    it.enqueue(handler, "busy", payload={"seconds": seconds})
    it.completed("busy")
    it.file("beside").touch()
    it.completed("beside")
    assert it.item("busy").result >= seconds
    for id in ("busy", "beside"):
        assert (len(it.traces("started", id)), it.item(id).fence) == (1, 1)
    assert "claim lost" not in worker.log


@POSTGRESQL
@pytest.mark.parametrize("beside", [0, 20])
def test_a_process_that_is_deadlocked_loses_its_leases(beside, backend, scene, record):
    it = scene(backend, QueuePolicy(lease_seconds=1, backoff_seconds=0))
    it.start("--processes", "1", "--concurrency", "24", "--stop-timeout", "1")
    # Threads that wait for the interpreter cost the processor a little.
    ids = [f"beside-{n}" for n in range(beside)]
    for id in ids:
        it.enqueue("wait", id)
    for id in ids:
        it.started(id)
    it.enqueue("lock_up", "one")
    victim = it.started("one")
    it.start("--processes", "1", "--concurrency", "24", "--stop-timeout", "1")
    eventually(lambda: it.state("one") is WorkState.COMPLETED, timeout=15)
    for id in ids:
        it.started(id, times=2)
        it.file(id).touch()
    it.completed(*ids)
    for id in (*ids, "one"):
        assert it.item(id).failures == (LEASE_LAPSED,)
        assert [trace.pid == victim for trace in it.traces("started", id)] == [True, False]
    first, again = (trace.at for trace in it.traces("started", "one"))
    took = (again - first).total_seconds()
    record(f"deadlocked with {beside} others, lease of 1 s: redelivered after {took:.2f} s")


@POSTGRESQL
def test_handlers_that_lock_each_other_out_are_no_deadlocked_process_until_their_time_limit(
    backend, scene
):
    it = scene(backend, QueuePolicy(lease_seconds=1, timeout_seconds=1, backoff_seconds=0))
    worker = it.start("--processes", "1", "--concurrency", "3", "--stop-timeout", "0.5")
    for id in ("a", "b"):
        it.enqueue("lock_each_other_out", id)
    victims = {it.started(id) for id in ("a", "b")}
    it.enqueue("leave_trace", "beside")
    it.completed("beside")
    it.completed("a", "b")
    kinds = Failure.objects.using(it.alias).values_list("kind", flat=True)
    # Whichever is overdue first costs the process, and so the other its attempt.
    assert "timeout" in kinds
    assert {*kinds} <= {"timeout", "died"}
    assert not victims & {*worker.children()}


@POSTGRESQL
def test_a_supervisor_that_stands_still_renews_nothing_and_goes_on_afterwards(backend, scene):
    it = scene(backend, QueuePolicy(lease_seconds=1, backoff_seconds=0))
    worker = it.start("--processes", "1")
    it.enqueue("wait", "one")
    first = it.started("one")
    other = it.start("--processes", "1")
    kill(worker.pid, signal.SIGSTOP)
    assert it.started("one", times=2) != first
    it.file("one").touch()
    it.completed("one")
    assert it.item("one").failures == (LEASE_LAPSED,)
    other.send(signal.SIGTERM)
    assert other.wait() == 0
    kill(worker.pid, signal.SIGCONT)
    eventually(lambda: "claim lost" in worker.log)
    it.enqueue("leave_trace", "next")
    it.completed("next")
    assert [trace.pid for trace in it.traces("ran", "next")] == [first]


@POSTGRESQL
def test_a_worker_that_stood_still_as_a_whole_is_refused_and_goes_on(backend, scene):
    it = scene(backend, QueuePolicy(lease_seconds=1, backoff_seconds=0))
    worker = it.start("--processes", "1")
    for id in ("sync", "async"):
        it.enqueue("wait_async" if id == "async" else "wait", id)
    pid = {it.started(id) for id in ("sync", "async")}.pop()
    for each in (pid, worker.pid):
        kill(each, signal.SIGSTOP)
    other = it.start("--processes", "1")
    for id in ("sync", "async"):
        assert it.started(id, times=2) != pid
        it.file(id).touch()
    it.completed("sync", "async")
    other.send(signal.SIGTERM)
    assert other.wait() == 0
    for each in (pid, worker.pid):
        kill(each, signal.SIGCONT)
    eventually(lambda: worker.log.count("claim lost") == 2)
    it.enqueue("leave_trace", "next")
    it.completed("next")
    assert [trace.pid for trace in it.traces("ran", "next")] == [pid]
    for id in ("sync", "async"):
        assert (it.item(id).fence, it.item(id).failures) == (2, (LEASE_LAPSED,))
