"""Holds on PostgreSQL: beside running claims, in batches, and when there are none."""

import random
import threading
from collections.abc import Iterator
from datetime import datetime
from functools import partial
from typing import Any

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from django_workqueue import QueuePolicy, WorkItem
from django_workqueue.doctor import examine
from django_workqueue.models import AuditEntry
from django_workqueue.moves import ClaimRequest
from django_workqueue.queues import DatabaseWorkQueue
from django_workqueue.testing import DatabaseTestQueue, make_queue
from tests.elsewhere import Elsewhere, crowd
from tests.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

POSTGRES = "postgresql"
Claim = tuple[datetime, datetime, list[str]]
KINDS: list[dict[str, str]] = [
    {"queue": "default"},
    {"tenant": "held"},
    {"queue": "default", "tenant": "held"},
]
#: Of four claimers.
LIMITS = (1, 1, 3, 7)
kinds = pytest.mark.parametrize("kind", KINDS, ids=["queue", "tenant", "tenant in queue"])


@pytest.fixture
def queue() -> Iterator[DatabaseTestQueue]:
    queue = make_queue(POSTGRES, QueuePolicy())
    yield queue
    assert examine(POSTGRES) == []


@pytest.fixture
def other() -> Iterator[Elsewhere]:
    with Elsewhere(POSTGRES) as other:
        yield other


def put(queue: DatabaseWorkQueue, *tenants: str, **fields: Any) -> None:
    queue.enqueue_many(WorkItem(tenant=tenant, **fields) for tenant in tenants)


def served(queue: DatabaseWorkQueue, limit: int, **options: Any) -> list[str]:
    return [item.tenant for item in queue.claim_many(worker="w", limit=limit, **options)]


class TestStatements:
    def claims(self, queue: DatabaseWorkQueue, limit: int) -> list[str]:
        """What a claim sends but for the promotion, which asks for holds."""
        with CaptureQueriesContext(connections[POSTGRES]) as sent:
            queue.claim_many(worker="w", limit=limit)
        [promotion] = [each["sql"] for each in sent if "django_workqueue_waiting" in each["sql"]]
        assert "django_workqueue_hold" in promotion
        return [each["sql"] for each in sent if "django_workqueue_ready" in each["sql"]][1:]

    @pytest.mark.parametrize("limit", [1, 5])
    def test_without_a_hold_the_claim_asks_for_none(self, queue, limit):
        put(queue, *"ab" * 5)
        for hold in (None, {"queue": "other"}, {"queue": "other", "tenant": "a"}):
            if hold:
                queue.hold(**hold)
            [claim, *_] = self.claims(queue, limit)
            assert "django_workqueue_hold" not in claim

    @pytest.mark.parametrize("limit", [1, 5])
    def test_with_a_held_tenant_the_claim_asks(self, queue, limit):
        put(queue, *"ab" * 5)
        queue.hold(tenant="elsewhere")
        [claim, *_] = self.claims(queue, limit)
        assert "django_workqueue_hold" in claim
        queue.unhold(tenant="elsewhere")
        [claim, *_] = self.claims(queue, limit)
        assert "django_workqueue_hold" not in claim

    def test_a_held_queue_isnt_claimed_from_at_all(self, queue):
        put(queue, "a")
        queue.hold(queue="default")
        assert self.claims(queue, 5) == []


class TestBesideClaims:
    @kinds
    def test_a_hold_counts_from_its_commit(self, queue, other, kind):
        put(queue, "held", "held")
        other.begin()
        other.call(partial(queue.hold, **kind))
        assert served(queue, 1) == ["held"]
        other.commit()
        assert served(queue, 9) == []
        other.begin()
        other.call(partial(queue.unhold, **kind))
        assert served(queue, 9) == []
        other.commit()
        assert served(queue, 9) == ["held"]

    @kinds
    def test_a_transaction_that_began_before_sees_it_too(self, queue, other, kind):
        put(queue, "held", "held")
        other.begin()
        assert other.call(partial(served, queue, 1)) == ["held"]
        queue.hold(**kind)
        assert other.call(partial(served, queue, 1)) == []
        other.commit()

    @kinds
    def test_a_hold_never_waits_for_a_claim_nor_a_claim_for_a_hold(self, queue, other, kind):
        put(queue, "free", "held", "held")
        other.begin()
        other.call(partial(served, queue, 1))
        with Elsewhere(POSTGRES) as operator:
            operator.begin()
            operator.call(partial(queue.hold, **kind))
            with Elsewhere(POSTGRES) as third:
                assert third.call(partial(served, queue, 1)) == ["held"]
            operator.commit()
        other.commit()

    @kinds
    def test_no_claim_that_begins_after_the_commit_takes_held_work(self, queue, kind):
        """Four claimers go on while the hold comes and goes."""
        put(queue, *["free", "held", "other"] * 1500)
        ended = threading.Event()
        claims: list[Claim] = []

        def claim_on(limit: int) -> None:
            while not ended.is_set():
                began = queue.moves.now()
                tenants = served(queue, limit)
                claims.append((began, queue.moves.now(), tenants))
                if not tenants:
                    ended.wait(0.002)

        def let_them_claim(times: int) -> None:
            # Those that are under way, one of each, don't count.
            enough = len(claims) + len(LIMITS) + times
            eventually(lambda: len(claims) >= enough)

        held: list[tuple[datetime, datetime]] = []
        with crowd(POSTGRES, len(LIMITS)) as claimers:
            runs = [
                each.start(partial(claim_on, limit))
                for each, limit in zip(claimers, LIMITS, strict=True)
            ]
            for _ in range(6):
                queue.hold(**kind)
                since = queue.moves.now()
                let_them_claim(8)
                held.append((since, queue.moves.now()))
                queue.unhold(**kind)
                let_them_claim(4)
            ended.set()
            for run in runs:
                run.result(60)
        meanwhile = [
            tenants
            for began, over, tenants in claims
            if any(since < began and over < until for since, until in held)
        ]
        assert len(meanwhile) >= 6 * 8
        for tenants in meanwhile:
            assert "held" not in tenants
            assert not tenants or "tenant" in kind
        assert any("held" in tenants for _, _, tenants in claims)
        if "tenant" in kind:
            assert any(meanwhile), "the others weren't served"

    def test_a_claim_in_which_a_hold_falls_is_all_or_nothing_per_tenant(self, queue, other):
        """Between its promotion and its walk: it began before, so it may serve all."""
        put(queue, "held", "free")
        promotion = queue.moves.promote("default")
        assert not promotion.has_held_tenants
        other.call(partial(queue.hold, tenant="held"))
        rows = queue.moves.claim(
            ClaimRequest(queue="default", worker="w", limit=5, has_held_tenants=False)
        )
        assert [row["tenant"] for row in rows] == ["free", "held"]
        put(queue, "held")
        assert served(queue, 5) == []


