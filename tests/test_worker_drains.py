"""The end of a worker that was told to end."""

import signal
import time
from datetime import timedelta

import pytest

from django_workqueue import QueuePolicy, WorkState
from django_workqueue.models import WorkerProcess
from django_workqueue.policy import WORKER_SHUTDOWN
from tests.workers import eventually, kill

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")
BOTH = pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
POSTGRESQL = pytest.mark.parametrize("backend", ["postgresql"])


@BOTH
def test_a_drain_finishes_what_it_can_gives_back_the_rest_and_exits_0(backend, scene):
    it = scene(backend)
    ids = ["ends", "deaf", "held-1", "held-2"]
    worker = it.prefetched(2, *ids, stop_timeout=1.5)
    worker.send(signal.SIGTERM)
    eventually(lambda: it.leases().count() == 2)
    it.file("ends").touch()
    assert worker.wait() == 0
    assert it.state("ends") is WorkState.COMPLETED
    assert (it.state("deaf"), it.item("deaf").failures) == (WorkState.QUEUED, (WORKER_SHUTDOWN,))
    for id in ("held-1", "held-2"):
        assert (it.state(id), it.item(id).attempts) == (WorkState.QUEUED, 0)
        assert not it.traces("started", id)
    assert not it.leases().exists()
    assert not WorkerProcess.objects.using(it.alias).exists()


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
def test_a_second_signal_ends_the_worker_at_once(backend, scene):
    it = scene(backend)
    ids = ["begun", "held-1", "held-2"]
    worker = it.prefetched(1, *ids)
    worker.send(signal.SIGTERM)
    eventually(lambda: "draining" in worker.log)
    began = time.monotonic()
    worker.send(signal.SIGTERM)
    assert worker.wait() == 128 + signal.SIGTERM
    assert time.monotonic() - began < 4  # the stop timeout is 5
    assert it.item("begun").failures == (WORKER_SHUTDOWN,)
    assert [it.item(id).attempts for id in ids] == [1, 0, 0]
    assert {it.state(id) for id in ids} == {WorkState.QUEUED}


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
