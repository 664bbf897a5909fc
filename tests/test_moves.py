"""The moves between places by themselves: each write re-checks the claim that it acts on."""

from datetime import UTC, datetime

import pytest

from django_workqueue import QueuePolicy, WorkItem, WorkState
from django_workqueue.doctor import examine
from django_workqueue.failures import FailureKind, describe
from django_workqueue.models import (
    Counter,
    DeadLetter,
    Failure,
    Finished,
    Lease,
    Ready,
    Turn,
    Waiting,
)
from django_workqueue.moves import ClaimRequest, Completion, EndedAttempt, Release
from django_workqueue.testing import DatabaseTestQueue, make_queue

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


@pytest.fixture(params=["sqlite", "postgresql"])
def queue(request: pytest.FixtureRequest):
    queue = make_queue(request.param, QueuePolicy(backoff_seconds=0, lease_seconds=60))
    yield queue
    assert examine(queue.using) == []


def ended(item: int, fence: int, **more) -> EndedAttempt:
    return EndedAttempt(
        item=item, fence=fence, kind=FailureKind.ERROR, text=describe("broken"), **more
    )


#: Each write on a claim, as (moves, worker, item, fence) -> what it changed.
WRITES = {
    "complete": lambda m, w, i, f: m.complete(w, [Completion(item=i, fence=f)]),
    "fail": lambda m, w, i, f: m.fail(w, [ended(i, f)]),
    "release": lambda m, w, i, f: m.release(w, [Release(item=i, fence=f)]),
    "renew": lambda m, w, i, f: m.renew(w, [(i, f)], wait=True),
    "renew many": lambda m, w, i, f: m.renew(w, [(i, f)], wait=False),
}


def standing(queue: DatabaseTestQueue) -> list[tuple]:
    rows = Lease.objects.using(queue.using).values_list("item_id", "fence", "worker", "expires_at")
    return list(rows)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
class TestEveryWriteOnAClaim:
    def claim_again(self, queue: DatabaseTestQueue) -> tuple[WorkItem, WorkItem]:
        """An item that one worker has held, lost, and holds again."""
        queue.enqueue(WorkItem(tenant="acme", id="one"))
        first = queue.claim(worker="w")
        queue.advance(61)
        queue.reap()
        return first, queue.claim(worker="w")

    def test_needs_the_fence_of_the_very_claim(self, queue, write):
        first, second = self.claim_again(queue)
        before = standing(queue)
        assert not write(queue.moves, "w", first.job_id, first.fence)
        assert not write(queue.moves, "w", first.job_id, second.fence + 1)
        assert standing(queue) == before
        assert write(queue.moves, "w", second.job_id, second.fence)

    def test_needs_the_name_of_the_worker(self, queue, write):
        _, second = self.claim_again(queue)
        before = standing(queue)
        assert not write(queue.moves, "other", second.job_id, second.fence)
        assert standing(queue) == before

    def test_needs_a_lease_that_stands(self, queue, write):
        _, second = self.claim_again(queue)
        before = standing(queue)
        queue.advance(61)
        assert not write(queue.moves, "w", second.job_id, second.fence)
        assert standing(queue) == before


class TestBatches:
    def test_a_lost_claim_in_a_batch_leaves_the_others_settled(self, queue):
        queue.enqueue_many(WorkItem(tenant="acme") for _ in range(450))
        items = queue.claim_many(worker="w", limit=450)
        lost = {items[0].job_id, items[200].job_id, items[449].job_id}
        told = [
            Completion(item=item.job_id, fence=item.fence + (item.job_id in lost), result="[1]")
            for item in items
        ]
        settled = queue.moves.complete("w", told)
        assert {item.job_id for item in items} - {*settled} == lost
        assert queue.stats().completed == 447
        assert {item for item, *_ in standing(queue)} == lost

    def test_each_item_of_a_batch_goes_its_own_way(self, queue):
        queue.enqueue_many(WorkItem(tenant="acme", id=f"i{n}", max_attempts=2) for n in range(4))
        a, b, c, d = queue.claim_many(worker="w", limit=4)
        states = queue.moves.fail(
            "w",
            [
                ended(a.job_id, a.fence),
                ended(b.job_id, b.fence, retryable=False),
                ended(c.job_id, c.fence, delay=100.0),
                ended(d.job_id, d.fence, delay=0.0),
            ],
        )
        assert states == {
            a.job_id: WorkState.QUEUED,
            b.job_id: WorkState.DEAD_LETTERED,
            c.job_id: WorkState.QUEUED,
            d.job_id: WorkState.QUEUED,
        }
        assert [item.id for item in queue.claim_many(worker="w", limit=9)] == ["i0", "i3"]
        [waiting] = Waiting.objects.using(queue.using)
        assert (waiting.item_id, waiting.cause) == (c.job_id, "backoff")

    def test_a_wish_to_cancel_ends_every_claim_but_a_completed_one_cancelled(self, queue):
        queue.enqueue_many(WorkItem(tenant="acme") for _ in range(5))
        a, b, c, d, e = queue.claim_many(worker="w", limit=5)
        Lease.objects.using(queue.using).update(cancel_requested=True)
        moves = queue.moves
        assert moves.complete("w", [Completion(item=a.job_id, fence=1)]) == {
            a.job_id: WorkState.COMPLETED
        }
        assert moves.fail("w", [ended(b.job_id, 1)]) == {b.job_id: WorkState.CANCELLED}
        assert moves.release("w", [Release(item=c.job_id, fence=1)]) == {
            c.job_id: WorkState.CANCELLED
        }
        assert moves.renew("w", [(d.job_id, 1)], wait=True)[d.job_id].cancel_requested
        queue.advance(61)
        states = {item.id: item.state for item in queue.reap()}
        assert states == {d.id: WorkState.CANCELLED, e.id: WorkState.CANCELLED}
        # Counted as they would have been: a failure, a lapse; not a release.
        counted = [queue.get(item.id, tenant="acme").attempts for item in (b, c, d)]
        assert counted == [1, 0, 1]

    @pytest.mark.parametrize("wait", [True, False])
    def test_a_renewal_tells_for_how_long_the_claim_can_still_be_renewed(self, queue, wait):
        item = queue.enqueue(WorkItem(tenant="acme"))
        queue.claim(worker="w")
        for seconds, left in ((0, 3600.0), (50, 3550.0), (50, 3500.0)):
            queue.advance(seconds)
            renewed = queue.moves.renew("w", [(item.job_id, 1)], wait=wait)[item.job_id]
            assert renewed.renewable_for == pytest.approx(left, abs=20)

    def test_nothing_to_do_is_nothing_done(self, queue):
        moves = queue.moves
        assert moves.accept([]) == {}
        assert moves.complete("w", []) == moves.fail("w", []) == moves.release("w", []) == {}
        assert moves.renew("w", [], wait=False) == {}
        assert moves.reap(10) == moves.adopt("w") == {}
        assert moves.promote("default").promoted == 0
        assert moves.claim(ClaimRequest(queue="default", worker="w", limit=5)) == []
        assert not Turn.objects.using(queue.using).exists()


