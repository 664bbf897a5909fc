"""
Memory, SQLite and PostgreSQL are told the same, call after call, by one Hypothesis machine;
after each call their answers and all that can be seen of them are equal, and the invariants hold.

The machine makes every call of the contract with all its arguments, also as those make it who come
late: with any worker and fence that was ever given out, on any item, and again what it said
before. The clock stands (`tests.lockstep`), so it can be set to a deadline to the microsecond.
What is looked at besides equality: `tests.invariants`, and what the doctor finds.

WORKQUEUE_TEST_LOCKSTEP=1000 runs so many examples, longer ones, each time others. Without it
they are few and always the same.
"""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from itertools import product
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, note, seed, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.providers import AVAILABLE_PROVIDERS, HypothesisProvider
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from django_workqueue import QueuePolicy, WorkItem
from django_workqueue.doctor import examine
from tests.invariants import BY_HOLDERS, BY_OPERATORS, SETTLING, Step, Witness
from tests.lockstep import (
    START,
    Outcome,
    Picture,
    StandingClock,
    Store,
    differences,
    standing_databases,
)


class EvenProvider(HypothesisProvider):
    """
    Hypothesis's own, but each choice is as likely as another, and no example is made from another.

    By itself it prefers the first of several choices, and makes five of six examples by changing
    one bit of the one before: of the actions of a queue most would hardly ever come.
    """

    def draw_integer(
        self, min_value: int | None = None, max_value: int | None = None, **rest: Any
    ) -> int:
        if min_value is None or max_value is None:
            return super().draw_integer(min_value, max_value, **rest)
        assert self._random is not None
        return self._random.randint(min_value, max_value)


AVAILABLE_PROVIDERS["evenly"] = f"{__name__}.{EvenProvider.__name__}"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.django_db(transaction=True, databases="__all__"),
]

LONGER = int(os.environ.get("WORKQUEUE_TEST_LOCKSTEP", "0"))
EXAMPLES, STEPS = (LONGER, 50) if LONGER else (36, 45)
#: Between two visits of the doctor.
STEPS_TO_THE_DOCTOR = 15

# Names of whose order and likeness databases and Python have different opinions.
TENANTS = ("a", "Z", "é")
IDS = ("i", "I", "j")
KEYS = ("k", "K")
WORKERS = ("w", "W", "v")
QUEUES = ("default", "mail")
PINS = ("blue", "green")


POLICIES = st.builds(
    QueuePolicy,
    lease_seconds=st.sampled_from([30, 10, 60]),
    max_attempts=st.sampled_from([2, 1, 3]),
    backoff_seconds=st.sampled_from([5, 0, 10]),
    backoff_cap_seconds=st.sampled_from([300, 15, 0]),
    max_lease_seconds=st.sampled_from([60, 30, 20, 3600]),
    timeout_seconds=st.sampled_from([None, 5]),
    retention_seconds=st.sampled_from([10, 60, 0, None]),
    dead_letter_retention_seconds=st.sampled_from([30, None, None, 0]),
    max_depth=st.sampled_from([*[None] * 6, 3, 6]),
    max_payload_bytes=st.sampled_from([*[262_144] * 9, 20]),
)
# The last one can't be stored.
PAYLOADS = st.sampled_from([*[{}, {"n": 1}, {"text": "é" * 10}] * 12, {"n": float("nan")}])
RESULTS = st.sampled_from([*[None, 0, {"sum": [1, None]}, ["é" * 10]] * 2, float("inf")])
LEASES = st.sampled_from([None, None, 15, 90])
DELAYS = st.sampled_from([0, 10, 30])
MOMENTS = st.sampled_from([None, None, 0, 10, 30, -10])
LIMITS = st.sampled_from([None, None, 1, 2])

