"""
Two calls on one item, in all orders of their statements, on two connections to PostgreSQL.

How the orders are made, and which ones are the same: see `tests.orders`. A pair of calls starts
from every state of the item in which at least one of the two does something, each call
by itself, and each in a transaction of its caller that stays open until the gate before its
COMMIT (only there do two single statements meet: one waits for the row of the other, and must
look again at what it got). After every schedule: the doctor finds nothing, no two live items have
one id or one key, nothing succeeded twice, no fence fell or was given out twice, no call raised
what the contract doesn't name, and what the two calls answered and left behind is what
one of the two would have after the other.

WORKQUEUE_ALL_ORDERS=1 runs every order of every pair from every start, in all four mixtures of
transactions, and more pairs. Without it every pair is run too, but only from the starts on which
the two meet, and in the orders with at most one interruption: one call comes in between any two
statements of the other, and waits for its locks or not. That is what finds a decision on a
picture that is no longer true.
"""

import json
import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial
from itertools import combinations_with_replacement, permutations, product
from typing import Any

import pytest
from django.db import connections, transaction

from django_workqueue import (
    InvalidTransitionError,
    LeaseLostError,
    QueuePolicy,
    WorkItem,
    WorkItemNotFoundError,
)
from django_workqueue.doctor import examine
from django_workqueue.reading import ItemReader
from django_workqueue.testing import DatabaseTestQueue, empty
from tests.orders import (
    Answer,
    Arena,
    Schedule,
    Tables,
    comparable,
    execute,
    read_tables,
    rewriting,
)

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

POSTGRES = "postgresql"
EVERYTHING = bool(os.environ.get("WORKQUEUE_ALL_ORDERS"))
SWITCHES = 1
#: Pairs that meet where it hurts from one state only, and after how many.
WHERE = {
    ("requeue_old", "enqueue_id+cancel+requeue"): ("dead", 2),
    ("requeue", "enqueue_key+cancel+requeue"): ("dead, its key free", 2),
    ("enqueue_key", "enqueue_many"): ("dead", 1),
}

LEASE = 86_400
BACKOFF = RETENTION = 3600
POLICY = QueuePolicy(
    lease_seconds=LEASE,
    max_lease_seconds=12 * LEASE,
    backoff_seconds=BACKOFF,
    backoff_cap_seconds=BACKOFF,
    retention_seconds=RETENTION,
    dead_letter_retention_seconds=RETENTION,
)
REFUSALS = (LeaseLostError, InvalidTransitionError, WorkItemNotFoundError)

# ---------------------------------------------------------------- the calls

ONE = {"item_id": "one", "tenant": "acme"}
BY_W = {**ONE, "worker": "w"}
CLAIM_1 = {**BY_W, "fence": 1}


def item(**fields: Any) -> WorkItem:
    return WorkItem(tenant="acme", payload={"of": "another"}, **fields)


Call = Callable[[DatabaseTestQueue], Any]

#: Every pair of these.
CALLS: dict[str, Call] = {
    "enqueue_id": lambda q: q.enqueue(item(id="one")),
    "enqueue_key": lambda q: q.enqueue(item(id="two", dedupe_key="k")),
    "claim": lambda q: q.claim(worker="c"),
    "heartbeat": lambda q: q.heartbeat(**CLAIM_1),
    "complete": lambda q: q.complete(**CLAIM_1, result="done"),
    "fail": lambda q: q.fail(**CLAIM_1, error="broken"),
    "release": lambda q: q.release(**CLAIM_1),
    "pause": lambda q: q.pause(**CLAIM_1),
    "resume": lambda q: q.resume(**ONE),
    "resume_edited": lambda q: q.resume(**ONE, payload={"of": "an editor"}),
    "reap": lambda q: q.reap(),
    "adopt": lambda q: q.adopt(worker="w"),
    "cancel": lambda q: q.cancel(**ONE),
    "requeue": lambda q: q.requeue(**ONE),
    "requeue_edited": lambda q: q.requeue(**ONE, payload={"of": "an editor"}),
    "discard": lambda q: q.discard(**ONE, by="op", reason="given up"),
    "prune": lambda q: q.prune(),
}


