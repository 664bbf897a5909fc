"""
Three stores that are told the same, and must answer and look the same: memory, SQLite, PostgreSQL.

They share one clock, which stands still unless it is moved. So their times are equal to the
microsecond, and a decision can be asked for at its very deadline. PostgreSQL reads it too:
in a schema that comes before ``pg_catalog`` are functions named like those of its own clock.

Job ids differ between the stores: an acceptance is known by its number, counted from 0 in the
order in which the stores said that they had accepted it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from django.db import connections

from django_workqueue import MemoryWorkQueue, QueuePolicy, QueueStats, WorkItem
from django_workqueue.exceptions import WorkItemNotFoundError, WorkQueueError
from django_workqueue.items import QueueHold
from django_workqueue.models import AuditEntry, Failure
from django_workqueue.reading import ItemReader
from django_workqueue.testing import DatabaseTestQueue, make_queue

START = datetime(2031, 5, 7, 11, 13, 17, 190_500, tzinfo=UTC)
#: What an item tells of a job id that no step has accepted.
UNKNOWN = -1

_STANDING_CLOCK = """
create schema if not exists lockstep;
create or replace function lockstep.clock_timestamp() returns timestamptz
  language sql stable as $$ select current_setting('lockstep.now')::timestamptz $$;
create or replace function lockstep.statement_timestamp() returns timestamptz
  language sql stable as $$ select current_setting('lockstep.now')::timestamptz $$;
set search_path = lockstep, pg_catalog, public;
set synchronous_commit = off;
"""


class StandingClock:
    """The one clock of the three stores."""

    def __init__(self) -> None:
        self._now = START

    def now(self) -> datetime:
        """Return the present of all stores."""
        return self._now

    def set(self, moment: datetime) -> None:
        """Make it *moment* in all stores."""
        self._now = moment
        with connections["postgresql"].cursor() as cursor:
            cursor.execute("select set_config('lockstep.now', %s, false)", [moment.isoformat()])


@contextmanager
def standing_databases() -> Iterator[None]:
    """Stop the clocks of both databases, and let them write without waiting for the disk."""
    with connections["postgresql"].cursor() as cursor:
        cursor.execute(_STANDING_CLOCK)
    with connections["default"].cursor() as cursor:
        cursor.execute("pragma synchronous = off")
    try:
        yield
    finally:
        with connections["postgresql"].cursor() as cursor:
            cursor.execute("drop schema lockstep cascade")
        for alias in ("default", "postgresql"):  # the next test's have their own clock again
            connections[alias].close()


class _StandingQueue(DatabaseTestQueue):
    """A database queue; on SQLite, whose clock is the machine's, it is given its time."""

    clock: StandingClock

    @property
    def moves(self) -> Any:
        moves = super().moves
        if connections[self.using].vendor == "sqlite":
            moves.now = self.clock.now
        return moves


@dataclass(frozen=True)
class Outcome:
    """What a call answered or raised, comparable between stores."""

    answer: Any = None
    error: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def items(self) -> list[WorkItem]:
        """The items of the answer."""
        answers = self.answer if isinstance(self.answer, tuple) else (self.answer,)
        return [each for each in answers if isinstance(each, WorkItem)]


@dataclass(frozen=True)
class Picture:
    """All that can be seen of a store. `holders`: the acceptances that hold their ids."""

    items: dict[int, WorkItem] = field(default_factory=dict)
    holders: frozenset[int] = frozenset()


