"""The same job offered twice: dedupe keys, ids, several at once, a queue that is full."""

from __future__ import annotations

from django_workqueue.conformance._bench import SETTLING_VERBS, Bench, ids, new_item, refused
from django_workqueue.exceptions import LeaseLostError, PayloadError, QueueFullError
from django_workqueue.items import WorkState


class SameJobTwice(Bench):
    def test_a_live_key_answers_with_its_item(self) -> None:
        """T12, T76, T77, T78."""
        self.start()
        first = self.put("i-1", dedupe_key="k")
        assert self.put("i-2", dedupe_key="k") == first
        assert self.figures().depth == 1
        assert self.figures().duplicates_suppressed == 1

    def test_a_live_id_answers_with_its_item(self) -> None:
        """R14, R16."""
        self.start()
        first = self.put("i-1", payload={"n": 1}, priority=3, handler="one")
        again = self.put("i-1", payload={"n": 2}, priority=9, handler="two", dedupe_key="k")
        assert again == first
        assert self.look(first) == first
        assert self.figures().duplicates_suppressed == 1

    def test_a_key_or_id_stays_taken_while_its_item_is_claimed(self) -> None:
        """R14."""
        self.start()
        held = self.take_new("i-1", dedupe_key="k")
        assert self.put("i-1") == held
        assert self.put("i-2", dedupe_key="k") == held
        assert self.nothing_due()

    def test_a_live_id_keeps_what_was_counted(self) -> None:
        """T79, R16."""
        self.start()
        self.say("fail", self.take_new("i-1"))
        assert self.put("i-1").attempts == 1
        assert self.put("i-1").failures == ("boom",)

    def test_the_key_is_asked_before_the_id(self) -> None:
        """R14."""
        self.start()
        by_id, by_key = self.put("i-1"), self.put("i-2", dedupe_key="k")
        assert self.put("i-1", dedupe_key="k").id == by_key.id
        assert self.put("i-1", dedupe_key="free").id == by_id.id

    def test_a_suppressed_duplicate_does_not_occupy_its_own_id_or_key(self) -> None:
        """R14."""
        self.start()
        self.put("i-1", dedupe_key="k")
        self.put("i-2", dedupe_key="k")
        self.put("i-1", dedupe_key="k-2")
        assert self.put("i-2").id == "i-2"
        assert self.put("i-3", dedupe_key="k-2").id == "i-3"

    def test_the_queue_is_not_part_of_a_key(self) -> None:
        """R39."""
        self.start()
        first = self.put("i-1", queue="mail", dedupe_key="k")
        assert self.put("i-2", queue="other", dedupe_key="k") == first

    def test_a_duplicate_is_counted_for_the_queue_it_was_offered_to(self) -> None:
        """V8."""
        self.start()
        self.put("i-1", queue="mail", dedupe_key="k")
        self.put("i-2", queue="other", dedupe_key="k")
        self.put("i-1", queue="other")
        assert self.figures("mail").duplicates_suppressed == 0
        assert self.figures("other").duplicates_suppressed == 2

    def test_items_without_a_key_are_no_duplicates(self) -> None:
        """T81."""
        self.start()
        assert self.put().id != self.put().id
        assert self.figures().depth == 2

    def test_a_blank_key_is_none(self) -> None:
        """V12."""
        self.start()
        for blank in ("", " ", "\t\n"):
            assert self.put(dedupe_key=blank).dedupe_key is None
        assert self.figures().depth == 3

    def test_keys_and_ids_are_compared_exactly(self) -> None:
        """SPEC 3."""
        self.start()
        names = ["k", "K", "k ", "ḱ", "k\u0301", "k%", "k_"]
        for name in names:
            assert self.put(name, dedupe_key=name).id == name
        assert self.figures().depth == len(names)

    def test_two_tenants_may_use_one_key_and_one_id(self) -> None:
        """T84, SPEC 3."""
        self.start()
        for tenant in ("a", "b"):
            assert self.put("i-1", tenant, dedupe_key="k").tenant == tenant
        assert self.figures().depth == 2

    def test_a_finished_id_and_key_are_free_again(self) -> None:
        """T80, T82, T83."""
        self.start()
        for verb, state in (("complete", "completed"), ("fail", "dead_lettered")):
            options = {"retryable": False} if verb == "fail" else {}
            done = self.say(verb, self.take_new("i-1", dedupe_key="k"), **options)
            assert (done.state, done.terminal) == (state, True)
            again = self.put("i-1", dedupe_key="k")
            assert again.state is WorkState.QUEUED
            assert (again.job_id or 0) > (done.job_id or 0)
            self.say("complete", self.take())
        assert self.put("i-9", dedupe_key="k").id == "i-9"

    def test_a_finished_id_starts_afresh(self) -> None:
        """V4."""
        self.start(max_attempts=2)
        self.say("fail", self.take_new("i-1", payload={"n": 1}))
        buried = self.say("fail", self.take())
        again = self.put("i-1", payload={"n": 2})
        assert (again.attempts, again.failures, again.payload) == (0, (), {"n": 2})
        assert self.queue.enqueue(buried) == again
        assert self.say("fail", self.take()).state is WorkState.QUEUED

    def test_an_old_item_passed_back_starts_afresh(self) -> None:
        """V4."""
        self.start()
        buried = self.bury("i-1")
        again = self.queue.enqueue(buried)
        assert (again.state, again.attempts, again.failures) == (WorkState.QUEUED, 0, ())

    def test_a_reused_id_means_its_newest_acceptance(self) -> None:
        """SPEC 4, get."""
        self.start()
        self.say("complete", self.take_new("i-1"))
        again = self.put("i-1", payload={"n": 2})
        assert self.queue.get("i-1", tenant="acme") == again
        done = self.say("complete", self.take())
        assert self.queue.get("i-1", tenant="acme") == done

    def test_the_fence_of_a_reused_id_goes_on(self) -> None:
        """SPEC 3: a late worker of the old item must not finish the new one."""
        self.start()
        self.say("release", self.take_new("i-1"))
        old = self.take()
        self.say("complete", old)
        self.put("i-1")
        new = self.take()
        assert (old.fence, new.fence) == (2, 3)
        for verb in SETTLING_VERBS:
            with refused(LeaseLostError, reason="taken", holder="w1"):
                self.say(verb, old)
        assert self.look(new) == new

    def test_the_old_dead_letter_of_a_reused_id_stays(self) -> None:
        """V4."""
        self.start()
        buried = self.bury("i-1")
        self.put("i-1")
        assert self.queue.dead_letters(tenant="acme") == (buried,)
        assert self.figures().dead_lettered == 1


