"""What the suite's themes share: the two hooks, and the words their tests are written in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from django_workqueue.contract import WorkQueue
from django_workqueue.items import QueueStats, WorkItem, WorkState
from django_workqueue.policy import QueuePolicy

#: The verbs of a worker that holds an item.
HOLDER_VERBS = ("heartbeat", "complete", "fail", "pause", "release")
#: Those of them that end its claim.
SETTLING_VERBS = ("complete", "fail", "pause", "release")
#: The verbs of an operator on one item.
OPERATOR_VERBS = ("resume", "cancel", "requeue", "discard")
#: What a queue counts of its items.
COUNTS = ("depth", "due", "claimed", "paused", "dead_lettered", "completed", "cancelled")
#: A store's clock also runs by itself while a test runs: so much, in seconds, is forgiven.
TOLERANCE = 5.0


class Bench:
    """A queue on the bench. Subclasses of the suite give the two hooks."""

    #: The queue of the test that runs, made by `start`.
    queue: WorkQueue

    def make_queue(self, policy: QueuePolicy | None) -> WorkQueue:
        """Return a fresh, empty queue with *policy* (None: with any policy of the store's)."""
        raise NotImplementedError

    def advance(self, queue: WorkQueue, seconds: float) -> None:
        """Move the clock of *queue*'s store forward."""
        raise NotImplementedError

    def start(self, **policy: Any) -> WorkQueue:
        """Make the test's queue, with these fields of its policy and no backoff unless asked."""
        self.queue = self.make_queue(QueuePolicy(**{"backoff_seconds": 0, **policy}))
        return self.queue

    def wait(self, seconds: float) -> None:
        """Let time pass in the store."""
        self.advance(self.queue, seconds)

    def now(self) -> datetime:
        """Return the store's time."""
        return self.queue.stats().as_of

    def figures(self, queue: str = "default") -> QueueStats:
        return self.queue.stats(queue=queue)

    def expect(self, queue: str = "default", **counts: int) -> None:
        """Expect these counts of *queue*, and 0 of every other."""
        figures = self.figures(queue)
        actual = {name: getattr(figures, name) for name in COUNTS}
        assert actual == dict.fromkeys(COUNTS, 0) | counts

    def put(self, item_id: str | None = None, tenant: str = "acme", **fields: Any) -> WorkItem:
        """Enqueue one item, under a generated id unless one is given."""
        return self.queue.enqueue(new_item(item_id, tenant, **fields))

    def put_for(self, tenants: Iterable[str], **fields: Any) -> tuple[WorkItem, ...]:
        """Enqueue one item for each of *tenants*, in their order."""
        return self.queue.enqueue_many([new_item(None, name, **fields) for name in tenants])

    def take(self, worker: str = "w1", **options: Any) -> WorkItem:
        """Claim the next item, which must be there."""
        item = self.queue.claim(worker=worker, **options)
        assert item is not None, "nothing was due"
        return item

    def take_many(self, limit: int, worker: str = "w1", **options: Any) -> tuple[WorkItem, ...]:
        return self.queue.claim_many(worker=worker, limit=limit, **options)

    def take_new(self, item_id: str | None = None, **fields: Any) -> WorkItem:
        """Enqueue an item and claim it, where no other is due."""
        stored = self.put(item_id, **fields)
        taken = self.take(queue=stored.queue)
        assert taken.id == stored.id, "another item was due"
        return taken

    def nothing_due(self, worker: str = "w9", **options: Any) -> bool:
        """Try to claim; say whether there was nothing."""
        return self.queue.claim(worker=worker, **options) is None

    def say(self, verb: str, item: WorkItem, **changes: Any) -> WorkItem:
        """Call a holder's *verb* as the claim that *item* shows, with *changes* to that."""
        arguments = {"tenant": item.tenant, "worker": item.worker, "fence": item.fence}
        if verb == "fail":
            arguments["error"] = "boom"
        answer: WorkItem = getattr(self.queue, verb)(item.id, **(arguments | changes))
        return answer

    def bury(self, item_id: str | None = None, tenant: str = "acme", **fields: Any) -> WorkItem:
        """Enqueue an item, claim it and fail it for good, where no other is due."""
        return self.say("fail", self.take_new(item_id, tenant=tenant, **fields), retryable=False)

    def operate(self, verb: str, item: WorkItem, **options: Any) -> WorkItem:
        """Call an operator's *verb* on *item*; "ann" discards it unless told otherwise."""
        if verb == "discard":
            options = {"by": "ann", "reason": "hopeless", **options}
        answer: WorkItem = getattr(self.queue, verb)(item.id, **{"tenant": item.tenant, **options})
        return answer

    def in_state(self, state: WorkState, item_id: str | None = None, **fields: Any) -> WorkItem:
        """Enqueue an item and bring it to *state*, where no other of its queue is due."""
        item = self.put(item_id, **fields)
        if state is WorkState.QUEUED:
            return item
        if state is WorkState.CANCELLED:
            return self.operate("cancel", item)
        held = self.take(queue=item.queue, deployment_id=item.deployment_id)
        assert held.id == item.id, "another item was due"
        if state is WorkState.CLAIMED:
            return held
        if state is WorkState.DEAD_LETTERED:
            return self.say("fail", held, retryable=False)
        return self.say("pause" if state is WorkState.PAUSED else "complete", held)

    def look(self, item: WorkItem) -> WorkItem:
        """Return the item as it now stands."""
        return self.queue.get(item.id, tenant=item.tenant)


def new_item(item_id: str | None = None, tenant: str = "acme", **fields: Any) -> WorkItem:
    if item_id is not None:
        fields["id"] = item_id
    return WorkItem(tenant=tenant, **fields)


def ids(items: Iterable[WorkItem]) -> list[str]:
    return [item.id for item in items]


def tenants(items: Iterable[WorkItem]) -> list[str]:
    return [item.tenant for item in items]


@contextmanager
def refused(kind: type[Exception], **facts: object) -> Iterator[None]:
    """Expect the block to raise *kind* with attributes equal to *facts*."""
    try:
        yield
    except kind as error:
        for name, expected in facts.items():
            actual = getattr(error, name)
            assert actual == expected, f"{kind.__name__}.{name}: {actual!r}, not {expected!r}"
    else:
        raise AssertionError(f"{kind.__name__} was not raised")


def seconds_between(earlier: datetime | None, later: datetime | None) -> float:
    assert earlier is not None, "the earlier time is missing"
    assert later is not None, "the later time is missing"
    return (later - earlier).total_seconds()


def assert_near(actual: float, expected: float) -> None:
    """Expect *actual* seconds to be *expected*, but for what passed while the test ran."""
    assert abs(actual - expected) <= TOLERANCE, f"{actual} s, not about {expected} s"
