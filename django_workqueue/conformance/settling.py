"""How a claim ends by its holder: complete, fail, pause, release, each repeated."""

from __future__ import annotations

from typing import Any

from django_workqueue.conformance._bench import (
    HOLDER_VERBS,
    SETTLING_VERBS,
    Bench,
    assert_near,
    ids,
    refused,
    seconds_between,
)
from django_workqueue.exceptions import LeaseLostError, PayloadError, WorkItemNotFoundError
from django_workqueue.items import WorkItem, WorkState


class Settling(Bench):
    def test_a_completed_item_never_comes_back(self) -> None:
        """T5, T22, T53."""
        self.start()
        done = self.say("complete", self.take_new())
        assert (done.state, done.terminal) == (WorkState.COMPLETED, True)
        self.wait(100_000)
        assert self.queue.reap() == ()
        assert self.queue.adopt(worker="w1") == ()
        assert self.nothing_due()

    def test_a_completed_item_counts_no_attempt(self) -> None:
        """R25, R37."""
        self.start()
        done = self.say("complete", self.take_new())
        assert (done.attempts, done.attempt, done.failures) == (0, 1, ())

    def test_a_settled_item_shows_no_claim(self) -> None:
        """SPEC 3: worker, start and expiry are of the current claim."""
        self.start()
        for verb in SETTLING_VERBS:
            item = self.say(verb, self.take_new())
            assert (item.worker, item.first_claimed_at, item.lease_expires_at) == (None,) * 3
            assert self.look(item) == item
            self.take_many(1, "w9")

    def test_a_result_is_kept(self) -> None:
        """SPEC 3."""
        self.start()
        for result in (None, True, 0, 1.5, "text ✓", [1, [2]], {"a": {"b": None}}, [], {}, ""):
            item = self.take_new()
            assert self.say("complete", item, result=result).result == result
            assert self.look(item).result == result

    def test_a_result_that_is_no_json_is_refused_and_the_claim_stands(self) -> None:
        """SPEC 4."""
        self.start(max_payload_bytes=100)
        item = self.take_new()
        for result in (float("nan"), {1: 2}, object(), "\x00", "\ud800", 2**63, "x" * 99):
            with refused(PayloadError, field="result"):
                self.say("complete", item, result=result)
        assert self.look(item) == item
        assert self.say("complete", item, result="x" * 98).state is WorkState.COMPLETED

    def test_a_result_is_not_shared_with_the_caller(self) -> None:
        """SPEC 3."""
        self.start()
        result = {"list": [1]}
        done = self.say("complete", self.take_new(), result=result)
        result["list"].append(2)
        done.result["list"].append(3)
        assert self.look(done).result == {"list": [1]}

    def test_a_late_completion_is_refused(self) -> None:
        """T8, T54."""
        self.start(lease_seconds=10)
        item = self.take_new()
        self.wait(10)
        self.queue.reap()
        with refused(LeaseLostError, reason="expired"):
            self.say("complete", item)
        assert self.look(item).state is WorkState.QUEUED

    def test_a_failed_item_is_queued_again(self) -> None:
        """T10, T57."""
        self.start()
        item = self.say("fail", self.take_new(), error="no route")
        assert (item.state, item.attempts, item.attempt) == (WorkState.QUEUED, 1, 1)
        assert item.failures == ("no route",)
        assert self.look(item) == item

    def test_a_failed_item_waits_for_its_backoff(self) -> None:
        """T58."""
        self.start(backoff_seconds=40)
        item = self.say("fail", self.take_new())
        assert_near(seconds_between(self.now(), item.available_at), 40)
        self.wait(30)
        assert self.nothing_due()
        self.wait(10)
        assert self.take().attempt == 2

    def test_the_backoff_doubles_up_to_its_cap(self) -> None:
        """T28, T29, T30."""
        self.start(backoff_seconds=40, backoff_cap_seconds=200)
        self.put()
        for wait in (40, 80, 160, 200):
            item = self.say("fail", self.take())
            assert_near(seconds_between(self.now(), item.available_at), wait)
            self.wait(wait)
        assert self.say("fail", self.take()).state is WorkState.DEAD_LETTERED

    def test_an_item_shows_its_accepted_time_once_it_is_due_again(self) -> None:
        """SPEC 3."""
        self.start(backoff_seconds=40)
        stored = self.put()
        failed = self.say("fail", self.take())
        assert failed.available_at != stored.available_at
        self.wait(40)
        assert self.look(stored).available_at == stored.available_at

    def test_a_given_delay_replaces_the_backoff(self) -> None:
        """SPEC 4."""
        self.start(backoff_seconds=40)
        item = self.say("fail", self.take_new(), delay_seconds=500)
        assert_near(seconds_between(self.now(), item.available_at), 500)
        self.wait(500)
        self.say("fail", self.take(), delay_seconds=0)
        assert self.take().attempts == 2

    def test_a_failure_that_can_not_be_retried_is_buried_at_once(self) -> None:
        """T11, T23, T59."""
        self.start(max_attempts=5)
        dead = self.say("fail", self.take_new(), retryable=False)
        assert (dead.state, dead.terminal) == (WorkState.DEAD_LETTERED, True)
        assert (dead.attempts, dead.failures) == (1, ("boom",))
        assert self.queue.dead_letters(tenant="acme") == (dead,)

    def test_the_last_attempt_is_buried_with_every_failure(self) -> None:
        """T60, T61, R38, R45."""
        self.start(max_attempts=2)
        self.say("fail", self.take_new(), error="first")
        dead = self.say("fail", self.take(), error="second")
        assert (dead.state, dead.attempts) == (WorkState.DEAD_LETTERED, 2)
        assert dead.failures == ("first", "second")

    def test_an_item_runs_as_often_as_its_policy_says(self) -> None:
        """R12."""
        self.start(max_attempts=3)
        self.put()
        ends = [self.say("fail", self.take()).state for _ in range(3)]
        assert ends == [WorkState.QUEUED, WorkState.QUEUED, WorkState.DEAD_LETTERED]
        assert self.nothing_due()

    def test_an_items_own_number_of_attempts_wins(self) -> None:
        """SPEC 3."""
        self.start(max_attempts=2)
        assert self.say("fail", self.take_new("one", max_attempts=1)).terminal
        self.put("three", max_attempts=3)
        assert [self.say("fail", self.take()).terminal for _ in range(3)] == [False, False, True]

    def test_a_dead_letter_is_never_claimed(self) -> None:
        """T62."""
        self.start()
        self.bury()
        self.wait(100_000)
        assert self.nothing_due()
        assert self.queue.reap() == ()

    def test_no_error_is_too_odd_to_be_kept(self) -> None:
        """SPEC 4: fail is never refused for its error."""
        self.start(max_attempts=100)
        self.put()
        for error in odd_errors():
            item = self.say("fail", self.take(), error=error)
            text = item.failures[-1]
            assert "\x00" not in text
            assert len(text.encode()) <= 65_536
            assert self.look(item).failures == item.failures
        assert item.attempts == len(item.failures) == len(odd_errors())

    def test_an_exception_is_kept_by_name_and_text(self) -> None:
        """SPEC 4."""
        self.start()
        item = self.say("fail", self.take_new(), error=ValueError("no such account"))
        assert item.failures == ("ValueError: no such account",)

    def test_what_can_not_be_stored_of_an_error_is_escaped(self) -> None:
        """SPEC 4."""
        self.start()
        item = self.say("fail", self.take_new(), error="a\x00b\ud800c ✓")
        assert item.failures == ("a\\x00b\\ud800c ✓",)

    def test_a_released_item_is_as_if_never_taken(self) -> None:
        """SPEC 4."""
        self.start(backoff_seconds=100)
        stored = self.put()
        item = self.say("release", self.take())
        assert (item.state, item.attempts, item.failures) == (WorkState.QUEUED, 0, ())
        assert item.available_at == stored.available_at
        assert self.take("w2").attempts == 0

    def test_a_released_item_keeps_its_place(self) -> None:
        """SPEC 4, R35."""
        self.start()
        for name in ("first", "second"):
            self.put(name)
        self.say("release", self.take())
        assert ids(self.take_many(2)) == ["first", "second"]

    def test_a_released_item_may_wait(self) -> None:
        """SPEC 4."""
        self.start()
        item = self.say("release", self.take_new(), delay_seconds=500)
        assert_near(seconds_between(self.now(), item.available_at), 500)
        self.wait(450)
        assert self.nothing_due()
        self.wait(50)
        assert self.take().id == item.id

    def test_releases_never_use_up_the_attempts(self) -> None:
        """SPEC 4."""
        self.start(max_attempts=1)
        self.put()
        for _ in range(3):
            assert self.say("release", self.take()).state is WorkState.QUEUED
        assert self.take().attempts == 0

    def test_another_tenant_can_not_touch_an_item(self) -> None:
        """T15, T85, T86, R43."""
        self.start()
        item = self.take_new("i-1")
        self.put("i-2", "other")
        for verb in HOLDER_VERBS:
            with refused(WorkItemNotFoundError, item_id="i-1", tenant="other"):
                self.say(verb, item, tenant="other")
        assert self.look(item) == item

    def test_equal_ids_of_two_tenants_are_settled_apart(self) -> None:
        """R43."""
        self.start()
        for tenant in ("a", "b"):
            self.put("i-1", tenant)
        first, second = self.take_many(2)
        assert self.say("complete", second).tenant == "b"
        assert self.look(first) == first