class TestRotation:
    """In lockstep with the plainest implementation."""

    @pytest.mark.parametrize("deployment", ["", "blue"])
    @pytest.mark.parametrize("seed", range(3))
    def test_batches_are_served_as_memory_serves_them(self, queue, deployment, seed):
        dice = random.Random(seed)
        twin = make_queue("memory")
        both = (twin, queue)
        tenants = [f"t{n}" for n in range(12)]
        number = 0
        claims = 0
        for _ in range(80):
            action = dice.choice(["put", "claim", "claim", "hold", "unhold"])
            if action == "put":
                for tenant in dice.sample(tenants, dice.choice([3, 8])):
                    for _ in range(dice.choice([1, 1, 6])):
                        number += 1
                        item = WorkItem(
                            tenant=tenant,
                            id=str(number),
                            priority=dice.choice([-5, 0, 0, 5]),
                            deployment_id=dice.choice(["", "blue"]),
                        )
                        for each in both:
                            each.enqueue(item)
            elif action == "claim":
                limit = dice.choice([1, 4, 15, 40])
                expected, taken = (
                    [
                        item.id
                        for item in each.claim_many(
                            worker="w", limit=limit, deployment_id=deployment
                        )
                    ]
                    for each in both
                )
                assert taken == expected
                claims += len(taken)
            else:
                tenant = dice.choice(tenants)
                for each in both:
                    getattr(each, action)(tenant=tenant)
        assert claims > 50

    def test_a_batch_is_full_while_others_hold_locks_and_tenants_are_held(self, queue, other):
        put(queue, *["a", "b", "c", "d"] * 5)
        queue.hold(tenant="b")
        other.begin()
        first = other.call(partial(served, queue, 6))
        assert first == ["a", "c", "d", "a", "c", "d"]
        with Elsewhere(POSTGRES) as third:
            second = third.call(partial(served, queue, 9))
        other.commit()
        assert sorted(second) == ["a"] * 3 + ["c"] * 3 + ["d"] * 3
        assert served(queue, 9) == []
        queue.unhold(tenant="b")
        assert served(queue, 9) == ["b"] * 5


@pytest.mark.parametrize("verb", ["hold", "unhold"])
def test_of_two_operators_at_once_one_does_it_and_the_audit_has_one_line(queue, other, verb):
    if verb == "unhold":
        queue.hold(tenant="held", by="first")
    AuditEntry.objects.using(POSTGRES).all().delete()
    other.begin()
    done = other.call(partial(getattr(queue, verb), tenant="held", by="first"))
    with Elsewhere(POSTGRES) as third:
        again = third.start(partial(getattr(queue, verb), tenant="held", by="second"))
        third.wait_until_blocked(again)
        other.commit()
        assert again.result(20) == (done if verb == "hold" else None)
    lines = AuditEntry.objects.using(POSTGRES).values_list("verb", "actor")
    assert [*lines] == [(verb, "first")]


def test_a_lift_that_waits_for_another_does_not_lift_what_came_after(queue, other):
    queue.hold(tenant="held", by="first")
    other.begin()
    other.call(partial(queue.unhold, tenant="held"))
    other.call(partial(queue.hold, tenant="held", by="second"))
    with Elsewhere(POSTGRES) as third:
        lift = third.start(partial(queue.unhold, tenant="held"))
        third.wait_until_blocked(lift)
        other.commit()
        lifted = lift.result(20)
    assert [hold.by for hold in queue.holds()] == ([] if lifted else ["second"])
    assert lifted is None or lifted.by == "second"


def test_a_lift_takes_the_hold_that_it_tells_of(queue, other):
    """Between its look and its delete the hold is lifted, and another one put in its place."""
    queue.hold(tenant="held", by="first")
    met = []

    def meet(execute, sql, *rest):
        if sql.startswith("DELETE") and not met:
            met.append(other.call(partial(queue.unhold, tenant="held")))
            other.call(partial(queue.hold, tenant="held", by="second"))
        return execute(sql, *rest)

    with connections[POSTGRES].execute_wrapper(meet):
        lifted = queue.unhold(tenant="held")
    left = [hold.by for hold in queue.holds()]
    assert (lifted and lifted.by, left) in ((None, ["second"]), ("second", []))
