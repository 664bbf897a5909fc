"""How items come back from workers that died, and where those end that don't: reap, adopt,
the dead letter."""

from __future__ import annotations

from django_workqueue.conformance._bench import (
    Bench,
    assert_near,
    ids,
    refused,
    seconds_between,
)
from django_workqueue.exceptions import InvalidFieldError
from django_workqueue.items import WorkItem, WorkState


class Reaping(Bench):
    def test_a_lapsed_item_is_queued_again(self) -> None:
        """T6, T65."""
        self.start(lease_seconds=10)
        item = self.take_new()
        self.wait(10)
        [reaped] = self.queue.reap()
        assert (reaped.id, reaped.state, reaped.attempts) == (item.id, WorkState.QUEUED, 1)
        assert (reaped.worker, reaped.first_claimed_at, reaped.lease_expires_at) == (None,) * 3
        assert self.look(item) == reaped

    def test_a_lapse_is_recorded_as_one(self) -> None:
        """T66."""
        self.start(lease_seconds=10)
        self.take_new()
        self.wait(10)
        [reaped] = self.queue.reap()
        [text] = reaped.failures
        assert text.startswith("lease lapsed")

    def test_a_reaped_item_can_be_taken_by_another_worker(self) -> None:
        """T67."""
        self.start(lease_seconds=10)
        item = self.take_new()
        self.wait(10)
        self.queue.reap()
        again = self.take("w2")
        assert (again.id, again.worker, again.fence) == (item.id, "w2", 2)

    def test_a_reaped_item_waits_for_its_backoff(self) -> None:
        """R28."""
        self.start(lease_seconds=10, backoff_seconds=40)
        self.take_new()
        self.wait(10)
        [reaped] = self.queue.reap()
        assert_near(seconds_between(self.now(), reaped.available_at), 40)
        assert self.nothing_due()
        self.wait(40)
        self.take()

    def test_a_live_lease_is_left_alone(self) -> None:
        """T68."""
        self.start(lease_seconds=100)
        item = self.take_new()
        self.wait(50)
        assert self.queue.reap() == ()
        assert self.look(item) == item

    def test_only_claims_are_reaped(self) -> None:
        """R28."""
        self.start()
        self.bury()
        self.say("complete", self.take_new())
        self.put()
        self.wait(100_000)
        assert self.queue.reap() == ()

    def test_an_item_is_reaped_once(self) -> None:
        """R28."""
        self.start(lease_seconds=10)
        self.take_new()
        self.wait(10)
        assert len(self.queue.reap()) == 1
        assert self.queue.reap() == ()
        assert self.figures().reaped == 1

    def test_the_last_attempt_of_a_lapsed_item_is_buried(self) -> None:
        """T69, SPEC 1.2: at most once."""
        self.start(lease_seconds=10, max_attempts=1)
        item = self.take_new()
        self.wait(10)
        [dead] = self.queue.reap()
        assert (dead.id, dead.state, dead.attempts) == (item.id, WorkState.DEAD_LETTERED, 1)
        assert self.queue.dead_letters(tenant="acme") == (dead,)
        assert self.nothing_due()

    def test_every_lapsed_claim_is_reaped_whosever_it_is(self) -> None:
        """R28: over all queues, tenants, workers and deployments."""
        self.start(lease_seconds=10)
        self.put("i-1", "a")
        self.put("i-2", "b", queue="mail")
        self.put("i-3", "a", deployment_id="blue")
        self.take("w1")
        self.take("w2", queue="mail")
        self.take("w1", deployment_id="blue")
        self.wait(10)
        assert sorted(ids(self.queue.reap())) == ["i-1", "i-2", "i-3"]

    def test_the_longest_lapsed_are_reaped_first(self) -> None:
        """SPEC 4."""
        self.start()
        self.put_for("abcd")
        for lease in (40, 20, 30, 10):
            self.take(lease_seconds=lease)
        self.wait(100)
        reaped = [self.queue.reap(limit=1), self.queue.reap(limit=2), self.queue.reap(limit=5)]
        assert [[item.tenant for item in batch] for batch in reaped] == [["d"], ["b", "c"], ["a"]]

    def test_reaped_items_are_counted_by_queue(self) -> None:
        """T70, V8."""
        self.start(lease_seconds=10, max_attempts=1)
        for queue in ("mail", "mail", "sms"):
            self.take_new(queue=queue)
        self.wait(10)
        self.queue.reap()
        counts = [self.figures(queue).reaped for queue in ("mail", "sms", "default")]
        assert counts == [2, 1, 0]


