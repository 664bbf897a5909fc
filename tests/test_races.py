"""Two connections to PostgreSQL at once: who wins, who waits, and who is passed over."""

import threading
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import pytest
from django.db import connections, transaction

from django_workqueue import LeaseLostError, QueuePolicy, WorkItem, WorkState, doctor
from django_workqueue.doctor import examine
from django_workqueue.models import Counter, Lease, Turn
from django_workqueue.moves import ClaimRequest
from django_workqueue.operating import Operator
from django_workqueue.testing import DatabaseTestQueue, make_queue
from tests.elsewhere import Elsewhere, crowd

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

POSTGRES = "postgresql"


@pytest.fixture
def queue() -> Iterator[DatabaseTestQueue]:
    queue = make_queue(POSTGRES, QueuePolicy(backoff_seconds=0))
    yield queue
    assert examine(POSTGRES) == []


@pytest.fixture
def other() -> Iterator[Elsewhere]:
    with Elsewhere(POSTGRES) as other:
        yield other


def put(queue: DatabaseTestQueue, *ids: str, tenant: str = "acme") -> None:
    queue.enqueue_many([WorkItem(tenant=tenant, id=each) for each in ids])


def run(statement: str) -> None:
    with connections[POSTGRES].cursor() as cursor:
        cursor.execute(statement)


class TestClaims:
    def test_a_second_claim_skips_the_row_that_the_first_is_claiming(self, queue, other):
        put(queue, "one", "two")
        other.begin()
        first = other.call(partial(queue.claim, worker="a"))
        with Elsewhere(POSTGRES) as third:  # must not wait for the open transaction
            second = third.call(partial(queue.claim, worker="b"))
            nothing = third.call(partial(queue.claim, worker="b"))
        other.commit()
        assert (first.id, second.id, nothing) == ("one", "two", None)

    def test_a_batch_skips_the_rows_that_another_is_claiming(self, queue, other):
        for tenant in ("a", "b", "c"):
            put(queue, "one", "two", "three", tenant=tenant)
        other.begin()
        first = other.call(partial(queue.claim_many, worker="a", limit=4))
        with Elsewhere(POSTGRES) as third:
            second = third.call(partial(queue.claim_many, worker="b", limit=100))
        other.commit()
        assert len(first) == 4
        assert len(second) == 5
        assert not {item.job_id for item in first} & {item.job_id for item in second}

    def test_a_claim_rolled_back_leaves_the_item_claimable(self, queue, other):
        put(queue, "one")
        other.begin()
        other.call(partial(queue.claim, worker="a"))
        other.rollback()
        assert queue.claim(worker="b").fence == 1

    def test_a_promotion_in_an_open_transaction_does_not_stop_another_claim(self, queue, other):
        soon = queue.moves.now() + timedelta(seconds=30)
        queue.enqueue_many(
            [WorkItem(tenant="acme", id=each, available_at=soon) for each in ("one", "two")]
        )
        put(queue, "ready")
        queue.advance(31)
        other.begin()
        assert other.call(partial(queue.moves.promote, "default")).promoted == 2
        with Elsewhere(POSTGRES) as third:
            assert third.call(partial(queue.claim, worker="b")).id == "ready"
        other.commit()

    def test_what_became_due_is_seen_by_the_very_next_claim(self, queue):
        due = queue.moves.now().replace(year=9000)
        queue.enqueue(WorkItem(tenant="acme", id="later", available_at=due))
        assert queue.claim(worker="w") is None
        queue.advance((due - queue.moves.now()).total_seconds() + 1)
        assert queue.claim(worker="w").id == "later"

    def test_a_slow_claims_turn_is_not_the_newest_and_is_ignored(self, queue, other):
        for tenant in ("a", "b", "c", "d"):
            put(queue, "one", "two", tenant=tenant)
        other.begin()
        slow = other.call(partial(queue.claim, worker="slow"))
        served = [queue.claim(worker="quick").tenant for _ in range(3)]
        other.commit()
        following = queue.claim(worker="quick").tenant
        assert slow.tenant == "a"
        # Its row is locked, not its tenant: the others began at the same turn.
        assert served == ["a", "b", "c"]
        assert following == "d"

    def test_the_log_of_turns_is_trimmed_by_the_claims(self, queue):
        queue.enqueue_many(WorkItem(tenant="acme") for _ in range(350))
        for _ in range(350):
            queue.claim(worker="w")
        assert Turn.objects.using(POSTGRES).count() <= 200


