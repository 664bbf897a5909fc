"""Processes that stand still, and processes whose interpreter is held."""

import signal

import pytest

from django_workqueue import QueuePolicy
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
