"""What an error of the database means to a worker, and how long it waits before the next try."""

from __future__ import annotations

import logging
import random
import time
from enum import Flag, auto
from typing import Final

from django.db import (
    DataError,
    IntegrityError,
    NotSupportedError,
    ProgrammingError,
    connections,
)

logger: Final = logging.getLogger("django_workqueue")

FIRST_WAIT: Final = 0.2
#: Work goes on within 5 s of the return of the database: 2 s are left for connecting and for
#: the work itself. Till then each connection is tried about every 2 s, since waits are jittered:
#: eight tries a second of a worker with 16 processes, no burden for a server that starts.
LONGEST_WAIT: Final = 3.0
#: Tries that may meet the same passing trouble before it is worth a warning.
_QUIET_TRIES: Final = 3


class Remedy(Flag):
    """What a worker does about an error. None of it charges an attempt but that of a bad row."""

    #: It passes by itself: go on after a pause, on the same connection.
    REPEAT = auto()
    #: Go on after a pause, on a new connection.
    RECONNECT = auto()
    #: The same; but it passes only once somebody has acted, so say it loudly.
    AWAIT = auto()
    #: It may come from one row of many: the others are handled without it.
    ROW = auto()
    #: Repeating can't help: end, and say it loudly.
    STOP = auto()


#: By SQLSTATE or by its class, the first two characters. What is not here goes by its type.
REMEDIES: Final = {
    "08": Remedy.RECONNECT,  # connection failed; also what a pooler says without a server
    "0A": Remedy.RECONNECT,  # a statement was prepared before a migration changed its result
    "22": Remedy.ROW,  # a value that can't be stored
    "23": Remedy.ROW,  # a constraint
    "25": Remedy.RECONNECT,  # 25006 read-only after a failover, 25P03 idle in transaction
    "28": Remedy.RECONNECT,  # not let in
    "40": Remedy.REPEAT,  # 40001 serialization, 40P01 deadlock: undone, and free to try again
    "40003": Remedy.RECONNECT,  # whether it was done is unknown
    "3F000": Remedy.AWAIT,  # no such schema,
    "42P01": Remedy.AWAIT,  # table
    "42703": Remedy.AWAIT,  # or column: a migration or a restore is on its way, or forgotten
    "42501": Remedy.AWAIT,  # or the right to use it
    "42": Remedy.STOP,  # a statement that can't be right
    "53": Remedy.RECONNECT,  # 53100 disk, 53200 memory, 53300 too many connections
    "54": Remedy.ROW | Remedy.STOP,  # 54001 too complex: of a result that one item brought, or ours
    "55": Remedy.RECONNECT,
    "55P03": Remedy.ROW | Remedy.REPEAT,  # lock_timeout: somebody else has locked a row
    "57": Remedy.RECONNECT,  # 57P01 to 57P03: shut down, crashed, starting
    "57014": Remedy.REPEAT,  # statement_timeout, or an administrator's pg_cancel_backend
    "58": Remedy.RECONNECT,  # the server's disk or files
    "XX": Remedy.RECONNECT,
}


def remedy_for(error: BaseException) -> Remedy:
    """Return what to do about an error of the database, or one that was caused by it."""
    sqlstate = sqlstate_of(error)
    for key in (sqlstate, sqlstate[:2]):
        if key in REMEDIES:
            return REMEDIES[key]
    # Of SQLite, of the driver itself, or while connecting, for which libpq tells no SQLSTATE.
    if _is_any(error, DataError, IntegrityError, OverflowError):
        return Remedy.ROW
    if _is_any(error, ProgrammingError, NotSupportedError):
        return Remedy.STOP
    return Remedy.RECONNECT


def sqlstate_of(error: BaseException) -> str:
    """Return the SQLSTATE behind *error*; empty if the server told none."""
    states = (getattr(each, "sqlstate", None) for each in _causes(error))
    return next((state for state in states if state), "")


def _is_any(error: BaseException, *kinds: type[BaseException]) -> bool:
    return any(isinstance(each, kinds) for each in _causes(error))


def _causes(error: BaseException) -> list[BaseException]:
    causes = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    return causes


def from_one_row(error: BaseException) -> bool:
    """True if the error may come from a single row of a batch."""
    return Remedy.ROW in remedy_for(error)


def is_hopeless(error: BaseException) -> bool:
    """True if repeating can't help."""
    return Remedy.STOP in remedy_for(error)


class Backoff:
    """Doubling waits with jitter while something keeps going wrong."""

    def __init__(self, first: float = FIRST_WAIT, longest: float = LONGEST_WAIT) -> None:
        self._first = first
        self._longest = longest
        self._until = 0.0
        #: How often it has failed since it last succeeded.
        self.failures = 0

    def failed(self) -> float:
        """Note one more failure; return the seconds to wait now."""
        wait = min(self._first * 2.0 ** min(self.failures, 30), self._longest)
        self.failures += 1
        wait *= random.uniform(0.5, 1.0)
        self._until = time.monotonic() + wait
        return wait

    def over(self) -> bool:
        """Note a success; return whether there had been failures."""
        had, self.failures, self._until = self.failures > 0, 0, 0.0
        return had

    @property
    def remaining(self) -> float:
        """Seconds of the present wait that are left; 0.0: go ahead."""
        return max(0.0, self._until - time.monotonic())


def back_off(trouble: Backoff, alias: str, who: str, error: BaseException) -> float:
    """
    Say that *who* met *error*, and make the thread's connection ready for the next try; return
    the seconds until then.
    """
    wait, remedy = trouble.failed(), remedy_for(error)
    if Remedy.AWAIT in remedy:
        level = logging.ERROR
    elif Remedy.REPEAT in remedy and trouble.failures <= _QUIET_TRIES:
        level = logging.INFO
    else:
        level = logging.WARNING
    text = str(error.__cause__ or error).strip().partition("\n")[0]
    logger.log(level, "database trouble: %s retry_in=%.1fs error=%s", who, wait, text)
    if Remedy.REPEAT not in remedy:
        connections[alias].close()
    return wait
