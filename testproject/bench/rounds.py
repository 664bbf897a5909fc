"""Rounds of one side or of two in turn, and the figures that come of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

from django.db import connections

from bench import BenchError
from bench.clients import Crew, Measured, Side
from bench.database import ALIAS, Settings
from bench.observer import Observer, Reading, report_statistics
from bench.sizes import Size

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bench:
    """What a scenario works with: its database, the server's counters, a place for progress."""

    settings: Settings
    observer: Observer
    say: Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A scenario of the command. `most_in_batch` 1: it has no batches."""

    help: str
    defaults: Size
    most_in_batch: int
    run: Callable[[Bench, Size], Figures]


@dataclass(frozen=True, slots=True)
class Round:
    """What the clients and the server counted in one round of one side."""

    parts: Sequence[Measured]
    before: Reading
    after: Reading

    @property
    def items(self) -> int:
        return sum(part.done for part in self.parts)

    @property
    def seconds(self) -> float:
        """From the first client's begin to the last one's end."""
        return max(part.ended for part in self.parts) - min(part.began for part in self.parts)

    @property
    def items_per_s(self) -> float:
        return self.items / self.seconds

    @property
    def commits(self) -> int | None:
        if self.before.commits is None or self.after.commits is None:
            return None
        # Each client commits once more, to report how often it has committed.
        return self.after.commits - self.before.commits - len(self.parts)

    @property
    def server_cpu_ms(self) -> float | None:
        if self.before.cpu_seconds is None or self.after.cpu_seconds is None:
            return None
        return 1000 * (self.after.cpu_seconds - self.before.cpu_seconds)


def compare(bench: Bench, size: Size, subject: Side, baseline: Side | None = None) -> Figures:
    """Run the sides in turn, each round checked; return the figures of *subject*."""
    sides = [subject] if baseline is None else [subject, baseline]
    rounds: dict[str, list[Round]] = {side.name: [] for side in sides}
    with ExitStack() as stack:
        crews = [stack.enter_context(Crew(bench.settings, side, size)) for side in sides]
        for number in range(size.rounds):
            for side, crew in zip(sides, crews, strict=True):
                done = _round(bench, size, side, crew)
                rounds[side.name].append(done)
                bench.say(
                    f"  round {number + 1} of {size.rounds}, {side.name}:"
                    f" {done.items_per_s:,.0f} items/s ({done.seconds:.1f} s)"
                )
    figures = _figures(rounds[subject.name])
    if baseline is None:
        return figures | {"ratio": None, "baseline": None}
    under = _figures(rounds[baseline.name])
    ratio = figures["items_per_s"] / under["items_per_s"]
    return figures | {"ratio": round(ratio, 3), "baseline": {"name": baseline.name} | under}


def _round(bench: Bench, size: Size, side: Side, crew: Crew) -> Round:
    bench.observer.checkpoint()
    side.prepare(size)
    connections[ALIAS].ensure_connection()
    report_statistics(connections[ALIAS].connection)
    crew.prepare()
    before = bench.observer.read()
    parts = crew.go()
    done = Round(parts, before, bench.observer.read())
    crew.leave()
    wrong = side.problems(size)
    if done.items != size.items:
        wrong.insert(0, f"the clients brought {done.items} items to their end, not {size.items}")
    if wrong:
        raise BenchError("\n  ".join([f"{side.name}: the outcome is wrong", *wrong]))
    return done


def _figures(rounds: Sequence[Round]) -> Figures:
    turns = sorted(each for done in rounds for part in done.parts for each in part.turns_ms)
    items = sum(done.items for done in rounds)
    parts = [part for done in rounds for part in done.parts]
    wal = sum(done.after.wal_bytes - done.before.wal_bytes for done in rounds)
    return {
        "items_per_s": round(median(done.items_per_s for done in rounds), 1),
        "rounds": [round(done.items_per_s, 1) for done in rounds],
        **{f"p{share}_ms": round(_percentile(turns, share), 3) for share in (50, 95, 99)},
        "commits_per_item": _per_item([done.commits for done in rounds], items),
        "wal_bytes_per_item": round(wal / items, 1),
        "cpu_ms_per_item": _per_item([1000 * part.cpu_seconds for part in parts], items),
        "server_cpu_ms_per_item": _per_item([done.server_cpu_ms for done in rounds], items),
        "peak_mib": round(max(part.peak_mib for part in parts), 1),
    }


def _per_item(amounts: Sequence[float | None], items: int) -> float | None:
    known = [amount for amount in amounts if amount is not None]
    return round(sum(known) / items, 4) if len(known) == len(amounts) else None


def _percentile(ordered: Sequence[float], share: int) -> float:
    return ordered[max(0, math.ceil(len(ordered) * share / 100) - 1)]
