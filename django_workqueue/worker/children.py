"""
The supervisor's view of its worker processes: how one is started, what it holds, and
whether it lives.
"""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from typing import Final, Protocol

from django_workqueue.worker.channel import RESTING_BEAT, Channel
from django_workqueue.worker.options import SILENCE, WorkerOptions

# The path first: where the project is found may be something that manage.py arranged; and
# settings may depend on which command runs.
_BOOTSTRAP: Final = (
    "import json, sys; descriptor = int(sys.argv[1]);"
    " sys.path[:], sys.argv[:] = json.loads(sys.argv[2]);"
    " from django_workqueue.worker.process import main; main(descriptor)"
)


#: Seconds after its time limit for which a handler that doesn't stop keeps its lease, and
#: seconds after the cap of its claim for which it keeps its process.
STOP_GRACE: Final = 5.0

#: Seconds between two looks at what threads use of the processor, and how much of it a thread
#: uses that works, also on a busy machine. One that only waits for the interpreter's lock looks
#: for it every 5 ms, which costs a thousandth.
LOOK: Final = 1.0
WORKING: Final = 0.01
_LEAST_TICKS: Final = 2
_TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")


@dataclass(eq=False, slots=True)
class HeldLease:
    """A claim that a process holds. Times are of the monotonic clock, in seconds."""

    item: int
    fence: int
    seconds: float
    timeout: float | None
    #: When to renew it, or to see that it is overdue.
    look_at: float
    begun: bool = False
    #: When the supervisor is to end it, because its handler doesn't stop.
    overdue_at: float = math.inf
    #: When it has surely reached its ``max_lease_seconds``, once that is known.
    capped_at: float = math.inf
    cancel_told: bool = False

    def begin(self, at: float) -> None:
        """Note that its handler began."""
        self.begun = True
        if self.timeout is not None:
            self.overdue_at = at + self.timeout + STOP_GRACE
            self.look_again(self.look_at)

    def look_again(self, at: float) -> None:
        """Look again at that time, or when it is overdue or capped."""
        self.look_at = min(at, self.overdue_at, self.capped_at)


@dataclass
class News:
    """What a renewal that began *at* found out about the claims of one process."""

    at: float
    renewed: list[tuple[int, int]] = field(default_factory=list)
    lost: list[tuple[int, int, str]] = field(default_factory=list)
    cancelled: list[tuple[int, int]] = field(default_factory=list)


class Child:
    """One worker process."""

    def __init__(
        self, number: int, budget: int | None, popen: subprocess.Popen[bytes], channel: Channel
    ) -> None:
        self.number = number
        #: How many items it may begin; None: no limit.
        self.budget = budget
        self.popen = popen
        self.channel = channel
        self.born = time.monotonic()
        #: When it is killed if it hasn't ended; infinity: it isn't being ended.
        self.deadline = math.inf
        self.leases: dict[int, HeldLease] = {}
        #: Begun claims (fence by item) that it holds no longer, though how they ended may
        #: not be stored: should one still stand when the process ends, it isn't unspent.
        self.unsettled: dict[int, int] = {}
        #: When a handler is to have stopped whose claim has reached its cap, by item and fence.
        self.capped: dict[tuple[int, int], float] = {}
        #: How many items it has begun.
        self.begun = 0
        #: It has free slots, and found nothing more due.
        self.hungry = False
        #: It has said that it is ready.
        self.ready = False
        #: It claims nothing more, and will end.
        self.leaving = False
        #: It is being replaced, because a handler doesn't stop.
        self.retired = False
        #: The queues for which it was woken, until it shows what it found there.
        self.woken_for: list[str] = []
        #: False once its end of the channel is closed.
        self.connected = True
        #: The supervisor has killed it, so that its death is no accident.
        self.killed = False
        self._heard = self.born
        # The processor time of its threads, in ticks, and when that was looked at.
        self._ticks: dict[str, int] = {}
        self._looked_at = self.born
        self._worked_at = self.born

    @property
    def serving(self) -> bool:
        """True if it takes work."""
        return self.ready and not self.leaving

    @property
    def idle(self) -> bool:
        """True if it holds nothing and found nothing due."""
        return self.hungry and not self.leases and not self.leaving

    def let_go(self, item: int, fence: int) -> bool:
        """Take it that a claim is lost, or is to be ended by others; False: it isn't held."""
        lease = self.leases.get(item)
        if lease is None or lease.fence != fence:
            return False
        del self.leases[item]
        if lease.begun:
            self.unsettled[item] = fence
        return True

    def begun_claims(self) -> dict[int, int]:
        """Return the claims (fence by item) that are not unspent, wherever they stand."""
        held = {lease.item: lease.fence for lease in self.leases.values() if lease.begun}
        return self.unsettled | held

    def heard(self) -> None:
        """Note a sign of life."""
        self._heard = time.monotonic()

    def responsive(self) -> bool:
        """
        True if it can be expected to get on with what it holds: it is not stopped, and
        either it was heard of lately or one of its threads works (a handler that holds the
        interpreter's lock keeps it silent, and uses the processor).
        """
        now = time.monotonic()
        if now - self._looked_at >= LOOK:
            ticks = _ticks_of_threads(self.popen.pid)
            gained = max((n - self._ticks.get(tid, n) for tid, n in ticks.items()), default=0)
            silent_for = now - max(self._looked_at, self._heard)
            least = max(_LEAST_TICKS, WORKING * silent_for * _TICKS_PER_SECOND)
            if ticks and (not self._ticks or gained >= least):
                self._worked_at = now
            self._ticks, self._looked_at = ticks, now
        if _state_of(self.popen.pid) in ("T", "t"):
            return False
        silence = SILENCE if self.leases else RESTING_BEAT + SILENCE
        return now - max(self._heard, self._worked_at) < silence

    def kill(self) -> None:
        """End it at once, and on purpose."""
        self.killed = True
        with suppress(ProcessLookupError):
            self.popen.kill()


