"""
All orders in which the statements of two calls can reach PostgreSQL.

Two threads, each with a Django connection of its own, make one call each. Before every
statement, and before every COMMIT, a thread stops at a gate and waits for its permit. A
schedule says whose statement goes next, such as ``AABAB``. `Arena.explore` runs them all,
depth first: it replays the beginning of a schedule on the same start state and turns off at
its last fork. A call whose statement waits for a lock has no next statement until that lock is
free; that it waits is read from ``pg_stat_activity`` and ``pg_blocking_pids``, on a third
connection. Nothing sleeps.

**Which schedules need not be run.** Two that differ only by swapping neighbours that are
indifferent to each other are one. A plain SELECT takes no lock on rows and sees only what is
committed: it is indifferent to another SELECT, to another call's statement inside a
transaction that stays open, and to a COMMIT that shows nothing new in the tables that it reads.
Statements that lock or change rows are indifferent if no table is common to both. Of schedules
that are one in this sense, one with the fewest changes between the two calls is run. Without a
gate pass savepoints, statements that ask no table (the store's time), and those that only
append to the counters or to the audit: nobody waits for such rows, and no call decides by them.
Nothing else is left out: also the reading after a call's last write is at a gate, since it
makes the answer.

**A bound.** `explore(switches=n)` runs those schedules in which a call that could go on is
interrupted at most n times. (A call that waits, or has ended, isn't interrupted.)
"""

import json
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from queue import SimpleQueue
from typing import Any, Final

from django.apps import apps
from django.db import DatabaseError, connections

#: Seconds after which a schedule that doesn't go on fails.
PATIENCE: Final = 20.0
#: More statements than any two calls have.
MANY: Final = 200

_PREFIX: Final = "django_workqueue_"
_NOT_OF_AN_ITEM: Final = {"sample", "workerprocess", "hold"}

_AT_GATE, _RUNNING, _DONE = "at gate", "running", "done"


class OrdersError(Exception):
    """The machinery itself failed: a schedule hangs, or its replay went another way."""


# ---------------------------------------------------------------- statements


_NONE: Final[frozenset[str]] = frozenset()


@dataclass(frozen=True, slots=True)
class Step:
    """A statement, or the end of a transaction, that waits at the gate; and its tables."""

    text: str
    #: Read without a lock.
    reads: frozenset[str] = _NONE
    #: With rows that are locked, or changed, or unlocked.
    locks: frozenset[str] = _NONE
    #: Of these, those that are changed.
    changes: frozenset[str] = _NONE
    #: What others see changed afterwards: nothing while the transaction stays open.
    shows: frozenset[str] = _NONE

    def indifferent_to(self, other: "Step") -> bool:
        """True if both do the same, whichever goes first."""
        meet = self.locks & other.locks or self.shows & other.reads or self.reads & other.shows
        return not meet


_ACTS: Final = re.compile(
    r"\b(?P<act>insert\s+into|delete\s+from|update|from|join)\s+(?:only\s+)?\"?"
    rf"{_PREFIX}(?P<table>\w+)",
    re.IGNORECASE,
)
_SIGNS: Final = {"insert": "+", "delete": "-", "update": "~"}
#: Nobody waits for these rows, and no call reads them.
_APPENDED: Final = {"counter", "auditentry"}


@cache
def _statement(sql: str, *, in_transaction: bool) -> Step | None:
    """Return the step that *sql* is; None if it needs no gate."""
    text = " ".join(sql.split())
    low = text.lower()
    if low.startswith(("savepoint", "release savepoint", "rollback to savepoint", "set ")):
        return None
    acts = [
        (_SIGNS.get(match["act"].split()[0].lower(), ""), match["table"].lower())
        for match in _ACTS.finditer(text)
    ]
    at = frozenset(table for _, table in acts) - _APPENDED
    changes = frozenset(table for sign, table in acts if sign) - _APPENDED
    if not at:
        return None
    # Which of the tables a FOR UPDATE means isn't looked for.
    locks = at if " for update" in low else changes
    shown = [sign + table for sign, table in acts if sign] or [*dict.fromkeys(t for _, t in acts)]
    kind = "" if changes else "lock " if locks else "read "
    return Step(
        text=kind + " ".join(dict.fromkeys(shown[:6])),
        reads=at,
        locks=locks,
        changes=changes,
        shows=_NONE if in_transaction else changes,
    )