def by_w(queue: DatabaseTestQueue) -> Any:
    return queue.claim(worker="w")


#: Other arguments, and other acceptances.
OTHERS: dict[str, Call] = {
    "enqueue_both": lambda q: q.enqueue(item(id="one", dedupe_key="k")),
    "enqueue_many": lambda q: q.enqueue_many(
        [item(id="one", dedupe_key="k"), item(id="three", dedupe_key="k")]
    ),
    "claim_many": lambda q: q.claim_many(worker="c", limit=3),
    "heartbeat_unfenced": lambda q: q.heartbeat(**BY_W),
    "complete_unfenced": lambda q: q.complete(**BY_W),
    "fail_unfenced": lambda q: q.fail(**BY_W, error="broken"),
    "release_unfenced": lambda q: q.release(**BY_W),
    "fail_for_good": lambda q: q.fail(**CLAIM_1, error="broken", retryable=False),
    "fail_at_once": lambda q: q.fail(**CLAIM_1, error="broken", delay_seconds=0),
    "release_later": lambda q: q.release(**CLAIM_1, delay_seconds=BACKOFF),
    "requeue_old": lambda q: q.requeue(**ONE, job_id=1),
}
#: Several in a row, each for itself.
ROWS: dict[str, tuple[Call, ...]] = {
    "release+claim": (CALLS["release"], by_w),
    "reap+claim": (CALLS["reap"], by_w),
    "claim+pause": (by_w, lambda q: q.pause(**BY_W)),
    "claim+fail": (by_w, lambda q: q.fail(**BY_W, error="broken")),
    "claim+release": (by_w, lambda q: q.release(**BY_W)),
    "complete+enqueue_id": (CALLS["complete"], CALLS["enqueue_id"]),
    "cancel+enqueue_key": (CALLS["cancel"], CALLS["enqueue_key"]),
    "requeue+claim": (CALLS["requeue"], by_w),
    "requeue+cancel": (CALLS["requeue"], CALLS["cancel"]),
    "enqueue_id+cancel+requeue": (CALLS["enqueue_id"], CALLS["cancel"], CALLS["requeue"]),
    "enqueue_key+cancel+requeue": (
        CALLS["enqueue_key"],
        lambda q: q.cancel("two", tenant="acme"),
        lambda q: q.requeue("two", tenant="acme"),
    ),
}
EVERY = {**{name: (call,) for name, call in {**CALLS, **OTHERS}.items()}, **ROWS}
#: Of the pairs with others, those that are run always.
MORE = {
    "claim": "claim_many fail_at_once",
    "heartbeat": "release+claim reap+claim complete+enqueue_id",
    "complete": "complete_unfenced release+claim complete+enqueue_id",
    "cancel": "claim_many release_later fail_for_good fail_at_once release+claim claim+pause"
    " claim+fail claim+release",
    "requeue": "enqueue_both requeue_old enqueue_key+cancel+requeue",
    "enqueue_id": "enqueue_both requeue_old",
    "enqueue_key": "enqueue_both enqueue_many requeue_old",
    "discard": "requeue_old",
    "prune": "enqueue_both requeue_old requeue+cancel",
    "requeue_old": "requeue_old enqueue_id+cancel+requeue",
    "release+claim": "complete_unfenced fail_unfenced release_unfenced",
    "reap+claim": "heartbeat_unfenced",
}
PAIRS = [
    *combinations_with_replacement(CALLS, 2),
    *((name, other) for name, others in MORE.items() for other in others.split()),
]
if EVERYTHING:
    PAIRS += [pair for pair in product(CALLS, {**OTHERS, **ROWS}) if pair not in PAIRS]
# ---------------------------------------------------------------- where the item stands


