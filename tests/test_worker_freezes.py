"""Processes that stand still, and processes whose interpreter is held."""

import signal

import pytest

from django_workqueue import QueuePolicy, WorkState
from django_workqueue.models import Failure
from django_workqueue.policy import LEASE_LAPSED
from tests.workers import eventually, kill

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")
POSTGRESQL = pytest.mark.parametrize("backend", ["postgresql"])


@POSTGRESQL
def test_a_stopped_process_loses_its_lease_and_is_refused_when_it_goes_on(backend, scene):
    it = scene(backend, QueuePolicy(lease_seconds=1, backoff_seconds=0))
    worker = it.start("--processes", "2")
    it.enqueue("wait", "one")
    victim = it.started("one")
    kill(victim, signal.SIGSTOP)
    assert it.started("one", times=2) != victim
    it.file("one").touch()
    it.completed("one")
    fence = it.item("one").fence
    kill(victim, signal.SIGCONT)
    eventually(lambda: len(it.traces("ran", "one")) == 2)
    eventually(lambda: "claim lost" in worker.log)
    it.enqueue("leave_trace", "next")
    it.completed("next")
    assert (it.item("one").fence, it.item("one").attempts) == (fence, 1)


@POSTGRESQL
def test_a_handler_that_holds_the_interpreter_longer_than_its_lease_keeps_it(backend, scene):
    it = scene(backend, QueuePolicy(lease_seconds=1.5))
    it.enqueue("hold_interpreter", "busy", payload={"seconds": 2})
    assert it.drain("--processes", "1") == 0
    assert it.item("busy").result > 2
    assert (len(it.traces("started", "busy")), it.item("busy").attempts) == (1, 0)


@POSTGRESQL
def test_a_calculation_that_holds_the_interpreter_for_three_leases_keeps_all_of_its_process(
    backend, scene
):
    it = scene(backend, QueuePolicy(lease_seconds=1))
    worker = it.start("--processes", "1", "--concurrency", "2")
    it.start("--processes", "1", "--concurrency", "1")
    it.enqueue("wait", "beside")
    it.enqueue("raise_to_a_power", "busy", payload={"seconds": 3})
    it.started("busy")
    eventually(lambda: it.state("busy") is WorkState.COMPLETED)
    it.file("beside").touch()
    it.completed("beside")
    for id in ("busy", "beside"):
        assert (len(it.traces("started", id)), it.item(id).attempts) == (1, 0)
    assert it.item("busy").result >= 3
    assert "claim lost" not in worker.log


@POSTGRESQL
def test_a_process_that_is_deadlocked_loses_its_leases(backend, scene):
    it = scene(backend, QueuePolicy(lease_seconds=1.5, backoff_seconds=0))
    it.start("--processes", "2", "--stop-timeout", "1")
    it.enqueue("lock_up", "one")
    victim = it.started("one")
    it.completed("one")
    assert it.item("one").failures == (LEASE_LAPSED,)
    assert [trace.pid == victim for trace in it.traces("started", "one")] == [True, False]


@POSTGRESQL
def test_handlers_that_lock_each_other_out_are_no_deadlocked_process_until_their_time_limit(
    backend, scene
):
    it = scene(backend, QueuePolicy(lease_seconds=1, timeout_seconds=3, backoff_seconds=0))
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