def test_counters_fold_into_a_row_per_queue(queue):
    for name in ("default", "email"):
        for _ in range(10):
            queue.enqueue(WorkItem(tenant="acme", queue=name))
        queue.claim(worker="w", queue=name)
    before = [queue.stats(queue=name) for name in ("default", "email")]
    queue.moves.fold_counters()
    queue.moves.fold_counters()
    assert Counter.objects.using(queue.using).count() == 2
    after = [queue.stats(queue=name) for name in ("default", "email")]
    assert [(s.depth, s.claimed) for s in after] == [(s.depth, s.claimed) for s in before]


def stray(model, item, **fields):
    """A row of *item* in a place where it isn't."""
    common = {"queue": "default", "tenant": "acme", "fence": 7}
    return model(item_id=item.job_id, **common, **fields)


NOW = datetime(2026, 1, 1, tzinfo=UTC)
#: What an item meets where its claim's end puts it: the row, and a settlement that goes there.
STRAYS = {
    "finished": (
        lambda i: stray(Finished, i, state="completed", finished_at=NOW),
        lambda m, items: m.complete("w", [Completion(item=i, fence=1) for i in items]),
    ),
    "ready": (
        lambda i: stray(Ready, i, rank=0, enqueued_at=NOW),
        lambda m, items: m.release("w", [Release(item=i, fence=1) for i in items]),
    ),
    "waiting": (
        lambda i: stray(
            Waiting, i, rank=0, enqueued_at=NOW, due_at=NOW, since=NOW, cause="backoff"
        ),
        lambda m, items: m.release("w", [Release(item=i, fence=1, delay=9.0) for i in items]),
    ),
    "ready after a failure": (
        lambda i: stray(Ready, i, rank=0, enqueued_at=NOW),
        lambda m, items: m.fail("w", [ended(i, 1) for i in items]),
    ),
    "waiting after a failure": (
        lambda i: stray(
            Waiting, i, rank=0, enqueued_at=NOW, due_at=NOW, since=NOW, cause="backoff"
        ),
        lambda m, items: m.fail("w", [ended(i, 1, delay=9.0) for i in items]),
    ),
    "dead": (
        lambda i: stray(DeadLetter, i, dead_at=NOW, reason="rejected"),
        lambda m, items: m.fail("w", [ended(i, 1, retryable=False) for i in items]),
    ),
    "failure": (
        lambda i: Failure(item_id=i.job_id, number=1, kind="error", failed_at=NOW),
        lambda m, items: m.fail("w", [ended(i, 1) for i in items]),
    ),
    "cancelled by a release": (
        lambda i: stray(Finished, i, state="cancelled", finished_at=NOW),
        lambda m, items: m.release("w", [Release(item=i, fence=1) for i in items]),
    ),
    "cancelled by a failure": (
        lambda i: stray(Finished, i, state="cancelled", finished_at=NOW),
        lambda m, items: m.fail("w", [ended(i, 1) for i in items]),
    ),
}


@pytest.mark.parametrize("alias", ["sqlite", "postgresql"])
@pytest.mark.parametrize(("row", "settle"), STRAYS.values(), ids=STRAYS)
def test_a_row_where_none_should_be_does_not_keep_the_others_from_being_settled(
    alias, request, row, settle
):
    queue = make_queue(alias, QueuePolicy(backoff_seconds=0))
    queue.enqueue_many(WorkItem(tenant="acme", id=name) for name in ("odd", "good"))
    odd, good = queue.claim_many(worker="w", limit=2)
    if "cancelled" in request.node.name:
        Lease.objects.using(queue.using).update(cancel_requested=True)
    row(odd).save(using=queue.using, force_insert=True)
    assert {*settle(queue.moves, [odd.job_id, good.job_id])} == {odd.job_id, good.job_id}
    assert not Lease.objects.using(queue.using).exists()
    assert not queue.get("good", tenant="acme").held
    assert all("good" not in found for found in examine(queue.using))
