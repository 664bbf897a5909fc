"""The end of a worker that was told to end."""

import signal
import time
from datetime import timedelta

import pytest
from django.db import connections

from django_workqueue import QueuePolicy, WorkState
from django_workqueue.models import Failure, WorkerProcess
from django_workqueue.policy import WORKER_DIED, WORKER_SHUTDOWN
from django_workqueue.worker.options import CANCEL_GRACE, SETTLE_GRACE
from tests.proxy import Proxy, redirect
from tests.workers import eventually, kill

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")
POSTGRESQL = pytest.mark.parametrize("backend", ["postgresql"])
#: Seconds that a drain may take beyond its stop timeout: what the processes get, and what
#: the supervisor takes for its last duties without a database; and a busy machine.
GRACE = CANCEL_GRACE + SETTLE_GRACE + 2 * 5.0 + 5.0


def nothing_is_left(it):
    """Check that a worker that has ended left nothing behind."""
    assert not it.leases().exists()
    assert not WorkerProcess.objects.using(it.alias).exists()
    return True


@pytest.mark.parametrize(
    ("backend", "number"),
    [
        ("sqlite", signal.SIGINT),
        ("postgresql", signal.SIGTERM),
    ],
)
def test_a_drain_finishes_what_it_can_gives_back_the_rest_and_exits_0(backend, number, scene):
    it = scene(backend)
    ids = ["ends", "deaf", "held-1", "held-2"]
    worker = it.prefetched(2, *ids, stop_timeout=1.5)
    worker.send(number)
    eventually(lambda: it.leases().count() == 2)
    it.file("ends").touch()
    assert worker.wait() == 0
    assert it.state("ends") is WorkState.COMPLETED
    assert (it.state("deaf"), it.item("deaf").failures) == (WorkState.QUEUED, (WORKER_SHUTDOWN,))
    for id in ("held-1", "held-2"):
        assert (it.state(id), it.item(id).attempts) == (WorkState.QUEUED, 0)
        assert not it.traces("started", id)
    assert nothing_is_left(it)
    assert f"draining: reason={number.name}" in worker.log
    assert "code=0" in worker.log.splitlines()[-1]


@POSTGRESQL
def test_a_drain_ends_stragglers_whatever_they_do(backend, scene):
    it = scene(backend, QueuePolicy(max_attempts=1))
    for handler in ("wait", "wait_politely", "wait_async", "deaf_async"):
        it.enqueue(handler, handler)
    worker = it.start("--processes", "1", "--stop-timeout", "0.3")
    for handler in ("wait", "wait_politely", "wait_async", "deaf_async"):
        it.started(handler)
    worker.send(signal.SIGINT)
    assert worker.wait() == 0
    for handler in ("wait", "wait_politely", "wait_async"):
        assert it.item(handler).failures == (WORKER_SHUTDOWN,)
        assert it.state(handler) is WorkState.DEAD_LETTERED
    # It swallowed the cancellation and returned: a completion wins.
    assert it.state("deaf_async") is WorkState.COMPLETED


@POSTGRESQL
def test_leases_are_renewed_throughout_a_drain(backend, scene):
    it = scene(backend, QueuePolicy(lease_seconds=1))
    it.enqueue("wait", "long")
    worker = it.start("--processes", "1")
    it.started("long")
    worker.send(signal.SIGTERM)
    lapse = it.leases().get().claimed_at + timedelta(seconds=2)
    eventually(lambda: it.leases().get().expires_at > lapse)
    it.file("long").touch()
    assert worker.wait() == 0
    assert (it.state("long"), it.item("long").attempts) == (WorkState.COMPLETED, 0)


@POSTGRESQL
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_the_worker_at_once(number, backend, scene):
    it = scene(backend)
    ids = ["begun", "held-1", "held-2"]
    worker = it.prefetched(1, *ids, stop_timeout=30)
    worker.send(signal.SIGTERM)
    eventually(lambda: "draining" in worker.log)
    began = time.monotonic()
    worker.send(number)
    assert worker.wait() == 128 + number
    assert time.monotonic() - began < 15
    assert it.item("begun").failures == (WORKER_SHUTDOWN,)
    assert [it.item(id).attempts for id in ids] == [1, 0, 0]
    assert {it.state(id) for id in ids} == {WorkState.QUEUED}
    assert nothing_is_left(it)
    assert f"reason=second signal, {number.name}" in worker.log