class TestSettling:
    def test_a_completion_and_the_reaper_meet_and_the_completion_wins(self, queue, other):
        put(queue, "one")
        item = queue.claim(worker="w", lease_seconds=30)
        other.begin()
        other.call(partial(queue.complete, "one", tenant="acme", worker="w", fence=item.fence))
        queue.advance(60)
        assert queue.reap() == ()  # passes over the lease that is being settled
        other.commit()
        assert queue.reap() == ()
        assert queue.get("one", tenant="acme").state is WorkState.COMPLETED

    def test_the_reaper_and_a_completion_meet_and_the_late_completion_is_refused(
        self, queue, other
    ):
        put(queue, "one")
        item = queue.claim(worker="w", lease_seconds=30)
        reaper = DatabaseTestQueue(POSTGRES)
        reaper.advance(60)
        other.begin()
        assert len(other.call(reaper.reap)) == 1
        with Elsewhere(POSTGRES) as late:
            completion = late.start(
                partial(queue.complete, "one", tenant="acme", worker="w", fence=item.fence)
            )
            late.wait_until_blocked(completion)
            other.commit()
            with pytest.raises(LeaseLostError) as refused:
                completion.result(20)
        assert refused.value.reason == "expired"
        assert queue.get("one", tenant="acme").attempts == 1

    def test_two_completions_of_one_claim_count_once_and_both_succeed(self, queue, other):
        put(queue, "one")
        item = queue.claim(worker="w")
        complete = partial(queue.complete, "one", tenant="acme", worker="w", fence=item.fence)
        other.begin()
        other.call(partial(complete, result=1))
        with Elsewhere(POSTGRES) as twin:
            repeated = twin.start(partial(complete, result=2))
            twin.wait_until_blocked(repeated)
            other.commit()
            assert repeated.result(20).result == 1
        assert queue.stats().completed == 1

    def test_a_completion_and_a_failure_of_one_claim_have_one_winner(self, queue, other):
        put(queue, "one")
        item = queue.claim(worker="w")
        names = {"tenant": "acme", "worker": "w", "fence": item.fence}
        other.begin()
        other.call(partial(queue.fail, "one", error="broken", **names))
        with Elsewhere(POSTGRES) as twin:
            completion = twin.start(partial(queue.complete, "one", **names))
            twin.wait_until_blocked(completion)
            other.commit()
            with pytest.raises(LeaseLostError):
                completion.result(20)
        assert queue.get("one", tenant="acme").failures == ("broken",)

    def test_a_settlement_that_meets_a_renewal_is_not_lost(self, queue, other):
        put(queue, "one")
        item = queue.claim(worker="w")
        other.begin()
        other.call(partial(queue.heartbeat, "one", tenant="acme", worker="w"))
        with Elsewhere(POSTGRES) as worker:
            completion = worker.start(
                partial(queue.complete, "one", tenant="acme", worker="w", fence=item.fence)
            )
            worker.wait_until_blocked(completion)
            other.commit()
            assert completion.result(20).state is WorkState.COMPLETED

    def test_a_lease_locked_by_somebody_does_not_stop_the_renewal_of_the_others(self, queue, other):
        put(queue, "one", "two")
        claims = [(item.job_id, item.fence) for item in queue.claim_many(worker="w", limit=2)]
        locked = Lease.objects.using(POSTGRES).select_for_update().filter(pk=claims[0][0])
        other.begin()
        other.call(lambda: list(locked))
        with Elsewhere(POSTGRES) as supervisor:
            renewed = supervisor.call(partial(queue.moves.renew, "w", claims, wait=False))
        other.commit()
        assert [*renewed] == [claims[1][0]]

    def test_eight_reapers_charge_each_lapse_once(self, queue):
        queue.enqueue_many(WorkItem(tenant=f"t{n % 5}") for n in range(400))
        while queue.claim_many(worker="w", limit=200, lease_seconds=5):
            pass
        queue.advance(10)
        with crowd(POSTGRES, 8) as others:
            passes = [each.start(queue.reap) for each in others]
            reaped = [item.job_id for each in passes for item in each.result(60)]
        assert len(reaped) == len(set(reaped)) == 400
        assert queue.stats().reaped == 400

    def test_adoption_spares_the_claims_of_living_boots(self, queue):
        put(queue, "one", "two", "three")
        for boot in ("old", "twin", "own"):
            request = ClaimRequest(queue="default", worker="w", limit=1, boot=boot)
            queue.claim_for(request)
        adopted = queue.moves.adopt("w", spare=["twin", "own"])
        assert len(adopted) == 1
        boots = Lease.objects.using(POSTGRES).order_by("boot").values_list("boot", flat=True)
        assert list(boots) == ["own", "twin"]


