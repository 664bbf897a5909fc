"""The figures of a queue through the life of its items, and the async twin of every verb."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from asgiref.sync import async_to_sync

from django_workqueue.conformance._bench import (
    COUNTS,
    Bench,
    assert_near,
    new_item,
    refused,
    seconds_between,
)
from django_workqueue.contract import WorkQueue
from django_workqueue.exceptions import LeaseLostError
from django_workqueue.items import WorkState


class Figures(Bench):
    def test_an_empty_queue_has_only_zeros(self) -> None:
        """T89."""
        self.start()
        self.expect()
        figures = self.figures()
        assert figures.oldest_age_seconds == 0.0
        assert (figures.reaped, figures.duplicates_suppressed) == (0, 0)

    def test_depth_counts_waiting_and_claimed_counts_held_items(self) -> None:
        """T16, T87."""
        self.start()
        self.put_for("ab")
        self.take()
        self.expect(depth=1, due=1, claimed=1)

    def test_the_counts_follow_an_item_through_its_life(self) -> None:
        """R13, SPEC 4."""
        self.start(lease_seconds=10, backoff_seconds=40, max_attempts=3)
        self.put(available_at=self.now() + timedelta(seconds=100))
        self.expect(depth=1)
        self.wait(100)
        self.expect(depth=1, due=1)
        item = self.take()
        self.expect(claimed=1)
        self.say("heartbeat", item)
        self.expect(claimed=1)
        self.say("release", item)
        self.expect(depth=1, due=1)
        self.say("fail", self.take())
        self.expect(depth=1)
        self.wait(40)
        self.take()
        self.wait(10)
        self.expect(claimed=1)
        self.queue.reap()
        self.expect(depth=1)
        self.wait(80)
        self.take()
        self.queue.adopt(worker="w1")
        self.expect(dead_lettered=1)

    def test_finished_items_are_counted(self) -> None:
        """T90."""
        self.start()
        self.bury()
        for _ in range(2):
            self.say("complete", self.take_new())
        self.expect(dead_lettered=1, completed=2)

    def test_a_repetition_is_counted_once(self) -> None:
        """SPEC 1.3."""
        self.start()
        item = self.take_new()
        for _ in range(3):
            self.say("complete", item)
        self.expect(completed=1)

    def test_a_refusal_counts_nothing(self) -> None:
        """R42."""
        self.start()
        item = self.take_new()
        for verb in ("complete", "fail", "release"):
            with refused(LeaseLostError):
                self.say(verb, item, fence=7)
        self.expect(claimed=1)

    def test_each_queue_has_its_own_figures(self) -> None:
        """T91."""
        self.start()
        self.put_for("abc", queue="mail")
        self.take(queue="mail")
        self.expect()
        self.expect("Mail")
        self.expect("mail", depth=2, due=2, claimed=1)

    def test_the_figures_are_of_all_tenants_and_pins(self) -> None:
        """R32, SPEC 4."""
        self.start()
        self.put_for("abc")
        self.put(deployment_id="blue")
        self.expect(depth=4, due=4)

    def test_the_oldest_age_is_of_the_longest_waiting_item(self) -> None:
        """T88."""
        self.start()
        self.put()
        self.wait(900)
        self.put()
        assert_near(self.figures().oldest_age_seconds, 900)
        self.take()
        assert_near(self.figures().oldest_age_seconds, 0)

    def test_the_age_counts_from_the_callers_enqueue_time(self) -> None:
        """T42, R15."""
        self.start()
        self.put(enqueued_at=self.now() - timedelta(seconds=5000))
        assert_near(self.figures().oldest_age_seconds, 5000)

    def test_scheduled_and_backing_off_items_have_an_age(self) -> None:
        """R13: of every queued item."""
        self.start(backoff_seconds=100)
        self.put(available_at=self.now() + timedelta(days=1))
        self.wait(300)
        assert_near(self.figures().oldest_age_seconds, 300)
        self.say("fail", self.take_new(enqueued_at=self.now() - timedelta(seconds=700)))
        assert_near(self.figures().oldest_age_seconds, 700)

    def test_a_future_enqueue_time_counts_as_age_0(self) -> None:
        """V7."""
        self.start()
        future = self.now() + timedelta(days=1)
        assert self.put(enqueued_at=future).enqueued_at == future
        assert self.figures().oldest_age_seconds == 0.0

    def test_held_and_finished_items_have_no_age(self) -> None:
        """R13."""
        self.start()
        self.bury()
        self.say("complete", self.take_new())
        self.take_new()
        self.wait(50)
        assert self.figures().oldest_age_seconds == 0.0

    def test_the_figures_say_when_they_were_read(self) -> None:
        """SPEC 4."""
        self.start()
        before = self.figures().as_of
        assert before.utcoffset() is not None
        self.wait(1000)
        assert_near(seconds_between(before, self.figures().as_of), 1000)

    def test_reading_the_figures_changes_nothing(self) -> None:
        """SPEC 4."""
        self.start()
        self.put(enqueued_at=self.now(), dedupe_key="k")
        self.put(dedupe_key="k")
        first, second = self.figures(), self.figures()
        for name in (*COUNTS, "reaped", "duplicates_suppressed"):
            assert getattr(first, name) == getattr(second, name), name


class AsyncTwins(Bench):
    def twin(self, verb: str) -> Callable[..., Any]:
        twin: Callable[..., Any] = getattr(self.queue, f"a{verb}")
        return twin

    def test_every_verb_has_an_async_twin(self) -> None:
        """SPEC 4."""
        self.start()
        verbs = [
            name
            for name, member in vars(WorkQueue).items()
            if not name.startswith("_") and callable(member)
        ]
        assert {"enqueue", "claim", "stats"} <= set(verbs)
        for verb in verbs:
            assert inspect.iscoroutinefunction(self.twin(verb)), verb

    def test_the_async_twins_do_what_the_verbs_do(self) -> None:
        """SPEC 4."""
        self.start(lease_seconds=60)

        async def life() -> list[WorkState]:
            where = {"tenant": "acme", "worker": "w1"}
            await self.twin("enqueue")(new_item("a"))
            await self.twin("enqueue_many")([new_item("b"), new_item("c")])
            first = await self.twin("claim")(worker="w1")
            many = await self.twin("claim_many")(worker="w1", limit=5)
            assert [first.id, *(item.id for item in many)] == ["a", "b", "c"]
            await self.twin("heartbeat")("a", **where, fence=1)
            assert await self.twin("reap")() == ()
            await self.twin("complete")("a", **where, result=[1])
            await self.twin("fail")("b", **where, error="boom", retryable=False)
            await self.twin("release")("c", **where, delay_seconds=99)
            assert await self.twin("adopt")(worker="w1") == ()
            [dead] = await self.twin("dead_letters")(tenant="acme")
            assert dead.id == "b"
            figures = await self.twin("stats")()
            assert (figures.depth, figures.completed, figures.dead_lettered) == (1, 1, 1)
            return [(await self.twin("get")(name, tenant="acme")).state for name in "abc"]

        states = async_to_sync(life)()
        assert states == [WorkState.COMPLETED, WorkState.DEAD_LETTERED, WorkState.QUEUED]
