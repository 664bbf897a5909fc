"""Queues and tenants that an operator has stopped serving: hold, unhold, holds."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import permutations
from typing import Any

from django_workqueue.conformance._bench import (
    HOLDER_VERBS,
    Bench,
    assert_near,
    ids,
    new_item,
    seconds_between,
    tenants,
)
from django_workqueue.conformance.fairness import _Rotation
from django_workqueue.items import QueueHold, WorkItem, WorkState

#: A whole queue, a tenant everywhere, and that tenant in that queue.
KINDS: tuple[dict[str, Any], ...] = (
    {"queue": "mail"},
    {"tenant": "a"},
    {"queue": "mail", "tenant": "a"},
)


class Holding(Bench):
    def dealt(self, queue: str = "default", **options: Any) -> str:
        """Claim all that is served and give it back; return its tenants, of one letter each."""
        taken = self.take_many(100, "w9", queue=queue, **options)
        for item in taken:
            self.say("release", item)
        return "".join(tenants(taken))

    def one_by_one(self, count: int, **options: Any) -> str:
        return "".join(self.take(**options).tenant for _ in range(count))

    def test_a_held_queue_is_not_served(self) -> None:
        """SPEC 4: the others are."""
        self.start()
        for queue in ("mail", "sms"):
            self.put_for("ab", queue=queue)
        self.queue.hold(queue="mail")
        assert self.nothing_due(queue="mail")
        assert self.take_many(5, queue="mail") == ()
        assert self.dealt("sms") == "ab"
        self.queue.unhold(queue="mail")
        assert self.dealt("mail") == "ab"

    def test_a_held_tenant_is_served_in_no_queue(self) -> None:
        """SPEC 4: the others are."""
        self.start()
        for queue in ("mail", "sms"):
            self.put_for("aab", queue=queue)
        self.queue.hold(tenant="a")
        assert [self.dealt(queue) for queue in ("mail", "sms")] == ["b", "b"]
        self.queue.unhold(tenant="a")
        assert [self.dealt(queue) for queue in ("mail", "sms")] == ["aba", "aba"]

    def test_a_tenant_held_in_a_queue_is_served_in_the_others(self) -> None:
        """SPEC 4."""
        self.start()
        for queue in ("mail", "sms"):
            self.put_for("ab", queue=queue)
        self.queue.hold(queue="mail", tenant="a")
        assert [self.dealt(queue) for queue in ("mail", "sms")] == ["b", "ab"]
        self.queue.unhold(queue="mail", tenant="a")
        assert self.one_by_one(2, queue="mail") == "ab"

    def test_an_item_is_served_once_no_hold_is_on_it(self) -> None:
        """SPEC 4: whatever the order in which several are lifted."""
        self.start()
        self.put(tenant="a", queue="mail")
        for order in permutations(KINDS):
            for hold in KINDS:
                self.queue.hold(**hold)
            for hold in order:
                assert self.dealt("mail") == "", order
                self.queue.unhold(**hold)
            assert self.dealt("mail") == "a", order

    def test_overlapping_holds_stop_what_each_of_them_names(self) -> None:
        """SPEC 4."""
        self.start()
        for queue in ("mail", "sms", "web"):
            self.put_for("abc", queue=queue)
        self.queue.hold(queue="mail")
        self.queue.hold(tenant="a")
        self.queue.hold(queue="sms", tenant="c")
        self.queue.hold(queue="mail", tenant="b")
        assert [self.dealt(queue) for queue in ("mail", "sms", "web")] == ["", "b", "bc"]
        self.queue.unhold(queue="mail")
        self.queue.unhold(tenant="a")
        assert ["".join(sorted(self.dealt(q))) for q in ("mail", "sms")] == ["ac", "ab"]

    def test_what_is_held_is_accepted_and_counted(self) -> None:
        """SPEC 4: due too, and its age."""
        self.start()
        self.queue.hold(queue="default")
        stored = self.put("i-1", dedupe_key="k")
        assert stored.state is WorkState.QUEUED
        assert self.put("i-2", dedupe_key="k") == stored
        self.put(available_at=self.now() + timedelta(seconds=900))
        self.expect(depth=2, due=1)
        self.wait(900)
        assert self.nothing_due()
        self.expect(depth=2, due=2)
        assert_near(self.figures().oldest_age_seconds, 900)

    def test_running_items_go_on_and_what_they_give_back_is_not_served(self) -> None:
        """SPEC 4."""
        for hold in KINDS:
            self.start(lease_seconds=100)
            held = {}
            for verb in (*HOLDER_VERBS, "reap", "adopt"):
                name = f"w-{verb}"
                self.put(verb, "a", queue="mail")
                held[verb] = self.take(
                    name, queue="mail", lease_seconds=10 if verb == "reap" else 99
                )
            self.queue.hold(**hold)
            for verb in HOLDER_VERBS:
                self.say(verb, held[verb])
            self.wait(10)
            assert ids(self.queue.reap()) == ["reap"]
            assert ids(self.queue.adopt(worker="w-adopt")) == ["adopt"]
            self.expect("mail", depth=4, due=4, claimed=1, paused=1, completed=1)
            assert self.nothing_due(queue="mail")
            self.queue.unhold(**hold)
            served = self.take_many(9, queue="mail")
            assert ids(served) == ["fail", "release", "reap", "adopt"]

    def test_operators_move_held_items(self) -> None:
        """SPEC 4: what they queue again isn't served before the hold is lifted."""
        self.start()
        dead = self.bury("dead")
        paused = self.in_state(WorkState.PAUSED, "paused")
        queued = self.put("queued")
        self.queue.hold(tenant="acme")
        assert self.operate("requeue", dead).state is WorkState.QUEUED
        assert self.operate("resume", paused).state is WorkState.QUEUED
        assert self.operate("cancel", queued).state is WorkState.CANCELLED
        self.expect(depth=2, due=2, cancelled=1)
        assert self.nothing_due()
        self.queue.unhold(tenant="acme")
        assert ids(self.take_many(9)) == ["dead", "paused"]

    def test_what_became_due_under_a_hold_has_its_place_after_it(self) -> None:
        """SPEC 4."""
        self.start()
        due = self.now() + timedelta(seconds=100)
        for name, priority in (("first", 0), ("urgent", 9)):
            self.put(name, available_at=due, priority=priority)
        self.put("last")
        self.queue.hold(tenant="acme")
        self.wait(100)
        assert self.nothing_due()
        self.queue.unhold(tenant="acme")
        assert ids(self.take_many(9)) == ["urgent", "first", "last"]

    def test_names_are_held_exactly(self) -> None:
        """SPEC 3: whatever they are made of."""
        self.start()
        names = ["a'b", "100%", "%s", '"', "\\", "{}", "_", "a", "A", "a ", "á", "a\u0301", "😀"]
        names += ["\u200fright", "\u202eleft", "right", "left", "--", ";", "$1", "\n", "NULL"]
        names.sort()
        for number, held in enumerate(names):
            self.put_for(names, queue=f"q-{number}")
            self.queue.hold(tenant=held)
            served = tenants(self.take_many(99, queue=f"q-{number}"))
            assert served == [name for name in names if name != held]
            assert self.queue.unhold(tenant=held) is not None
        for held in names:
            self.put_for("ab", queue=held)
            assert self.take(queue=held).tenant == "a", "another queue is held"
            self.queue.hold(queue=held)
            assert self.nothing_due(queue=held)
        for held in names:
            self.queue.unhold(queue=held)
            assert self.take(queue=held).tenant == "b"

    def test_a_held_pin_is_not_served_either(self) -> None:
        """SPEC 5."""
        self.start()
        for tenant, pin in (("a", "blue"), ("a", None), ("b", "blue"), ("b", None), ("c", "green")):
            self.put(tenant=tenant, deployment_id=pin)
        self.queue.hold(tenant="a")
        assert self.dealt(deployment_id="blue") == "bb"
        assert self.dealt() == "b"
        self.queue.hold(queue="default", tenant="b")
        assert self.nothing_due(deployment_id="blue")
        assert self.dealt(deployment_id="green") == "c"
        self.queue.unhold(tenant="a")
        assert self.dealt(deployment_id="blue") == "aa"
        self.queue.hold(queue="default")
        for deployment in ("", "blue", "green"):
            assert self.nothing_due(deployment_id=deployment)

    def test_a_queue_or_tenant_without_items_can_be_held(self) -> None:
        """SPEC 4."""
        self.start()
        self.queue.hold(queue="new")
        self.queue.hold(tenant="newcomer")
        self.put(queue="new")
        self.put_for(["newcomer", "other"])
        assert self.nothing_due(queue="new")
        assert tenants(self.take_many(9)) == ["other"]