class Store:
    """One of the stores, in which acceptances are named by their numbers."""

    def __init__(self, name: str, clock: StandingClock, policy: QueuePolicy) -> None:
        self.name = name
        self._clock = clock
        self._numbers: dict[int, int] = {}
        self._names: list[tuple[str, str]] = []
        #: The job ids of the acceptances.
        self.jobs: list[int] = []
        if name == "memory":
            self.queue: Any = MemoryWorkQueue(policy, clock)
        else:
            self.alias = make_queue(name, policy).using  # type: ignore[call-overload]
            self.restart(policy)

    def restart(self, policy: QueuePolicy) -> None:
        """Look at the store as a new process would, with these settings."""
        if self.name == "memory":
            self.queue.policy = policy
            return
        self.queue = _StandingQueue(self.alias, policy=policy)
        self.queue.clock = self._clock

    def call(
        self,
        verb: str,
        *args: Any,
        job: int | None = None,
        after: int | None = None,
        **kwargs: Any,
    ) -> Outcome:
        """Call the verb; *job* and *after* are numbers of acceptances."""
        for name, number in (("job_id", job), ("after", after)):
            if number is not None:
                kwargs[name] = self.jobs[number]
        try:
            answer = getattr(self.queue, verb)(*args, **kwargs)
        except WorkQueueError as error:
            facts = {name: self._comparable(value) for name, value in vars(error).items()}
            # The words may name a job id.
            words = {} if after is not None else {"words": str(error)}
            return Outcome(error=type(error).__name__, facts=facts | words)
        if verb in ("enqueue", "enqueue_many"):
            self._number(answer if isinstance(answer, tuple) else (answer,))
        return Outcome(answer=self._comparable(answer))

    def _number(self, accepted: tuple[WorkItem, ...]) -> None:
        for item in accepted:
            assert item.job_id is not None
            if item.job_id not in self._numbers:
                assert item.job_id > max(self.jobs, default=0), f"{self.name}: a job id fell"
                self._numbers[item.job_id] = len(self.jobs)
                self.jobs.append(item.job_id)
                self._names.append((item.id, item.tenant))

    def _comparable(self, value: Any) -> Any:
        if isinstance(value, WorkItem):
            return replace(value, job_id=self._numbers.get(value.job_id or 0, UNKNOWN))
        if isinstance(value, tuple):
            return tuple(self._comparable(each) for each in value)
        return value

    def picture(self) -> Picture:
        """Look at everything."""
        items = self._items_in_memory() if self.name == "memory" else self._items_in_database()
        seen = [(self._comparable(item), holds) for item, holds in items]
        return Picture(
            items={item.job_id: item for item, _ in seen},
            holders=frozenset(item.job_id for item, holds in seen if holds),
        )

    def _items_in_memory(self) -> Iterator[tuple[WorkItem, bool]]:
        for (item_id, tenant), job_id in zip(self._names, self.jobs, strict=True):
            with suppress(WorkItemNotFoundError):
                seen = self.queue.get(item_id, tenant=tenant, job_id=job_id)
                yield seen, self.queue.get(item_id, tenant=tenant).job_id == job_id

    def _items_in_database(self) -> Iterator[tuple[WorkItem, bool]]:
        reader = ItemReader(self.alias)
        rows = list(reader.items())
        for row, item in zip(rows, reader.shown(rows, self._clock.now()), strict=True):
            yield item, not row.id_freed

    def stats(self, queue: str) -> QueueStats:
        """The figures of a queue."""
        stats: QueueStats = self.queue.stats(queue=queue)
        return stats

    def holds(self) -> tuple[QueueHold, ...]:
        """What is held."""
        holds: tuple[QueueHold, ...] = self.queue.holds()
        return holds

    def failures(self) -> int:
        """How many failed attempts a database has on record, of items that are there or not."""
        return Failure.objects.using(self.alias).count()

    def audited(self) -> int | None:
        """How many lines the audit has; None in memory, which has none."""
        return None if self.name == "memory" else AuditEntry.objects.using(self.alias).count()


def differences(told: str, of: Callable[[Store], Any], stores: list[Store]) -> Any:
    """Return what all stores show; fail where one shows something else."""
    first, *others = [of(store) for store in stores]
    for store, other in zip(stores[1:], others, strict=True):
        if other != first:
            raise AssertionError(
                f"{told}: {stores[0].name} and {store.name} differ\n"
                + "\n".join(_unlike(first, other, stores[0].name, store.name))
            )
    return first


def _unlike(one: Any, other: Any, name: str, other_name: str, path: str = "") -> Iterator[str]:
    if one == other:
        return
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}, key=str):
            here = f"{path}[{key}]"
            yield from _unlike(one.get(key), other.get(key), name, other_name, here)
        return
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        for number, pair in enumerate(zip(one, other, strict=True)):
            yield from _unlike(*pair, name, other_name, f"{path}[{number}]")
        return
    if type(one) is type(other) and hasattr(one, "__dataclass_fields__"):
        for key in one.__dataclass_fields__:
            pair = getattr(one, key), getattr(other, key)
            yield from _unlike(*pair, name, other_name, f"{path}.{key}")
        return
    yield f"  {path}: {one!r} in {name}, {other!r} in {other_name}"
