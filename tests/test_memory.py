"""The queue in memory: the contract, and what only this queue promises."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

pytest.register_assert_rewrite("django_workqueue.conformance")

from django_workqueue.conformance import WorkQueueConformance  # noqa: E402
from django_workqueue.contract import WorkQueue  # noqa: E402
from django_workqueue.items import QueueHold, WorkItem, WorkState  # noqa: E402
from django_workqueue.memory import MemoryWorkQueue  # noqa: E402
from django_workqueue.policy import QueuePolicy  # noqa: E402


class StandingClock:
    """Stands still unless a test moves it."""

    def __init__(self) -> None:
        self.time = datetime(2030, 1, 1, tzinfo=UTC)

    def now(self) -> datetime:
        return self.time

    def move(self, seconds: float) -> None:
        self.time += timedelta(seconds=seconds)


def bury(queue: MemoryWorkQueue) -> int | None:
    """Let i-1, which is due, end in the dead letter; return its job id."""
    held = queue.claim(worker="w1")
    assert held is not None
    queue.fail("i-1", tenant="acme", worker="w1", error="boom", retryable=False)
    return held.job_id


class TestMemoryWorkQueue(WorkQueueConformance):
    def make_queue(self, policy: QueuePolicy | None) -> WorkQueue:
        self.clock = StandingClock()
        return MemoryWorkQueue(policy, clock=self.clock)

    def advance(self, queue: WorkQueue, seconds: float) -> None:
        self.clock.move(seconds)


def test_times_are_exact():
    """T37, T47, T58, T88: to the microsecond, with a clock that stands."""
    clock = StandingClock()
    policy = QueuePolicy(lease_seconds=30, backoff_seconds=4)
    queue = MemoryWorkQueue(policy, clock)
    start = clock.now()
    item = queue.enqueue(WorkItem(tenant="acme", id="i-1"))
    assert (item.enqueued_at, item.available_at) == (start, start)
    item = queue.claim(worker="w1")
    assert item.lease_expires_at == start + timedelta(seconds=30)
    clock.move(20)
    item = queue.heartbeat("i-1", tenant="acme", worker="w1")
    assert item.lease_expires_at == start + timedelta(seconds=50)
    item = queue.fail("i-1", tenant="acme", worker="w1", error="boom")
    assert item.available_at == start + timedelta(seconds=24)
    clock.move(3.999999)
    assert queue.claim(worker="w1") is None
    clock.move(0.000001)
    assert queue.stats().oldest_age_seconds == 24
    assert queue.claim(worker="w1").id == "i-1"


def test_a_clock_that_was_set_back_shortens_no_lease():
    clock = StandingClock()
    queue = MemoryWorkQueue(clock=clock)
    queue.enqueue(WorkItem(tenant="acme", id="i-1"))
    held = queue.claim(worker="w1")
    clock.move(-50)
    assert queue.heartbeat("i-1", tenant="acme", worker="w1") == held


def test_without_a_policy_and_a_clock_there_are_defaults():
    """T34."""
    queue = MemoryWorkQueue()
    assert queue.policy == QueuePolicy()
    assert abs(queue.stats().as_of - datetime.now(UTC)) < timedelta(seconds=60)


def test_threads_share_a_queue():
    queue = MemoryWorkQueue()
    items = [WorkItem(tenant=f"t{number % 7}", dedupe_key=str(number)) for number in range(200)]

    def enqueue(item):
        return queue.enqueue(item).id

    def work(number):
        taken = []
        while item := queue.claim(worker=f"w{number}"):
            queue.complete(item.id, tenant=item.tenant, worker=item.worker, fence=item.fence)
            taken.append(item.id)
        return taken

    with ThreadPoolExecutor(8) as threads:
        stored = set(threads.map(enqueue, items * 2))
        done = Counter(name for taken in threads.map(work, range(8)) for name in taken)
    assert len(stored) == 200
    assert done == Counter(stored)
    figures = queue.stats()
    assert (figures.completed, figures.duplicates_suppressed) == (200, 200)


def test_an_error_whose_text_asks_the_queue_does_not_lock_it():
    queue = MemoryWorkQueue()
    queue.enqueue(WorkItem(tenant="acme", id="i-1"))
    queue.claim(worker="w1")

    class AsksError(Exception):
        def __str__(self):
            return queue.get("i-1", tenant="acme").state

    item = queue.fail("i-1", tenant="acme", worker="w1", error=AsksError())
    assert item.failures[0].endswith("AsksError: claimed")


def test_a_payload_that_replaces_another_is_a_private_copy():
    queue = MemoryWorkQueue()
    queue.enqueue(WorkItem(tenant="acme", id="i-1"))
    queue.claim(worker="w1")
    queue.pause("i-1", tenant="acme", worker="w1")
    payload = {"sizes": [1]}
    queue.resume("i-1", tenant="acme", payload=payload)
    payload["sizes"].append(2)  # the caller's own still, and so is what is shown
    queue.get("i-1", tenant="acme").payload["sizes"].append(3)
    assert queue.get("i-1", tenant="acme").payload == {"sizes": [1]}
    queue.cancel("i-1", tenant="acme")
    shown = queue.requeue("i-1", tenant="acme", payload=payload)
    payload["sizes"].append(4)
    shown.payload["sizes"].append(5)
    assert queue.get("i-1", tenant="acme").payload == {"sizes": [1, 2]}


def test_a_job_id_is_never_given_twice():
    queue = MemoryWorkQueue(QueuePolicy(retention_seconds=0))
    first = queue.enqueue(WorkItem(tenant="acme", id="i-1"))
    queue.cancel("i-1", tenant="acme")
    assert queue.prune() == 1
    second, third = queue.enqueue_many([WorkItem(tenant="acme"), WorkItem(tenant="acme")])
    assert first.job_id < second.job_id < third.job_id


def test_a_holder_that_is_pruned_leaves_the_id_to_the_newest_of_the_others():
    """Also to one that was accepted after it."""
    clock = StandingClock()
    queue = MemoryWorkQueue(QueuePolicy(dead_letter_retention_seconds=5), clock)
    queue.enqueue(WorkItem(tenant="acme", id="i-1"))
    first = bury(queue)
    later = []
    for _ in range(2):
        later.append(queue.enqueue(WorkItem(tenant="acme", id="i-1")).job_id)
        queue.cancel("i-1", tenant="acme")
    queue.requeue("i-1", tenant="acme", job_id=first)
    assert bury(queue) == first
    clock.move(5)
    assert queue.prune() == 1
    assert queue.get("i-1", tenant="acme").job_id == later[1]
    assert queue.get("i-1", tenant="acme", job_id=later[0]).state is WorkState.CANCELLED


def test_a_hold_is_since_the_clocks_time():
    clock = StandingClock()
    queue = MemoryWorkQueue(clock=clock)
    hold = queue.hold(tenant="acme")
    assert hold == QueueHold(tenant="acme", since=clock.now())
    clock.move(1)
    assert queue.hold(tenant="acme", by="ann", reason="later") == hold