class Adopting(Bench):
    def test_adopted_items_come_in_the_order_of_their_leases(self) -> None:
        """SPEC 4."""
        self.start()
        for name in "abc":
            self.put(name)
        for seconds in (900, 300, 600):
            self.take(lease_seconds=seconds)
        assert ids(self.queue.adopt(worker="w1")) == ["b", "c", "a"]

    def test_an_adopted_item_is_queued_and_due_at_once(self) -> None:
        """T13, T71, T72."""
        self.start(backoff_seconds=60)
        item = self.take_new()
        [adopted] = self.queue.adopt(worker="w1")
        assert (adopted.id, adopted.state, adopted.worker) == (item.id, WorkState.QUEUED, None)
        assert self.look(item) == adopted
        assert self.take("w2").id == item.id

    def test_an_adoption_counts_an_attempt(self) -> None:
        """T73."""
        self.start()
        self.take_new()
        [adopted] = self.queue.adopt(worker="w1")
        assert (adopted.attempts, adopted.failures) == (1, ("worker restarted",))

    def test_an_adopted_item_shows_its_accepted_time(self) -> None:
        """SPEC 3."""
        self.start(backoff_seconds=60)
        item = self.take_new()
        [adopted] = self.queue.adopt(worker="w1")
        assert adopted.available_at == item.available_at

    def test_another_workers_items_are_left_alone(self) -> None:
        """T74."""
        self.start()
        item = self.take_new()
        for name in ("w2", "W1", "w1 ", "w"):
            assert self.queue.adopt(worker=name) == ()
        assert self.look(item) == item

    def test_without_a_claim_nothing_is_adopted(self) -> None:
        """T75."""
        self.start()
        self.say("complete", self.take_new())
        self.say("fail", self.take_new())
        assert self.queue.adopt(worker="w1") == ()

    def test_everything_a_worker_holds_is_adopted(self) -> None:
        """R29: over all queues and tenants, lapsed or not."""
        self.start(lease_seconds=10)
        self.put("i-1", "a")
        self.take()
        self.wait(10)
        self.put("i-2", "b", queue="mail")
        self.put("i-3", "a", deployment_id="blue")
        self.take(queue="mail")
        self.take(deployment_id="blue")
        assert sorted(ids(self.queue.adopt(worker="w1"))) == ["i-1", "i-2", "i-3"]

    def test_an_adoption_is_no_reaping(self) -> None:
        """R29."""
        self.start(lease_seconds=10)
        self.take_new()
        self.wait(10)
        self.queue.adopt(worker="w1")
        assert self.figures().reaped == 0
        assert self.queue.reap() == ()

    def test_the_last_attempt_of_an_adopted_item_is_buried(self) -> None:
        """R29, SPEC 1.2."""
        self.start(max_attempts=1)
        self.take_new()
        [dead] = self.queue.adopt(worker="w1")
        assert dead.state is WorkState.DEAD_LETTERED
        assert self.queue.dead_letters(tenant="acme") == (dead,)


