"""`manage.py runworkers` whose processes die: nothing is lost, and nothing starts too often."""

import re
import signal
import statistics
import time
from datetime import datetime
from itertools import pairwise

import pytest

from django_workqueue import QueuePolicy, WorkItem, WorkState
from django_workqueue.models import Failure
from django_workqueue.policy import LEASE_LAPSED, WORKER_DIED, WORKER_SHUTDOWN
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
@pytest.mark.parametrize("handler", ["die", "kill_itself", "exit_tidily"])
def test_a_handler_that_ends_its_process_is_started_exactly_max_attempts_times(
    handler, backend, scene
):
    it = scene(backend)
    it.enqueue(handler, "thrice", max_attempts=3)
    it.enqueue(handler, "once", max_attempts=1)
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


@pytest.mark.slow
@POSTGRESQL
def test_fifty_killed_processes_each_lose_their_item_for_less_than_a_second(backend, scene, record):
    it = scene(backend, QueuePolicy(max_attempts=60))
    it.start("--processes", "2", "--concurrency", "1")
    it.enqueue("wait", "one")
    took = []
    for kills in range(1, 51):
        victim = it.started("one", times=kills)
        # Its successor has started: only the other process can run this.
        it.enqueue("leave_trace", f"other-{kills}")
        it.completed(f"other-{kills}")
        began = time.monotonic()
        kill(victim)
        assert it.started("one", times=kills + 1) != victim
        took.append(time.monotonic() - began)
    it.file("one").touch()
    it.completed("one")
    assert it.item("one").failures == (WORKER_DIED,) * 50
    assert len(it.traces("started", "one")) == 51
    record(
        f"50 processes killed: redelivered after {statistics.median(took):.2f} s (median), "
        f"{max(took):.2f} s (worst)"
    )
    assert statistics.median(took) < 1


@POSTGRESQL
def test_beside_an_item_that_ends_its_process_what_began_has_died_too_and_what_did_not_is_unspent(
    backend, scene
):
    it = scene(backend)
    it.queue.enqueue_many(WorkItem(tenant="t", handler="nothing", priority=1) for _ in range(60))
    it.enqueue("wait_and_die", "culprit", max_attempts=1)
    ids = ("begun", "held-1", "held-2")
    for id in ids:
        it.enqueue("wait", id)
    it.environment["WORKQUEUE_TEST_PREFETCH_PATIENCE"] = "3600"
    worker = it.start("--processes", "1", "--concurrency", "2")
    it.started("begun")
    eventually(lambda: it.leases().count() == 4)
    it.file("culprit").touch()
    it.started("begun", times=2)  # before anything ends, after which one that is held would begin
    for id in ids:
        it.file(id).touch()
    it.completed(*ids)
    assert it.state("culprit") is WorkState.DEAD_LETTERED
    failures = {id: it.item(id).failures for id in ("culprit", *ids)}
    died = (WORKER_DIED,)
    assert failures == {"culprit": died, "begun": died, "held-1": (), "held-2": ()}
    assert len(it.traces("started", "culprit")) == 1
    worker.send(signal.SIGTERM)
    assert worker.wait() == 3


def freeze(worker, pid):
    kill(pid, signal.SIGSTOP)


def kill_process(worker, pid):
    kill(pid)


def kill_all(worker, pid):
    kill(worker.pid)
    kill(pid)


def kill_supervisor(worker, pid):
    kill(worker.pid)


@POSTGRESQL
@pytest.mark.parametrize("end", [freeze, kill_process, kill_all, kill_supervisor])
def test_what_may_run_once_never_starts_twice_whatever_ends_it(end, backend, scene):
    it = scene(backend, QueuePolicy(lease_seconds=1, max_attempts=1))
    worker = it.start("--processes", "1", "--stop-timeout", "0.3")
    ids = ("wait", "wait_async")
    for id in ids:
        it.enqueue(id, id)
    [pid] = {it.started(id) for id in ids}
    end(worker, pid)
    it.start("--processes", "1", "--stop-timeout", "0.3")
    for id in ids:
        eventually(lambda id=id: it.state(id) is WorkState.DEAD_LETTERED)
        assert len(it.item(id).failures) == 1
    # The next one is run, and the first ones were not in its way.
    it.enqueue("leave_trace", "next", priority=-100)
    it.completed("next")
    assert [len(it.traces("started", id)) for id in ids] == [1, 1]


@POSTGRESQL
def test_of_a_killed_supervisor_the_items_come_back_within_their_lease_and_a_pass_of_the_reaper(
    backend, scene, record
):
    it = scene(backend, QueuePolicy(lease_seconds=2, backoff_seconds=0))
    worker = it.start("--processes", "1")
    it.enqueue("seize_interpreter", "one")
    victim = it.started("one")
    it.start("--processes", "1", "--stop-timeout", "1")
    kill(worker.pid)
    it.file("one").touch()  # so that its process can't even see it
    began = time.monotonic()
    try:
        second = it.started("one", times=2)
        took = time.monotonic() - began
    finally:
        kill(victim)  # which is nobody's child any more
    record(f"supervisor killed, lease of 2 s, reaper every 0.2 s: redelivered after {took:.2f} s")
    assert it.item("one").failures == (LEASE_LAPSED,)
    assert second != victim
    assert took < 2 + 0.2 + 5  # five for a busy machine


@POSTGRESQL
@pytest.mark.parametrize("code", ["7", "0"])
def test_processes_that_can_not_start_are_not_started_in_a_hot_loop(code, backend, scene):
    it = scene(backend)
    it.environment["WORKQUEUE_TEST_CRASH"] = code
    worker = it.start("--processes", "1")
    eventually(lambda: worker.log.count("process ended") == 5)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 3
    told = re.findall(r"^(\S+) \d+ \w+ +process (ended|started)", worker.log, re.MULTILINE)
    times = [(datetime.strptime(f"{at}Z", "%H:%M:%S.%f%z"), what) for at, what in told]
    pauses = [
        (later - at).total_seconds()
        for (at, what), (later, _) in pairwise(times)
        if what == "ended"
    ]
    # The pause doubles, and up to half of it may be jitter. The log tells thousandths.
    for pause, least in zip(pauses[:4], (0.05, 0.1, 0.2, 0.4), strict=True):
        assert pause % 86_400 >= least - 0.002
    assert len(pauses) <= 5