#: What the machine does, and how often.
ACTIONS = {
    "enqueue": 3,
    "enqueue_many": 2,
    "claim": 3,
    "claim_many": 6,
    "settle": 14,
    "come_late": 2,
    "say_it_again": 3,
    "reap": 3,
    "restart": 1,
    "operate": 3,
    "operate_on_what_waits": 8,
    "hold": 1,
    "unhold": 3,
    "wait": 1,
    "wait_for_a_deadline": 7,
    "prune": 5,
    "keep_up": 1,
    "change_the_settings": 1,
    "read_dead_letters": 1,
}
#: Each example leaves some of these out.
DISPENSABLE = ("come_late", "say_it_again", "reap", "restart", "operate", "hold")
#: What an operator may do with an item as it stands.
FITTING = {
    "queued": ["cancel"],
    "claimed": ["cancel"],
    "paused": ["resume", "resume", "cancel"],
    "completed": ["get"],
    "dead_lettered": ["requeue", "requeue", "discard"],
    "cancelled": ["requeue"],
}
#: Where an item stays until a person does something.
WAITING = ("paused", "dead_lettered", "cancelled")


@st.composite
def items(draw: st.DrawFn, now: datetime, ended: list[WorkItem]) -> WorkItem:
    """Work to enqueue, with few names, so that they meet; half of it names of what has *ended*."""

    def at() -> datetime | None:
        ahead = draw(MOMENTS)
        return None if ahead is None else now + timedelta(seconds=ahead)

    tenant, item_id = draw(st.sampled_from(["a", *TENANTS])), draw(st.sampled_from(["i", *IDS]))
    key = draw(st.sampled_from([None, None, *KEYS]))
    if ended and draw(st.booleans()):
        before = draw(st.sampled_from(ended))
        tenant = before.tenant
        item_id = draw(st.sampled_from([before.id, before.id, item_id]))
        key = draw(st.sampled_from([before.dedupe_key, key]))
    return WorkItem(
        tenant=tenant,
        id=item_id,
        dedupe_key=key,
        queue=draw(st.sampled_from(["default", "default", *QUEUES])),
        priority=draw(st.sampled_from([0, 0, 50, -100])),
        deployment_id=draw(st.sampled_from([None, "", PINS[0]])),
        max_attempts=draw(st.sampled_from([None, None, 1, 3])),
        timeout_seconds=draw(st.sampled_from([None, 7])),
        payload=draw(PAYLOADS),
        available_at=at(),
        enqueued_at=at(),
    )


def in_short(value: Any) -> str:
    """What is told, for a reader: of an item what isn't the default."""
    if isinstance(value, list):
        return f"[{', '.join(in_short(each) for each in value)}]"
    if isinstance(value, WorkItem):
        plain = WorkItem(tenant="-", id="-")
        named = {name: getattr(value, name) for name in value.__dataclass_fields__}
        told = {name: each for name, each in named.items() if each != getattr(plain, name)}
        return f"WorkItem({arguments_in_short(told)})"
    return str(value) if isinstance(value, datetime) else repr(value)


