"""
The supervisor: starts worker processes, hears what they hold, sees them die, replaces
them, and ends them in order.

Its main thread runs no code of the project and never talks to the database, so nothing
can keep it from seeing a death or a signal. `Renewal` and `Upkeep` do that beside it, and
post what they find out.
"""

from __future__ import annotations

import logging
import math
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final

from django_workqueue.conf import get_settings
from django_workqueue.failures import FailureKind
from django_workqueue.worker.channel import ChannelClosedError
from django_workqueue.worker.children import STOP_GRACE, Child, HeldLease, News, start_child
from django_workqueue.worker.health import Health
from django_workqueue.worker.options import CANCEL_GRACE, SETTLE_GRACE, WorkerOptions
from django_workqueue.worker.reasons import CAPPED, OVERDUE, RETIRED, SHUTDOWN
from django_workqueue.worker.renewal import Renewal
from django_workqueue.worker.trouble import Backoff
from django_workqueue.worker.upkeep import Death, Upkeep
from django_workqueue.worker.wakeup import Wakeup

logger: Final = logging.getLogger("django_workqueue")

#: Exit codes beside 0 (and 1, of a command that refuses to start): a worker process died
#: abnormally at some time, though it was replaced; the supervisor itself failed. A second
#: signal ends with 128 + its number.
EXIT_PROCESS_DIED: Final = 3
EXIT_FAILED: Final = 70

#: Seconds that a process may take beyond its own last deadline of a drain.
_KILL_GRACE: Final = 1.0
#: Seconds of life under which the death of a process slows down its replacement.
_YOUNG: Final = 5.0
#: Seconds that the last duties may take.
_LAST_DUTIES: Final = 5.0