def for_ever() -> DatabaseTestQueue:
    """The queue, but dead letters are kept."""
    policy = replace(POLICY, dead_letter_retention_seconds=None)
    return DatabaseTestQueue(POSTGRES, policy=policy)


def queued(queue: DatabaseTestQueue, **fields: Any) -> None:
    queue.enqueue(WorkItem(tenant="acme", id="one", dedupe_key="k", payload={"of": 1}, **fields))


def claimed(queue: DatabaseTestQueue, **fields: Any) -> None:
    queued(queue, **fields)
    queue.claim(worker="w")


def asked_to_stop(queue: DatabaseTestQueue) -> None:
    claimed(queue)
    queue.cancel(**ONE)


def lapsed(queue: DatabaseTestQueue, start: Callable[..., None] = claimed, **fields: Any) -> None:
    start(queue, **fields)
    queue.advance(LEASE + 1)


def lapsing(queue: DatabaseTestQueue) -> None:
    queue.advance(-LEASE / 2)
    claimed(queue)
    queue.advance(LEASE / 2)


def backed_off(queue: DatabaseTestQueue) -> None:
    claimed(queue)
    queue.fail(**CLAIM_1, error="broken")


def due(queue: DatabaseTestQueue) -> None:
    backed_off(queue)
    queue.advance(BACKOFF + 1)


def paused(queue: DatabaseTestQueue) -> None:
    claimed(queue)
    queue.pause(**CLAIM_1)


def dead(queue: DatabaseTestQueue) -> None:
    claimed(queue, max_attempts=1)
    queue.fail(**CLAIM_1, error="broken")


def completed(queue: DatabaseTestQueue) -> None:
    claimed(queue)
    queue.complete(**CLAIM_1)


def cancelled(queue: DatabaseTestQueue) -> None:
    queued(queue)
    queue.cancel(**ONE)


def over(start: Callable[[DatabaseTestQueue], None]) -> Callable[[DatabaseTestQueue], None]:
    def build(queue: DatabaseTestQueue) -> None:
        start(queue)
        queue.advance(RETENTION + 1)

    return build


def dead_twice(queue: DatabaseTestQueue) -> None:
    dead(queue)
    queued(queue, max_attempts=1)
    queue.fail(**ONE, worker="w", fence=queue.claim(worker="w").fence, error="broken")


def dead_then_completed(queue: DatabaseTestQueue) -> None:
    dead(queue)
    queued(queue)
    queue.complete(**ONE, worker="w", fence=queue.claim(worker="w").fence)


def dead_then_completed_and_over(queue: DatabaseTestQueue) -> None:
    """The older one is kept: it inherits the id, and the fence. It still has its key."""
    dead(for_ever())
    queue.enqueue(item(id="one"))
    queue.complete(**ONE, worker="w", fence=queue.claim(worker="w").fence)
    queue.advance(RETENTION + 1)


def dead_and_its_id_live(queue: DatabaseTestQueue) -> None:
    dead(queue)
    queue.enqueue(item(id="one"))


def dead_and_its_key_free(queue: DatabaseTestQueue) -> None:
    """Another one had the key, which is over and gone."""
    dead(for_ever())
    queue.enqueue(item(id="two", dedupe_key="k"))
    queue.cancel("two", tenant="acme")
    queue.advance(RETENTION + 1)
    queue.prune()


def dead_and_its_key_live(queue: DatabaseTestQueue) -> None:
    dead(queue)
    queue.enqueue(item(id="two", dedupe_key="k"))