def arguments_in_short(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={in_short(each)}" for name, each in arguments.items())


class Lockstep(RuleBasedStateMachine):
    """Drives the three stores."""

    clock: ClassVar[StandingClock]
    #: How often each verb was answered, and refused with what.
    figures: ClassVar[Counter[str]] = Counter()
    #: How the stores stood, names and times left out.
    pictures: ClassVar[set[Any]] = set()

    @initialize(policy=POLICIES, data=st.data())
    def begin(self, policy: QueuePolicy, data: st.DataObject) -> None:
        self.clock.set(START)
        self.stores = [
            Store(name, self.clock, policy) for name in ("memory", "sqlite", "postgresql")
        ]
        self.witness = Witness(policy)
        self.picture = Picture()
        self.holds: Any = ()
        #: Every claim: tenant, id, worker, fence.
        self.claims: list[tuple[str, str, str, int]] = []
        #: Accepted settlements, to be repeated: verb and arguments.
        self.settled: list[tuple[str, dict[str, Any]]] = []
        self.steps = 0
        self.figures["examples"] += 1
        self.data = data
        self.left_out = {self.one_of(DISPENSABLE) for _ in range(3)}
        for _ in range(self.one_of([0, 1, 2, 3])):
            self._run_and_end()
            if self.one_of([True, False]):  # so that an older acceptance may outlive the next
                self.change_the_settings()
        self.enqueue_many()

    def _run_and_end(self) -> None:
        """So that an id and a key have had other holders before."""
        key = self.one_of([None, *KEYS])
        self.tell("enqueue", item=WorkItem(tenant="a", id="i", dedupe_key=key))
        self._claim("claim", worker="w", queue="default", lease_seconds=None, deployment_id=None)
        named = {"item_id": "i", "tenant": "a", "worker": "w", "fence": None}
        if self.one_of([True, False]):
            self.tell("complete", **named, result=None)
        else:
            self.tell("fail", **named, error="boom", retryable=False, delay_seconds=None)

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """Whatever can be done now."""
        self.data = data
        items = self.picture.items.values()
        held = [item for item in items if item.held]
        impossible = {
            "claim_many": not self._due(),
            "settle": not any(not item.lapsed_at(self.clock.now()) for item in held),
            "come_late": not self.claims,
            "say_it_again": not self.settled,
            "reap": not held,
            "restart": not held,
            "operate": not items,
            "operate_on_what_waits": not any(item.state in WAITING for item in items),
            "unhold": not self.holds,
            "prune": not any(item.terminal for item in items),
        }
        out = self.left_out | {name for name, isnt in impossible.items() if isnt}
        actions = [name for name in ACTIONS if name not in out for _ in range(ACTIONS[name])]
        getattr(self, self.draw(st.sampled_from(actions)))()

    def teardown(self) -> None:
        if hasattr(self, "stores"):
            self._ask_the_doctor()
            _, *databases = self.stores
            counted = differences("the audit", Store.audited, databases)
            assert counted == self.witness.audited, "accepted moves of operators in the audit"

    def draw(self, strategy: st.SearchStrategy[Any]) -> Any:
        return self.data.draw(strategy)

    def one_of(self, likely: Sequence[Any], others: Sequence[Any] = ()) -> Any:
        """Draw one of the *likely* ones, or rarely one of the *others*."""
        if others and (not likely or self.draw(st.sampled_from(range(8))) == 7):
            return self.draw(st.sampled_from(others))
        return self.draw(st.sampled_from(likely))

    # Telling the stores.

    def tell(self, verb: str, **wanted: Any) -> Outcome:
        """Call *verb* of every store, and look at what came of it."""

        def call(store: Store) -> Outcome:
            return store.call(verb, **wanted)

        note(f"{verb}({arguments_in_short(wanted)})")
        outcome: Outcome = differences(verb, call, self.stores)
        self.figures[f"{verb} {outcome.error}".rstrip()] += 1
        if verb == "enqueue":
            wanted = {"items": [wanted["item"]]}
        elif verb == "claim":
            wanted = {**wanted, "limit": 1}
        self._look(verb, wanted, outcome)
        return outcome

    def _look(self, verb: str, wanted: dict[str, Any], outcome: Outcome) -> None:
        before, now = self.picture, self.clock.now()
        self.picture = differences(f"after {verb}", Store.picture, self.stores)
        step = Step(
            verb=verb,
            wanted=wanted,
            outcome=outcome,
            before=before,
            after=self.picture,
            now=now,
            holds=self.holds,
        )
        self.witness.see(step)
        self.steps += 1
        self.figures["steps"] += 1
        self.pictures.add(
            tuple(
                (i.state, i.attempts, i.fence, i.max_attempts) for i in self.picture.items.values()
            )
        )
        queue = QUEUES[self.steps % 2]
        figures = differences(f"stats after {verb}", lambda s: s.stats(queue), self.stores)
        assert figures == self.witness.figures(self.picture, queue, now)
        if self.steps % STEPS_TO_THE_DOCTOR == 0:
            self._ask_the_doctor()

    def _ask_the_doctor(self) -> None:
        counted = sum(item.attempts for item in self.picture.items.values())
        for store in self.stores[1:]:
            assert examine(store.alias) == [], store.name
            assert store.failures() == counted, f"{store.name} keeps failures of pruned items"

    # Accepting and claiming.

    def enqueue(self) -> None:
        self.tell("enqueue", item=self._item())

    def enqueue_many(self) -> None:
        self.tell("enqueue_many", items=[self._item() for _ in range(self.one_of(range(2, 6)))])

    def _item(self) -> WorkItem:
        ended = [item for item in self.picture.items.values() if item.terminal]
        item: WorkItem = self.draw(items(self.clock.now(), ended))
        return item

    def claim(self) -> None:
        self._claim("claim", **self._who_claims())

    def claim_many(self) -> None:
        self._claim("claim_many", limit=self.one_of(range(1, 6)), **self._who_claims())

    def _who_claims(self) -> dict[str, Any]:
        lanes = [(item.queue, item.deployment_id) for item in self._due()]
        queue, pin = self.one_of(lanes, [*product(QUEUES, (None, *PINS, ""))])
        return {
            "worker": self.one_of(WORKERS),
            "queue": queue,
            "lease_seconds": self.draw(LEASES),
            "deployment_id": pin,
        }

    def _claim(self, verb: str, **wanted: Any) -> None:
        for item in self.tell(verb, **wanted).items():
            self.figures["claims"] += 1
            self.claims.append((item.tenant, item.id, item.worker or "", item.fence or 0))

    def _due(self) -> list[WorkItem]:
        now, records = self.clock.now(), self.witness.records
        queued = (i for i in self.picture.items.items() if i[1].state == "queued")
        return [item for n, item in queued if records[n].due_at <= now]

    # By holders.

    def settle(self) -> None:
        """Any verb of a holder, by the holder."""
        held = [item for item in self.picture.items.values() if item.held]
        item = self.one_of([item for item in held if not item.lapsed_at(self.clock.now())])
        self._settle(
            self.one_of([*BY_HOLDERS, "fail", "fail", "complete"]),
            item_id=item.id,
            tenant=item.tenant,
            worker=item.worker,
            fence=self.one_of([item.fence, item.fence, None]),
        )

    def come_late(self) -> None:
        """Any verb of a holder, by one who held something once."""
        tenant, item_id, worker, fence = self.one_of(self.claims[-12:])
        self._settle(
            self.one_of(BY_HOLDERS),
            item_id=self.one_of([item_id], IDS),
            tenant=self.one_of([tenant], TENANTS),
            worker=self.one_of([worker], WORKERS),
            fence=self.one_of([fence, fence, None], sorted({each[3] for each in self.claims})),
        )

    def say_it_again(self) -> None:
        """What was accepted before; or another verb instead."""
        verb, wanted = self.one_of(self.settled[-3:])
        other = self.one_of([verb], BY_HOLDERS)
        if other == verb:
            self.tell(verb, **wanted)
        else:
            names = ("item_id", "tenant", "worker", "fence")
            self._settle(other, **{name: wanted[name] for name in names})

    def _settle(self, verb: str, **named: Any) -> None:
        arguments: dict[str, Any] = {}
        if verb == "complete":
            arguments = {"result": self.draw(RESULTS)}
        elif verb == "release":
            arguments = {"delay_seconds": self.draw(DELAYS)}
        elif verb == "fail":
            arguments = {
                "error": self.one_of(["boom", "bust"]),
                "retryable": self.one_of([True, True, False]),
                "delay_seconds": self.one_of([None, None, 0, 10]),
            }
        outcome = self.tell(verb, **named, **arguments)
        if verb in SETTLING and not outcome.error:
            self.settled.append((verb, {**named, "fence": outcome.answer.fence, **arguments}))

    def reap(self) -> None:
        self.tell("reap", limit=self.draw(LIMITS))

    def restart(self) -> None:
        """A worker comes back under its old name, in another process."""
        for store in self.stores:
            store.restart(self.witness.policy)
        self.tell("adopt", worker=self.one_of(WORKERS))

    # By operators.

    def operate(self) -> None:
        """A verb of an operator on any item."""
        self._operate([*self.picture.items.values()])

    def operate_on_what_waits(self) -> None:
        """The same of one that waits for it."""
        self._operate([item for item in self.picture.items.values() if item.state in WAITING])

    def _operate(self, likely: list[WorkItem]) -> None:
        ever = range(len(self.stores[0].jobs))
        item = self.one_of(likely)
        verb = self.one_of(FITTING[item.state], ["get", *BY_OPERATORS])
        named = {"item_id": item.id, "tenant": self.one_of([item.tenant], TENANTS)}
        # Of a holder of the id it need not be told which acceptance is meant.
        n = item.job_id
        job = self.one_of([None, n] if n in self.picture.holders else [n], [None, *ever])
        arguments: dict[str, Any] = {}
        if verb in ("resume", "requeue"):
            payload = self.one_of([None, self.draw(PAYLOADS)])
            arguments = {"payload": payload, "by": "op"}
        elif verb == "discard":
            arguments = {"by": "op", "reason": self.one_of(["why not"], [" "])}
        self.tell(verb, **named, job=job, **arguments)

    def hold(self) -> None:
        scopes = [
            scope
            for item in self._due()
            for scope in ((None, item.tenant), (item.queue, item.tenant), (item.queue, None))
        ]
        queue, tenant = self.one_of(scopes, [*product((None, *QUEUES), (None, *TENANTS))])
        self._set_holds("hold", queue=queue, tenant=tenant)

    def unhold(self) -> None:
        hold = self.one_of(self.holds)
        queue = self.one_of([hold.queue], [None, *QUEUES])
        self._set_holds("unhold", queue=queue, tenant=hold.tenant)

    def _set_holds(self, verb: str, **named: Any) -> None:
        before = {(hold.queue, hold.tenant) for hold in self.holds}
        self.tell(verb, **named)
        self.holds = differences("the holds", Store.holds, self.stores)
        one = {(named["queue"], named["tenant"])} - {(None, None)}
        expected = before | one if verb == "hold" else before - one
        assert {(hold.queue, hold.tenant) for hold in self.holds} == expected
        self.witness.audited += expected != before

    # Time and upkeep.

    def wait(self) -> None:
        self._set_clock(self.clock.now() + timedelta(seconds=self.one_of([10, 1, 30, 60, 600])))

    def wait_for_a_deadline(self) -> None:
        """Until it, until just before one, or just after."""
        now = self.clock.now()
        ahead = sorted({moment for moment in self.witness.deadlines(self.picture) if moment > now})
        if ahead:
            off = timedelta(microseconds=self.one_of([0, 0, -1, 1]))
            self._set_clock(max(now, self.one_of(ahead[:8]) + off))

    def _set_clock(self, moment: datetime) -> None:
        note(f"now it is {moment}")
        self.clock.set(moment)
        self.figures["clock set"] += 1
        self._look("wait", {}, Outcome())

    def prune(self) -> None:
        self.tell("prune", limit=self.draw(LIMITS))

    def keep_up(self) -> None:
        """What workers do beside their work, which nobody must see."""
        queue, pin = self.one_of(QUEUES), self.one_of(["", *PINS])
        note(f"keep up with {queue}, {pin}")
        for store in self.stores[1:]:
            store.queue.moves.promote(queue)
            store.queue.moves.fold_counters()
        self.figures["kept up"] += 1
        self._look("keep_up", {}, Outcome())

    def change_the_settings(self) -> None:
        self.witness.policy = policy = self.draw(POLICIES)
        for store in self.stores:
            store.restart(policy)
        self.figures["settings changed"] += 1

    # Reading.

    def read_dead_letters(self) -> None:
        """Page after page; and after any acceptance."""
        tenant, limit = self.one_of(TENANTS), self.one_of(range(1, 4))
        pages: list[int | None] = []
        after = None
        while page := self.tell("dead_letters", tenant=tenant, limit=limit, after=after).items():
            assert all(item.tenant == tenant for item in page), "I15"
            pages += [item.job_id for item in page]
            after = pages[-1]
        assert pages == self.witness.dead_letters(self.picture, tenant)
        if ever := range(len(self.stores[0].jobs)):
            self.tell("dead_letters", tenant=tenant, limit=limit, after=self.one_of(ever))


@pytest.fixture
def standing_clock() -> Iterator[StandingClock]:
    with standing_databases():
        yield StandingClock()


@pytest.mark.timeout(0 if LONGER else 900)
def test_three_stores_in_lockstep(standing_clock, record_property):
    Lockstep.clock = standing_clock
    Lockstep.figures.clear()
    Lockstep.pictures.clear()
    try:
        run_state_machine_as_test(
            Lockstep if LONGER else seed(7)(Lockstep),
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                backend="evenly",
                deadline=None,
                print_blob=True,
                database=None,
                # Explaining a failure would trace every line of the stores: it takes minutes.
                phases=[Phase.generate, Phase.shrink],
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        Lockstep.figures["pictures"] = len(Lockstep.pictures)
        for name, number in sorted(Lockstep.figures.items()):
            record_property(name, number)
            print(f"{number:7} {name}")
