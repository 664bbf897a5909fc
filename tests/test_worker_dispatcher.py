"""The dispatcher of a worker process: what it does when the database answers oddly, or not."""

import logging
import select
import socket
import threading
from contextlib import contextmanager

import pytest
from django.db import OperationalError, transaction

from django_workqueue import WorkItem, WorkState
from django_workqueue.doctor import examine
from django_workqueue.exceptions import QueueUnavailableError
from django_workqueue.models import Lease, Ready
from django_workqueue.queues import DatabaseWorkQueue
from django_workqueue.testing import make_queue
from django_workqueue.worker import attempts, dispatcher
from django_workqueue.worker.channel import Channel, ChannelClosedError
from django_workqueue.worker.dispatcher import Dispatcher
from django_workqueue.worker.options import WorkerOptions
from tests.workers import PATIENCE, eventually

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")
BOTH = pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
POSTGRESQL = pytest.mark.parametrize("backend", ["postgresql"])


class Running:
    """A dispatcher at work in a thread, and what it says to its supervisor."""

    def __init__(self, queue, channel, listener, concurrency):
        self.queue = queue
        self.alias = queue.using
        self.said = []
        self._listener = listener
        options = WorkerOptions(
            name="w", boot="b", alias=self.alias, queues=("default",), concurrency=concurrency
        )
        self.dispatcher = Dispatcher(
            options, process=1, budget=None, channel=channel, announce=lambda held: None
        )
        self._threads = [
            threading.Thread(target=self.dispatcher.run),
            threading.Thread(target=self._listen),
        ]
        for thread in self._threads:
            thread.start()

    def _listen(self):
        try:
            while True:
                select.select([self._listener], [], [])
                self.said += self._listener.receive()
        except ChannelClosedError:
            pass

    def wake(self):
        self.dispatcher.wake(["default"])

    def end(self):
        self.dispatcher.drain()
        self._threads[0].join(PATIENCE)
        assert not self._threads[0].is_alive()

    def state(self, id):
        return self.queue.get(id, tenant="t").state

    def completed(self, *ids):
        eventually(lambda: all(self.state(id) is WorkState.COMPLETED for id in ids))


@pytest.fixture
def running(monkeypatch):
    """Starts a dispatcher on a queue with the given items: (id, handler, payload) each."""
    # What is given back is given back for another reason than having waited.
    monkeypatch.setattr(dispatcher, "PREFETCH_PATIENCE", 3600.0)

    @contextmanager
    def running(backend, *items, concurrency=4):
        queue = make_queue(backend)
        queue.enqueue_many(
            WorkItem(tenant="t", id=id, handler=handler, payload=payload)
            for id, handler, payload in items
        )
        ours, theirs = socket.socketpair()
        with ours, theirs:
            it = Running(queue, Channel(ours), Channel(theirs), concurrency)
            try:
                yield it
                it.end()
            finally:
                it.end()
                ours.shutdown(socket.SHUT_RDWR)
                it._threads[1].join(PATIENCE)
        assert examine(it.alias) == []

    return running


def loses_an_answer(monkeypatch, owner, name, error, matters=bool):
    """Let a method raise, once it has done its work and the answer *matters*."""
    method = getattr(owner, name)

    def lossy(self, *args):
        answer = method(self, *args)
        if matters(answer) and not lossy.failed:
            lossy.failed = True
            raise error
        return answer

    lossy.failed = False
    monkeypatch.setattr(owner, name, lossy)
    return lossy


@BOTH
def test_a_drain_gives_back_at_once_what_has_not_begun(backend, running, tmp_path):
    quick = [(f"quick-{n}", "nothing", {}) for n in range(60)]
    slow = [(id, "wait_without_trace", {"until": str(tmp_path / id)}) for id in "abc"]
    with running(backend, *quick, *slow, concurrency=1) as it:
        it.wake()
        eventually(lambda: it.dispatcher.slots.backlog and (tmp_path / "a.started").exists())
        held = Lease.objects.using(it.alias).count()
        it.dispatcher.drain()
        eventually(lambda: Lease.objects.using(it.alias).count() == 1)
        assert held > 1
        (tmp_path / "a").touch()
    assert it.state("a") is WorkState.COMPLETED
    for id in "bc":
        assert (it.state(id), it.queue.get(id, tenant="t").attempts) == (WorkState.QUEUED, 0)


