"""What an operator does with the dead and the cancelled: requeue, discard."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from django_workqueue.conformance._bench import (
    HOLDER_VERBS,
    Bench,
    assert_near,
    ids,
    refused,
    tenants,
)
from django_workqueue.exceptions import (
    InvalidTransitionError,
    LeaseLostError,
    PayloadError,
)
from django_workqueue.items import WorkItem, WorkPriority, WorkState


class Requeueing(Bench):
    def test_a_dead_letter_gets_exactly_one_more_attempt(self) -> None:
        """SPEC 4: buried again with all its failures, as often as it is requeued."""
        self.start(max_attempts=2)
        self.say("fail", self.take_new(), error="1")
        dead = self.say("fail", self.take(), error="2")
        for number in (3, 4, 5):
            back = self.operate("requeue", dead)
            assert (back.state, back.attempts, back.max_attempts) == ("queued", number - 1, number)
            assert back.failures == dead.failures
            assert self.queue.dead_letters(tenant="acme") == ()
            self.expect(depth=1, due=1)
            held = self.take()
            assert (held.attempt, held.fence) == (number, number)
            dead = self.say("fail", held, error=str(number))
            assert dead.state is WorkState.DEAD_LETTERED
            assert dead.failures == tuple("12345"[:number])
            assert self.queue.dead_letters(tenant="acme") == (dead,)
            self.expect(dead_lettered=1)

    def test_attempts_that_were_left_are_not_given_back(self) -> None:
        """SPEC 4: max_attempts = attempts + 1, whatever it was."""
        self.start(max_attempts=5)
        dead, cancelled = self.bury(), self.in_state(WorkState.CANCELLED)
        assert [self.operate("requeue", item).max_attempts for item in (dead, cancelled)] == [2, 1]
        for item in self.take_many(2):
            assert self.say("fail", item).state is WorkState.DEAD_LETTERED

    def test_a_lapse_or_an_adoption_uses_the_attempt_up(self) -> None:
        """SPEC 4."""
        self.start(lease_seconds=10)
        for _ in range(2):
            self.operate("requeue", self.bury())
            self.take()
        [adopted, _] = self.queue.adopt(worker="w1")
        assert (adopted.state, adopted.attempts) == (WorkState.DEAD_LETTERED, 2)
        self.operate("requeue", adopted)
        self.take()
        self.wait(10)
        [reaped] = self.queue.reap()
        assert (reaped.state, reaped.attempts) == (WorkState.DEAD_LETTERED, 3)

    def test_what_counts_nothing_leaves_the_attempt(self) -> None:
        """SPEC 4."""
        self.start()
        self.operate("requeue", self.bury())
        self.say("release", self.take())
        back = self.operate("resume", self.say("pause", self.take()))
        assert (back.attempts, back.max_attempts) == (1, 2)
        assert self.say("fail", self.take()).state is WorkState.DEAD_LETTERED

    def test_a_requeued_item_can_complete(self) -> None:
        """SPEC 4: what had failed stays to be seen."""
        self.start()
        self.operate("requeue", self.bury())
        done = self.say("complete", self.take(), result="late")
        assert (done.state, done.result, done.attempt) == (WorkState.COMPLETED, "late", 2)
        assert done.failures == ("boom",)
        self.expect(completed=1)

    def test_a_requeued_item_is_due_at_once(self) -> None:
        """SPEC 3, 4: though it was scheduled, backing off or released with a delay."""
        self.start(backoff_seconds=1000)
        waiting = (
            self.put(available_at=self.now() + timedelta(seconds=1000)),
            self.say("fail", self.take_new()),
            self.say("release", self.take_new(), delay_seconds=1000),
        )
        for item in waiting:
            cancelled = self.operate("cancel", item)
            back = self.operate("requeue", item)
            assert back.available_at == cancelled.available_at
            assert self.look(item) == back
        self.expect(depth=3, due=3)
        assert ids(self.take_many(9)) == ids(waiting)

    def test_a_requeued_item_keeps_its_place(self) -> None:
        """SPEC 4: by priority and acceptance."""
        self.start()
        dead = [self.bury("old"), self.bury("urgent", priority=WorkPriority.URGENT)]
        for name in ("first", "second"):
            self.put(name)
        for item in dead:
            self.operate("requeue", item)
        assert ids(self.take_many(4)) == ["urgent", "old", "first", "second"]

    def test_a_requeued_item_waits_for_its_tenants_turn(self) -> None:
        """SPEC 5."""
        self.start()
        self.put_for("abc")
        self.operate("requeue", self.say("fail", self.take(), retryable=False))
        assert tenants(self.take_many(3)) == ["b", "c", "a"]

    def test_a_requeued_item_keeps_its_pin(self) -> None:
        """SPEC 3."""
        self.start()
        dead = self.in_state(WorkState.DEAD_LETTERED, deployment_id="blue")
        assert self.operate("requeue", dead).deployment_id == "blue"
        assert self.nothing_due()
        assert self.nothing_due(deployment_id="green")
        assert self.take(deployment_id="blue").id == dead.id

    def test_a_requeued_item_has_its_full_age(self) -> None:
        """R13: counted from its acceptance."""
        self.start()
        dead = self.bury()
        self.wait(900)
        self.operate("requeue", dead)
        assert_near(self.figures().oldest_age_seconds, 900)

    def test_a_full_queue_takes_a_requeued_item(self) -> None:
        """SPEC 4."""
        self.start(max_depth=1)
        dead = self.bury()
        self.put()
        assert self.operate("requeue", dead).state is WorkState.QUEUED
        self.expect(depth=2, due=2)

    def test_a_requeued_item_may_get_another_payload(self) -> None:
        """SPEC 4."""
        self.start()
        item = self.bury(payload={"n": 1})
        for given, kept in ((None, {"n": 1}), ({"list": [2]}, {"list": [2]}), ({}, {})):
            assert self.operate("requeue", item, payload=given).payload == kept
            item = self.say("fail", self.take())
            assert self.look(item).payload == item.payload == kept

    def test_a_new_payload_is_not_shared_with_the_caller(self) -> None:
        """SPEC 3."""
        self.start()
        for verb, state in (("requeue", WorkState.CANCELLED), ("resume", WorkState.PAUSED)):
            payload: dict[str, Any] = {"list": [1]}
            item = self.operate(verb, self.in_state(state, queue=verb), payload=payload)
            payload["list"].append(2)
            item.payload["list"].append(3)
            assert self.look(item).payload == {"list": [1]}

    def test_a_payload_that_can_not_be_stored_requeues_nothing(self) -> None:
        """SPEC 3, 4."""
        self.start(max_payload_bytes=100)
        dead = self.bury(payload={"n": 1})
        for payload in ({"n": float("nan")}, {"n": "x" * 99}, ["a"], "text"):
            with refused(PayloadError):
                self.operate("requeue", dead, payload=payload)
        assert self.queue.dead_letters(tenant="acme") == (dead,)
        self.expect(dead_lettered=1)

    def test_an_item_is_requeued_once(self) -> None:
        """SPEC 4."""
        self.start()
        dead = self.bury()
        back = self.operate("requeue", dead)
        with refused(InvalidTransitionError, state="queued", verb="requeue"):
            self.operate("requeue", dead)
        assert self.look(dead) == back

    def test_a_requeued_item_is_live(self) -> None:
        """R14: it answers for its id and its key."""
        self.start()
        back = self.operate("requeue", self.bury("i-1", dedupe_key="k"))
        assert self.put("i-1") == self.put("i-2", dedupe_key="k") == back
        self.expect(depth=1, due=1)


class OldWorkers(Bench):
    """Whoever held an item before it was requeued."""

    def ended(self, verb: str, queue: str) -> tuple[WorkItem, WorkItem]:
        """Return an item as it was claimed, and as it can be requeued after *verb*."""
        held = self.in_state(WorkState.CLAIMED, queue=queue)
        settled = self.say(verb, held, **({"retryable": False} if verb == "fail" else {}))
        return held, settled if verb == "fail" else self.operate("cancel", settled)

    def test_the_old_worker_of_a_requeued_item_is_refused(self) -> None:
        """SPEC 1.3: also if it repeats what it had settled."""
        self.start()
        for verb in ("fail", "pause", "release"):
            held, ended = self.ended(verb, verb)
            back = self.operate("requeue", ended)
            for late in HOLDER_VERBS:
                for fence in (held.fence, None):
                    with refused(LeaseLostError, reason="expired", holder=None, worker="w1"):
                        self.say(late, held, fence=fence)
            assert self.look(held) == back
            new = self.take("w2", queue=verb)
            assert new.fence == 2
            for late in HOLDER_VERBS:
                with refused(LeaseLostError, reason="taken", holder="w2", worker="w1"):
                    self.say(late, held)
            assert self.look(held) == new

    def test_a_settlement_is_no_repetition_where_its_item_came_back_to_by_other_means(self) -> None:
        """SPEC 1.3: the item doesn't stand there still."""
        self.start()
        for verb in ("fail", "pause", "release"):
            held = self.in_state(WorkState.CLAIMED, queue=verb)
            self.operate("cancel", held)
            self.say(verb, held)
            again = self.operate("cancel", self.operate("requeue", held))
            with refused(LeaseLostError, reason="expired"):
                self.say(verb, held)
            assert self.look(held) == again
            self.expect(verb, cancelled=1)

    def test_a_retry_is_no_repetition_once_its_item_was_cancelled_and_requeued(self) -> None:
        """SPEC 1.3."""
        self.start()
        for verb in ("fail", "release"):
            held = self.in_state(WorkState.CLAIMED, queue=verb)
            back = self.operate("requeue", self.operate("cancel", self.say(verb, held)))
            with refused(LeaseLostError, reason="expired"):
                self.say(verb, held)
            assert self.look(held) == back

    def test_the_fence_grows_through_every_operators_verb(self) -> None:
        """SPEC 3: never reset."""
        self.start()
        item = self.take_new("i-1")
        for fence, verbs in enumerate(
            (
                ("pause", "resume"),
                ("pause", "cancel", "requeue"),
                ("release", "cancel", "requeue"),
                ("fail", "requeue"),
                ("fail", "discard", "requeue"),
                ("cancel", "release", "requeue"),
            ),
            start=1,
        ):
            for verb in verbs:
                operated = verb not in HOLDER_VERBS
                answer = self.operate(verb, item) if operated else self.say(verb, item)
                assert answer.fence == fence, verbs
            item = self.take()
            assert item.fence == fence + 1, verbs


