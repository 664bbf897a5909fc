"""Retention beside everybody else, on two connections: what moved meanwhile stays."""

from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connections
from django.db.models import F

from django_workqueue import QueuePolicy, WorkItem, WorkItemNotFoundError, WorkState
from django_workqueue.doctor import examine
from django_workqueue.models import DeadLetter, Failure, Finished, QueueItem
from django_workqueue.testing import DatabaseTestQueue, make_queue
from tests.elsewhere import Elsewhere

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

POSTGRES = "postgresql"


@pytest.fixture
def queue() -> Iterator[DatabaseTestQueue]:
    """Everything that has ended may go at once."""
    policy = QueuePolicy(retention_seconds=0, dead_letter_retention_seconds=0)
    queue = make_queue(POSTGRES, policy)
    yield queue
    assert examine(POSTGRES) == []


@pytest.fixture
def other() -> Iterator[Elsewhere]:
    with Elsewhere(POSTGRES) as other:
        yield other


def end(queue: DatabaseTestQueue, state: str, name: str = "one", **fields: Any) -> WorkItem:
    """Return an item that has ended in *state*, with a failure."""
    queue.enqueue(WorkItem(tenant="acme", id=name, **fields))
    item = queue.claim(worker="w")
    assert item.id == name
    names = {"tenant": "acme", "worker": "w"}
    if state == "completed":
        return queue.complete(name, **names)
    dead = queue.fail(name, **names, error="boom", retryable=False)
    if state == "cancelled":
        return queue.discard(name, tenant="acme", by="op", reason="r")
    return dead


def is_gone(item: WorkItem) -> bool:
    bodies, failures = QueueItem.objects.using(POSTGRES), Failure.objects.using(POSTGRES)
    there = bodies.filter(pk=item.job_id).exists()
    assert there or not failures.filter(item_id=item.job_id).exists()
    return not there


def run(statement: str, *given: Any) -> None:
    with connections[POSTGRES].cursor() as cursor:
        cursor.execute(statement, given)


class TestAgainstRequeue:
    @pytest.mark.parametrize("state", ["cancelled", "dead_lettered"])
    def test_an_item_that_is_being_requeued_is_passed_over(self, queue, other, state):
        item, beside = end(queue, state), end(queue, "completed", "two")
        other.begin()
        other.call(partial(queue.requeue, "one", tenant="acme"))
        with Elsewhere(POSTGRES) as third:  # must not wait for the open transaction
            assert third.call(queue.prune) == 1
        other.commit()
        assert is_gone(beside)
        assert queue.prune() == 0
        assert queue.get("one", tenant="acme").state is WorkState.QUEUED
        assert queue.claim(worker="w").failures == ("boom",)
        assert item.job_id == queue.get("one", tenant="acme").job_id

    @pytest.mark.parametrize("state", ["cancelled", "dead_lettered"])
    def test_a_requeue_taken_back_leaves_it_to_the_next_prune(self, queue, other, state):
        item = end(queue, state)
        other.begin()
        other.call(partial(queue.requeue, "one", tenant="acme"))
        assert queue.prune() == 0
        other.rollback()
        assert queue.prune() == 1
        assert is_gone(item)

    @pytest.mark.parametrize("state", ["cancelled", "dead_lettered"])
    def test_an_item_that_is_being_pruned_is_not_found(self, queue, other, state):
        item = end(queue, state)
        other.begin()
        assert other.call(queue.prune) == 1
        with Elsewhere(POSTGRES) as operator:
            requeue = operator.start(partial(queue.requeue, "one", tenant="acme"))
            operator.wait_until_blocked(requeue)
            other.commit()
            with pytest.raises(WorkItemNotFoundError):
                requeue.result(20)
        assert is_gone(item)

    @pytest.mark.parametrize("state", ["cancelled", "dead_lettered"])
    def test_a_prune_taken_back_leaves_it_to_the_requeue(self, queue, other, state):
        end(queue, state)
        other.begin()
        assert other.call(queue.prune) == 1
        with Elsewhere(POSTGRES) as operator:
            requeue = operator.start(partial(queue.requeue, "one", tenant="acme"))
            operator.wait_until_blocked(requeue)
            other.rollback()
            assert requeue.result(20).state is WorkState.QUEUED
        assert queue.prune() == 0

    @pytest.mark.parametrize("place", ["finished", "deadletter"])
    @pytest.mark.parametrize(
        "change", ["delete from {place}", "update {place} set keep_until = now() + '1 day'"]
    )
    def test_what_it_saw_is_looked_at_again_in_the_very_delete(self, queue, other, place, change):
        """At the last gate: it has chosen and locked the item, and then its row changes."""
        state = {"finished": "completed", "deadletter": "dead_lettered"}[place]
        item, beside = end(queue, state), end(queue, state, "two")
        table = f"django_workqueue_{place}"
        other.begin()
        change = change.format(place=table)
        other.call(partial(run, f"{change} where item = %s", item.job_id))
        with Elsewhere(POSTGRES) as third:
            prune = third.start(queue.prune)
            third.wait_until_blocked(prune)
            other.commit()
            assert prune.result(20) == 1
        assert (is_gone(item), is_gone(beside)) == (False, True)
        assert Failure.objects.using(POSTGRES).filter(item_id=item.job_id).exists() == (
            state == "dead_lettered"
        )
        if change.startswith("delete"):  # put right what this test broke
            run("delete from django_workqueue_queueitem where id = %s", item.job_id)
            run("delete from django_workqueue_failure where item = %s", item.job_id)
            figure = {"finished": "completed", "deadletter": "dead_lettered"}[place]
            run(f"insert into django_workqueue_counter (queue, {figure}) values ('default', -1)")

    def test_paused_and_requeued_items_survive_whatever_the_time(self, queue):
        queue.enqueue_many(WorkItem(tenant="acme", id=name) for name in ("paused", "back"))
        queue.claim_many(worker="w", limit=2)
        queue.pause("paused", tenant="acme", worker="w")
        queue.fail("back", tenant="acme", worker="w", error="x", retryable=False)
        queue.requeue("back", tenant="acme")
        queue.advance(timedelta(days=4000).total_seconds())
        assert queue.prune() == 0
        states = [queue.get(name, tenant="acme").state for name in ("paused", "back")]
        assert states == [WorkState.PAUSED, WorkState.QUEUED]