# ---------------------------------------------------------------- the two callers


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call returned or raised."""

    value: Any = None
    error: BaseException | None = None


class _Caller:
    """A thread with a connection of its own, whose statements stop at a gate."""

    def __init__(self, name: str, alias: str, changed: threading.Condition) -> None:
        self.name = name
        self._alias = alias
        self._changed = changed
        self._calls: SimpleQueue[Callable[[], Any] | None] = SimpleQueue()
        self._permitted = False
        self._gated = True
        # In the transaction so far.
        self._locked: frozenset[str] = _NONE
        self._written: frozenset[str] = _NONE
        self.state = _DONE
        self.step: Step | None = None
        self.answer = Answer()
        started: Future[int] = Future()
        self._thread = threading.Thread(target=self._work, args=(started,), name=name, daemon=True)
        self._thread.start()
        self.pid = started.result(PATIENCE)

    def begin(self, call: Callable[[], Any]) -> None:
        """Let the thread make *call*, up to its first gate."""
        self.state, self.step, self.answer, self._gated = _RUNNING, None, Answer(), True
        self._locked = self._written = _NONE
        self._calls.put(call)

    def permit(self) -> None:
        """Let the waiting statement go. With the condition held."""
        self.state, self.step, self._permitted = _RUNNING, None, True
        self._changed.notify_all()

    def open_the_gates(self) -> None:
        """Let the call run to its end. With the condition held."""
        self._gated = False
        self._changed.notify_all()

    def close(self) -> None:
        """End the thread and its connection."""
        self._calls.put(None)
        self._thread.join(PATIENCE)

    def _work(self, started: "Future[int]") -> None:
        connection: Any = connections[self._alias]
        try:
            connection.ensure_connection()
            with connection.cursor() as cursor:
                # Visible at once, and lost in a crash: nothing here is about durability.
                cursor.execute("set synchronous_commit = off")
                with suppress(DatabaseError):  # not every user may; then it takes a second
                    cursor.execute("set deadlock_timeout = '20ms'")
                cursor.execute(f"set statement_timeout = '{PATIENCE}s'")
            connection.execute_wrappers.append(self._before_statement)
            connection._commit = self._gated_end("COMMIT", connection._commit)
            connection._rollback = self._gated_end("ROLLBACK", connection._rollback)
            started.set_result(connection.connection.info.backend_pid)
        except BaseException as error:
            started.set_exception(error)
        while call := self._calls.get():
            try:
                answer = Answer(call())
            except Exception as error:
                answer = Answer(error=error)
            with self._changed:
                self.answer, self.state = answer, _DONE
                self._changed.notify_all()
        connection.close()

    def _before_statement(
        self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any
    ) -> Any:
        in_transaction = context["connection"].in_atomic_block
        step = _statement(str(sql), in_transaction=in_transaction)
        if step is not None:
            if in_transaction:
                self._locked |= step.locks
                self._written |= step.changes
            self._pass_gate(step)
        return execute(sql, params, many, context)

    def _gated_end(self, name: str, end: Callable[[], Any]) -> Callable[[], Any]:
        def gated() -> Any:
            shows = self._written if name == "COMMIT" else _NONE
            self._pass_gate(Step(name, locks=self._locked, changes=self._written, shows=shows))
            self._locked = self._written = _NONE
            return end()

        return gated

    def _pass_gate(self, step: Step) -> None:
        with self._changed:
            if not self._gated:
                return
            self.state, self.step = _AT_GATE, step
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._permitted or not self._gated)
            self.state, self.step, self._permitted = _RUNNING, None, False


# ---------------------------------------------------------------- schedules


@dataclass(slots=True)
class _Fork:
    """Before a step: who could go, and whether another order from here is to be run."""

    chosen: int
    step: Step
    other_way: bool
    waited: bool = False


@dataclass(slots=True)
class Schedule:
    """One schedule as it went."""

    forks: list[_Fork] = field(default_factory=list)
    answers: tuple[Answer, ...] = ()

    @property
    def choices(self) -> tuple[int, ...]:
        return tuple(fork.chosen for fork in self.forks)

    @property
    def waited(self) -> bool:
        """True if a call had to wait for the other's lock."""
        return any(fork.waited for fork in self.forks)

    def turn(self, length: int) -> list[Step] | None:
        """
        What the call did that the last of the first *length* choices turned to, until it ended or
        waited; None if it was interrupted.
        """
        if not length:
            return None
        rest = self.forks[length - 1 :]
        steps = []
        for fork in rest:
            if fork.chosen != rest[0].chosen:
                break
            steps.append(fork.step)
            if fork.waited:
                return steps
        ended = sum(fork.chosen == rest[0].chosen for fork in rest) == len(steps)
        return steps if ended else None

    def __str__(self) -> str:
        return "".join("AB"[choice] for choice in self.choices)

    def told(self) -> str:
        """The statements in their order."""
        return "\n".join(
            f"    {'AB'[fork.chosen]}  {fork.step.text}{'  … waits' if fork.waited else ''}"
            for fork in self.forks
        )