class TestEnqueueing:
    def test_an_item_of_an_open_transaction_is_not_claimed(self, queue, other):
        other.begin()
        other.call(partial(put, queue, "one"))
        assert queue.claim(worker="w") is None
        other.commit()
        assert queue.claim(worker="w").id == "one"

    def test_an_item_whose_transaction_is_rolled_back_never_existed(self, queue):
        with transaction.atomic(using=POSTGRES):
            put(queue, "one")
            transaction.set_rollback(True, using=POSTGRES)
        assert queue.claim(worker="w") is None
        assert queue.stats().depth == 0

    @pytest.mark.parametrize("names", [{"id": "same"}, {"dedupe_key": "same"}])
    def test_of_two_enqueued_at_once_the_second_waits_and_is_answered_with_the_first(
        self, queue, other, names
    ):
        other.begin()
        first = other.call(partial(queue.enqueue, WorkItem(tenant="acme", **names)))
        with Elsewhere(POSTGRES) as twin:
            second = twin.start(partial(queue.enqueue, WorkItem(tenant="acme", **names)))
            twin.wait_until_blocked(second)
            other.commit()
            assert second.result(20).job_id == first.job_id
        assert queue.stats().duplicates_suppressed == 1

    @pytest.mark.parametrize("names", [{"id": "same"}, {"dedupe_key": "same"}])
    def test_of_two_enqueued_at_once_the_second_is_stored_if_the_first_is_taken_back(
        self, queue, other, names
    ):
        other.begin()
        other.call(partial(queue.enqueue, WorkItem(tenant="acme", **names)))
        with Elsewhere(POSTGRES) as twin:
            second = twin.start(partial(queue.enqueue, WorkItem(tenant="acme", **names)))
            twin.wait_until_blocked(second)
            other.rollback()
            second.result(20)
        assert queue.stats().depth == 1

    def test_a_key_that_is_freed_while_another_waits_for_it_has_one_live_item(self, queue, other):
        put(queue, "first")
        keyed = queue.enqueue(WorkItem(tenant="acme", id="old", dedupe_key="k"))
        for item in queue.claim_many(worker="w", limit=2):
            queue.complete(item.id, tenant="acme", worker="w")
        other.begin()
        new = other.call(partial(queue.enqueue, WorkItem(tenant="acme", id="new", dedupe_key="k")))
        with Elsewhere(POSTGRES) as twin:
            second = twin.start(
                partial(queue.enqueue, WorkItem(tenant="acme", id="newer", dedupe_key="k"))
            )
            twin.wait_until_blocked(second)
            other.commit()
            assert second.result(20).id == "new"
        assert new.job_id > keyed.job_id

    def test_thirty_two_producers_of_one_key_make_one_live_item(self, queue):
        with crowd(POSTGRES, 32) as others:
            offers = [
                each.start(partial(queue.enqueue, WorkItem(tenant="acme", dedupe_key="k")))
                for each in others
            ]
            jobs = {offer.result(60).job_id for offer in offers}
        assert len(jobs) == 1
        assert queue.stats().duplicates_suppressed == 31

    def test_batches_that_share_keys_in_opposite_orders_wait_for_each_other_in_one_order(
        self, queue, other
    ):
        """In a caller's transaction, where a deadlock would not be retried."""
        keys = [f"k{n}" for n in range(50)]
        batches = [
            [WorkItem(tenant="acme", dedupe_key=key) for key in order]
            for order in (keys, keys[::-1])
        ]
        other.begin()
        other.call(partial(queue.enqueue_many, batches[0][:25]))
        with Elsewhere(POSTGRES) as third:
            third.begin()
            second = third.start(partial(queue.enqueue_many, batches[1]))
            third.wait_until_blocked(second)
            other.call(partial(queue.enqueue_many, batches[0][25:]))
            other.commit()
            assert len(second.result(20)) == 50
            third.commit()
        assert queue.stats().depth == 50

    def test_batches_that_share_keys_in_opposite_orders_do_not_deadlock(self, queue):
        keys = [f"k{n}" for n in range(200)]
        orders = [keys, keys[::-1]] * 2
        batches = [[WorkItem(tenant="acme", dedupe_key=key) for key in order] for order in orders]
        with crowd(POSTGRES, len(batches)) as others:
            offers = [
                each.start(partial(queue.enqueue_many, batch))
                for each, batch in zip(others, batches, strict=True)
            ]
            for offer in offers:
                assert len(offer.result(60)) == 200
        assert queue.stats().depth == 200


def test_the_doctor_has_one_picture_of_a_queue_at_work(queue, other, monkeypatch):
    queue.enqueue_many(WorkItem(tenant="acme") for _ in range(20))
    question = doctor._wrong_counters

    def interrupted(using):
        other.call(partial(queue.claim_many, worker="w", limit=5))
        return question(using)

    queue.claim(worker="v")
    with monkeypatch.context() as patched:
        patched.setattr(doctor, "_wrong_counters", interrupted)
        assert examine(POSTGRES) == []
    assert queue.stats().claimed == 6