class Discarding(Bench):
    def test_a_discarded_dead_letter_is_cancelled(self) -> None:
        """SPEC 4: with everything that is known of it."""
        self.start()
        dead = self.bury(dedupe_key="k")
        discarded = self.operate("discard", dead, by="ann", reason="paid by hand")
        assert discarded == replace(dead, state=WorkState.CANCELLED) == self.look(dead)
        assert self.queue.dead_letters(tenant="acme") == ()
        self.expect(cancelled=1)

    def test_a_discarded_dead_letter_can_be_requeued(self) -> None:
        """SPEC 4."""
        self.start()
        self.operate("requeue", self.operate("discard", self.bury()))
        dead = self.say("fail", self.take())
        assert (dead.state, dead.failures) == (WorkState.DEAD_LETTERED, ("boom", "boom"))
        assert self.queue.dead_letters(tenant="acme") == (dead,)

    def test_pages_go_on_after_a_letter_that_has_left(self) -> None:
        """SPEC 4: requeued, completed, cancelled or discarded since."""
        self.start()
        dead = []
        for number in range(7):
            dead.append(self.bury(f"i-{number}"))
            self.wait(1)
        self.operate("requeue", dead[0])
        self.say("complete", self.take())
        self.operate("requeue", dead[1])
        self.operate("cancel", dead[1])
        self.operate("discard", dead[2])
        self.operate("requeue", dead[4])
        left = [dead[3], dead[5], dead[6]]
        assert self.queue.dead_letters(tenant="acme") == tuple(left)
        for number, after in enumerate(dead):
            page = self.queue.dead_letters(tenant="acme", limit=2, after=after.job_id)
            following = [item for item in left if item in dead[number + 1 :]]
            assert page == tuple(following[:2]), number

    def test_a_second_burial_is_listed_by_its_own_time(self) -> None:
        """V10."""
        self.start()
        first = self.bury()
        self.wait(1)
        second = self.bury()
        self.wait(1)
        self.operate("requeue", first)
        again = self.say("fail", self.take())
        assert self.queue.dead_letters(tenant="acme") == (second, again)
        assert self.queue.dead_letters(tenant="acme", after=second.job_id) == (again,)