class Arena:
    """Two gated connections to the database *alias*, and the caller's own to look and to reset."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._changed = threading.Condition()
        self._callers = [_Caller(name, alias, self._changed) for name in "AB"]
        self._pids = [caller.pid for caller in self._callers]
        with connections[alias].cursor() as cursor:
            cursor.execute("set synchronous_commit = off")

    def close(self) -> None:
        """End the threads and close their connections."""
        for caller in self._callers:
            caller.close()
        with connections[self.alias].cursor() as cursor:
            cursor.execute("reset synchronous_commit")

    def explore(
        self,
        calls: tuple[Callable[[], Any], Callable[[], Any]],
        reset: Callable[[], None],
        switches: int | None = None,
        *,
        alike: bool = False,
    ) -> Iterator[Schedule]:
        """
        Run *calls* in all orders of their statements, each after *reset*.

        At most *switches* interruptions; *alike*: the two are the same call, so A begins.
        """
        todo: list[tuple[tuple[int, ...], Step | None]] = [((), None), ((1,), None)]
        if alike:
            todo.pop()
        turns: dict[tuple[int, ...], list[Step] | None] = {}
        while todo:
            beginning, postponed = todo.pop()
            if postponed is not None:
                # Was turning to the other one a step later the same? If the step is indifferent to
                # all that the other one did until it ended, or waited.
                later = turns.get((*beginning[:-1], 1 - beginning[-1], beginning[-1]))
                if later is not None and all(map(postponed.indifferent_to, later)):
                    turns[beginning] = later
                    continue
            reset()
            schedule = self._run(calls, beginning, switches)
            yield schedule
            turns[beginning] = schedule.turn(len(beginning))
            choices = schedule.choices
            todo += [
                ((*choices[:depth], 1 - choices[depth]), schedule.forks[depth].step)
                for depth in range(max(1, len(beginning)), len(choices))
                if schedule.forks[depth].other_way
            ]

    def _run(
        self,
        calls: tuple[Callable[[], Any], Callable[[], Any]],
        beginning: tuple[int, ...],
        switches: int | None,
    ) -> Schedule:
        schedule = Schedule()
        interruptions = 0
        try:
            for caller, call in zip(self._callers, calls, strict=True):
                caller.begin(call)
            self._settle(None)
            while ready := [n for n, each in enumerate(self._callers) if each.state == _AT_GATE]:
                forks = schedule.forks
                last = forks[-1].chosen if forks else 0
                chosen = last if last in ready else ready[0]
                if len(forks) < len(beginning):
                    chosen = beginning[len(forks)]
                    if chosen not in ready:
                        raise OrdersError(f"{beginning} can't be replayed: it went {schedule}")
                elif len(forks) == MANY:
                    raise OrdersError(f"{MANY} statements and no end")
                interrupting = bool(forks) and chosen != last and last in ready
                interruptions += interrupting
                other_way = (
                    len(ready) == 2
                    and (switches is None or interruptions < switches)
                    and self._matters(forks, 1 - chosen)
                )
                step = self._callers[chosen].step
                assert step is not None
                forks.append(_Fork(chosen, step, other_way))
                with self._changed:
                    self._callers[chosen].permit()
                self._settle(chosen)
                forks[-1].waited = self._callers[chosen].state == _RUNNING
        except BaseException:
            self._abandon()
            raise
        schedule.answers = tuple(caller.answer for caller in self._callers)
        return schedule

    def _matters(self, forks: list[_Fork], other: int) -> bool:
        """True unless the *other* one's next step could as well have followed its last one."""
        step = self._callers[other].step
        assert step is not None
        for fork in reversed(forks):
            if fork.chosen == other:
                return False
            if not step.indifferent_to(fork.step):
                return True
        return True  # it hasn't begun

    def _settle(self, moved: int | None) -> None:
        """Return when each call is at a gate, has ended, or waits for the other one's lock."""
        deadline = time.monotonic() + PATIENCE
        patience = 0.002
        with self._changed:
            self._changed.wait_for(lambda: moved not in self._running(), patience)
        while True:
            with self._changed:
                running = self._running()
            if not running:
                return
            if len(running) == 1 and self._waits(*running):
                # Looked at once more: it may have reached its gate before the server was asked.
                with self._changed:
                    if self._running() == running:
                        return
            # Both run: one of them waits for the other at most until that one's next gate;
            # if both wait, the server ends the deadlock.
            if time.monotonic() > deadline:
                raise OrdersError("a call neither goes on, nor ends, nor waits for the other")
            with self._changed:
                self._changed.wait_for(lambda: not self._running(), patience)

    def _running(self) -> list[int]:
        return [n for n, caller in enumerate(self._callers) if caller.state == _RUNNING]

    def _waits(self, number: int) -> bool:
        with connections[self.alias].cursor() as cursor:
            cursor.execute(
                "select from pg_stat_activity where pid = %s and wait_event_type = 'Lock'"
                " and %s = any(pg_blocking_pids(pid))",
                [self._pids[number], self._pids[1 - number]],
            )
            return bool(cursor.fetchall())

    def _abandon(self) -> None:
        with self._changed:
            for caller in self._callers:
                caller.open_the_gates()
            self._changed.wait_for(lambda: not self._busy(), 2 * PATIENCE)

    def _busy(self) -> list[_Caller]:
        return [caller for caller in self._callers if caller.state != _DONE]


