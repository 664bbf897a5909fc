"""What the server counts about itself: commits, write-ahead log, processor time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psycopg

_PROC: Final = Path("/proc")
#: The first version in which a session can be told to report what it counted.
_FLUSHES_ON_DEMAND: Final = 150_000

_COUNTED: Final = """
select (select xact_commit from pg_stat_database where datname = %s),
       pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint
"""


@dataclass(frozen=True, slots=True)
class Reading:
    """The state of the server's counters at one moment; None: can't be read here."""

    commits: int | None
    wal_bytes: int
    cpu_seconds: float | None


def report_statistics(connection: psycopg.Connection[Any]) -> None:
    """Let a session report its commits now, this one included, and not seconds later."""
    if connection.info.server_version >= _FLUSHES_ON_DEMAND:
        connection.execute("select pg_stat_force_next_flush()")


class Observer:
    """Reads the counters of the server, for the database *name*, from outside that database."""

    def __init__(self, connection: psycopg.Connection[Any], name: str) -> None:
        self._connection = connection
        self._name = name
        self._postmaster = _postmaster(connection)

    @property
    def version(self) -> str:
        """PostgreSQL's version."""
        return self._connection.info.parameter_status("server_version") or ""

    def checkpoint(self) -> None:
        """Begin with a fresh log, where the role may: one in a round would add whole pages."""
        with suppress(psycopg.errors.InsufficientPrivilege):
            self._connection.execute("checkpoint")

    def read(self) -> Reading:
        """Return the counters as they stand."""
        row = self._connection.execute(_COUNTED, [self._name]).fetchone()
        assert row is not None
        commits, wal = row
        exact = self._connection.info.server_version >= _FLUSHES_ON_DEMAND
        return Reading(commits if exact else None, wal, self._cpu_seconds())

    def _cpu_seconds(self) -> float | None:
        """Processor time of the server: its processes, and those that have ended."""
        if self._postmaster is None:
            return None
        ticks = sum(_ticks(self._postmaster, ended=True))
        for pid in _children(self._postmaster):
            ticks += sum(_ticks(pid))
        return ticks / os.sysconf("SC_CLK_TCK")


def _postmaster(connection: psycopg.Connection[Any]) -> int | None:
    """Return the process id of the server's parent process if it runs on this machine."""
    pid = connection.info.backend_pid
    try:
        title = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return None
    # A server elsewhere may have a process whose id is a stranger's here.
    if not title.startswith("postgres:") or f" {connection.info.dbname} " not in title:
        return None
    return int(_stat(pid)[1])


def _stat(pid: int) -> list[str]:
    """Return the fields after the name: state, parent, …; empty for one that has ended."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _ticks(pid: int, *, ended: bool = False) -> list[int]:
    """Return the user's and the system's clock ticks; *ended*: of its ended children too."""
    return [int(field) for field in _stat(pid)[11 : 15 if ended else 13]]


def _children(parent: int) -> Iterator[int]:
    for folder in _PROC.iterdir():
        if folder.name.isdecimal():
            fields = _stat(int(folder.name))
            if fields and int(fields[1]) == parent:
                yield int(folder.name)