#: With these options an item doesn't come back at once.
AWAY: dict[str, dict[str, Any]] = {
    "complete": {},
    "fail": {"delay_seconds": 99},
    "pause": {},
    "release": {"delay_seconds": 99},
}


class Repeats(Bench):
    def settled(self, verb: str, **options: Any) -> tuple[WorkItem, WorkItem]:
        """Return an item as it was claimed, and as *verb* left it."""
        held = self.take_new()
        return held, self.say(verb, held, **options)

    def test_a_settlement_repeated_counts_once(self) -> None:
        """SPEC 1.3: its answer was lost."""
        self.start(backoff_seconds=40)
        for verb, options in (
            ("complete", {"result": [1]}),
            ("fail", {"delay_seconds": 1000}),
            ("fail", {"retryable": False}),
            ("pause", {}),
            ("release", {"delay_seconds": 1000}),
        ):
            held, settled = self.settled(verb, **options)
            for _ in range(2):
                assert self.say(verb, held, **options) == settled
            assert self.look(held) == settled
            assert settled.attempts == (verb == "fail")
        self.expect(completed=1, dead_lettered=1, paused=1, depth=2)

    def test_a_repetition_is_known_for_as_long_as_the_item_stands(self) -> None:
        """SPEC 1.3: also after the lease, the cap and the wait have passed."""
        self.start(backoff_seconds=40, lease_seconds=60, max_lease_seconds=90)
        ends = {verb: self.settled(verb, **AWAY[verb]) for verb in SETTLING_VERBS}
        self.wait(10_000)
        for verb, (held, settled) in ends.items():
            again = self.say(verb, held)
            assert (again.state, again.attempts) == (settled.state, settled.attempts)
            assert again == self.look(held)

    def test_a_repetition_without_a_fence_is_refused(self) -> None:
        """SPEC 1.3."""
        self.start()
        for verb in SETTLING_VERBS:
            held, _ = self.settled(verb, **AWAY[verb])
            with refused(LeaseLostError, reason="expired", holder=None):
                self.say(verb, held, fence=None)

    def test_a_repetition_by_another_worker_is_refused(self) -> None:
        """SPEC 1.3."""
        self.start()
        for verb in SETTLING_VERBS:
            held, _ = self.settled(verb, **AWAY[verb])
            with refused(LeaseLostError, reason="expired", worker="w2"):
                self.say(verb, held, worker="w2")

    def test_another_fence_is_no_repetition(self) -> None:
        """SPEC 1.3."""
        self.start()
        for verb in SETTLING_VERBS:
            held, _ = self.settled(verb, **AWAY[verb])
            for fence in (0, 2):
                with refused(LeaseLostError, reason="expired"):
                    self.say(verb, held, fence=fence)

    def test_another_verb_is_no_repetition(self) -> None:
        """SPEC 1.3."""
        self.start()
        for verb in SETTLING_VERBS:
            held, settled = self.settled(verb, **AWAY[verb])
            for other in set(HOLDER_VERBS) - {verb}:
                with refused(LeaseLostError, reason="expired"):
                    self.say(other, held)
            assert self.look(held) == settled

    def test_a_settlement_is_no_repetition_once_the_item_is_claimed_again(self) -> None:
        """SPEC 1.3."""
        self.start()
        for verb in ("fail", "release"):
            held, _ = self.settled(verb)
            new = self.take("w2")
            with refused(LeaseLostError, reason="taken", holder="w2"):
                self.say(verb, held)
            assert self.look(new) == new
            self.say("complete", new)
            with refused(LeaseLostError, reason="expired"):
                self.say(verb, held)

    def test_a_settlement_is_no_repetition_once_its_id_is_enqueued_again(self) -> None:
        """SPEC 1.3, 3."""
        self.start()
        for verb, options in (("complete", {}), ("fail", {"retryable": False})):
            held, _ = self.settled(verb, **options)
            new = self.put(held.id)
            with refused(LeaseLostError, reason="expired"):
                self.say(verb, held, **options)
            assert self.look(new) == new
            self.take()

    def test_what_the_reaper_ended_is_no_repetition(self) -> None:
        """R42."""
        self.start(lease_seconds=10)
        held = self.take_new()
        self.wait(10)
        reaped = self.queue.reap()
        for verb in SETTLING_VERBS:
            with refused(LeaseLostError, reason="expired"):
                self.say(verb, held)
        assert self.look(held) == reaped[0]

    def test_what_an_adoption_ended_is_no_repetition(self) -> None:
        """R42."""
        self.start()
        held = self.take_new()
        adopted = self.queue.adopt(worker="w1")
        for verb in SETTLING_VERBS:
            with refused(LeaseLostError, reason="expired"):
                self.say(verb, held)
        assert self.look(held) == adopted[0]


class _TextFailsError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def odd_errors() -> list[str | BaseException]:
    return [
        "",
        "\x00",
        "\ud800 lone \udfff",
        "x" * 2**20,
        "😀" * 2**18,
        ValueError(),
        ValueError("a\x00b", b"\xff", "\ud800"),
        _TextFailsError(),
        ExceptionGroup("several", [ValueError("one"), ExceptionGroup("two", [KeyError("\x00")])]),
        KeyboardInterrupt(),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid"),
    ]
