"""
The slots of a process: threads for sync handlers, one event loop for async ones.

Together they run at most `concurrency` handlers. What is offered beyond that waits here,
so that a slot that becomes free goes on at once, whatever the dispatcher is doing.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING, Final, NoReturn

from django_workqueue.moves import Release
from django_workqueue.worker.attempts import (
    Held,
    Settlement,
    cancel,
    failed,
    run_async,
    run_sync,
)
from django_workqueue.worker.channel import ChannelClosedError
from django_workqueue.worker.reasons import SETTLING_REASONS

if TYPE_CHECKING:
    from django_workqueue.queues import DatabaseWorkQueue

logger: Final = logging.getLogger("django_workqueue")

Announce = Callable[[Held], None]
Report = Callable[[Held, Settlement | None], None]

# Of so many latest attempts the median tells how long they take: a pause of the machine
# must not look as if all of them were long.
_LATEST: Final = 9


class Slots:
    """
    Runs the items it is offered. The public methods may be called by any thread.

    *announce* is called right before a handler runs; if it raises `ChannelClosedError`, the
    handler does not run and the item is released. *report* is called once per offered item that was
    not withdrawn, with its settlement, or None if nothing is left to settle.
    """

    def __init__(
        self, queue: DatabaseWorkQueue, concurrency: int, *, announce: Announce, report: Report
    ) -> None:
        self._queue = queue
        self._concurrency = concurrency
        self._announce = announce
        self._report = report
        self._lock = threading.Lock()
        self._waiting: deque[Held] = deque()
        self._running: dict[int, Held] = {}
        self._for_threads: SimpleQueue[Held] = SimpleQueue()
        self._threads = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._latest = deque([1.0] * _LATEST, _LATEST)

    def attempt_seconds(self) -> float:
        """Return how long it takes of late until a slot is free again; long at first."""
        with self._lock:
            usual = sorted(self._latest)[_LATEST // 2]
            if len(self._running) < self._concurrency:
                return usual
            now = time.monotonic()
            busy = min(now - (held.started or now) for held in self._running.values())
            return max(usual, busy)

    @property
    def backlog(self) -> bool:
        """True while items wait for a slot."""
        return bool(self._waiting)

    def running(self) -> list[Held]:
        """Return what runs, or is about to."""
        with self._lock:
            return list(self._running.values())

    def offer(self, items: Iterable[Held]) -> None:
        """Run *items* as slots are free, in order."""
        with self._lock:
            self._waiting.extend(items)
            self._fill()

    def withdraw(self, unless: Callable[[Held], bool] = lambda held: False) -> list[Held]:
        """Take back the items whose handlers have not been begun, but for those *unless*."""
        with self._lock:
            back = [held for held in self._waiting if not unless(held)]
            self._waiting = deque(held for held in self._waiting if unless(held))
            return back

    def stop(self, held: Held, reason: str) -> None:
        """
        Tell the handler of *held* to stop: a sync one by its context, an async one by
        cancelling it, once. The first reason stays, but for a loss, which settles nothing.
        """
        with self._lock:
            if not held.stopped or reason not in SETTLING_REASONS:
                held.stopped = reason
            held.context.stop(reason)
            if self._loop is not None:
                self._loop.call_soon_threadsafe(cancel, held)

    # Inside.

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._concurrency:
            held = self._waiting.popleft()
            self._running[held.job_id] = held
            if held.handler.is_async:
                asyncio.run_coroutine_threadsafe(self._run_async(held), self._started_loop())
            else:
                self._for_threads.put(held)
                if self._threads < min(len(self._running), self._concurrency):
                    self._threads += 1
                    self._thread(self._work, f"workqueue-slot-{self._threads}")

    def _thread(self, run: Callable[[], None], name: str) -> None:
        # Daemons: a handler that never ends must not keep the process.
        threading.Thread(target=run, name=name, daemon=True).start()

    def _started_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread(partial(_run_on, self._loop), "workqueue-loop")
        return self._loop

    def _work(self) -> None:
        while True:
            held = self._for_threads.get()
            try:
                settlement = run_sync(self._queue, held) if self._begin(held) else _unspent(held)
            except BaseException as error:  # thrown into this thread by others: the slot lives on
                settlement = failed(held, error)
            self._end(held, settlement)

    async def _run_async(self, held: Held) -> None:
        begun = self._begin(held)
        self._end(held, await run_async(self._queue, held) if begun else _unspent(held))

    def _begin(self, held: Held) -> bool:
        """Announce the start; return whether the handler may run."""
        if held.stopped or held.lapsed(time.monotonic()):
            return False
        try:
            self._announce(held)
        except ChannelClosedError:
            return False
        held.started = time.monotonic()
        return True

    def _end(self, held: Held, settlement: Settlement | None) -> None:
        with self._lock:
            held.ended = time.monotonic()
            if held.started is not None:
                self._latest.append(held.ended - held.started)
            # Reported before another one starts: the dispatcher sees ends in their order.
            self._report(held, settlement)
            self._running.pop(held.job_id, None)
            self._fill()


def _run_on(loop: asyncio.AbstractEventLoop) -> NoReturn:
    """Run *loop* for ever, also if a task of a handler stops it or lets SystemExit out."""
    while True:
        try:
            loop.run_forever()
            logger.error("a handler stopped the event loop: it goes on")
        except BaseException as error:
            logger.error("the event loop was left by %s: it goes on", type(error).__name__)


def _unspent(held: Held) -> Settlement | None:
    # If the lease is gone after all, the release is refused.
    return None if held.lost else Release(item=held.job_id, fence=held.fence)