class TestLocks:
    def test_locked_bodies_are_skipped_and_go_the_next_time(self, queue, other):
        items = [end(queue, "completed", f"i{n}") for n in range(5)]
        other.begin()
        locked = {items[1].job_id, items[3].job_id}
        other.call(partial(QueueItem.bodies.db_manager(POSTGRES).lock, locked))
        with Elsewhere(POSTGRES) as third:
            assert third.call(queue.prune) == 3
        assert {item.job_id for item in items if not is_gone(item)} == locked
        other.commit()
        assert queue.prune() == 2

    def test_two_sweeps_at_once_delete_and_count_each_item_once(self, queue, other):
        items = [end(queue, "completed", f"i{n}") for n in range(4)]
        other.begin()
        assert other.call(partial(queue.prune, limit=2)) == 2
        with Elsewhere(POSTGRES) as third:
            assert third.call(partial(queue.prune, limit=4)) == 2
        other.commit()
        assert all(map(is_gone, items))
        assert queue.stats().completed == 0

    def test_a_claim_and_a_settlement_never_wait_for_a_sweep(self, queue, other):
        for n in range(5):
            end(queue, "completed", f"i{n}")
        queue.enqueue_many(WorkItem(tenant="acme", id=name) for name in ("held", "due"))
        queue.claim(worker="w")
        other.begin()
        assert other.call(queue.prune) == 5
        with Elsewhere(POSTGRES) as third:
            third.call(partial(queue.complete, "held", tenant="acme", worker="w"))
            assert third.call(partial(queue.claim, worker="w")).id == "due"
            third.call(partial(queue.enqueue, WorkItem(tenant="acme", id="new")))
            assert third.call(queue.stats).depth == 1
        other.commit()