@POSTGRESQL
def test_a_signal_during_the_start_is_not_lost(backend, scene):
    it = scene(backend)
    worker = it.start("--processes", "2")
    eventually(lambda: worker.log.count("process started") == 2)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert "killing" not in worker.log


@POSTGRESQL
def test_a_process_that_is_told_to_end_drains_and_is_replaced(backend, scene):
    it = scene(backend)
    it.enqueue("wait", "one")
    worker = it.start("--processes", "1")
    first = it.started("one")
    kill(first, signal.SIGTERM)
    it.file("one").touch()
    it.completed("one")
    eventually(lambda: worker.children() and first not in worker.children())
    it.enqueue("leave_trace", "two")
    it.completed("two")
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert it.item("one").attempts == 0


@POSTGRESQL
def test_an_idle_worker_ends_at_once(backend, scene):
    it = scene(backend)
    worker = it.start("--processes", "2", "--stop-timeout", "30")
    # It was given nothing to do, and waits for it.
    it.enqueue("leave_trace", "one")
    it.completed("one")
    began = time.monotonic()
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert time.monotonic() - began < 15
    assert nothing_is_left(it)


@POSTGRESQL
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_all_processes_at_once_is_one_drain(number, backend, scene):
    """As a terminal sends Ctrl-C, and a service manager its SIGTERM."""
    it = scene(backend, QueuePolicy(lease_seconds=2))
    worker = it.start("--processes", "2", "--concurrency", "1", "--stop-timeout", "30")
    ids = ["one", "two"]
    for id in ids:
        it.enqueue("wait_politely", id)
    assert {it.started(id) for id in ids} == {*worker.children()}
    for pid in [*worker.children(), worker.pid]:
        kill(pid, number)
    eventually(lambda: "draining" in worker.log)
    # Long enough for whoever cuts them at once.
    lapse = max(lease.expires_at for lease in it.leases()) + timedelta(seconds=1)
    eventually(lambda: it.leases().filter(expires_at__gt=lapse).count() == 2)
    for id in ids:
        it.file(id).touch()
    assert worker.wait() == 0
    assert {it.state(id) for id in ids} == {WorkState.COMPLETED}
    assert {it.item(id).fence for id in ids} == {1}
    assert nothing_is_left(it)


@POSTGRESQL
def test_nothing_is_claimed_in_a_drain(backend, scene):
    it = scene(backend)
    it.enqueue("wait", "one")
    worker = it.start("--processes", "2", "--stop-timeout", "30")
    it.started("one")
    worker.send(signal.SIGTERM)
    eventually(lambda: "draining" in worker.log and len(worker.children()) == 1)
    # The end of one makes a process look for the next.
    it.enqueue("leave_trace", "new", priority=1)
    it.file("one").touch()
    assert worker.wait() == 0
    assert it.state("one") is WorkState.COMPLETED
    assert (it.state("new"), it.item("new").fence or 0) == (WorkState.QUEUED, 0)


@POSTGRESQL
def test_what_a_drain_cuts_is_due_again_at_once(backend, scene):
    it = scene(backend, QueuePolicy(backoff_seconds=3600, backoff_cap_seconds=3600))
    handlers = ("wait", "wait_politely", "wait_async", "deaf_async_for_ever")
    for handler in handlers:
        it.enqueue(handler, handler)
    worker = it.start("--processes", "1", "--stop-timeout", "0.3")
    for handler in handlers:
        it.started(handler)
    began = time.monotonic()
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert 0.3 + CANCEL_GRACE < time.monotonic() - began < 0.3 + GRACE
    assert nothing_is_left(it)
    assert not any(it.traces("ran", handler) for handler in handlers)
    assert {row.kind for row in Failure.objects.using(it.alias).all()} == {"shutdown"}
    for deaf in ("wait", "deaf_async_for_ever"):
        assert f"handler did not stop: handler={deaf} " in worker.log
    for handler in handlers:
        it.file(handler).touch()
    assert it.drain() == 0
    for handler in handlers:
        assert it.state(handler) is WorkState.COMPLETED
        assert it.item(handler).failures == (WORKER_SHUTDOWN,)
        assert len(it.traces("started", handler)) == 2


