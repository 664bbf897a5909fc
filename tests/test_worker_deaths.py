"""`manage.py runworkers` whose processes die: nothing is lost, and nothing starts too often."""

import signal
import time

import pytest

from django_workqueue import QueuePolicy, WorkState
from django_workqueue.models import Failure
from django_workqueue.policy import WORKER_DIED, WORKER_SHUTDOWN
from tests.workers import eventually, kill, runs

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")
BOTH = pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
POSTGRESQL = pytest.mark.parametrize("backend", ["postgresql"])


@BOTH
def test_what_a_killed_process_had_begun_runs_elsewhere_within_about_a_second(backend, scene):
    it = scene(backend)
    worker = it.start("--processes", "2")
    it.enqueue("wait", "one")
    victim = it.started("one")
    began = time.monotonic()
    kill(victim)
    successor = it.started("one", times=2)
    print(f"redelivered after {time.monotonic() - began:.3f} s")
    assert successor != victim
    assert it.item("one").failures == (WORKER_DIED,)
    assert Failure.objects.using(it.alias).get().kind == "died"
    eventually(lambda: len(worker.children()) == 2 and victim not in worker.children())
    it.file("one").touch()
    it.completed("one")
    worker.send(signal.SIGTERM)
    assert worker.wait() == 3


@BOTH
def test_what_a_killed_process_only_held_is_given_back_unspent(backend, scene):
    it = scene(backend)
    begun, held = ["begun-1", "begun-2"], ["held-1", "held-2", "held-3"]
    worker = it.prefetched(2, *begun, *held)
    kill(worker.children()[0])
    for id in begun:
        it.started(id, times=2)
    assert [it.item(id).failures for id in begun] == [(WORKER_DIED,)] * 2
    assert [it.item(id).attempts for id in held] == [0, 0, 0]
    assert not any(it.traces("started", id) for id in held)
    for id in begun + held:
        it.file(id).touch()
    it.completed(*begun, *held)
    assert [it.item(id).attempts for id in held] == [0, 0, 0]


@POSTGRESQL
def test_a_handler_that_ends_its_process_is_started_exactly_max_attempts_times(backend, scene):
    it = scene(backend)
    it.enqueue("die", "thrice", max_attempts=3)
    it.enqueue("die", "once", max_attempts=1)
    it.enqueue("leave_trace", "good", priority=-1)
    assert it.drain("--processes", "1", "--concurrency", "1") == 3
    assert len(it.traces("started", "thrice")) == 3
    assert len(it.traces("started", "once")) == 1
    assert it.item("thrice").failures == (WORKER_DIED,) * 3
    assert it.item("once").failures == (WORKER_DIED,)
    assert {it.state("thrice"), it.state("once")} == {WorkState.DEAD_LETTERED}
    assert it.state("good") is WorkState.COMPLETED


@POSTGRESQL
def test_processes_end_when_their_supervisor_is_killed(backend, scene):
    it = scene(backend)
    worker = it.start("--processes", "2")
    it.enqueue("wait", "deaf")
    it.enqueue("wait_politely", "polite")
    it.started("deaf")
    it.started("polite")
    children = worker.children()
    assert len(children) == 2
    kill(worker.pid)
    eventually(lambda: not any(map(runs, children)))
    assert {it.item(id).failures for id in ("deaf", "polite")} == {(WORKER_SHUTDOWN,)}
    it.file("deaf").touch()
    it.file("polite").touch()
    assert it.drain() == 0
    assert {it.state("deaf"), it.state("polite")} == {WorkState.COMPLETED}


@POSTGRESQL
def test_what_is_left_when_everything_is_killed_comes_back_with_its_lease(backend, scene):
    it = scene(backend, QueuePolicy(lease_seconds=1, backoff_seconds=0))
    worker = it.start("--processes", "1")
    it.enqueue("wait", "one")
    it.started("one")
    for pid in [*worker.children(), worker.pid]:
        kill(pid)
    it.file("one").touch()
    assert it.drain() == 0
    assert (it.state("one"), it.item("one").attempts) == (WorkState.COMPLETED, 1)
    assert Failure.objects.using(it.alias).get().kind == "lapsed"