#: In all of them "one" is the id and "k" the key, and the first claim is that of worker "w".
#: "lapsing": by the time at which the reaper comes it has lapsed, unless it was renewed.
STATES: dict[str, Callable[[DatabaseTestQueue], None]] = {
    "absent": lambda queue: None,
    "queued": queued,
    "backing off": backed_off,
    "due again": due,
    "claimed": claimed,
    "claimed for the last time": lambda queue: claimed(queue, max_attempts=1),
    "claimed, asked to stop": asked_to_stop,
    "lapsing": lapsing,
    "lapsed": lapsed,
    "lapsed for the last time": lambda queue: lapsed(queue, max_attempts=1),
    "lapsed, asked to stop": lambda queue: lapsed(queue, asked_to_stop),
    "paused": paused,
    "dead": dead,
    "dead and over": over(dead),
    "completed": completed,
    "completed and over": over(completed),
    "cancelled": cancelled,
    "cancelled and over": over(cancelled),
    "dead twice and over": over(dead_twice),
    "dead, then completed": dead_then_completed,
    "dead, then completed and over": dead_then_completed_and_over,
    "dead, its id live": dead_and_its_id_live,
    "dead, its key live": dead_and_its_key_live,
    "dead, its key free": dead_and_its_key_free,
}
# What differs from the same state without the addition only for some: without EVERYTHING one
# of the two must be of these.
_FAILING = {"fail", "fail_for_good", "fail_at_once", "fail_unfenced"}
_ENDING = _FAILING | {"release", "release_later", "pause"}
MATTERS_TO = {
    "backing off": {"cancel", "fail"},
    "due again": {"claim", "claim_many", "cancel"},
    "lapsing": {"reap", "reap+claim"},
    "lapsed": {"reap", "reap+claim", "adopt"},
    "claimed for the last time": _FAILING | {"adopt"},
    "claimed, asked to stop": _ENDING | {"adopt", "heartbeat"},
    "lapsed for the last time": {"reap", "adopt"},
    "lapsed, asked to stop": {"reap", "adopt"},
    "dead and over": {"prune"},
    "completed and over": {"prune"},
    "cancelled and over": {"prune"},
    "dead twice and over": {"prune", "requeue_old", "requeue"},
    "dead, then completed": {"requeue_old", "prune"},
    "dead, then completed and over": {"prune"},
    "dead, its id live": {"requeue_old"},
    "dead, its key live": {"requeue", "requeue_edited", "enqueue_key", "prune"},
    "dead, its key free": {"enqueue_key", "enqueue_key+cancel+requeue"},
}

# ---------------------------------------------------------------- outcomes


@dataclass(frozen=True)
class Outcome:
    """
    What one run of two calls can be compared by with another: what kind of answer each call gave,
    how many items were pruned in all, and the tables. `pictures` is all that was told: a call that
    succeeded returns the item as it then stands, which may be where the other has put it since.
    """

    kinds: tuple[str, ...]
    pruned: int
    tables: str
    pictures: frozenset[str] = field(compare=False)


def outcome(answers: Sequence[Answer], tables: Tables) -> Outcome:
    known = sorted(row["id"] for row in tables["queueitem"])
    numbers = {job_id: number for number, job_id in enumerate(known, 1)}
    shown = [_shown(answer, numbers) for answer in answers]
    return Outcome(
        tuple(json.dumps([kind for kind, _ in each if not kind.isdigit()]) for each in shown),
        sum(int(kind) for each in shown for kind, _ in each if kind.isdigit()),
        json.dumps(comparable(tables), sort_keys=True),
        frozenset(picture for each in shown for kind, picture in each if not kind.isdigit()),
    )


def _shown(value: Any, numbers: dict[int, int]) -> list[tuple[str, str]]:
    """Of each thing that was answered: what it is, and all that it says."""
    if isinstance(value, Answer):
        value = value.error or value.value
    if isinstance(value, list | tuple):
        return [each for one in value for each in _shown(one, numbers)]
    if isinstance(value, BaseException):
        facts = dict(vars(value))
        if twin := facts.pop("twin", None):
            facts["twin"] = numbers.get(twin.job_id, "gone")
        return [(type(value).__name__, f"{type(value).__name__} {json.dumps(facts)}")]
    if not isinstance(value, WorkItem):
        return [(str(value), str(value))]
    told = {each.name: getattr(value, each.name) for each in fields(value)}
    told["job_id"] = numbers.get(told["job_id"], "gone")
    if told["job_id"] == "gone":  # they are read after it, and may be gone then
        del told["failures"]
    for name in told:
        if name.endswith("_at") and told[name] is not None:
            told[name] = "a time"
    return [(f"item {told['job_id']}", json.dumps(told, sort_keys=True))]


