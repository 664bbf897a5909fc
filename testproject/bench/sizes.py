"""How much a scenario does, and which item is which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Final

from bench import BenchError

QUEUE: Final = "bench"
HANDLER: Final = "bench"


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What the options say; each scenario has its own defaults."""

    items: int
    tenants: int = 100
    batch: int = 1
    processes: int = 1
    rounds: int = 3
    payload_bytes: int = 100

    def share(self, number: int) -> range:
        """Return the numbers of the items that client *number* (from 0) takes care of."""
        start, stop = (self.items * place // self.processes for place in (number, number + 1))
        return range(start, stop)

    def batches(self, number: int) -> list[range]:
        """Return the share of client *number* in pieces of at most `batch`."""
        share = self.share(number)
        return [share[start : start + self.batch] for start in range(0, len(share), self.batch)]

    def tenant(self, item: int) -> str:
        """Return whose the item of this number is: neighbours are of different tenants."""
        return f"tenant-{item % self.tenants:05}"

    def payload(self) -> dict[str, Any]:
        """Return the payload of every item; hexadecimal digits, which hardly compress."""
        digits = Random(0).randbytes(self.payload_bytes // 2 + 1).hex()
        return {"data": digits[: self.payload_bytes]}


@dataclass(frozen=True, slots=True)
class Option:
    """A field of `Size` as an option of the command."""

    meaning: str
    least: int
    most: int


OPTIONS: Final = {
    "items": Option("items a round", 1, 10_000_000),
    "tenants": Option("tenants that the items belong to", 1, 99_999),
    "batch": Option("items a claim, or an insert in bulk", 1, 100_000),
    "processes": Option("client processes", 1, 64),
    "rounds": Option("rounds, of which the median counts", 1, 1000),
    "payload_bytes": Option("length of the text in each payload", 0, 250_000),
}


def flag(name: str) -> str:
    """Return how the option is written."""
    return f"--{name.replace('_', '-')}"


def size_of(
    scenario: str, defaults: Size, given: Mapping[str, int | None], *, most_in_batch: int
) -> Size:
    """
    Return *defaults* with what is *given*, or raise `BenchError` that names the option.

    A scenario without batches (*most_in_batch* 1) ignores that option: others may need it.
    """
    wanted = {name: number for name in OPTIONS if (number := given.get(name)) is not None}
    for name, number in wanted.items():
        option = OPTIONS[name]
        if not option.least <= number <= option.most:
            raise BenchError(f"{flag(name)} must be {option.least} to {option.most}, not {number}")
    if most_in_batch == 1:
        wanted.pop("batch", None)
    size = replace(defaults, **wanted)
    if size.batch > most_in_batch:
        raise BenchError(f"--batch must be 1 to {most_in_batch} for {scenario}, not {size.batch}")
    if size.processes > size.items:
        raise BenchError(f"--processes must be at most --items, and {size.processes} is more")
    return size