class DeadLetters(Bench):
    def bury_several(self, count: int) -> list[WorkItem]:
        """Bury *count* items of one tenant, one after the other."""
        dead = []
        for _ in range(count):
            dead.append(self.bury())
            self.wait(1)
        return dead

    def test_an_empty_dead_letter_lists_nothing(self) -> None:
        """R31."""
        self.start()
        self.put()
        assert self.queue.dead_letters(tenant="acme") == ()

    def test_a_dead_letter_shows_everything_that_is_known(self) -> None:
        """SPEC 1.1, R45."""
        self.start(max_attempts=2)
        self.say("fail", self.take_new(payload={"n": 1}, dedupe_key="k"), error="first")
        dead = self.say("fail", self.take(), error="second")
        [listed] = self.queue.dead_letters(tenant="acme")
        assert listed == dead == self.look(dead)
        assert (listed.payload, listed.dedupe_key) == ({"n": 1}, "k")
        assert (listed.attempts, listed.attempt) == (2, 2)
        assert (listed.worker, listed.fence) == (None, 2)

    def test_at_most_limit_are_listed(self) -> None:
        """T63."""
        self.start()
        dead = self.bury_several(3)
        assert self.queue.dead_letters(tenant="acme", limit=2) == tuple(dead[:2])
        assert self.queue.dead_letters(tenant="acme") == tuple(dead)

    def test_the_dead_letters_of_another_tenant_are_not_listed(self) -> None:
        """T64."""
        self.start()
        self.bury()
        for tenant in ("other", "ACME", "acme ", "acm"):
            assert self.queue.dead_letters(tenant=tenant) == ()

    def test_the_dead_letters_of_all_queues_are_listed(self) -> None:
        """R31."""
        self.start()
        for queue in ("mail", "default", "sms"):
            self.bury(queue=queue)
            self.wait(1)
        listed = self.queue.dead_letters(tenant="acme")
        assert [item.queue for item in listed] == ["mail", "default", "sms"]

    def test_the_oldest_burial_is_listed_first(self) -> None:
        """V10: not the oldest acceptance."""
        self.start()
        for name in ("first", "second", "third"):
            self.put(name)
        for item in reversed(self.take_many(3)):
            self.say("fail", item, retryable=False)
            self.wait(1)
        assert ids(self.queue.dead_letters(tenant="acme")) == ["third", "second", "first"]

    def test_pages_follow_each_other(self) -> None:
        """V10."""
        self.start()
        dead = self.bury_several(5)
        self.bury(tenant="other")
        pages, after = [], None
        while page := self.queue.dead_letters(tenant="acme", limit=2, after=after):
            pages.append(ids(page))
            after = page[-1].job_id
        assert pages == [ids(dead[:2]), ids(dead[2:4]), ids(dead[4:])]

    def test_pages_follow_burials_not_acceptances(self) -> None:
        """V10."""
        self.start()
        for name in ("first", "second", "third"):
            self.put(name)
        for item in reversed(self.take_many(3)):
            self.say("fail", item, retryable=False)
            self.wait(1)
        [third] = self.queue.dead_letters(tenant="acme", limit=1)
        rest = self.queue.dead_letters(tenant="acme", after=third.job_id)
        assert ids(rest) == ["second", "first"]

    def test_those_buried_together_are_listed_by_acceptance_and_paged(self) -> None:
        """SPEC 4."""
        self.start(lease_seconds=10, max_attempts=1)
        stored = self.put_for(["acme"] * 5)
        self.take_many(5)
        self.wait(10)
        self.queue.reap()
        assert ids(self.queue.dead_letters(tenant="acme")) == ids(stored)
        [*_, last] = self.queue.dead_letters(tenant="acme", limit=3)
        assert ids(self.queue.dead_letters(tenant="acme", after=last.job_id)) == ids(stored[3:])

    def test_a_cursor_that_never_was_a_dead_letter_is_refused(self) -> None:
        """SPEC 4."""
        self.start()
        foreign = self.bury(tenant="other")
        done = self.say("complete", self.take_new())
        waiting = self.put()
        self.take()
        for job_id in (foreign.job_id, done.job_id, waiting.job_id, 10**12, 0):
            with refused(InvalidFieldError, field="after"):
                self.queue.dead_letters(tenant="acme", after=job_id)

    def test_a_cursor_that_retention_deleted_is_refused_and_not_taken_for_the_end(self) -> None:
        """SPEC 4: where it stood is not known; what is left can be read from the beginning."""
        self.start(retention_seconds=100, dead_letter_retention_seconds=300)
        first, second, third, fourth = self.bury_several(4)
        self.operate("discard", first)
        self.operate("requeue", second)
        self.say("complete", self.take())
        self.wait(100)
        assert self.queue.prune() == 2
        for gone in (first, second):
            with refused(InvalidFieldError, field="after"):
                self.queue.dead_letters(tenant="acme", after=gone.job_id)
        assert self.queue.dead_letters(tenant="acme") == (third, fourth)
        assert self.queue.dead_letters(tenant="acme", after=third.job_id) == (fourth,)
        self.wait(300)
        assert self.queue.prune() == 2
        with refused(InvalidFieldError, field="after"):
            self.queue.dead_letters(tenant="acme", after=third.job_id)