@BOTH
def test_claims_whose_answer_was_lost_are_given_back_unspent(backend, running, monkeypatch):
    lost = QueueUnavailableError(operation="claim")
    lossy = loses_an_answer(monkeypatch, DatabaseWorkQueue, "claim_for", lost)
    with running(backend, ("one", "nothing", {})) as it:
        it.wake()
        it.completed("one")
    item = it.queue.get("one", tenant="t")
    assert lossy.failed
    assert (item.attempts, item.fence) == (0, 2)


@BOTH
def test_a_settlement_whose_answer_was_lost_counts_once(backend, running, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, "django_workqueue")
    lossy = loses_an_answer(
        monkeypatch,
        Dispatcher,
        "_exchange",
        OperationalError("the answer is lost"),
        matters=lambda answer: bool(answer[0]),
    )
    with running(backend, ("good", "nothing", {}), ("bad", "reject", {})) as it:
        it.wake()
        it.completed("good")
        eventually(lambda: it.state("bad") is WorkState.DEAD_LETTERED)
    assert lossy.failed
    assert "database trouble" in caplog.text
    assert "claim lost" not in caplog.text
    assert it.queue.get("bad", tenant="t").attempts == 1


@POSTGRESQL
def test_a_result_that_the_database_refuses_fails_its_item_and_no_other(
    backend, running, monkeypatch
):
    def encode(result, limit):
        return None if result is None else "{no JSON"

    monkeypatch.setattr(attempts, "encode_result", encode)
    items = [(f"good-{n}", "nothing", {}) for n in range(3)]
    with running(backend, *items, ("bad", "return_one", {})) as it:
        it.wake()
        it.completed(*(id for id, _, _ in items))
        eventually(lambda: it.queue.get("bad", tenant="t").attempts == 1)
        [failure] = it.queue.get("bad", tenant="t").failures
    assert failure.startswith("the end of the attempt could not be stored: ")


@POSTGRESQL
def test_a_lease_that_somebody_has_locked_holds_up_no_other(backend, running, tmp_path):
    waits = [(id, "wait_without_trace", {"until": str(tmp_path / id)}) for id in ("a", "b")]
    with running(backend, *waits) as it:
        it.wake()
        eventually(lambda: Lease.objects.using(it.alias).count() == 2)
        with transaction.atomic(using=it.alias):
            job_id = it.queue.get("a", tenant="t").job_id
            Lease.objects.using(it.alias).select_for_update().get(pk=job_id)
            (tmp_path / "a").touch()
            (tmp_path / "b").touch()
            it.completed("b")
            assert it.state("a") is WorkState.CLAIMED
        it.completed("a")


@BOTH
def test_a_claim_that_the_store_refuses_keeps_no_end_from_being_stored(backend, running, tmp_path):
    waits = [(id, "wait_without_trace", {"until": str(tmp_path / id)}) for id in ("a", "b")]
    with running(backend, *waits) as it:
        it.wake()
        eventually(lambda: Lease.objects.using(it.alias).count() == 2)
        # Somebody queues what is claimed: no claim of the queue succeeds.
        held, ready = Lease.objects.using(it.alias), Ready.objects.using(it.alias)
        row = held.get(pk=it.queue.get("b", tenant="t").job_id)
        ready.create(
            item_id=row.pk, queue=row.queue, tenant="t", rank=0, enqueued_at=row.enqueued_at
        )
        (tmp_path / "a").touch()
        it.completed("a")
        assert it.state("b") is WorkState.CLAIMED
        ready.filter(item_id=row.pk).delete()
        (tmp_path / "b").touch()
        it.completed("b")
