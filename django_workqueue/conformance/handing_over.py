"""What goes in comes out: enqueue, claim, due times, deployment pins."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta, timezone
from typing import Any

from django_workqueue.conformance._bench import (
    Bench,
    assert_near,
    ids,
    new_item,
    refused,
    seconds_between,
)
from django_workqueue.contract import WorkQueue
from django_workqueue.exceptions import WorkItemNotFoundError
from django_workqueue.items import WorkItem, WorkPriority, WorkState
from django_workqueue.policy import QueuePolicy


class HandingOver(Bench):
    def test_the_queue_offers_every_verb(self) -> None:
        """T1, T33."""
        assert isinstance(self.start(), WorkQueue)

    def test_the_policy_in_force_is_readable(self) -> None:
        """T34."""
        policy = QueuePolicy(lease_seconds=42, max_attempts=7)
        assert self.make_queue(policy).policy == policy

    def test_a_store_has_a_policy_of_its_own(self) -> None:
        """T34, R53."""
        assert isinstance(self.make_queue(None).policy, QueuePolicy)

    def test_an_empty_queue_gives_nothing(self) -> None:
        """T2, T36."""
        self.start()
        assert self.nothing_due()
        assert self.take_many(10) == ()

    def test_an_enqueued_item_is_queued_and_not_held(self) -> None:
        """T17, T18, T20, T24, T25."""
        self.start()
        item = self.put()
        assert item.state is WorkState.QUEUED
        assert not item.held
        assert item.first_claimed_at is None
        assert item.lease_expires_at is None
        assert not item.terminal
        assert not item.lapsed_at(self.now())

    def test_what_is_enqueued_is_stored_as_given(self) -> None:
        """SPEC 3."""
        self.start()
        given = new_item(
            "i-1",
            "acme",
            queue="mail",
            handler="send",
            payload={"to": "a@b.example"},
            priority=-7,
            dedupe_key="k-1",
            deployment_id="blue",
            max_attempts=3,
            timeout_seconds=12.5,
        )
        stored = self.queue.enqueue(given)
        kept = replace(
            given,
            enqueued_at=stored.enqueued_at,
            available_at=stored.available_at,
            job_id=stored.job_id,
        )
        assert stored == kept
        assert self.look(stored) == stored

    def test_an_item_that_says_nothing_gets_the_defaults(self) -> None:
        """SPEC 3, T34."""
        self.start(max_attempts=4, timeout_seconds=90)
        item = self.put()
        assert (item.queue, item.handler, item.payload, item.priority) == ("default", "", {}, 0)
        assert (item.dedupe_key, item.deployment_id) == (None, None)
        assert (item.max_attempts, item.timeout_seconds) == (4, 90.0)
        assert (item.attempts, item.failures, item.result) == (0, (), None)
        assert not item.cancel_requested

    def test_an_item_is_accepted_at_the_stores_time(self) -> None:
        """SPEC 1.4, R15."""
        self.start()
        self.wait(100_000)
        item = self.put()
        assert_near(seconds_between(item.enqueued_at, self.now()), 0)
        assert_near(seconds_between(item.available_at, self.now()), 0)

    def test_the_stores_own_fields_are_not_taken_from_the_caller(self) -> None:
        """SPEC 3, V4."""
        self.start()
        now = self.now()
        forged = self.put(
            state=WorkState.CLAIMED,
            worker="mallory",
            attempts=4,
            failures=("old",),
            fence=9,
            first_claimed_at=now,
            lease_expires_at=now,
            job_id=77,
            cancel_requested=True,
            result="forged",
        )
        assert (forged.state, forged.worker) == (WorkState.QUEUED, None)
        assert (forged.attempts, forged.failures, forged.fence) == (0, (), None)
        assert (forged.first_claimed_at, forged.lease_expires_at) == (None, None)
        assert (forged.cancel_requested, forged.result) == (False, None)
        assert self.take().fence == 1

    def test_job_ids_grow_with_each_acceptance(self) -> None:
        """SPEC 3."""
        self.start()
        items = [self.put("z"), self.put("a"), *self.put_for(["t2", "t1"]), self.put("m")]
        job_ids = [item.job_id or 0 for item in items]
        assert job_ids == sorted(set(job_ids))

    def test_a_claimed_item_shows_its_claim(self) -> None:
        """T3, T21, T35."""
        self.start()
        stored = self.put(payload={"n": 1})
        item = self.take("w1")
        assert (item.id, item.tenant, item.job_id) == (stored.id, stored.tenant, stored.job_id)
        assert (item.worker, item.state, item.fence) == ("w1", WorkState.CLAIMED, 1)
        assert (item.attempts, item.attempt) == (0, 1)
        assert item.payload == {"n": 1}
        assert_near(seconds_between(item.first_claimed_at, self.now()), 0)
        assert self.look(stored) == item

    def test_a_claim_lasts_as_long_as_the_policy_says(self) -> None:
        """T37."""
        self.start(lease_seconds=500)
        item = self.take_new()
        assert_near(seconds_between(item.first_claimed_at, item.lease_expires_at), 500)

    def test_a_longer_or_shorter_lease_may_be_asked_for(self) -> None:
        """T38."""
        self.start(lease_seconds=100)
        self.put_for("ab")
        for asked in (900, 20):
            item = self.take(lease_seconds=asked)
            assert_near(seconds_between(item.first_claimed_at, item.lease_expires_at), asked)

    def test_a_lease_is_never_longer_than_the_cap(self) -> None:
        """SPEC 4, V5."""
        self.start(lease_seconds=900, max_lease_seconds=60)
        self.put_for("ab")
        for item in (self.take(), self.take(lease_seconds=5000)):
            assert_near(seconds_between(item.first_claimed_at, item.lease_expires_at), 60)

    def test_only_one_worker_gets_an_item(self) -> None:
        """T4, T39."""
        self.start()
        self.take_new()
        assert self.nothing_due("w2")
        assert self.nothing_due("w1")

    def test_a_queue_gives_only_its_own_items(self) -> None:
        """T40."""
        self.start()
        self.put(queue="mail")
        assert self.nothing_due()
        assert self.nothing_due(queue="Mail")
        assert self.take(queue="mail").queue == "mail"

    def test_a_higher_priority_goes_first(self) -> None:
        """T43."""
        self.start()
        for priority in (0, -100, 100, WorkPriority.LOW, 1, WorkPriority.HIGH, -1):
            self.put(str(int(priority)), priority=priority)
        assert ids(self.take_many(9)) == ["100", "50", "1", "0", "-1", "-50", "-100"]

    def test_the_older_acceptance_goes_first(self) -> None:
        """T44."""
        self.start()
        for name in ("z", "a", "m"):
            self.put(name)
        assert [self.take().id for _ in range(3)] == ["z", "a", "m"]

    def test_a_callers_enqueue_time_is_kept_and_changes_no_order(self) -> None:
        """T42, R15."""
        self.start()
        long_ago = self.now() - timedelta(days=30)
        self.put("first")
        assert self.put("second", enqueued_at=long_ago).enqueued_at == long_ago
        assert [self.take().id, self.take().id] == ["first", "second"]

    def test_claim_many_serves_as_claim_would(self) -> None:
        """SPEC 4."""
        self.start()
        for queue in ("serial", "batch"):
            for number, priority in enumerate([0, 5, -5, 5, 0, 100]):
                self.put(f"{queue}-{number}", queue=queue, priority=priority)
        serial = [self.take(queue="serial").id[-1] for _ in range(6)]
        assert [name[-1] for name in ids(self.take_many(6, queue="batch"))] == serial

    def test_claim_many_is_full_unless_nothing_more_is_due(self) -> None:
        """SPEC 4."""
        self.start()
        self.put_for(["acme"] * 5)
        self.put(available_at=self.now() + timedelta(hours=1))
        assert len(self.take_many(3)) == 3
        assert len(self.take_many(3)) == 2
        assert self.take_many(3) == ()

    def test_each_of_several_has_its_own_claim(self) -> None:
        """SPEC 4."""
        self.start(lease_seconds=200)
        self.put_for("abc")
        for item in self.take_many(3, "w7", lease_seconds=300):
            assert (item.worker, item.fence) == ("w7", 1)
            assert_near(seconds_between(item.first_claimed_at, item.lease_expires_at), 300)
            assert self.look(item) == item

    def test_an_item_returned_before_stays_as_it_was(self) -> None:
        """SPEC 3: an item is a value; the store holds the truth."""
        self.start()
        stored = self.put(payload={"list": [1]})
        self.take()
        assert stored.state is WorkState.QUEUED
        stored.payload["list"].append(2)
        assert self.look(stored).payload == {"list": [1]}

    def test_an_item_is_found_by_its_id_and_tenant_alone(self) -> None:
        """SPEC 4, R43."""
        self.start()
        item = self.put("i-1", "acme")
        assert self.queue.get("i-1", tenant="acme") == item
        for item_id, tenant in (("i-1", "other"), ("i-2", "acme"), ("I-1", "acme")):
            with refused(WorkItemNotFoundError, item_id=item_id, tenant=tenant):
                self.queue.get(item_id, tenant=tenant)


class DueTimes(Bench):
    def scheduled(self, item_id: str, seconds: float, **fields: Any) -> WorkItem:
        due = self.now() + timedelta(seconds=seconds)
        return self.put(item_id, available_at=due, **fields)

    def test_a_scheduled_item_is_not_given_before_its_time(self) -> None:
        """T41."""
        self.start()
        self.scheduled("later", 1000)
        assert self.nothing_due()
        self.wait(900)
        assert self.nothing_due()

    def test_a_scheduled_item_is_due_at_its_very_time(self) -> None:
        """SPEC 4: what has become due is seen by this very call."""
        self.start()
        self.scheduled("later", 1000)
        self.wait(1000)
        assert self.take().id == "later"

    def test_a_scheduled_item_shows_its_time(self) -> None:
        """SPEC 3."""
        self.start()
        due = self.now() + timedelta(seconds=1000)
        item = self.put(available_at=due)
        assert item.available_at == due
        assert self.look(item).available_at == due
        self.wait(2000)
        assert self.take().available_at == due

    def test_a_time_in_the_past_is_kept_and_due_at_once(self) -> None:
        """SPEC 3."""
        self.start()
        past = self.now() - timedelta(days=400)
        assert self.put(available_at=past).available_at == past
        assert self.take().available_at == past

    def test_times_are_compared_across_zones(self) -> None:
        """SPEC 3: aware datetimes."""
        self.start()
        zone = timezone(timedelta(hours=5, minutes=45))
        due = (self.now() + timedelta(seconds=100)).astimezone(zone)
        assert self.put(available_at=due).available_at == due
        assert self.nothing_due()
        self.wait(100)
        assert self.take().available_at == due

    def test_of_many_due_at_once_none_is_missed(self) -> None:
        """SPEC 4."""
        self.start()
        due = self.now() + timedelta(seconds=1000)
        stored = self.put_for(["acme"] * 300, available_at=due)
        self.wait(1000)
        assert ids(self.take_many(300)) == ids(stored)

    def test_what_becomes_due_takes_its_place_by_priority_and_acceptance(self) -> None:
        """R35."""
        self.start()
        self.scheduled("old", 50)
        self.put("young")
        self.scheduled("urgent", 100, priority=100)
        self.wait(100)
        assert ids(self.take_many(3)) == ["urgent", "old", "young"]

    def test_scheduled_items_of_one_queue_are_not_due_in_another(self) -> None:
        """T40, T41."""
        self.start()
        self.scheduled("mail", 10, queue="mail")
        self.wait(10)
        assert self.nothing_due()
        assert self.take(queue="mail").id == "mail"


class DeploymentPins(Bench):
    def test_a_worker_without_a_deployment_takes_only_unpinned_items(self) -> None:
        """SPEC 3."""
        self.start()
        self.put("blue", deployment_id="blue")
        self.put("free")
        assert ids(self.take_many(5)) == ["free"]

    def test_an_empty_deployment_is_none(self) -> None:
        """SPEC 3."""
        self.start()
        assert self.put("free", deployment_id="").deployment_id is None
        self.put("blue", deployment_id="blue")
        assert ids(self.take_many(5, deployment_id="")) == ["free"]

    def test_a_worker_takes_its_own_and_the_unpinned_items(self) -> None:
        """SPEC 3."""
        self.start()
        for name in ("green", "blue", "Blue"):
            self.put(name, deployment_id=name)
        self.put("free")
        assert ids(self.take_many(5, deployment_id="blue")) == ["blue", "free"]
        assert self.take(deployment_id="green").deployment_id == "green"

    def test_own_and_unpinned_items_are_one_order(self) -> None:
        """SPEC 5."""
        self.start()
        for name, pin, priority in (
            ("free-0", None, 0),
            ("blue-0", "blue", 0),
            ("blue-9", "blue", 9),
            ("free-9", None, 9),
            ("free-5", None, 5),
            ("blue-5", "blue", 5),
        ):
            self.put(name, deployment_id=pin, priority=priority)
        expected = ["blue-9", "free-9", "free-5", "blue-5", "free-0", "blue-0"]
        serial = [self.take(deployment_id="blue").id for _ in range(3)]
        assert serial + ids(self.take_many(5, deployment_id="blue")) == expected

    def test_own_and_unpinned_items_are_one_rotation(self) -> None:
        """SPEC 5."""
        self.start()
        for tenant, pin in (("a", "blue"), ("b", None), ("c", "blue"), ("d", "green")):
            self.put(tenant=tenant, deployment_id=pin)
            self.put(tenant=tenant, deployment_id=pin)
        served = [self.take(deployment_id="blue").tenant for _ in range(4)]
        batch = [item.tenant for item in self.take_many(9, deployment_id="blue")]
        assert (served, batch) == (["a", "b", "c", "a"], ["b", "c"])

    def test_a_pin_survives_every_way_back(self) -> None:
        """SPEC 3."""
        self.start(lease_seconds=10)
        self.put(deployment_id="blue")
        self.say("fail", self.take(deployment_id="blue"))
        self.say("release", self.take(deployment_id="blue"))
        self.take(deployment_id="blue")
        self.wait(10)
        self.queue.reap()
        assert self.nothing_due()
        self.take(deployment_id="blue")
        self.queue.adopt(worker="w1")
        assert self.nothing_due()
        assert self.take(deployment_id="blue").deployment_id == "blue"