# ---------------------------------------------------------------- running


@dataclass
class Start:
    """A state of the item, kept as rows."""

    state: str
    queue: DatabaseTestQueue
    tables: Tables
    script: str

    def reset(self) -> None:
        execute(POSTGRES, self.script)

    def queue_for(self, name: str) -> DatabaseTestQueue:
        """The queue, by the clock that the call sees."""
        if self.state != "lapsing" or not name.startswith("reap"):
            return self.queue
        late = DatabaseTestQueue(POSTGRES, policy=POLICY)
        late.advance(LEASE * 3 / 4)
        return late


class Bench:
    """The arena, the start states as far as needed, and the figures."""

    def __init__(self) -> None:
        self.arena = Arena(POSTGRES)
        self.figures: Counter[str] = Counter()
        self._starts: dict[str, Start] = {}
        self._alone: dict[tuple[str, str], Outcome] = {}
        self._healthy: set[str] = set()

    def start(self, state: str) -> Start:
        if state not in self._starts:
            tables = read_tables(POSTGRES)
            execute(POSTGRES, rewriting({name: [] for name in tables}))
            queue = DatabaseTestQueue(POSTGRES, policy=POLICY)
            STATES[state](queue)
            tables = read_tables(POSTGRES)
            self._starts[state] = Start(state, queue, tables, rewriting(tables))
        return self._starts[state]

    def alone(self, name: str, state: str) -> Outcome:
        """What the call does with nobody beside it."""
        key = (name, state)
        if key not in self._alone:
            [self._alone[key]] = self.one_after_the_other((name,), state)
        return self._alone[key]

    def one_after_the_other(self, names: tuple[str, ...], state: str) -> list[Outcome]:
        """How it ends if each call waits until the one before has ended, in all orders."""
        start = self.start(state)
        of_whom = [number for number, name in enumerate(names) for _ in EVERY[name]]
        ends = []
        for order in sorted({*permutations(of_whom)}):
            start.reset()
            rest = [iter(EVERY[name]) for name in names]
            answers: list[list[Answer]] = [[] for _ in names]
            for number in order:
                queue = start.queue_for(names[number])
                answers[number].append(answered(next(rest[number]), queue))
            together = [each[0] if len(each) == 1 else Answer(each) for each in answers]
            ends.append(outcome(together, read_tables(POSTGRES)))
        return ends

    def does_something(self, name: str, state: str) -> bool:
        alone = self.alone(name, state)
        kinds = json.loads(alone.kinds[0])
        return alone.pruned > 0 or any(kind.startswith("item") for kind in kinds)

    def examine(self, comparable: str) -> list[str]:
        """What the doctor says; asked once per content of the tables."""
        if comparable in self._healthy:
            return []
        self.figures["different ends"] += 1
        found = examine(POSTGRES)
        if not found:
            self._healthy.add(comparable)
        return found


@pytest.fixture(scope="module")
def bench(django_db_setup, django_db_blocker, request) -> Iterator[Bench]:
    # Building the query that reads an item takes longer than most statements: built once.
    items = cache(ItemReader.items)
    with django_db_blocker.unblock(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ItemReader, "__eq__", lambda self, other: self._using == other._using)
        patch.setattr(ItemReader, "__hash__", lambda self: hash(self._using))
        patch.setattr(ItemReader, "items", lambda self: items(self).all())
        bench = Bench()
        request.config.pluginmanager.register(Figures(bench.figures), "all-orders")
        yield bench
        bench.arena.close()
        empty(POSTGRES)
        connections[POSTGRES].close()