@dataclass
class _HeldRotation(_Rotation):
    """The rule of SPEC 5 while some tenants (None: all) are held."""

    held: set[str | None] = field(default_factory=set)

    def serve(self, deployment: str) -> str | None:
        """Take the next item that isn't held away; return its id."""
        every = self.waiting
        away = {None, *(item.tenant for item in every.values())} if None in self.held else self.held
        self.waiting = {name: item for name, item in every.items() if item.tenant not in away}
        served = super().serve(deployment)
        self.waiting = {name: item for name, item in every.items() if name != served}
        return served


class HeldTurns(Bench):
    def test_held_tenants_are_passed_over_and_then_join_the_rotation(self) -> None:
        """SPEC 5: at its start, in its middle, at its end; by single claims and by batches."""
        self.start()
        for held in ("a", "c", "e", "ab", "bd", "ae", "de", "abde", "abcde"):
            for size in (1, 3, 20):
                queue = f"{held} by {size}"
                self.put_for("abcde" * 2, queue=queue)
                for tenant in held:
                    self.queue.hold(queue=queue, tenant=tenant)
                free = [name for name in "abcde" if name not in held]
                assert self.drained(queue, size) == free * 2, queue
                for tenant in held:
                    self.queue.unhold(queue=queue, tenant=tenant)
                last = free[-1] if free else ""
                rest = sorted(held, key=lambda name: (name <= last, name))
                assert self.drained(queue, size) == rest * 2, queue

    def drained(self, queue: str, size: int) -> list[str]:
        """Claim batches of *size* until nothing is served; return their tenants."""
        served: list[str] = []
        while taken := self.take_many(size, queue=queue):
            served += tenants(taken)
        return served

    def test_a_hold_between_two_claims_is_seen_by_the_second(self) -> None:
        """SPEC 5."""
        self.start()
        self.put_for("abc" * 3)
        assert self.take().tenant == "a"
        self.queue.hold(tenant="b")
        assert [self.take().tenant for _ in range(2)] == ["c", "a"]
        self.queue.unhold(tenant="b")
        assert [self.take().tenant for _ in range(3)] == ["b", "c", "a"]

    def test_a_claim_that_finds_only_held_work_does_not_move_the_turn(self) -> None:
        """SPEC 5."""
        self.start()
        self.put_for("abc")
        assert self.take().tenant == "a"
        for hold in ({"queue": "default"}, {"tenant": "b"}):
            self.queue.hold(**hold)
        self.queue.hold(tenant="c")
        assert self.nothing_due()
        self.queue.unhold(queue="default")
        assert self.take_many(5) == ()
        for tenant in "cb":
            self.queue.unhold(tenant=tenant)
        self.put_for("a")
        assert tenants(self.take_many(5)) == ["b", "c", "a"]

    def test_a_batch_is_full_though_some_are_held(self) -> None:
        """SPEC 4, 5: with fewer tenants than the limit, too."""
        self.start()
        self.put_for("a" * 7 + "b" + "c" * 12 + "d" * 3 + "e" * 9)
        self.queue.hold(tenant="c")
        self.queue.hold(tenant="e")
        assert "".join(tenants(self.take_many(6))) == "abdada"
        assert "".join(tenants(self.take_many(20))) == "daaaa"
        self.queue.unhold(tenant="c")
        assert tenants(self.take_many(5)) == ["c"] * 5
        self.queue.unhold(tenant="e")
        assert "".join(tenants(self.take_many(4))) == "ecec"

    def test_many_held_tenants_hide_no_other(self) -> None:
        """SPEC 5."""
        self.start()
        names = [f"t{number:03}" for number in range(60)]
        self.put_for(names)
        free = {names[0], names[31], names[59]}
        for name in names:
            if name not in free:
                self.queue.hold(tenant=name)
        assert len(self.queue.holds()) == 57
        assert self.take().tenant == names[0]
        assert tenants(self.take_many(9)) == [names[31], names[59]]

    def test_holds_come_and_go_in_exact_rotation(self) -> None:
        """SPEC 5, V1: a random walk against the rule, with pins, returns and batches."""
        self.start(max_attempts=1000)
        rotation, dice, running = _HeldRotation(), random.Random(7), list[WorkItem]()
        for _ in range(150):
            action = dice.choice(["put", "put", "claim", "claim_many", "back", "hold", "unhold"])
            deployment = dice.choice(["", "", "blue"])
            if action == "put":
                for name in dice.sample("abcdefgh", dice.choice([1, 2, 5])):
                    pin = dice.choice(["", "", "blue", "green"])
                    priority = dice.choice([0, 9])
                    rotation.add(self.put(None, name, priority=priority, deployment_id=pin))
            elif action == "back" and running:
                item = running.pop(dice.randrange(len(running)))
                rotation.add(self.say(dice.choice(["fail", "release"]), item))
            elif action == "hold":
                tenant = dice.choice([*"abcdefgh", None])
                self.queue.hold(queue="default", tenant=tenant)
                rotation.held.add(tenant)
            elif action == "unhold" and rotation.held:
                tenant = dice.choice(sorted(rotation.held, key=str))
                self.queue.unhold(queue="default", tenant=tenant)
                rotation.held.remove(tenant)
            else:
                limit = dice.choice([1, 1, 2, 3, 12])
                taken = self.take_many(limit, deployment_id=deployment)
                expected = [rotation.serve(deployment) for _ in range(limit)]
                assert ids(taken) == [name for name in expected if name is not None]
                running.extend(taken)


