"""Attempts with a time limit, and attempts that are told to stop."""

import signal

import pytest

from django_workqueue import QueuePolicy, WorkState
from django_workqueue.models import Failure
from tests.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")
POSTGRESQL = pytest.mark.parametrize("backend", ["postgresql"])


@POSTGRESQL
def test_an_attempt_ends_at_its_time_limit(backend, scene):
    it = scene(backend, QueuePolicy(max_attempts=1, timeout_seconds=0.4))
    for handler in ("wait_politely", "wait_async", "deaf_async"):
        it.enqueue(handler, handler)
    assert it.drain("--processes", "1") == 0
    for handler in ("wait_politely", "wait_async", "deaf_async"):
        assert it.item(handler).failures == ("exceeded its time limit of 0.4 s",)
        assert not it.traces("ran", handler)
    assert {row.kind for row in Failure.objects.using(it.alias).all()} == {"timeout"}


@POSTGRESQL
def test_a_handler_that_ignores_its_time_limit_costs_its_process(backend, scene):
    it = scene(backend, QueuePolicy(max_attempts=1, timeout_seconds=0.2))
    it.enqueue("wait", "deaf")
    worker = it.start("--processes", "1", "--stop-timeout", "0.5")
    victim = it.started("deaf")
    eventually(lambda: it.state("deaf") is WorkState.DEAD_LETTERED)
    assert it.item("deaf").failures == ("exceeded its time limit of 0.2 s",)
    eventually(lambda: victim not in worker.children() and worker.children())
    it.enqueue("leave_trace", "next", max_attempts=1)
    it.completed("next")
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0


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
