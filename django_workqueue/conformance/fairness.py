"""Whose turn it is: the rotation of SPEC 5, exactly."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from django_workqueue.conformance._bench import Bench, ids, new_item, tenants
from django_workqueue.items import WorkItem, WorkPriority


@dataclass
class _Rotation:
    """The rule of SPEC 5 in a few lines, for one queue: what must be served next."""

    waiting: dict[str, WorkItem] = field(default_factory=dict)
    #: The tenant served last, by worker deployment.
    last: dict[str, str] = field(default_factory=dict)

    def add(self, item: WorkItem) -> None:
        self.waiting[item.id] = item

    def serve(self, deployment: str) -> str | None:
        """Take the next item away; return its id."""
        pins = (None, deployment or None)
        own = [item for item in self.waiting.values() if item.deployment_id in pins]
        if not own:
            return None
        last = self.last.get(deployment, "")
        tenant = min((item.tenant <= last, item.tenant) for item in own)[1]
        lane = [item for item in own if item.tenant == tenant]
        best = min(lane, key=lambda item: (-item.priority, item.job_id))
        self.last[deployment] = tenant
        return self.waiting.pop(best.id).id


class Fairness(Bench):
    def serve(self, count: int, **options: Any) -> str:
        """Claim *count* items one by one; return their tenants, of one letter each."""
        return "".join(self.take(**options).tenant for _ in range(count))

    def test_a_loud_tenant_does_not_keep_a_quiet_one_out(self) -> None:
        """T14, T45."""
        self.start()
        self.put_for("aaaaaaaaz")
        assert self.serve(4) == "azaa"

    def test_priority_orders_only_a_tenants_own_work(self) -> None:
        """T46, R2."""
        self.start()
        self.put("a-low", "a", priority=WorkPriority.LOW)
        for number in range(3):
            self.put(f"b-{number}", "b", priority=WorkPriority.URGENT - number)
        self.put("a-high", "a", priority=WorkPriority.HIGH)
        assert ids(self.take_many(9)) == ["a-high", "b-0", "a-low", "b-1", "b-2"]

    def test_single_claims_rotate_exactly_over_1_2_and_7_tenants(self) -> None:
        """SPEC 5."""
        self.start()
        for names in ("a", "ab", "abcdefg"):
            for name in reversed(names):
                self.put_for(name * 3, queue=names)
            assert self.serve(3 * len(names), queue=names) == names * 3

    def test_claims_rotate_exactly_over_1000_tenants(self) -> None:
        """SPEC 5."""
        self.start()
        names = [f"t{number:04}" for number in range(1000)]
        for seed in range(2):
            self.put_for(random.Random(seed).sample(names, 1000))
        served = tenants(self.take_many(997))
        served += [self.take().tenant for _ in range(6)]
        served += tenants(self.take_many(1000))
        assert served == names * 2

    def test_tenants_that_come_and_go_are_served_in_exact_rotation(self) -> None:
        """SPEC 5, V1: a random walk against the rule, with pins, retries and batches."""
        self.start(max_attempts=1000)
        rotation, dice, held = _Rotation(), random.Random(20), list[WorkItem]()
        for _ in range(150):
            action = dice.choice(["put", "put", "claim", "claim", "claim_many", "back"])
            deployment = dice.choice(["", "", "blue"])
            if action == "put":
                for name in dice.sample("abcdefgh", dice.choice([1, 1, 1, 4])):
                    pin = dice.choice(["", "", "blue", "green"])
                    item = self.put(None, name, priority=dice.choice([0, 9]), deployment_id=pin)
                    rotation.add(item)
            elif action == "back" and held:
                item = held.pop(dice.randrange(len(held)))
                rotation.add(self.say(dice.choice(["fail", "release"]), item))
            else:
                limit = 1 if action == "claim" else dice.choice([2, 3, 5, 12])
                taken = self.take_many(limit, deployment_id=deployment)
                expected = [rotation.serve(deployment) for _ in range(limit)]
                assert ids(taken) == [name for name in expected if name is not None]
                held.extend(taken)

    def test_no_set_of_changing_tenants_starves_one(self) -> None:
        """V1: a turn counted modulo the tenants with work, of which c is one now and then."""
        self.start()
        self.put_for("ab" * 30)
        served, c_waits = "", False
        for turn in range(30):
            if turn % 2 and not c_waits:
                self.put_for("c")
                c_waits = True
            served += self.serve(1)
            c_waits = c_waits and served[-1] != "c"
        assert served == "abc" * 10

    def test_the_turn_survives_that_the_tenant_served_last_vanishes(self) -> None:
        """SPEC 5."""
        self.start()
        self.put_for("aabcc")
        assert self.serve(2) == "ab"
        assert self.serve(3) == "cac"

    def test_the_turn_survives_an_empty_queue(self) -> None:
        """SPEC 5."""
        self.start()
        self.put_for("ab")
        for item in self.take_many(2):
            self.say("complete", item)
        assert self.nothing_due()
        self.wait(1000)
        self.put_for("abc")
        assert self.serve(3) == "cab"

    def test_an_empty_claim_does_not_move_the_turn(self) -> None:
        """SPEC 5."""
        self.start()
        self.put_for("a")
        assert self.serve(1) == "a"
        assert self.nothing_due()
        assert self.take_many(5) == ()
        self.put_for("ab")
        assert self.serve(2) == "ba"

    def test_a_new_tenant_joins_within_one_round(self) -> None:
        """SPEC 5."""
        self.start()
        self.put_for("bdfbdf")
        assert self.serve(2) == "bd"
        self.put_for("ace")
        assert self.serve(7) == "efabcdf"

    def test_tenants_are_in_code_point_order(self) -> None:
        """SPEC 5: the same in every store, whatever its language."""
        self.start()
        names = ["A", "B", "Z", "a", "a b", "a-b", "aa", "b", "z", "ä", "é", "中", "\uff5a", "😀"]
        assert names == sorted(names)
        self.put_for(random.Random(1).sample(names, len(names)))
        served = [self.take().tenant for _ in range(7)]
        assert served + tenants(self.take_many(20)) == names

    def test_the_cursor_compares_by_code_point_too(self) -> None:
        """SPEC 5."""
        self.start()
        self.put_for(["a", "a"])
        assert self.serve(1) == "a"
        self.put_for(["B", "é", "😀"])
        assert tenants(self.take_many(9)) == ["é", "😀", "B", "a"]

    def test_tenants_differing_in_one_character_are_two(self) -> None:
        """SPEC 5, R43."""
        self.start()
        names = ["a", "a ", "a%", "a_", "aa", "á", "a\u0301"]
        self.put_for(sorted(names) * 2)
        assert tenants(self.take_many(20)) == sorted(names) * 2

    def test_a_batch_is_spread_evenly(self) -> None:
        """SPEC 5: each tenant gets ⌊k/n⌋ or ⌈k/n⌉."""
        self.start()
        for limit, count in ((7, 3), (3, 7), (10, 10), (10, 4), (5, 1), (12, 5)):
            queue = f"{limit} of {count}"
            names = "abcdefghij"[:count]
            self.put_for(sorted(names * 12), queue=queue)
            for _ in range(2):
                served = Counter(tenants(self.take_many(limit, queue=queue)))
                shares = [served[name] for name in names]
                assert sum(shares) == limit
                assert set(shares) <= {limit // count, -(-limit // count)}, queue

    def test_batches_serve_as_single_claims_when_tenants_run_short(self) -> None:
        """SPEC 4, 5."""
        self.start()
        backlog = "a" * 7 + "b" + "c" * 3 + "d" * 12 + "e" * 2
        orders = {}
        for sizes in ((1,) * 25, (25,), (4, 1, 9, 11), (2, 2, 2, 1, 5, 13)):
            queue = str(sizes)
            self.put_for(backlog, queue=queue)
            orders[queue] = [
                name for size in sizes for name in tenants(self.take_many(size, queue=queue))
            ]
        expected = "abcde" + "acde" + "acd" + "ad" * 4 + "d" * 5
        assert set(map("".join, orders.values())) == {expected}

    def test_the_turn_is_kept_per_queue(self) -> None:
        """SPEC 5."""
        self.start()
        for queue in ("mail", "sms"):
            self.put_for("abc", queue=queue)
        assert self.serve(2, queue="mail") == "ab"
        assert self.serve(3, queue="sms") == "abc"
        assert self.serve(1, queue="mail") == "c"

    def test_the_turn_is_kept_per_worker_deployment(self) -> None:
        """SPEC 5."""
        self.start()
        self.put_for("abcd" * 3)
        assert self.serve(2) == "ab"
        assert self.serve(1, deployment_id="blue") == "a"
        assert self.serve(1, deployment_id="green") == "a"
        assert self.serve(2, deployment_id="blue") == "bc"
        assert self.serve(2) == "cd"

    def test_all_workers_share_the_turn(self) -> None:
        """SPEC 5."""
        self.start()
        self.put_for("abcd")
        assert [self.take(f"w{number}").tenant for number in range(4)] == list("abcd")

    def test_a_tenant_without_due_work_is_passed_over(self) -> None:
        """SPEC 5."""
        self.start()
        self.put_for("aacc")
        self.put(None, "b", available_at=self.now() + timedelta(seconds=1000))
        assert self.serve(3) == "aca"
        self.wait(1000)
        assert self.serve(2) == "bc"

    def test_a_retried_item_keeps_its_place(self) -> None:
        """R35."""
        self.start()
        for name in ("first", "second", "third"):
            self.put(name)
        self.say("fail", self.take())
        assert ids(self.take_many(3)) == ["first", "second", "third"]

    def test_a_retried_item_waits_for_its_tenants_turn(self) -> None:
        """SPEC 5."""
        self.start()
        self.put_for("abc")
        self.say("fail", self.take())
        assert self.serve(3) == "bca"

    def test_an_old_item_does_not_outrank_a_higher_priority_on_its_return(self) -> None:
        """R35."""
        self.start()
        self.say("release", self.take_new("old"))
        self.put("urgent", priority=WorkPriority.URGENT)
        self.put("young")
        assert ids(self.take_many(3)) == ["urgent", "old", "young"]

    def test_duplicates_and_scheduled_items_do_not_move_the_turn(self) -> None:
        """SPEC 5."""
        self.start()
        self.put_for("abc")
        assert self.serve(1) == "a"
        self.put("i-1", "a")
        self.put("i-1", "a")
        self.queue.enqueue_many([new_item("i-2", "z", available_at=self.now() + timedelta(days=1))])
        assert self.serve(3) == "bca"
