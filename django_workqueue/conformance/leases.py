"""Who holds an item, and for how long: lease, heartbeat, cap, fence, the order of refusals."""

from __future__ import annotations

from django_workqueue.conformance._bench import (
    HOLDER_VERBS,
    Bench,
    assert_near,
    ids,
    refused,
    seconds_between,
)
from django_workqueue.exceptions import LeaseLostError, WorkItemNotFoundError
from django_workqueue.items import WorkItem, WorkState


class Leases(Bench):
    def held_for(self, item: WorkItem) -> float:
        """Return the seconds from the claim's start to the end of its lease."""
        return seconds_between(item.first_claimed_at, item.lease_expires_at)

    def test_a_heartbeat_renews_the_lease(self) -> None:
        """T47."""
        self.start(lease_seconds=300)
        item = self.take_new()
        self.wait(200)
        assert_near(self.held_for(self.say("heartbeat", item)), 500)
        assert_near(self.held_for(self.look(item)), 500)

    def test_a_renewed_lease_is_left_alone(self) -> None:
        """T7."""
        self.start(lease_seconds=100)
        item = self.take_new()
        self.wait(50)
        self.say("heartbeat", item)
        self.wait(50)
        assert self.queue.reap() == ()
        self.wait(50)
        assert ids(self.queue.reap()) == [item.id]

    def test_a_heartbeat_changes_nothing_but_the_expiry(self) -> None:
        """R23."""
        self.start()
        item = self.take_new(payload={"n": 1})
        self.wait(30)
        renewed = self.say("heartbeat", item)
        assert renewed.state is WorkState.CLAIMED
        for name in ("worker", "fence", "attempts", "failures", "first_claimed_at", "payload"):
            assert getattr(renewed, name) == getattr(item, name), name
        assert not renewed.cancel_requested

    def test_a_heartbeat_never_shortens_a_lease(self) -> None:
        """V3: a longer lease was asked for than the policy's."""
        self.start(lease_seconds=30)
        self.put()
        item = self.take(lease_seconds=1200)
        renewed = self.say("heartbeat", item)
        assert renewed.lease_expires_at is not None
        assert item.lease_expires_at is not None
        assert renewed.lease_expires_at >= item.lease_expires_at

    def test_an_asked_lease_is_renewed_by_its_own_length(self) -> None:
        """V3."""
        self.start(lease_seconds=30)
        self.put()
        item = self.take(lease_seconds=1000)
        self.wait(600)
        assert_near(self.held_for(self.say("heartbeat", item)), 1600)

    def test_the_next_claim_has_the_policys_length_again(self) -> None:
        """V3."""
        self.start(lease_seconds=100)
        self.put()
        self.say("release", self.take(lease_seconds=1000))
        item = self.take()
        self.wait(50)
        assert_near(self.held_for(self.say("heartbeat", item)), 150)

    def test_a_claim_is_never_renewed_past_its_cap(self) -> None:
        """SPEC 4, R24."""
        self.start(lease_seconds=100, max_lease_seconds=160)
        item = self.take_new()
        self.wait(80)
        assert_near(self.held_for(self.say("heartbeat", item)), 160)
        self.wait(40)
        assert_near(self.held_for(self.say("heartbeat", item)), 160)

    def test_a_claim_past_its_cap_is_capped(self) -> None:
        """T50."""
        self.start(lease_seconds=100, max_lease_seconds=60)
        item = self.take_new()
        self.wait(61)
        for verb in HOLDER_VERBS:
            with refused(LeaseLostError, reason="capped", item_id=item.id, worker="w1"):
                self.say(verb, item)

    def test_a_claim_is_capped_at_the_very_cap(self) -> None:
        """R23."""
        self.start(lease_seconds=60, max_lease_seconds=60)
        item = self.take_new()
        self.wait(60)
        with refused(LeaseLostError, reason="capped"):
            self.say("heartbeat", item)

    def test_a_capped_claim_goes_at_the_cap(self) -> None:
        """V11."""
        self.start(lease_seconds=50, max_lease_seconds=60)
        item = self.take_new()
        self.wait(40)
        self.say("heartbeat", item)
        self.wait(20)
        assert ids(self.queue.reap()) == [item.id]

    def test_the_cap_counts_from_the_present_claim(self) -> None:
        """R9."""
        self.start(lease_seconds=60, max_lease_seconds=60)
        item = self.take_new()
        self.wait(40)
        self.say("release", item)
        item = self.take()
        self.wait(40)
        assert_near(self.held_for(self.say("heartbeat", item)), 60)

    def test_a_lapsed_claim_can_do_nothing(self) -> None:
        """T48, R26, SPEC 4: even if nobody has taken the item."""
        self.start(lease_seconds=60)
        item = self.take_new()
        self.wait(90)
        for verb in HOLDER_VERBS:
            with refused(LeaseLostError, reason="expired", item_id=item.id, worker="w1"):
                self.say(verb, item)
        assert self.look(item) == item

    def test_a_lease_has_lapsed_at_its_very_end(self) -> None:
        """T26, R8: the bound is inclusive."""
        self.start(lease_seconds=60)
        item = self.take_new()
        self.wait(60)
        assert item.lapsed_at(self.now())
        with refused(LeaseLostError, reason="expired"):
            self.say("complete", item)
        assert ids(self.queue.reap()) == [item.id]

    def test_a_lease_stands_before_its_end(self) -> None:
        """T26."""
        self.start(lease_seconds=60)
        item = self.take_new()
        self.wait(50)
        assert not item.lapsed_at(self.now())
        assert self.say("complete", item).state is WorkState.COMPLETED

    def test_a_claim_never_takes_a_lapsed_lease(self) -> None:
        """R22."""
        self.start(lease_seconds=10)
        item = self.take_new()
        self.wait(1000)
        assert self.nothing_due("w2")
        assert self.take_many(5, "w2") == ()
        assert self.look(item) == item

    def test_an_item_taken_by_another_is_taken(self) -> None:
        """T49."""
        self.start(lease_seconds=10)
        old = self.take_new()
        self.wait(10)
        self.queue.reap()
        new = self.take("w2")
        for verb in HOLDER_VERBS:
            for fence in (old.fence, None):
                with refused(LeaseLostError, reason="taken", holder="w2", worker="w1"):
                    self.say(verb, old, fence=fence)
        assert self.look(new) == new

    def test_a_lost_lease_is_not_retryable(self) -> None:
        """T51."""
        self.start()
        with refused(LeaseLostError, retryable=False):
            self.say("complete", self.put(), worker="w1")

    def test_an_item_that_nobody_holds_is_expired(self) -> None:
        """T55, R26."""
        self.start(backoff_seconds=100)
        backing_off = self.say("fail", self.take_new())
        dead = self.bury()
        done = self.say("complete", self.take_new())
        paused = self.say("pause", self.take_new())
        cancelled = self.operate("cancel", self.put())
        for item in (backing_off, dead, done, paused, cancelled, self.put()):
            for verb in HOLDER_VERBS:
                with refused(LeaseLostError, reason="expired", holder=None, worker="w5"):
                    self.say(verb, item, worker="w5", fence=1)
            assert self.look(item) == item

    def test_an_unknown_item_is_not_found(self) -> None:
        """T9, T52, T56."""
        self.start()
        item = self.take_new("i-1")
        for verb in HOLDER_VERBS:
            with refused(WorkItemNotFoundError, item_id="nope", tenant="acme"):
                arguments = {"error": "boom"} if verb == "fail" else {}
                getattr(self.queue, verb)("nope", tenant="acme", worker="w1", **arguments)
        assert self.look(item) == item

    def test_refusals_come_in_their_order(self) -> None:
        """SPEC 4: not found, then not held, then taken, then capped, then lapsed."""
        self.start(lease_seconds=60, max_lease_seconds=90)
        item = self.take_new()
        self.wait(60)
        for verb in HOLDER_VERBS:
            with refused(WorkItemNotFoundError):
                self.say(verb, item, tenant="other", worker="w2", fence=9)
            with refused(LeaseLostError, reason="taken", holder="w1"):
                self.say(verb, item, worker="w2")
            with refused(LeaseLostError, reason="expired"):
                self.say(verb, item)
        self.wait(30)
        for verb in HOLDER_VERBS:
            with refused(LeaseLostError, reason="taken", holder="w1"):
                self.say(verb, item, worker="w2")
            with refused(LeaseLostError, reason="capped"):
                self.say(verb, item)
        self.queue.reap()
        for verb in HOLDER_VERBS:
            with refused(LeaseLostError, reason="expired", holder=None):
                self.say(verb, item)