class Figures:
    """Prints what was run at the end of the session."""

    def __init__(self, figures: Counter[str]) -> None:
        self._figures = figures

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.write_sep("=", "all orders")
        order = "every order" if EVERYTHING else f"orders with <= {SWITCHES} interruptions"
        terminalreporter.write_line(f"{order}: {told_figures(self._figures)}")


def told_figures(figures: Counter[str]) -> str:
    return ", ".join(f"{number} {name}" for name, number in figures.items())


# ---------------------------------------------------------------- judging


def answered(call: Call, queue: DatabaseTestQueue) -> Answer:
    try:
        return Answer(call(queue))
    except REFUSALS as refusal:
        return Answer(error=refusal)


def act(name: str, queue: DatabaseTestQueue, *, in_a_transaction: bool) -> Callable[[], Any]:
    """What one of the two does."""
    [first, *more] = EVERY[name]
    if more:
        return lambda: [answered(call, queue) for call in (first, *more)]
    if not in_a_transaction:
        return partial(first, queue)

    def within() -> Any:
        with transaction.atomic(using=POSTGRES):
            return first(queue)

    return within


def wrong(start: Start, schedule: Schedule, after: Tables) -> Iterator[str]:
    """What must never be, in whatever order."""
    for answer in schedule.answers:
        if answer.error is not None and not isinstance(answer.error, REFUSALS):
            told = "".join(traceback.format_exception(answer.error)[-3:])
            yield f"raised {told}"
    yield from wrong_names(after)
    yield from wrong_fences(start, schedule, after)
    successes = {
        (each.job_id, each.fence)
        for answer in schedule.answers
        for each in items(answer)
        if each.state == "completed"
    }
    if len(successes) > 1:
        yield f"more than one success: {sorted(successes)}"


def wrong_names(after: Tables) -> Iterator[str]:
    live = {row["item"] for place in ("ready", "waiting", "lease") for row in after[place]}
    for name in ("item_id", "dedupe_key"):
        names = Counter(row[name] for row in after["queueitem"] if row["id"] in live)
        for value, number in names.items():
            if value is not None and number > 1:
                yield f"{number} live items have the {name} {value!r}"
    ids = {row["item_id"] for row in after["queueitem"]}
    held = [row["item_id"] for row in after["queueitem"] if not row["id_freed"]]
    if sorted(ids) != sorted(held):
        yield f"there are items {ids}, but the ids are held by those of {held}"


def wrong_fences(start: Start, schedule: Schedule, after: Tables) -> Iterator[str]:
    before, now = fences(start.tables), fences(after)
    for row in after["queueitem"]:
        name = row["item_id"]
        known = {each["id"] for each in start.tables["queueitem"] if each["item_id"] == name}
        given = max((before[job] for job in known if not known.isdisjoint(now)), default=0)
        if not row["id_freed"] and now.get(row["id"], given) < given:
            yield f"{name!r} has fence {now[row['id']]}, but had {given}"
    claims = [
        (each.id, each.fence)
        for answer in schedule.answers
        for each in items(answer)
        if each.held and (each.worker, each.fence) != ("w", 1)
    ]
    for name, fence in claims:
        known = [row["id"] for row in start.tables["queueitem"] if row["item_id"] == name]
        kept = [job for job in known if job in now]  # with an id that is pruned its fence goes
        if kept and fence <= max(before[job] for job in kept):
            yield f"a claim of {name!r} has fence {fence}, which was given out before"


def items(value: Any) -> Iterator[WorkItem]:
    if isinstance(value, Answer):
        yield from items(value.value)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from items(each)
    elif isinstance(value, WorkItem):
        yield value


def fences(tables: Tables) -> dict[int, int]:
    places = ("ready", "waiting", "lease", "deadletter", "finished")
    return {row["item"]: row["fence"] for place in places for row in tables[place]}


LOCKING_BODIES = {
    "enqueue_id", "enqueue_key", "enqueue_both", "enqueue_many", "resume", "cancel", "requeue",
    "requeue_old", "discard", "prune",
}  # fmt: skip

