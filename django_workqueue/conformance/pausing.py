"""What waits for a person: pause, resume."""

from __future__ import annotations

from typing import Any

from django_workqueue.conformance._bench import (
    HOLDER_VERBS,
    Bench,
    assert_near,
    ids,
    refused,
    seconds_between,
    tenants,
)
from django_workqueue.exceptions import LeaseLostError, PayloadError
from django_workqueue.items import WorkItem, WorkState


class Pausing(Bench):
    def paused(self, item_id: str | None = None, **fields: Any) -> WorkItem:
        return self.in_state(WorkState.PAUSED, item_id, **fields)

    def test_a_paused_item_waits_for_a_person(self) -> None:
        """SPEC 2, 4."""
        self.start(retention_seconds=0)
        paused = self.paused()
        assert (paused.state, paused.live, paused.held) == (WorkState.PAUSED, True, False)
        assert (paused.worker, paused.first_claimed_at, paused.lease_expires_at) == (None,) * 3
        self.wait(100_000)
        assert self.nothing_due()
        assert self.queue.reap() == self.queue.adopt(worker="w1") == ()
        assert self.queue.prune() == 0
        assert self.look(paused) == paused
        assert self.figures().oldest_age_seconds == 0.0

    def test_a_pause_counts_no_attempt(self) -> None:
        """SPEC 4."""
        self.start(max_attempts=2)
        self.say("fail", self.take_new("i-1"))
        for fence in (2, 3, 4):
            paused = self.say("pause", self.take())
            assert (paused.attempts, paused.attempt, paused.failures) == (1, 1, ("boom",))
            assert (paused.max_attempts, paused.fence) == (2, fence)
            self.operate("resume", paused)
        assert self.say("fail", self.take()).state is WorkState.DEAD_LETTERED

    def test_a_paused_item_keeps_its_id_and_key(self) -> None:
        """SPEC 4."""
        self.start()
        paused = self.paused("i-1", dedupe_key="k")
        assert self.put("i-1") == paused
        assert self.put("i-2", dedupe_key="k") == paused
        self.expect(paused=1)
        assert self.figures().duplicates_suppressed == 2

    def test_paused_items_take_no_room_and_are_never_refused_on_their_return(self) -> None:
        """SPEC 1.1."""
        self.start(max_depth=1)
        paused = self.paused("a")
        self.put("b")
        assert self.operate("resume", paused).state is WorkState.QUEUED
        self.expect(depth=2, due=2)

    def test_a_pause_is_no_repetition_once_its_item_was_resumed(self) -> None:
        """SPEC 1.3: its worker is refused with every verb."""
        self.start()
        held = self.take_new()
        resumed = self.operate("resume", self.say("pause", held))
        for verb in HOLDER_VERBS:
            for fence in (held.fence, None):
                with refused(LeaseLostError, reason="expired", holder=None, worker="w1"):
                    self.say(verb, held, fence=fence)
        assert self.look(held) == resumed
        new = self.take("w2")
        for verb in HOLDER_VERBS:
            with refused(LeaseLostError, reason="taken", holder="w2"):
                self.say(verb, held)
        assert self.look(held) == new

    def test_a_pause_is_no_repetition_once_its_item_was_cancelled(self) -> None:
        """SPEC 1.3."""
        self.start()
        held = self.take_new()
        cancelled = self.operate("cancel", self.say("pause", held))
        for verb in HOLDER_VERBS:
            with refused(LeaseLostError, reason="expired"):
                self.say(verb, held)
        assert self.look(held) == cancelled

    def test_a_resumed_item_is_due_at_once(self) -> None:
        """SPEC 4."""
        self.start(backoff_seconds=100, lease_seconds=300)
        paused = self.paused()
        resumed = self.operate("resume", paused)
        assert resumed.max_attempts == paused.max_attempts
        taken = self.take("w2")
        assert (taken.id, taken.fence, taken.attempt) == (paused.id, 2, 1)
        assert_near(seconds_between(taken.first_claimed_at, taken.lease_expires_at), 300)

    def test_a_resumed_item_has_at_least_one_attempt_left(self) -> None:
        """SPEC 4: also one that was paused in its last."""
        self.start(max_attempts=1)
        resumed = self.operate("resume", self.paused())
        assert (resumed.attempts, resumed.max_attempts) == (0, 1)
        dead = self.say("fail", self.take())
        assert (dead.state, dead.failures) == (WorkState.DEAD_LETTERED, ("boom",))

    def test_a_resumed_item_keeps_its_place(self) -> None:
        """SPEC 4."""
        self.start()
        for name, priority in (("first", 0), ("second", 0), ("urgent", 9)):
            self.put(name, priority=priority)
        items = self.take_many(2)
        assert ids(items) == ["urgent", "first"]
        for item in reversed(items):
            self.operate("resume", self.say("pause", item))
        assert ids(self.take_many(3)) == ["urgent", "first", "second"]

    def test_a_resumed_item_waits_for_its_tenants_turn(self) -> None:
        """SPEC 5."""
        self.start()
        self.put_for("abc")
        self.operate("resume", self.say("pause", self.take()))
        assert tenants(self.take_many(3)) == ["b", "c", "a"]

    def test_a_resumed_item_keeps_its_pin(self) -> None:
        """SPEC 4."""
        self.start()
        paused = self.paused(deployment_id="blue")
        assert self.operate("resume", paused).deployment_id == "blue"
        assert self.nothing_due()
        assert self.nothing_due(deployment_id="green")
        assert self.take(deployment_id="blue").id == paused.id

    def test_a_resumed_item_may_get_another_payload(self) -> None:
        """SPEC 4."""
        self.start()
        item = self.paused(payload={"n": 1})
        for given, kept in ((None, {"n": 1}), ({"list": [2]}, {"list": [2]}), ({}, {})):
            assert self.operate("resume", item, payload=given).payload == kept
            item = self.say("pause", self.take())
            assert self.look(item).payload == item.payload == kept

    def test_a_payload_that_can_not_be_stored_resumes_nothing(self) -> None:
        """SPEC 3, 4."""
        self.start(max_payload_bytes=100)
        paused = self.paused(payload={"n": 1})
        for payload in ({"n": float("nan")}, {"n": "x" * 99}, ["a"], "text"):
            with refused(PayloadError):
                self.operate("resume", paused, payload=payload)
        assert self.look(paused) == paused