class Fences(Bench):
    def test_the_fence_grows_by_one_with_every_claim(self) -> None:
        """SPEC 3: through every way in which an item can come back."""
        self.start(lease_seconds=10, max_attempts=100)
        fences = [self.take_new("i-1").fence]
        for way in ("release", "fail", "reap", "adopt", "complete and enqueue", "bury and enqueue"):
            held = self.queue.get("i-1", tenant="acme")
            if way in ("release", "fail"):
                self.say(way, held)
            elif way == "reap":
                self.wait(10)
                self.queue.reap()
            elif way == "adopt":
                self.queue.adopt(worker="w1")
            else:
                options = {"retryable": False} if "bury" in way else {}
                self.say("fail" if "bury" in way else "complete", held, **options)
                self.put("i-1")
            fences.append(self.take().fence)
        assert fences == [1, 2, 3, 4, 5, 6, 7]

    def test_the_fence_is_shown_wherever_the_item_is(self) -> None:
        """SPEC 3: carried through every place."""
        self.start(backoff_seconds=100)
        assert self.put("i-1").fence is None
        assert self.say("release", self.take()).fence == 1
        assert self.say("fail", self.take(), delay_seconds=50).fence == 2
        self.wait(50)
        held = self.take()
        assert self.say("heartbeat", held).fence == 3
        assert self.say("fail", held, retryable=False).fence == 3
        assert self.put("i-1").fence == 3
        assert self.say("complete", self.take()).fence == 4
        assert self.queue.get("i-1", tenant="acme").fence == 4

    def test_each_item_has_its_own_fence(self) -> None:
        """SPEC 3."""
        self.start()
        self.put_for("abc")
        self.say("release", self.take())
        assert sorted(item.fence or 0 for item in self.take_many(9)) == [1, 1, 2]

    def test_an_older_claim_of_the_same_worker_is_taken(self) -> None:
        """V2: a stale thread must not finish a later claim of its own worker."""
        self.start()
        old = self.take_new()
        self.say("release", old)
        new = self.take()
        for verb in HOLDER_VERBS:
            with refused(LeaseLostError, reason="taken", holder="w1", worker="w1"):
                self.say(verb, old)
        assert self.look(new) == new

    def test_an_older_claim_of_a_lapsed_item_is_taken(self) -> None:
        """SPEC 1.3: while the item is claimed, whoever holds it."""
        self.start(lease_seconds=10)
        old = self.take_new()
        self.say("release", old)
        self.take("w2")
        self.wait(10)
        for verb in HOLDER_VERBS:
            with refused(LeaseLostError, reason="taken", holder="w2"):
                self.say(verb, old)

    def test_a_fence_that_never_was_is_refused(self) -> None:
        """SPEC 1.3."""
        self.start()
        item = self.take_new()
        for verb in HOLDER_VERBS:
            for fence in (0, 2, 2**62):
                with refused(LeaseLostError, reason="taken"):
                    self.say(verb, item, fence=fence)
        assert self.look(item) == item

    def test_without_a_fence_the_worker_and_its_lease_are_enough(self) -> None:
        """SPEC 4."""
        self.start()
        for verb in HOLDER_VERBS:
            self.say(verb, self.take_new(verb), fence=None)
            if self.queue.get(verb, tenant="acme").live:
                self.queue.cancel(verb, tenant="acme")
                self.queue.adopt(worker="w1")

    def test_the_right_fence_of_another_worker_is_not_enough(self) -> None:
        """SPEC 1.3."""
        self.start()
        item = self.take_new()
        for verb in HOLDER_VERBS:
            with refused(LeaseLostError, reason="taken", holder="w1", worker="w2"):
                self.say(verb, item, worker="w2")
        assert self.look(item) == item