# The third outcome that is right: what somebody has locked is passed over, as if it weren't
# there. The next call takes it.
PASSING_OVER = {"claim", "claim_many", "reap", "prune"}
# Others, in the answers only.
THIRD = {
    # Refused either way. That it is the repetition of a failure is looked up after the item was
    # found, and both may be pruned in between.
    ("fail", "prune"): ('["LeaseLostError"]', "[]"),
}


def called_again(
    pair: tuple[str, str],
    end: Outcome,
    alone: list[Outcome],
    answers: Sequence[Answer],
    start: Start,
) -> Outcome:
    """How it ends if one that found nothing, and left the other to itself, is called once more."""
    told = [*answers]
    for number, name in enumerate(pair):
        other = 1 - number
        if name == "prune":  # it may have passed over one of two
            again = answered(*EVERY[name], start.queue)
            told[number] = Answer([answers[number], again])
        elif (
            name in PASSING_OVER
            and end.kinds[number] in ("[]", '["None"]')
            and (end.kinds[other], end.tables) == (alone[other].kinds[0], alone[other].tables)
        ):
            told[number] = answered(*EVERY[name], start.queue_for(name))
    return outcome(told, read_tables(POSTGRES))


_HOLDERS = "adopt cancel complete fail heartbeat pause release"
_REQUEUE = "requeue requeue_edited"
#: The calls that do something; `fail`, `complete` and `pause` also as their own repetition.
DO_SOMETHING = {
    "absent": "",
    "queued": "cancel claim",
    "backing off": "cancel fail",
    "due again": "cancel claim fail",
    "claimed": _HOLDERS,
    "claimed for the last time": _HOLDERS,
    "claimed, asked to stop": _HOLDERS,
    "lapsing": f"{_HOLDERS} reap",
    "lapsed": "adopt cancel reap",
    "lapsed for the last time": "adopt cancel reap",
    "lapsed, asked to stop": "adopt cancel reap",
    "paused": "cancel pause resume resume_edited",
    "dead": f"discard fail {_REQUEUE}",
    "dead and over": f"discard fail prune {_REQUEUE}",
    "completed": "complete",
    "completed and over": "complete prune",
    "cancelled": _REQUEUE,
    "cancelled and over": f"prune {_REQUEUE}",
    "dead twice and over": f"discard prune {_REQUEUE}",
    "dead, then completed": "",
    "dead, then completed and over": "prune",
    "dead, its id live": "cancel claim",
    "dead, its key live": "claim discard fail",
    "dead, its key free": f"discard fail {_REQUEUE}",
}


@pytest.mark.parametrize("state", STATES)
def test_what_each_call_does_alone(bench, state):
    """What the orders are compared with: they can't tell that all orders are wrong alike."""
    active = {name for name in CALLS if bench.does_something(name, state)}
    assert active == {"enqueue_id", "enqueue_key", *DO_SOMETHING[state].split()}


@pytest.mark.parametrize(("one", "other"), PAIRS, ids=["-".join(p) for p in PAIRS])
def test_all_orders(bench, one, other):
    before = bench.figures.copy()
    trouble: list[str] = []
    for state in STATES:
        trouble += explore(bench, one, other, state)
    print(told_figures(bench.figures - before))
    assert not trouble, "\n\n".join(trouble[:4]) + f"\n\n({len(trouble)} schedules in all)"