@POSTGRESQL
def test_a_drain_ends_a_process_whose_interpreter_is_held(backend, scene):
    it = scene(backend)
    worker = it.start("--processes", "1", "--stop-timeout", "0.2")
    it.enqueue("hold_interpreter", "one", payload={"seconds": 3600})
    it.started("one")
    began = time.monotonic()
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert time.monotonic() - began < 0.2 + GRACE
    assert "reason=did not end in time" in worker.log
    assert (it.state("one"), it.item("one").failures) == (WorkState.QUEUED, (WORKER_SHUTDOWN,))
    assert nothing_is_left(it)


@POSTGRESQL
def test_a_process_that_dies_in_a_drain_shows_in_the_exit_code(backend, scene):
    it = scene(backend)
    it.enqueue("wait", "one")
    worker = it.start("--processes", "1")
    victim = it.started("one")
    worker.send(signal.SIGTERM)
    eventually(lambda: "draining" in worker.log)
    kill(victim)
    assert worker.wait() == 3
    assert (it.state("one"), it.item("one").failures) == (WorkState.QUEUED, (WORKER_DIED,))
    assert worker.log.count("process started") == 1
    assert nothing_is_left(it)


@POSTGRESQL
def test_a_handler_that_ends_its_process_in_a_drain_has_died_whatever_the_code(backend, scene):
    it = scene(backend)
    it.enqueue("wait_and_exit_tidily", "one", max_attempts=1)
    worker = it.start("--processes", "1")
    it.started("one")
    worker.send(signal.SIGTERM)
    eventually(lambda: "draining" in worker.log)
    it.file("one").touch()
    assert worker.wait() == 3
    assert (it.state("one"), it.item("one").failures) == (WorkState.DEAD_LETTERED, (WORKER_DIED,))


# While the database has the word.

ONE_PROCESS = "workqueue process 1"


@pytest.fixture
def proxied(scene):
    """The scene of a test whose processes reach the database through a proxy, and that."""
    it = scene("postgresql")
    with Proxy(int(connections.settings["postgresql"]["PORT"])) as proxy:
        redirect(it.environment, PORT=proxy.port)
        yield it, proxy


def run_one(it, *options):
    """Have a worker run the item "one"."""
    worker = it.start("--processes", "1", *options)
    it.enqueue("wait_without_trace", "one")
    eventually(it.file("one.started").exists)
    return worker


def settle_unheard(it, proxy):
    """Have "one" completed, and its process not hear of it."""
    trap = proxy.trap("COMMIT", ONE_PROCESS)
    it.file("one").touch()
    trap.wait()
    while it.state("one") is not WorkState.COMPLETED:  # that was one that came too early for it
        early, trap = trap, proxy.trap("COMMIT", ONE_PROCESS)
        early.let_go()
        trap.wait()
    return trap


@pytest.mark.parametrize("answer", ["comes late", "is lost", "never comes"])
def test_a_stop_during_the_commit_of_a_completion_counts_it_once(answer, proxied):
    it, proxy = proxied
    timeout = 0.2 if answer == "never comes" else 30.0
    worker = run_one(it, "--stop-timeout", str(timeout))
    trap = settle_unheard(it, proxy)
    worker.send(signal.SIGTERM)
    eventually(lambda: "draining" in worker.log)
    if answer == "comes late":
        trap.let_go()
    elif answer == "is lost":
        trap.swallow()
    # Without an answer the process can't tell that it has nothing more to do.
    assert worker.wait() == (3 if answer == "never comes" else 0)
    assert ("ends not stored" in worker.log) == (answer == "never comes")
    assert ("database trouble" in worker.log) == (answer == "is lost")
    assert "claim lost" not in worker.log
    assert (it.state("one"), it.item("one").fence) == (WorkState.COMPLETED, 1)
    assert (it.item("one").attempts, it.queue.stats().completed) == (0, 1)
    assert nothing_is_left(it)