def test_folding_the_counters_under_way_changes_no_figure(queue, other):
    queue.enqueue_many(WorkItem(tenant="acme") for _ in range(50))
    for _ in range(20):
        queue.claim(worker="w")
    before = queue.stats()
    other.begin()
    other.call(queue.moves.fold_counters)
    queue.claim(worker="w")  # a delta beside the fold
    during = queue.stats()
    other.commit()
    after = queue.stats()
    assert (before.depth, before.claimed) == (30, 20)
    assert (during.depth, during.claimed) == (after.depth, after.claimed) == (29, 21)
    queue.moves.fold_counters()
    assert Counter.objects.using(POSTGRES).count() == 1
    assert connections[POSTGRES].in_atomic_block is False


class TestOperators:
    @pytest.mark.parametrize("delay", [0.0, 60.0])
    def test_a_cancel_does_not_take_the_row_of_a_later_claim_for_the_one_it_saw(
        self, queue, other, monkeypatch, delay
    ):
        """Between its look and its delete the item is claimed, and its attempt fails."""
        queue.enqueue(WorkItem(tenant="acme", id="x"))
        leave, met = Operator._leave, []

        def fail_elsewhere():
            claim = queue.claim(worker="w")
            queue.fail("x", tenant="acme", worker="w", error="e", delay_seconds=delay)
            return claim

        def leave_late(self, row):
            if not met:
                met.append(other.call(fail_elsewhere))
            return leave(self, row)

        monkeypatch.setattr(Operator, "_leave", leave_late)
        cancelled = queue.cancel("x", tenant="acme")
        assert (cancelled.state, cancelled.attempts, cancelled.fence) == ("cancelled", 1, 1)
        assert examine(POSTGRES) == []
        assert queue.enqueue(WorkItem(tenant="acme", id="x")).fence == 1


@pytest.mark.parametrize(
    "sweep",
    [
        lambda moves: moves.fold_counters(),
        lambda moves: moves.trim_turns("default", "", 1_000),
    ],
    ids=["fold_counters", "trim_turns"],
)
def test_a_sweep_in_an_open_transaction_does_not_stop_another(queue, other, sweep):
    """Acceptances and claims sweep too, in whatever transaction they are."""
    put(queue, "one", "two")
    queue.claim(worker="w")
    queue.claim(worker="w")
    other.begin()
    other.call(partial(sweep, queue.moves))
    with Elsewhere(POSTGRES) as third:
        third.call(partial(sweep, queue.moves))
    other.commit()


def test_an_adoption_locks_in_the_order_of_a_batch(queue, other):
    put(queue, "one", "two")
    one = queue.claim_many(worker="w", limit=2)[0].job_id
    Lease.objects.using(POSTGRES).filter(pk=one).update(process=1)  # now behind the other one
    other.begin()
    other.call(partial(queue.complete, "one", tenant="acme", worker="w"))
    with Elsewhere(POSTGRES) as restarted:
        restarted.begin()
        adoption = restarted.start(partial(queue.moves.adopt, "w"))
        restarted.wait_until_blocked(adoption)
        other.call(partial(queue.complete, "two", tenant="acme", worker="w"))
        other.commit()
        assert adoption.result(20) == {}
        restarted.commit()


def test_a_cancel_that_met_a_transaction_crosswise_is_made_again(queue, other, monkeypatch):
    """One has the item's lease and waits for its body, the other one the body."""
    put(queue, "one")
    queue.claim(worker="w")
    locked, looked, go_on = Operator._locked, threading.Event(), threading.Event()

    def locked_and_held(self, wish):
        row = locked(self, wish)
        looked.set()
        assert go_on.wait(20)
        return row

    monkeypatch.setattr(Operator, "_locked", locked_and_held)
    other.call(partial(run, "set deadlock_timeout = '1min'"))
    other.begin()
    other.call(partial(queue.complete, "one", tenant="acme", worker="w"))
    with Elsewhere(POSTGRES) as operator:
        operator.call(partial(run, "set deadlock_timeout = '10ms'"))
        cancel = operator.start(partial(queue.cancel, "one", tenant="acme"))
        assert looked.wait(20)
        again = other.start(partial(queue.enqueue, WorkItem(tenant="acme", id="one")))
        other.wait_until_blocked(again)
        go_on.set()
        accepted = again.result(20)
        other.commit()
        cancelled = cancel.result(20)
    assert (cancelled.job_id, cancelled.state) == (accepted.job_id, WorkState.CANCELLED)
