"""What must not be lost, or run twice, when a handler or a row misbehaves."""

import asyncio
import logging
import sys
import threading

import pytest
from django.db import connections

from django_workqueue import QueuePolicy, WorkItem, WorkState
from django_workqueue.handlers import Handler
from django_workqueue.models import Failure, Lease, Ready
from django_workqueue.moves import Completion, EndedAttempt
from django_workqueue.testing import make_queue
from django_workqueue.worker.attempts import Held, claim_of
from django_workqueue.worker.channel import Channel
from django_workqueue.worker.children import Child, HeldLease
from django_workqueue.worker.options import configure_logging
from django_workqueue.worker.settling import Settling
from tests.elsewhere import Elsewhere
from tests.test_worker_parts import Bench, held


class Unprintable(Exception):
    def __init__(self, error):
        self.error = error

    def __str__(self):
        raise self.error


def exits(payload, context):
    raise Unprintable(SystemExit(3))


def interrupts(payload, context):
    raise Unprintable(KeyboardInterrupt())


async def subtask_exits(payload, context):
    async def leave():
        sys.exit(3)

    await asyncio.gather(leave(), asyncio.sleep(0))


async def stops_the_loop(payload, context):
    asyncio.get_running_loop().stop()
    await asyncio.sleep(0)
    raise ValueError("after the stop")


async def fine(payload, context):
    return 1


@pytest.mark.parametrize("handler", [exits, interrupts, subtask_exits, stops_the_loop])
def test_no_handler_ends_its_slot_or_the_loop(handler):
    bench = Bench(concurrency=1)
    for number in (1, 2, 3):  # more often than there are slots
        bad = held(handler, number)
        bench.slots.offer([bad])
        assert isinstance(bench.end_of(bad), EndedAttempt)
    good = [held(fine, 8), held(lambda payload, context: 2, 9)]
    bench.slots.offer(good)
    assert [bench.end_of(each).result for each in good] == ["1", "2"]


def test_an_error_thrown_into_a_slot_from_outside_is_a_failure_and_the_slot_lives_on(monkeypatch):
    bench = Bench(concurrency=1)
    original = bench.slots._begin
    monkeypatch.setattr(bench.slots, "_begin", lambda held: 1 / 0)
    bad = held(lambda payload, context: 1, 1)
    bench.slots.offer([bad])
    assert "ZeroDivisionError" in bench.end_of(bad).text.message
    monkeypatch.setattr(bench.slots, "_begin", original)
    good = held(lambda payload, context: 2, 2)
    bench.slots.offer([good])
    assert bench.end_of(good).result == "2"


def test_a_begun_claim_that_was_let_go_is_still_not_unspent_when_its_process_ends():
    import socket

    ours, theirs = socket.socketpair()
    child = Child(1, None, None, Channel(ours))
    for item in (1, 2, 3, 4):
        child.leases[item] = HeldLease(item, 7, 60.0, None, look_at=0.0)
    for item in (1, 2):
        child.leases[item].begin(0.0)
    assert child.let_go(1, 7)
    assert child.let_go(3, 7)
    assert not child.let_go(4, 6)
    assert child.begun_claims() == {1: 7, 2: 7}
    assert [*child.leases] == [2, 4]
    ours.close()
    theirs.close()


def test_control_characters_do_not_forge_log_lines(capsys):
    logger = logging.getLogger("django_workqueue")
    before = (logger.level, logger.propagate, [*logger.handlers])
    logger.propagate, logger.handlers = False, []
    try:
        configure_logging(1)
        logger.warning("claim lost: tenant=%s", "a\n12:00:00 ERROR forged\x1b[31m")
    finally:
        logger.handlers[0].flush()
        logger.level, logger.propagate, logger.handlers = before
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert r"a\n12:00:00 ERROR forged\x1b[31m" in line


@pytest.mark.django_db(transaction=True, databases="__all__")
class TestRows:
    @pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
    def test_rows_that_should_not_be_there_do_not_keep_others_from_being_reaped(self, backend):
        queue = make_queue(backend, QueuePolicy(backoff_seconds=0))
        queue.enqueue_many(WorkItem(tenant="acme", id=name) for name in ("a", "b", "c"))
        a, b, c = queue.claim_many(worker="w", limit=3, lease_seconds=5)
        rows = {"fence": 1, "failed_at": queue.moves.now(), "kind": "error", "message": "forged"}
        Failure.objects.using(queue.using).create(
            item_id=a.job_id, number=1, outcome="queued", **rows
        )
        Ready.objects.using(queue.using).create(
            queue="default",
            tenant="acme",
            rank=0,
            item_id=b.job_id,
            enqueued_at=b.enqueued_at,
        )
        queue.advance(10)
        assert {item.id for item in queue.reap()} == {"a", "b", "c"}
        assert not Lease.objects.using(queue.using).exists()
        assert queue.get(c.id, tenant="acme").attempts == 1

    def test_ends_whose_leases_are_locked_are_kept_until_they_can_be_stored(self):
        queue = make_queue("postgresql")
        queue.enqueue_many(WorkItem(tenant="acme") for _ in range(3))
        items = queue.claim_many(worker="w", limit=3)
        settling = Settling(queue, "w")
        handler = Handler(function=lambda payload, context: None, name="h")
        for item in items:
            each = Held(item, handler, lease_seconds=60, confirmed=1e9)
            settling.add(Completion(item=item.job_id, fence=item.fence, result="1"), each)
        locked = Lease.objects.using("postgresql").select_for_update()
        with connections["postgresql"].cursor() as cursor:
            cursor.execute("set lock_timeout = '300ms'")
        try:
            with Elsewhere("postgresql") as other:
                other.begin()
                other.call(lambda: list(locked.filter(pk__in=[i.job_id for i in items[:2]])))
                batch = settling.due()
                states = settling.store_singly(batch)
                # Longer than the first one's pause.
                threading.Event().wait(1.2)
                assert settling.done(batch, states) == [claim_of(items[2])]
                other.commit()
            batch = settling.due()
            assert len(batch) == 2
            assert len(settling.done(batch, settling.store(batch))) == 2
        finally:
            connections["postgresql"].close()
        assert not settling
        for item in items:
            assert queue.get(item.id, tenant="acme").state is WorkState.COMPLETED