class TestSuccession:
    def acceptances(self, queue: DatabaseTestQueue, states: list[str]) -> list[WorkItem]:
        """Acceptances of one id, oldest first, each of which has ended."""
        return [end(queue, state) for state in states]

    def keep(self, *items: WorkItem) -> None:
        """These aren't over yet."""
        for place in (Finished, Finished.item.field.model):
            place.objects.using(POSTGRES).filter(item_id__in=[i.job_id for i in items]).update(
                keep_until=F("keep_until") + timedelta(days=1)
            )

    def holder(self) -> int:
        bodies = QueueItem.objects.using(POSTGRES)
        return int(bodies.get(item_id="one", id_freed=False).pk)

    def test_the_id_goes_to_the_newest_older_acceptance_with_its_fence(self, queue):
        first, second, third = self.acceptances(queue, ["cancelled", "cancelled", "completed"])
        self.keep(first, second)
        assert queue.prune() == 1
        assert self.holder() == second.job_id
        assert queue.get("one", tenant="acme").fence == third.fence == 3

    def test_an_heir_that_is_over_too_goes_in_the_same_batch(self, queue):
        items = self.acceptances(queue, ["completed"] * 4)
        assert queue.prune() == 4
        assert all(map(is_gone, items))

    @pytest.mark.parametrize(
        ("verb", "more", "place"),
        [
            ("complete", {}, Finished),
            ("fail", {"error": "boom", "retryable": False}, DeadLetter),
        ],
    )
    def test_an_heir_after_which_nothing_was_claimed_is_still_known_by_its_settlement(
        self, queue, verb, more, place
    ):
        queue.enqueue(WorkItem(tenant="acme", id="one"))
        fence = queue.claim(worker="w").fence
        settle = partial(getattr(queue, verb), "one", tenant="acme", worker="w", fence=fence)
        first = settle(**more)
        later = F("keep_until") + timedelta(days=1)
        place.objects.using(POSTGRES).filter(item_id=first.job_id).update(keep_until=later)
        queue.enqueue(WorkItem(tenant="acme", id="one"))
        queue.cancel("one", tenant="acme")
        assert queue.prune() == 1
        assert settle(**more).job_id == first.job_id

    @pytest.mark.parametrize("limit", [1, 2, 3])
    def test_small_batches_hand_the_id_on_step_by_step(self, queue, limit):
        items = self.acceptances(queue, ["completed"] * 7)
        # The newest first, the other way round than they were accepted.
        for n, item in enumerate(reversed(items)):
            Finished.objects.using(POSTGRES).filter(pk=item.job_id).update(
                keep_until=queue.moves.now() - timedelta(seconds=100 - n)
            )
        gone = 0
        while gone < 7:
            pruned = queue.prune(limit=limit)
            assert pruned
            gone += pruned
            assert examine(POSTGRES) == []
            if gone < 7:
                left = [item for item in items if not is_gone(item)]
                assert self.holder() == left[-1].job_id
                assert queue.get("one", tenant="acme").fence == 7

    def test_a_locked_heir_keeps_its_predecessor(self, queue, other):
        first, second = self.acceptances(queue, ["cancelled", "completed"])
        self.keep(first)
        other.begin()
        other.call(partial(QueueItem.bodies.db_manager(POSTGRES).lock, [first.job_id]))
        with Elsewhere(POSTGRES) as third:
            assert third.call(queue.prune) == 0
        other.commit()
        assert not is_gone(second)
        assert queue.prune() == 1
        assert self.holder() == first.job_id

    def test_a_new_acceptance_takes_the_id_before_the_sweep(self, queue, other):
        first, second = self.acceptances(queue, ["cancelled", "completed"])
        self.keep(first)
        other.begin()
        new = other.call(partial(queue.enqueue, WorkItem(tenant="acme", id="one")))
        with Elsewhere(POSTGRES) as third:
            assert third.call(queue.prune) == 0
        other.commit()
        assert queue.prune() == 1
        assert (is_gone(first), is_gone(second)) == (False, True)
        assert self.holder() == new.job_id
        assert queue.claim(worker="w").fence == 3

    @pytest.mark.parametrize("heir", [True, False])
    @pytest.mark.parametrize("kept", [True, False])
    def test_a_new_acceptance_waits_for_the_sweep_of_the_holder(self, queue, other, heir, kept):
        first, second = self.acceptances(queue, ["cancelled", "completed"])
        if heir:
            self.keep(first)
        other.begin()
        assert other.call(queue.prune) == (1 if heir else 2)
        with Elsewhere(POSTGRES) as producer:
            new = producer.start(partial(queue.enqueue, WorkItem(tenant="acme", id="one")))
            producer.wait_until_blocked(new)
            if kept:
                other.commit()
            else:
                other.rollback()
            accepted = new.result(20)
        assert self.holder() == accepted.job_id
        # It goes on from the last claim, while anything of the id is known.
        assert queue.claim(worker="w").fence == (3 if heir or not kept else 1)
        assert is_gone(second) == kept

    def test_an_older_acceptance_that_takes_the_id_back_is_no_heir(self, queue, other):
        first, second = self.acceptances(queue, ["cancelled", "completed"])
        other.begin()
        other.call(partial(queue.requeue, "one", tenant="acme", job_id=first.job_id))
        with Elsewhere(POSTGRES) as third:
            assert third.call(queue.prune) == 0
        other.commit()
        assert queue.prune() == 1
        assert is_gone(second)
        assert self.holder() == first.job_id
        assert queue.claim(worker="w").fence == 3

    def test_a_requeue_of_the_heir_waits_for_the_succession(self, queue, other):
        first, second = self.acceptances(queue, ["cancelled", "completed"])
        self.keep(first)
        other.begin()
        assert other.call(queue.prune) == 1
        with Elsewhere(POSTGRES) as operator:
            requeue = operator.start(
                partial(queue.requeue, "one", tenant="acme", job_id=first.job_id)
            )
            operator.wait_until_blocked(requeue)
            other.commit()
            assert requeue.result(20).state is WorkState.QUEUED
        assert is_gone(second)
        claimed = queue.claim(worker="w")
        assert (claimed.job_id, claimed.fence) == (first.job_id, 3)