class SeveralAtOnce(Bench):
    def test_several_are_stored_in_their_order(self) -> None:
        """SPEC 4."""
        self.start()
        names = ["z", "a", "m", "b"]
        stored = self.queue.enqueue_many([new_item(name) for name in names])
        assert ids(stored) == names
        job_ids = [item.job_id or 0 for item in stored]
        assert job_ids == sorted(set(job_ids))
        assert ids(self.take_many(9)) == names

    def test_several_may_be_none(self) -> None:
        """SPEC 4."""
        self.start()
        assert self.queue.enqueue_many([]) == ()
        assert self.figures().depth == 0

    def test_several_may_come_from_a_generator(self) -> None:
        """SPEC 4."""
        self.start()
        assert ids(self.queue.enqueue_many(new_item(name) for name in "abc")) == ["a", "b", "c"]

    def test_several_may_be_of_many_tenants_and_queues(self) -> None:
        """SPEC 4."""
        self.start()
        places = [("t1", "mail"), ("t2", "mail"), ("t1", "sms"), ("t2", "default")]
        stored = self.queue.enqueue_many([new_item("i", t, queue=q) for t, q in places[:2]])
        stored += self.queue.enqueue_many([new_item("j", t, queue=q) for t, q in places[2:]])
        assert [(item.tenant, item.queue) for item in stored] == places
        for tenant, queue in places:
            assert self.take(queue=queue).tenant == tenant

    def test_the_second_of_two_equals_in_one_call_is_a_duplicate(self) -> None:
        """SPEC 4."""
        self.start()
        stored = self.queue.enqueue_many(
            [
                new_item("i-1", payload={"n": 1}),
                new_item("i-1", payload={"n": 2}),
                new_item("i-2", dedupe_key="k"),
                new_item("i-3", dedupe_key="k"),
                new_item("i-1", "other"),
            ]
        )
        assert ids(stored) == ["i-1", "i-1", "i-2", "i-2", "i-1"]
        assert stored[1] == stored[0]
        assert stored[3] == stored[2]
        assert self.figures().depth == 3
        assert self.figures().duplicates_suppressed == 2

    def test_duplicates_of_stored_items_stay_in_their_place(self) -> None:
        """SPEC 4."""
        self.start()
        live = self.put("live", dedupe_key="k")
        self.say("complete", self.take_new("done", priority=9))
        stored = self.queue.enqueue_many(
            [new_item("new"), new_item("other", dedupe_key="k"), new_item("done")]
        )
        assert ids(stored) == ["new", "live", "done"]
        assert stored[1] == live
        assert stored[2].fence == 1
        assert ids(self.take_many(9)) == ["live", "new", "done"]

    def test_all_or_none_are_stored(self) -> None:
        """SPEC 4."""
        self.start()
        self.put("live")
        items = [new_item("a"), new_item("live"), new_item("b", payload={"n": float("nan")})]
        with refused(PayloadError, field="payload.n"):
            self.queue.enqueue_many(items)
        assert self.figures().depth == 1
        assert self.figures().duplicates_suppressed == 0
        assert self.put("a").id == "a"