class Supervisor:
    """
    One worker, from its start to its exit code. `run` belongs into the main thread, and
    so do all other methods but `children` and `post`: see `Crew`.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._options = options
        self._children: dict[int, Child] = {}
        self._last_number = 0
        self._posted: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._wakeup = Wakeup([signal.SIGINT, signal.SIGTERM, signal.SIGCHLD])
        self._selector = selectors.DefaultSelector()
        self._renewal = Renewal(options, self)
        self._upkeep = Upkeep(options, self)
        duties = {"renewal": self._renewal, "upkeep": self._upkeep}
        self._health = Health(options.health_file, duties)
        self._stop_timeout = options.stop_timeout
        self._may_claim = False
        self._budget = options.max_items
        self._draining = False
        self._stops = 0
        self._restart = Backoff(first=0.1, longest=30.0)
        self._code = 0

    def run(self) -> int:
        """Work until drained; return the exit code."""
        options = self._options
        logger.info(
            "worker started: name=%s queues=%s processes=%d concurrency=%d",
            options.name,
            ",".join(options.queues),
            options.processes,
            options.concurrency,
        )
        with self._wakeup, self._selector:
            self._selector.register(self._wakeup, selectors.EVENT_READ)
            self._renewal.start()
            self._upkeep.start()
            try:
                while not self._over():
                    self._turn()
            finally:
                self._end()
        logger.info("worker ended: name=%s code=%d", options.name, self._code)
        return self._code

    # The loop.

    def _over(self) -> bool:
        return not self._children and (self._draining or (self._may_claim and self._budget == 0))

    def _turn(self) -> None:
        for key, events in self._selector.select(self._patience()):
            if key.fileobj is self._wakeup:
                for number in self._wakeup.take():
                    self._on_signal(number)
                continue
            child: Child = key.data
            if events & selectors.EVENT_WRITE and not child.channel.flush():
                self._selector.modify(child.channel, selectors.EVENT_READ, child)
            if events & selectors.EVENT_READ and child.connected:
                self._listen(child)
        with suppress(Empty):
            while True:
                self._posted.get_nowait()()
        now = time.monotonic()
        for child in self.children():
            if child.deadline <= now and not child.killed:
                self._kill(child, "did not end in time")
            if min(child.capped.values(), default=math.inf) <= now:
                self._replace(child)
        self._supply()
        obstacle = "draining" if self._draining else "" if self._may_claim else "starting"
        self._health.tell(obstacle, self.children())

    def _patience(self) -> float | None:
        """Seconds after which something is to be done of its own accord; None: nothing."""
        now = time.monotonic()
        times = [child.deadline - now for child in self.children() if not child.killed]
        times += [at - now for child in self.children() for at in child.capped.values()]
        times.append(self._health.next_at - now)
        if self._restart.remaining:
            times.append(self._restart.remaining)
        soonest = min(times, default=math.inf)
        return None if soonest == math.inf else max(0.0, soonest)

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if number == signal.SIGCHLD:
            for child in self.children():
                if child.popen.poll() is not None:
                    self._bury(child)
        elif not self._stops:
            self._stops = 1
            self.drain(name)
        elif self._stops == 1:
            self._stops = 2
            self._code = 128 + number
            self.drain(name)
            for child in self.children():
                self._kill(child, f"second signal, {name}")

    def _end(self) -> None:
        for child in self.children():  # only after an error of the supervisor itself
            self._kill(child, "the supervisor failed")
            child.popen.wait()
            self._bury(child)
        self._upkeep.end(_LAST_DUTIES)
        self._renewal.end(_LAST_DUTIES)
        self._health.end()

    # Processes.

    def children(self) -> list[Child]:
        return [*self._children.values()]

    def _supply(self) -> None:
        """Start processes until there are as many as wanted."""
        if not self._may_claim or self._draining or self._restart.remaining:
            return
        for missing in range(self._options.processes - len(self._children), 0, -1):
            budget = None
            if self._budget is not None:
                budget = -(-self._budget // missing)
                self._budget -= budget
                if not budget:
                    return
            self._last_number += 1
            child = start_child(self._options, self._last_number, budget)
            self._children[child.number] = child
            self._selector.register(child.channel, selectors.EVENT_READ, child)
            logger.info("process started: process=%d pid=%d", child.number, child.popen.pid)

    def _say(self, child: Child, kind: str, *parts: Any) -> None:
        child.channel.post(kind, *parts)
        if child.connected and child.channel.flush():
            both = selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(child.channel, both, child)

    def _listen(self, child: Child) -> bool:
        """Take in what a process says; False if it had nothing to say."""
        try:
            messages = child.channel.receive()
        except ChannelClosedError:
            self._disconnect(child)
            # It ends, or it has closed what it doesn't know: it can't be led any more.
            child.deadline = min(child.deadline, time.monotonic() + SETTLE_GRACE)
            return False
        child.heard()
        for kind, *parts in messages:
            _HEARD[kind](self, child, *parts)
        return bool(messages)

    def _disconnect(self, child: Child) -> None:
        self._selector.unregister(child.channel)
        child.connected = False

    def _bury(self, child: Child) -> None:
        """Take in the last words of a process that has ended, and settle its claims."""
        while child.connected and self._listen(child):
            pass
        if child.connected:  # something that it has forked holds its end open
            self._disconnect(child)
        child.channel.close()
        del self._children[child.number]
        code, age = child.popen.returncode, time.monotonic() - child.born
        # A handler can end its process with a 0, too.
        busy = any(lease.begun for lease in child.leases.values())
        tidy = code == 0 and child.leaving and not busy
        accident = not child.killed and not tidy
        logger.log(
            logging.WARNING if accident else logging.INFO,
            "process ended: process=%d pid=%d code=%d",
            child.number,
            child.popen.pid,
            code,
        )
        if accident:
            self._code = self._code or EXIT_PROCESS_DIED
        # One that an item ended is replaced at once: the others must not wait for it.
        if accident and age < _YOUNG and not child.begun:
            self._restart.failed()
        else:
            self._restart.over()
        if child.budget is not None and self._budget is not None:
            self._budget += max(0, child.budget - child.begun)
        cut_by_drain = child.killed and self._draining and not child.retired
        self._upkeep.bury(
            Death(
                process=child.number,
                begun=child.begun_claims(),
                kind=FailureKind.SHUTDOWN if cut_by_drain else FailureKind.DIED,
                watched_until=time.monotonic() + self._longest_lease(),
            )
        )

    def _longest_lease(self) -> float:
        settings = get_settings()
        return max(settings.policy_for(queue).lease_seconds for queue in self._options.queues)

    def _retire(self, child: Child, reason: str = SHUTDOWN) -> None:
        """Have a process finish what it runs, and end."""
        patience = self._stop_timeout + CANCEL_GRACE + SETTLE_GRACE + _KILL_GRACE
        child.deadline = min(child.deadline, time.monotonic() + patience)
        child.leaving = True
        self._say(child, "drain", self._stop_timeout, reason)

    def _replace(self, child: Child) -> None:
        """Have a process end because of a handler that doesn't."""
        child.capped.clear()
        if not child.leaving:
            logger.warning("handler does not stop: replacing process=%d", child.number)
            child.retired = True
            self._retire(child, RETIRED)

    def _kill(self, child: Child, reason: str) -> None:
        logger.warning("killing process: process=%d reason=%s", child.number, reason)
        child.kill()

    # What upkeep and renewal tell.

    def post(self, call: Callable[[], None]) -> None:
        self._posted.put(call)
        self._wakeup.nudge()

    def booted(self) -> None:
        self._may_claim = True

    def failed(self) -> None:
        self._code = EXIT_FAILED
        self.drain("duties are not done")

    def drain(self, reason: str, stop_timeout: float = math.inf) -> None:
        if self._draining:
            return
        logger.info("draining: reason=%s", reason)
        self._stop_timeout = min(self._stop_timeout, stop_timeout)
        self._draining = self._upkeep.draining = True
        for child in self.children():
            self._retire(child)

    def wake(self, queues: Sequence[str]) -> None:
        # One at a time: if it fills up, the next is woken. A few items don't rouse all.
        for child in self.children():
            if child.hungry and not child.leaving:
                child.hungry = False
                child.woken_for = [*queues]
                self._say(child, "wake", queues)
                return

    def tell(self, child: Child, news: News) -> None:
        if news.renewed:
            self._say(child, "renewed", news.at, news.renewed)
        if news.cancelled:
            self._say(child, "cancel", news.cancelled)
        if news.lost:
            self._say(child, "lost", news.lost)
        for item, fence, reason in news.lost:
            if child.let_go(item, fence) and reason == CAPPED and item in child.unsettled:
                child.capped[item, fence] = time.monotonic() + STOP_GRACE

    def overdue(self, child: Child, lease: HeldLease) -> None:
        if not child.let_go(lease.item, lease.fence):
            return
        self._upkeep.time_out(lease)
        self._say(child, "lost", [(lease.item, lease.fence, OVERDUE)])
        self._replace(child)

    # What processes say.

    def _on_ready(self, child: Child) -> None:
        child.ready = True
        self._say(child, "wake", self._options.queues)

    def _on_beat(self, child: Child) -> None:
        pass  # that it was heard is all

    def _on_held(self, child: Child, began: float, claims: Sequence[list[Any]]) -> None:
        child.hungry = False
        if child.woken_for and len(child.leases) + len(claims) >= self._options.concurrency:
            self.wake(child.woken_for)
            child.woken_for = []
        leases = [
            HeldLease(item, fence, seconds, timeout, look_at=began + seconds / 3)
            for item, fence, seconds, timeout in claims
        ]
        child.leases.update((lease.item, lease) for lease in leases)
        self._renewal.expect(leases)

    def _on_started(self, child: Child, item: int, fence: int) -> None:
        child.begun += 1
        lease = child.leases.get(item)
        if lease is not None and lease.fence == fence:
            lease.begin(time.monotonic())
            self._renewal.expect([lease])

    def _on_left(self, child: Child, claims: Sequence[tuple[int, int]]) -> None:
        for item, fence in claims:
            child.let_go(item, fence)

    def _on_gone(self, child: Child, claims: Sequence[tuple[int, int]]) -> None:
        for item, fence in claims:
            lease = child.leases.get(item)
            if lease is not None and lease.fence == fence:
                del child.leases[item]
            child.capped.pop((item, fence), None)
        self._look_if_idle(child)

    def _on_hungry(self, child: Child) -> None:
        child.hungry = True
        child.woken_for = []
        self._look_if_idle(child)

    def _on_leaving(self, child: Child) -> None:
        self._retire(child)  # told to by a signal, it has its deadline nonetheless

    def _look_if_idle(self, child: Child) -> None:
        if self._options.until_empty and child.idle:
            self._upkeep.look()


_HEARD: Final[dict[str, Callable[..., None]]] = {
    "ready": Supervisor._on_ready,
    "beat": Supervisor._on_beat,
    "held": Supervisor._on_held,
    "started": Supervisor._on_started,
    "left": Supervisor._on_left,
    "gone": Supervisor._on_gone,
    "hungry": Supervisor._on_hungry,
    "leaving": Supervisor._on_leaving,
}