# ---------------------------------------------------------------- the tables


Rows = list[dict[str, Any]]
Tables = dict[str, Rows]


def _tables() -> list[str]:
    models = apps.get_app_config("django_workqueue").get_models()
    names = (model._meta.db_table for model in models)
    return [name for name in names if name.removeprefix(_PREFIX) not in _NOT_OF_AN_ITEM]


def read_tables(alias: str) -> Tables:
    """All rows of the tables that hold items, by the tables' short names."""
    columns = ", ".join(
        f"'{name.removeprefix(_PREFIX)}', (select coalesce(json_agg(t), '[]') from {name} t)"
        for name in _tables()
    )
    with connections[alias].cursor() as cursor:
        cursor.execute(f"select json_build_object({columns})::text")
        [[text]] = cursor.fetchall()
    tables: Tables = json.loads(text)
    return tables


def rewriting(tables: Tables) -> str:
    """The statements that make the tables hold what *tables* holds, and nothing else."""
    statements = []
    for name in _tables():
        statements.append(f"delete from {name}")
        if rows := tables[name.removeprefix(_PREFIX)]:
            told = json.dumps(rows).replace("'", "''")
            statements.append(
                f"insert into {name} select * from json_populate_recordset(null::{name}, '{told}')"
            )
    known = [row["id"] for row in tables["queueitem"]]
    known += [row["item"] for row in tables["auditentry"] if row["item"]]
    newest = max(known, default=0)
    statements.append(
        f"select setval(pg_get_serial_sequence('{_PREFIX}queueitem', 'id'), {newest + 1}, false)"
    )
    return ";\n".join(statements)


def execute(alias: str, script: str) -> None:
    """Run several statements in one go, as one transaction."""
    with connections[alias].cursor() as cursor:
        cursor.execute(script)


def comparable(tables: Tables) -> Tables:
    """
    *tables* without what differs between two runs of the same: times, the numbers of rows
    in logs, the turn, how the counters are split, whether the key of an item that has ended was
    let go of (nobody can tell); and with job ids counted through.
    """
    live = {row["item"] for place in ("ready", "waiting", "lease") for row in tables[place]}
    known = sorted(row["id"] for row in tables["queueitem"])
    numbers = {job_id: number for number, job_id in enumerate(known, 1)}
    result = {}
    for name, rows in tables.items():
        if name == "turn":
            continue
        if name == "counter":
            rows = _summed(rows)
        shown = [_comparable_row(name, row, numbers) for row in rows]
        if name == "lease":
            for row, old in zip(shown, rows, strict=True):
                row["renewed"] = _lasts(old) > old["lease_seconds"]
        if name == "queueitem":
            for row, old in zip(shown, rows, strict=True):
                row["key_freed"] &= old["id"] in live
        result[name] = sorted(shown, key=lambda row: json.dumps(row, sort_keys=True))
    return result


def _lasts(lease: dict[str, Any]) -> float:
    start, end = (datetime.fromisoformat(lease[name]) for name in ("claimed_at", "expires_at"))
    return (end - start).total_seconds()


def _summed(rows: Sequence[dict[str, Any]]) -> Rows:
    sums: dict[str, dict[str, Any]] = {}
    for row in rows:
        total = sums.setdefault(row["queue"], {"queue": row["queue"]})
        for name, number in row.items():
            if name not in ("id", "queue"):
                total[name] = total.get(name, 0) + number
    return list(sums.values())


_TIMES: Final = ("_at", "_until")


def _comparable_row(name: str, row: dict[str, Any], numbers: dict[int, int]) -> dict[str, Any]:
    shown = {}
    for column, value in row.items():
        if column == "id":
            if name == "queueitem":
                shown[column] = numbers[value]
        elif column == "item":
            shown[column] = numbers.get(value, "gone") if value is not None else None
        elif column in ("at", "since") or column.endswith(_TIMES):
            shown[column] = None if value is None else "a time"
        else:
            shown[column] = value
    return shown