class OneAfterTheOther(Bench):
    """`enqueue_many` does as `enqueue` would, one after the other."""

    def test_the_key_of_an_earlier_one_in_the_call_wins_over_a_live_id(self) -> None:
        """SPEC 4."""
        self.start()
        self.say("complete", self.take_new("old", dedupe_key="k"))
        self.put("y")
        offered = [new_item("n", dedupe_key="k"), new_item("y", dedupe_key="k")]
        assert ids(self.queue.enqueue_many(offered)) == ["n", "n"]

    def test_an_id_taken_over_keeps_its_place_among_the_others(self) -> None:
        """SPEC 4: age goes by acceptance."""
        self.start()
        self.say("complete", self.take_new("old"))
        self.queue.enqueue_many([new_item("old"), new_item("new"), new_item("newer")])
        assert ids(self.take_many(9)) == ["old", "new", "newer"]

    def test_what_follows_a_duplicate_keeps_its_place(self) -> None:
        """SPEC 4."""
        self.start()
        offered = [
            new_item("a"),
            new_item("a", dedupe_key="k"),
            new_item("c", dedupe_key="k"),
            new_item("d"),
        ]
        assert ids(self.queue.enqueue_many(offered)) == ["a", "a", "c", "d"]
        assert ids(self.take_many(9)) == ["a", "c", "d"]

    def test_a_chain_of_shared_names_is_accepted_whole(self) -> None:
        """SPEC 4: however long."""
        self.start()
        offered = [new_item(f"i{n // 2}", dedupe_key=f"k{(n + 1) // 2}") for n in range(40)]
        assert ids(self.queue.enqueue_many(offered)) == [f"i{n // 2}" for n in range(40)]
        assert self.figures().depth == self.figures().duplicates_suppressed == 20


class FullQueue(Bench):
    def test_a_full_queue_refuses(self) -> None:
        """SPEC 4."""
        self.start(max_depth=2)
        self.put("a")
        self.put("b")
        with refused(QueueFullError, queue="default", limit=2, retryable=True):
            self.put("c")
        assert ids(self.take_many(9)) == ["a", "b"]

    def test_room_comes_back_with_a_claim(self) -> None:
        """SPEC 4: claimed items don't wait."""
        self.start(max_depth=1)
        self.take_new("a")
        self.put("b")
        with refused(QueueFullError):
            self.put("c")
        self.take()
        assert self.put("c").id == "c"

    def test_scheduled_items_count(self) -> None:
        """SPEC 4: depth includes them."""
        self.start(max_depth=1, backoff_seconds=100)
        self.say("fail", self.take_new("a"))
        with refused(QueueFullError):
            self.put("b")

    def test_a_full_queue_still_answers_duplicates(self) -> None:
        """SPEC 4."""
        self.start(max_depth=1)
        first = self.put("a", dedupe_key="k")
        assert self.put("a") == first
        assert self.put("b", dedupe_key="k") == first
        assert self.figures().duplicates_suppressed == 2

    def test_a_queue_beyond_its_bound_still_answers_duplicates(self) -> None:
        """SPEC 4: what came back may lie above it."""
        self.start(max_depth=1)
        held = self.take_new("a")
        waiting = self.put("b")
        self.say("release", held)
        assert self.put("b") == waiting
        with refused(QueueFullError):
            self.put("c")

    def test_a_finished_id_is_refused_like_any_other_by_a_full_queue(self) -> None:
        """SPEC 4: it is a new acceptance."""
        self.start(max_depth=1)
        self.say("complete", self.take_new("a"))
        self.put("b")
        with refused(QueueFullError):
            self.put("a")
        assert self.queue.get("a", tenant="acme").state is WorkState.COMPLETED

    def test_several_that_do_not_all_fit_are_refused_together(self) -> None:
        """SPEC 4."""
        self.start(max_depth=3)
        self.put("a")
        with refused(QueueFullError, queue="default"):
            self.queue.enqueue_many([new_item(name) for name in "bacd"])
        assert self.figures().depth == 1
        assert self.figures().duplicates_suppressed == 0
        assert ids(self.queue.enqueue_many([new_item(name) for name in "bac"])) == ["b", "a", "c"]

    def test_queues_are_full_one_by_one(self) -> None:
        """SPEC 9."""
        self.start(max_depth=1)
        self.put("a")
        assert self.put("b", queue="mail").queue == "mail"
        with refused(QueueFullError, queue="mail"):
            self.queue.enqueue_many([new_item("c", queue="sms"), new_item("d", queue="mail")])
        assert self.figures("sms").depth == 0

    def test_what_comes_back_is_never_refused(self) -> None:
        """SPEC 1.1."""
        self.start(max_depth=1)
        held = self.take_new("a")
        self.put("b")
        assert self.say("release", held).state is WorkState.QUEUED
        assert self.figures().depth == 2
