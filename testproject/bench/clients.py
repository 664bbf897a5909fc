"""
The client processes: each is started once for a scenario, and works in every round.

A side is pickled to its clients only after Django is set up there, so its module may import
models; this module must not.
"""

from __future__ import annotations

import multiprocessing
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import django
import psycopg

from bench import BenchError
from bench.database import Settings, register
from bench.observer import report_statistics
from bench.sizes import Size


@dataclass(frozen=True, slots=True)
class Work:
    """
    One client's part in a round.

    Each step of *turns* is a batch or a statement, is timed, and tells how many items it
    brought to their end.
    """

    connection: psycopg.Connection[Any]
    turns: Iterator[int]


class Side(Protocol):
    """What is measured. It is pickled, so it is of a class in a module."""

    @property
    def name(self) -> str:
        """What it is called in the figures; the sides of a scenario differ in it."""

    def prepare(self, size: Size) -> None:
        """Set the tables up for a round, in the command's process."""

    def client(self, size: Size, number: int) -> AbstractContextManager[Work]:
        """Connect client *number* (from 0), in its own process."""

    def problems(self, size: Size) -> list[str]:
        """Say what is wrong in the database after a round, in the command's process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A client's part as it went. Begin and end are of the machine's monotonic clock."""

    began: float
    ended: float
    done: int
    turns_ms: list[float]
    cpu_seconds: float
    peak_mib: float


class Crew:
    """The clients of one side."""

    def __init__(self, settings: Settings, side: Side, size: Size) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(size.processes):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            ours.send((settings, side, size, number))
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for pipe in self._pipes:
            pipe.close()  # a client ends when it hears no more
        for process in self._processes:
            if kind is not None:
                process.terminate()
            process.join()

    def prepare(self) -> None:
        """Connect all clients for a round; return once all wait for the start."""
        self._ask("prepare")

    def go(self) -> list[Measured]:
        """Start all clients at the same time; return how it went once all have finished."""
        return self._ask("go")

    def leave(self) -> None:
        """Let all clients disconnect; until then the server's processes for them can be read."""
        self._ask("leave")

    def _ask(self, word: str) -> list[Any]:
        with suppress(BrokenPipeError):  # told by what is read then
            for pipe in self._pipes:
                pipe.send(word)
        return [self._answer(pipe) for pipe in self._pipes]

    def _answer(self, pipe: Connection) -> Any:
        try:
            answer = pipe.recv()
        except EOFError:
            raise BenchError("A client process died") from None
        if isinstance(answer, str):
            raise BenchError(f"A client process failed:\n{answer}")
        return answer


def _serve(pipe: Connection) -> None:
    """Be a client, until the command hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        django.setup()
        settings, side, size, number = pipe.recv()
        register(settings)
        while pipe.recv():
            _take_part(pipe, side.client(size, number))
    except (EOFError, BrokenPipeError):
        pass
    except Exception:
        pipe.send(traceback.format_exc())


def _take_part(pipe: Connection, connected: AbstractContextManager[Work]) -> None:
    with connected as work:
        report_statistics(work.connection)
        pipe.send(None)
        pipe.recv()
        measured = _measure(work.turns)
        report_statistics(work.connection)
        pipe.send(measured)
        pipe.recv()
    pipe.send(None)


def _measure(turns: Iterator[int]) -> Measured:
    done, turns_ms = 0, []
    cpu = _cpu_seconds()
    began = before = time.monotonic()
    for number in turns:
        now = time.monotonic()
        turns_ms.append(1000 * (now - before))
        done += number
        before = now
    return Measured(
        began=began,
        ended=time.monotonic(),
        done=done,
        turns_ms=turns_ms,
        cpu_seconds=_cpu_seconds() - cpu,
        peak_mib=_peak_mib(),
    )


def _cpu_seconds() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _peak_mib() -> float:
    with suppress(OSError):
        # On Linux what getrusage tells may be the size of the process that started this one.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1024**2