@pytest.mark.parametrize("answer", ["comes late", "is lost"])
def test_a_stop_while_a_completion_is_on_its_way_stores_it_once(answer, proxied):
    it, proxy = proxied
    worker = run_one(it, "--stop-timeout", "30")
    # Of a transaction that also claims: so it isn't committed yet.
    trap = proxy.trap("into django_workqueue_finished", ONE_PROCESS)
    it.file("one").touch()
    trap.wait()
    worker.send(signal.SIGTERM)
    eventually(lambda: "draining" in worker.log)
    assert it.state("one") is WorkState.CLAIMED
    if answer == "comes late":
        trap.let_go()
    else:
        trap.swallow()
    assert worker.wait() == 0
    assert (it.state("one"), it.item("one").fence) == (WorkState.COMPLETED, 1)
    assert it.queue.stats().completed == 1
    assert nothing_is_left(it)


@pytest.mark.parametrize(
    ("statement", "answer"),
    [
        ("into django_workqueue_lease", "comes late"),
        ("into django_workqueue_lease", "is lost"),
        ("COMMIT", "is lost"),
    ],
)
def test_a_stop_during_a_claim_runs_nothing_and_leaves_nothing_claimed(statement, answer, proxied):
    it, proxy = proxied
    it.enqueue("wait_without_trace", "one")
    trap = proxy.trap(statement, ONE_PROCESS)
    worker = it.start("--processes", "1", "--stop-timeout", "30")
    trap.wait()
    assert it.state("one") is (WorkState.CLAIMED if statement == "COMMIT" else WorkState.QUEUED)
    worker.send(signal.SIGTERM)
    eventually(lambda: "draining" in worker.log)
    if answer == "comes late":
        trap.let_go()
    else:
        trap.swallow()
    assert worker.wait() == 0
    assert (it.state("one"), it.item("one").attempts) == (WorkState.QUEUED, 0)
    assert not it.file("one.started").exists()
    assert nothing_is_left(it)


@pytest.mark.parametrize("answer", ["comes late", "never comes"])
def test_a_stop_during_the_commit_of_an_atomic_handler_counts_it_once(answer, proxied):
    it, proxy = proxied
    worker = it.start("--processes", "1", "--stop-timeout", "0.5")
    trap = proxy.trap("COMMIT", "")  # its connection has no name of the runtime's
    it.enqueue("atomic", "one")
    trap.wait()
    worker.send(signal.SIGTERM)
    eventually(lambda: "draining" in worker.log)
    if answer == "comes late":
        trap.let_go()
    assert worker.wait() == 0
    assert (it.state("one"), it.item("one").fence) == (WorkState.COMPLETED, 1)
    assert (it.item("one").attempts, len(it.traces("ran", "one"))) == (0, 1)
    assert nothing_is_left(it)


def test_a_drain_ends_in_time_though_the_database_stands_still(proxied):
    it, proxy = proxied
    worker = run_one(it, "--stop-timeout", "0.2")
    proxy.stall()
    began = time.monotonic()
    worker.send(signal.SIGTERM)
    assert worker.wait() == 3
    assert time.monotonic() - began < 0.2 + GRACE
    assert "ends not stored" in worker.log
    assert it.leases().get().fence == 1  # until it lapses


def test_an_idle_worker_without_a_database_ends_in_time(proxied):
    it, proxy = proxied
    worker = it.start("--processes", "1", "--stop-timeout", "30")
    it.enqueue("leave_trace", "one")
    it.completed("one")
    proxy.refuse()
    began = time.monotonic()
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert time.monotonic() - began < GRACE