class Crew(Protocol):
    """
    What the duties beside the supervisor's main thread know of it. `children` and `post`
    may be called from their threads; every other call is to be posted.
    """

    def children(self) -> list[Child]:
        """Return the processes that have not been seen to end."""

    def post(self, call: Callable[[], None]) -> None:
        """Have *call* made in the main thread."""

    def booted(self) -> None:
        """Take note that claiming may begin."""

    def wake(self, queues: Sequence[str]) -> None:
        """Have a process with free slots look into *queues*."""

    def tell(self, child: Child, news: News) -> None:
        """Pass on what a renewal found out."""

    def overdue(self, child: Child, lease: HeldLease) -> None:
        """End an attempt whose handler doesn't stop at its time limit."""

    def drain(self, reason: str) -> None:
        """End all processes in order."""

    def failed(self) -> None:
        """Take note that duties are no longer done."""


def _state_of(pid: int) -> str:
    """Return the letter of a process's state; empty where that isn't told."""
    fields = _stat(f"/proc/{pid}/stat")
    return fields[0].decode() if fields else ""


def _ticks_of_threads(pid: int) -> dict[str, int]:
    """Return the processor time of each thread by its number; empty where that isn't told."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return {}
    stats = {thread: _stat(f"/proc/{pid}/task/{thread}/stat") for thread in threads}
    return {thread: int(stat[11]) + int(stat[12]) for thread, stat in stats.items() if stat}


def _stat(path: str) -> list[bytes]:
    try:
        with open(path, "rb") as file:
            return file.read().rpartition(b")")[2].split()
    except OSError:
        return []


def start_child(options: WorkerOptions, number: int, budget: int | None) -> Child:
    """
    Start a worker process.

    A plain command and not `multiprocessing`: it does not run the project's main module
    again, needs no helper process, and inherits nothing but its end of the channel.
    """
    ours, theirs = socket.socketpair()
    with theirs, _signals_blocked():
        command = [sys.executable, "-P", *(f"-W{option}" for option in sys.warnoptions)]
        told = json.dumps([[str(entry) for entry in sys.path], sys.argv])
        command += ["-c", _BOOTSTRAP, str(theirs.fileno()), told]
        popen = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], env=os.environ
        )
    channel = Channel(ours)
    channel.post("configure", number, budget, asdict(options))
    return Child(number, budget, popen, channel)


@contextmanager
def _signals_blocked() -> Iterator[None]:
    # The child inherits it, and unblocks once it can take signals: none is lost, and none
    # ends it while Python starts.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