def explore(bench: Bench, one: str, other: str, state: str) -> list[str]:
    """Run the two from *state* in all orders; return what was wrong."""
    pair = (one, other)
    if not EVERYTHING and {*pair}.isdisjoint(MATTERS_TO.get(state, pair)):
        return []
    where, switches = WHERE.get(pair, (state, SWITCHES))
    if not EVERYTHING and state != where:
        return []
    active = [bench.does_something(name, state) for name in pair]
    if not any(active):
        return []
    serial = bench.one_after_the_other(pair, state)
    alone = [bench.alone(name, state) for name in pair]
    meet = all(active) or any(each.kinds != tuple(a.kinds[0] for a in alone) for each in serial)
    if not EVERYTHING and not meet:
        return []
    bench.figures["pairs from a start"] += 1
    start, trouble = bench.start(state), []
    bound = None if EVERYTHING else switches
    for mixture in mixtures(one, other):
        acts = tuple(
            act(name, start.queue_for(name), in_a_transaction=within)
            for name, within in zip(pair, mixture, strict=True)
        )
        alike = one == other and mixture[0] == mixture[1]
        for schedule in bench.arena.explore(acts, start.reset, bound, alike=alike):
            bench.figures["schedules"] += 1
            bench.figures["in which a call waited"] += schedule.waited
            bench.figures["statements"] += len(schedule.forks)
            if found := [*judged(bench, pair, start, schedule, serial, alone)]:
                within = ["", " in a transaction"]
                trouble.append(
                    f"A: {one}{within[mixture[0]]}, B: {other}{within[mixture[1]]},"
                    f" item {state}, {schedule}\n{schedule.told()}\n"
                    + "\n".join(f"  ! {each}" for each in found)
                )
    return trouble


def judged(
    bench: Bench,
    pair: tuple[str, str],
    start: Start,
    schedule: Schedule,
    serial: list[Outcome],
    alone: list[Outcome],
) -> Iterator[str]:
    """Say what was wrong in this schedule."""
    after = read_tables(POSTGRES)
    end = outcome(schedule.answers, after)
    yield from bench.examine(end.tables)
    yield from wrong(start, schedule, after)
    for fork in schedule.forks:
        if fork.waited and pair[fork.chosen] in PASSING_OVER:
            yield f"{pair[fork.chosen]} waits; it should pass over what is locked"
    if end not in serial and not PASSING_OVER.isdisjoint(pair):
        bench.figures["in which a locked row was passed over"] += 1
        end = called_again(pair, end, alone, schedule.answers, start)
    if end not in serial:
        if end.kinds == THIRD.get(pair):
            serial = [replace(each, kinds=end.kinds) for each in serial]
        if end not in serial:
            yield unexplained(end, serial)
    elif strange := end.pictures.difference(*(each.pictures for each in (*serial, *alone))):
        yield f"never was so: {' '.join(strange)}"


def mixtures(one: str, other: str) -> list[tuple[bool, bool]]:
    """
    Which of the two are in a transaction of the caller.

    A transaction of the caller adds the gate before the COMMIT, so mostly that is the harder
    case. But calls that lock bodies also make transactions of their own, several in a row; and
    between the write of a call outside one and its reading after that, the id can go on.
    """
    choices = [[False] if name in ROWS else [True, False] for name in (one, other)]
    every = [*product(*choices)]
    if one == other:
        every.remove((False, True))
    if EVERYTHING:
        return every
    both = {one, other} <= LOCKING_BODIES or other == "complete+enqueue_id"
    return [every[0], every[-1]] if both else [every[0]]


def unexplained(end: Outcome, serial: list[Outcome]) -> str:
    lines = ["neither order alone ends so:"]
    for title, each in [("now", end), *(("alone", each) for each in serial)]:
        lines.append(f"    {title}: {each.kinds} {each.pruned or ''}")
        for name, rows in json.loads(each.tables).items():
            lines += [
                f"      {name} " + " ".join(f"{k}={v}" for k, v in row.items() if k in TELLING)
                for row in rows
            ]
    return "\n".join(lines)


#: The columns by which ends differ.
TELLING = {
    "id", "item", "item_id", "dedupe_key", "id_freed", "key_freed", "fence", "attempts", "state",
    "worker", "cause", "payload", "number", "kind", "verb", "cancel_requested", "reason",
    "renewed", "max_attempts", "ready", "waiting", "claimed", "paused", "dead_lettered",
    "completed", "cancelled", "reaped", "duplicates_suppressed", "detail",
}  # fmt: skip
