"""What operators may do with an item, and where it leads; what they call off: cancel."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

from asgiref.sync import async_to_sync

from django_workqueue.conformance._bench import (
    HOLDER_VERBS,
    OPERATOR_VERBS,
    Bench,
    assert_near,
    new_item,
    refused,
    seconds_between,
)
from django_workqueue.exceptions import (
    InvalidTransitionError,
    LeaseLostError,
    WorkItemNotFoundError,
)
from django_workqueue.items import WorkItem, WorkState

#: Where an operator's verb leads, by verb and state. Everything else is refused.
LEGAL = {
    ("resume", WorkState.PAUSED): WorkState.QUEUED,
    ("cancel", WorkState.QUEUED): WorkState.CANCELLED,
    ("cancel", WorkState.PAUSED): WorkState.CANCELLED,
    ("cancel", WorkState.CLAIMED): WorkState.CLAIMED,
    ("requeue", WorkState.DEAD_LETTERED): WorkState.QUEUED,
    ("requeue", WorkState.CANCELLED): WorkState.QUEUED,
    ("discard", WorkState.DEAD_LETTERED): WorkState.CANCELLED,
}
#: What no operator's verb changes unless it says so.
KEPT = (
    *("id", "tenant", "queue", "job_id", "handler", "payload", "priority", "dedupe_key"),
    *("deployment_id", "timeout_seconds", "enqueued_at", "available_at", "attempts", "failures"),
    *("fence", "worker", "first_claimed_at", "lease_expires_at", "result"),
)


def counts_of(state: WorkState) -> dict[str, int]:
    """Return the counts of a queue with one item in *state*."""
    return {"depth": 1, "due": 1} if state is WorkState.QUEUED else {state.value: 1}


class Operating(Bench):
    def test_an_operators_verb_leads_where_it_should_and_changes_nothing_else(self) -> None:
        """SPEC 4."""
        self.start()
        fields: dict[str, Any] = {
            "handler": "send",
            "payload": {"n": 1},
            "priority": 7,
            "deployment_id": "blue",
            "timeout_seconds": 5,
        }
        for (verb, state), to in LEGAL.items():
            queue = f"{verb} {state.value}"
            item = self.in_state(state, queue=queue, dedupe_key=queue, **fields)
            moved = self.operate(verb, item, by="ann", reason="because")
            assert moved.state is to, queue
            assert {name: getattr(moved, name) for name in KEPT} == {
                name: getattr(item, name) for name in KEPT
            }
            assert moved.cancel_requested == (to is WorkState.CLAIMED)
            assert self.look(item) == moved
            self.expect(queue, **counts_of(to))

    def test_an_operators_verb_is_refused_in_every_other_state(self) -> None:
        """SPEC 4: and nothing is changed."""
        self.start()
        for state in WorkState:
            item = self.in_state(state, queue=state.value)
            for verb in OPERATOR_VERBS:
                if (verb, state) not in LEGAL:
                    facts = {"item_id": item.id, "state": state.value, "verb": verb}
                    for job_id in (None, item.job_id):
                        with refused(InvalidTransitionError, retryable=False, **facts):
                            self.operate(verb, item, job_id=job_id)
            assert self.look(item) == item
            self.expect(state.value, **counts_of(state))

    def test_an_operators_verb_does_not_find_a_foreign_or_unknown_item(self) -> None:
        """SPEC 1.6."""
        self.start()
        for number, state in enumerate(WorkState):
            item = self.in_state(state, f"i-{number}", queue=state.value)
            self.put(f"j-{number}", "other", queue="elsewhere")
            for verb in (*OPERATOR_VERBS, "get"):
                for job_id in (None, item.job_id):
                    with refused(WorkItemNotFoundError, item_id=item.id, tenant="other"):
                        self.operate(verb, item, tenant="other", job_id=job_id)
                for name in ("nope", f"j-{number}", f"I-{number}"):
                    with refused(WorkItemNotFoundError, item_id=name, tenant="acme"):
                        self.operate(verb, replace(item, id=name))
            assert self.look(item) == item

    def test_a_job_id_is_found_with_its_own_item_id_alone(self) -> None:
        """SPEC 1.6, 4."""
        self.start()
        item, other = self.put("i-1"), self.put("i-2")
        foreign = self.put("i-1", "other")
        for verb in (*OPERATOR_VERBS, "get"):
            for job_id in (other.job_id, foreign.job_id, 0, 2**63 - 1):
                with refused(WorkItemNotFoundError, item_id="i-1", tenant="acme"):
                    self.operate(verb, item, job_id=job_id)
        assert self.queue.get("i-1", tenant="acme", job_id=item.job_id) == item
        assert self.operate("cancel", item, job_id=item.job_id).state is WorkState.CANCELLED
        assert [self.look(each) for each in (other, foreign)] == [other, foreign]

    def test_the_async_twins_of_operators_do_what_their_verbs_do(self) -> None:
        """SPEC 4."""
        queue: Any = self.start(retention_seconds=0)

        async def life() -> None:
            where, who = {"tenant": "acme"}, {"by": "ann", "reason": "because"}
            await queue.aenqueue(new_item("a"))
            held = await queue.aclaim(worker="w1")
            paused = await queue.apause("a", **where, worker="w1", fence=held.fence)
            resumed = await queue.aresume("a", **where, payload={"n": 1}, **who)
            cancelled = await queue.acancel("a", **where, **who)
            requeued = await queue.arequeue("a", **where, payload={"n": 2}, **who)
            assert (resumed.payload, requeued.payload) == ({"n": 1}, {"n": 2})
            hold = await queue.ahold(tenant="acme", **who)
            assert await queue.aholds() == (hold,)
            assert await queue.aclaim(worker="w1") is None
            assert await queue.aunhold(tenant="acme", **who) == hold
            held = await queue.aclaim(worker="w1")
            await queue.afail("a", **where, worker="w1", error="boom")
            discarded = await queue.adiscard("a", **where, job_id=held.job_id, **who)
            assert await queue.aget("a", **where, job_id=held.job_id) == discarded
            assert await queue.aprune(limit=5) == 1
            moves = (paused, resumed, cancelled, requeued, discarded)
            states = ["paused", "queued", "cancelled", "queued", "cancelled"]
            assert [item.state for item in moves] == states

        async_to_sync(life)()


#: How a claim can end without success, and the failure that then counts.
ENDS: dict[str, str | None] = {
    "fail": "boom",
    "fail for good": "boom",
    "fail with a delay": "boom",
    "release": None,
    "release with a delay": None,
    "pause": None,
    "reap": "lease lapsed",
    "adopt": "worker restarted",
}


class Cancelling(Bench):
    def asked(self, item_id: str | None = None, **fields: Any) -> WorkItem:
        """Return a claimed item of which the cancellation was asked."""
        return self.operate("cancel", self.in_state(WorkState.CLAIMED, item_id, **fields))

    def end(self, way: str, held: WorkItem) -> WorkItem:
        """End the claim of *held* in one of the `ENDS`; return the item."""
        if way == "reap":
            self.wait(1000)
            return self.queue.reap()[0]
        if way == "adopt":
            return self.queue.adopt(worker="w1")[0]
        options: dict[str, Any] = {"retryable": False} if "for good" in way else {}
        if "delay" in way:
            options["delay_seconds"] = 500
        return self.say(way.split()[0], held, **options)

    def test_an_item_that_nobody_holds_is_cancelled_at_once(self) -> None:
        """SPEC 4: due, scheduled, backing off, released or paused."""
        self.start(backoff_seconds=100)
        due = self.now() + timedelta(seconds=1000)
        waiting = (
            self.put(available_at=due),
            self.say("fail", self.take_new()),
            self.say("release", self.take_new(), delay_seconds=100),
            self.say("pause", self.take_new()),
            self.put(),
        )
        for item in waiting:
            cancelled = self.operate("cancel", item)
            assert (cancelled.state, cancelled.terminal) == (WorkState.CANCELLED, True)
            assert (cancelled.attempts, cancelled.failures) == (item.attempts, item.failures)
            assert self.look(item) == cancelled
        self.expect(cancelled=5)
        self.wait(1000)
        assert self.nothing_due()
        assert self.figures().oldest_age_seconds == 0.0

    def test_a_cancelled_item_shows_its_accepted_time(self) -> None:
        """SPEC 3: it doesn't wait any more."""
        self.start(backoff_seconds=100)
        stored = self.put()
        self.say("fail", self.take())
        assert self.operate("cancel", stored).available_at == stored.available_at
        due = self.now() + timedelta(seconds=1000)
        assert self.operate("cancel", self.put(available_at=due)).available_at == due

    def test_a_cancelled_item_leaves_its_id_its_key_and_its_room(self) -> None:
        """SPEC 3, 4."""
        self.start(max_depth=1)
        cancelled = self.in_state(WorkState.CANCELLED, "i-1", dedupe_key="k")
        again = self.put("i-1", dedupe_key="k")
        assert (again.state, again.job_id == cancelled.job_id) == (WorkState.QUEUED, False)
        assert self.queue.get("i-1", tenant="acme", job_id=cancelled.job_id) == cancelled
        self.expect(cancelled=1, depth=1, due=1)

    def test_a_claimed_item_is_asked_for_and_its_claim_stands(self) -> None:
        """SPEC 4: asking twice is the same."""
        self.start()
        held = self.take_new("i-1", dedupe_key="k")
        for _ in range(2):
            asked = self.operate("cancel", held)
            assert asked == self.look(held) == replace(held, cancel_requested=True)
        assert self.put("i-1") == self.put("i-2", dedupe_key="k") == asked
        self.expect(claimed=1)

    def test_the_holder_hears_the_wish_at_its_heartbeat(self) -> None:
        """SPEC 4: and at each one."""
        self.start(lease_seconds=100)
        held = self.take_new()
        other = self.take_new()
        assert not self.say("heartbeat", held).cancel_requested
        self.operate("cancel", held)
        self.wait(60)
        for _ in range(2):
            renewed = self.say("heartbeat", held)
            assert renewed.cancel_requested
            assert_near(seconds_between(held.first_claimed_at, renewed.lease_expires_at), 160)
        assert not self.say("heartbeat", other).cancel_requested

    def test_a_completion_wins_over_the_wish(self) -> None:
        """SPEC 4."""
        self.start()
        asked = self.asked()
        for _ in range(2):
            done = self.say("complete", asked, result=[1])
            assert (done.state, done.result) == (WorkState.COMPLETED, [1])
            assert not done.cancel_requested
        assert self.look(asked) == done
        self.expect(completed=1)

    def test_every_other_end_of_the_claim_is_cancelled(self) -> None:
        """SPEC 4: counted as it would have been, also by the last attempt."""
        self.start(lease_seconds=1000, backoff_seconds=100)
        for attempts in (1, 5):
            for way, failure in ENDS.items():
                queue = f"{way} of {attempts}"
                asked = self.asked(queue=queue, max_attempts=attempts)
                ended = self.end(way, asked)
                assert ended.state is WorkState.CANCELLED, queue
                assert ended.attempts == len(ended.failures) == (failure is not None)
                assert "".join(ended.failures).startswith(failure or "")
                assert (ended.worker, ended.first_claimed_at, ended.lease_expires_at) == (None,) * 3
                assert (ended.fence, ended.available_at) == (1, asked.available_at)
                assert not ended.cancel_requested
                assert self.look(asked) == ended
                self.expect(queue, cancelled=1)
                assert self.figures(queue).reaped == (way == "reap")
                self.wait(1000)
                assert self.nothing_due(queue=queue)
        assert self.queue.dead_letters(tenant="acme") == ()

    def test_a_settlement_that_ended_cancelled_can_be_repeated(self) -> None:
        """SPEC 1.3."""
        self.start()
        for verb in ("fail", "pause", "release"):
            held = self.asked(queue=verb)
            ended = self.say(verb, held)
            assert self.say(verb, held) == ended
            # Cancelled instead, pause and release are the same.
            same = {"pause", "release"} if verb != "fail" else {"fail"}
            for other in set(HOLDER_VERBS) - same:
                with refused(LeaseLostError, reason="expired"):
                    self.say(other, held)
            assert self.look(held) == ended
            self.expect(verb, cancelled=1)

    def test_a_wish_ends_with_its_item(self) -> None:
        """SPEC 4: requeued, the item runs once more as if nobody had asked."""
        self.start(lease_seconds=1000)
        for way, failure in ENDS.items():
            asked = self.asked(queue=way)
            ended = self.end(way, asked)
            back = self.operate("requeue", ended)
            assert (back.state, back.cancel_requested) == (WorkState.QUEUED, False)
            assert back.max_attempts == ended.attempts + 1 == 1 + (failure is not None)
            held = self.take(queue=way)
            assert not held.cancel_requested
            assert not self.say("heartbeat", held).cancel_requested
            assert self.say("fail", held).state is WorkState.DEAD_LETTERED

    def test_a_wish_does_not_reach_the_next_acceptance_of_an_id(self) -> None:
        """SPEC 3."""
        self.start()
        self.say("release", self.asked("i-1"))
        assert not self.put("i-1").cancel_requested
        assert not self.take().cancel_requested
        assert self.say("release", self.queue.get("i-1", tenant="acme")).live

    def test_a_lapsed_claim_can_still_be_asked_for(self) -> None:
        """SPEC 4."""
        self.start(lease_seconds=10)
        held = self.take_new()
        self.wait(10)
        assert self.operate("cancel", held).state is WorkState.CLAIMED
        [reaped] = self.queue.reap()
        assert (reaped.state, reaped.attempts) == (WorkState.CANCELLED, 1)

    def test_a_settlement_is_no_repetition_once_its_item_was_cancelled(self) -> None:
        """SPEC 1.3."""
        self.start()
        for verb in ("fail", "release"):
            held = self.take_new()
            self.say(verb, held)
            cancelled = self.operate("cancel", held)
            with refused(LeaseLostError, reason="expired"):
                self.say(verb, held)
            assert self.look(held) == cancelled