class Holds(Bench):
    def test_a_hold_says_what_is_held_since_when_by_whom_and_why(self) -> None:
        """SPEC 4."""
        self.start()
        for kind in KINDS:
            hold = self.queue.hold(**kind, by="ann", reason="the gateway is down")
            assert isinstance(hold, QueueHold)
            assert (hold.queue, hold.tenant) == (kind.get("queue"), kind.get("tenant"))
            assert (hold.by, hold.reason) == ("ann", "the gateway is down")
            assert hold.since.utcoffset() is not None
            assert_near(seconds_between(hold.since, self.now()), 0)
            self.wait(100)
            assert hold in self.queue.holds()

    def test_nobody_and_no_reason_are_empty(self) -> None:
        """SPEC 4."""
        self.start()
        hold = self.queue.hold(tenant="a", by=None)
        assert (hold.by, hold.reason) == ("", "")

    def test_a_hold_that_is_there_is_returned_unchanged(self) -> None:
        """SPEC 4."""
        self.start()
        first = self.queue.hold(queue="mail", by="ann", reason="one")
        self.wait(100)
        assert self.queue.hold(queue="mail", by="bob", reason="two") == first
        assert self.queue.holds() == (first,)
        self.queue.unhold(queue="mail")
        assert self.queue.holds() == ()

    def test_a_lifted_hold_is_returned_and_a_new_one_is_new(self) -> None:
        """SPEC 4."""
        self.start()
        hold = self.queue.hold(tenant="a", by="ann")
        self.wait(100)
        assert self.queue.unhold(tenant="a", by="bob", reason="over") == hold
        assert self.queue.unhold(tenant="a") is None
        again = self.queue.hold(tenant="a", by="bob")
        assert again.by == "bob"
        assert_near(seconds_between(hold.since, again.since), 100)

    def test_only_the_very_hold_is_lifted(self) -> None:
        """SPEC 4: none, if there is none for the same queue and tenant."""
        self.start()
        for made in KINDS:
            hold = self.queue.hold(**made)
            others = [*(kind for kind in KINDS if kind != made)]
            for other in (*others, {"queue": "a"}, {"tenant": "mail"}, {"queue": "Mail"}):
                assert self.queue.unhold(**other) is None
            assert self.queue.holds() == (hold,)
            assert self.queue.unhold(**made) == hold

    def test_holds_are_listed_by_queue_then_by_tenant(self) -> None:
        """SPEC 4: by code point; all of them before any name."""
        self.start()
        assert self.queue.holds() == ()
        names = ["B", "a", "b", "é", "😀"]
        kinds: list[dict[str, str]] = [
            *({"tenant": name} for name in names),
            {"queue": "B"},
            *({"queue": "B", "tenant": name} for name in names),
            *({"queue": name} for name in names[1:]),
        ]
        for kind in random.Random(3).sample(kinds, len(kinds)):
            self.queue.hold(**kind)
        listed = [(hold.queue, hold.tenant) for hold in self.queue.holds()]
        assert listed == [(kind.get("queue"), kind.get("tenant")) for kind in kinds]

    def test_a_hold_survives_the_items_it_stops(self) -> None:
        """SPEC 4."""
        self.start(retention_seconds=0)
        hold = self.queue.hold(tenant="acme")
        self.operate("cancel", self.put("i-1"))
        self.queue.prune()
        self.wait(100_000)
        assert self.queue.holds() == (hold,)
        self.queue.enqueue_many([new_item("i-1")])
        assert self.nothing_due()
