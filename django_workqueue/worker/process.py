"""
A worker process: the main thread listens to the supervisor and to signals and keeps the
time, the dispatcher's thread claims and settles, the slots run handlers.

The main thread never waits for the database or for a handler. So it always hears that a
claim is lost, that the worker drains or that the supervisor is gone, and it can always
end the process.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn

import django

from django_workqueue.worker.channel import RESTING_BEAT, Channel, ChannelClosedError, Message
from django_workqueue.worker.options import (
    BEAT,
    CANCEL_GRACE,
    SETTLE_GRACE,
    WorkerOptions,
    configure_logging,
)
from django_workqueue.worker.reasons import CANCELLED, EXPIRED, SHUTDOWN, TIMEOUT
from django_workqueue.worker.wakeup import Wakeup

if TYPE_CHECKING:
    from django_workqueue.worker.attempts import Held

logger: Final = logging.getLogger("django_workqueue")

#: Exit codes of a process: its runtime failed; it could not store how its attempts ended.
EXIT_CRASHED: Final = 70
EXIT_UNSETTLED: Final = 75
#: Seconds that handlers may go on when the supervisor has died: nobody renews the leases.
ORPHAN_TIMEOUT: Final = 2.0
#: Seconds that threads of a project may delay the end of the process.
_EXIT_PATIENCE: Final = 2.0


def main(descriptor: int) -> NoReturn:
    """Run as the worker process whose supervisor is at the other end of *descriptor*."""
    os.set_inheritable(descriptor, False)
    # Ctrl-C reaches the whole group of processes; the supervisor tells what to do about it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What a handler forks is no worker: a signal ends it, and says nothing to us.
    os.register_at_fork(after_in_child=_forget_signals)
    with Wakeup([signal.SIGTERM]) as wakeup:
        # Blocked by the supervisor until here, so that none could get lost.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
        channel = Channel(socket.socket(fileno=descriptor))
        try:
            (_, number, budget, told), *more = _first_messages(channel)
        except ChannelClosedError:
            sys.exit(0)
        options = WorkerOptions(**told | {"queues": tuple(told["queues"])})
        django.setup()
        configure_logging(options.verbosity)
        process = Process(options, number, budget, channel, wakeup)
        code = process.run(more)
        logging.shutdown()
        if process.busy:
            os._exit(code)  # a handler goes on, and would be torn apart by a tidy end
        _end_soon(code)
    sys.exit(code)


def _forget_signals() -> None:
    with contextlib.suppress(ValueError):  # not in the main thread of an interpreter
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)


def _first_messages(channel: Channel) -> list[Message]:
    while not (messages := channel.receive()):
        select.select([channel], [], [])
    return messages


def _end_soon(code: int) -> None:
    def end() -> None:
        threading.Event().wait(_EXIT_PATIENCE)
        os._exit(code)

    threading.Thread(target=end, daemon=True).start()


class Process:
    """The main thread of a worker process."""

    def __init__(
        self,
        options: WorkerOptions,
        number: int,
        budget: int | None,
        channel: Channel,
        wakeup: Wakeup,
    ) -> None:
        # Imported late: it needs the models.
        from django_workqueue.worker.dispatcher import Dispatcher

        self._options = options
        self._number = number
        self._channel = channel
        self._wakeup = wakeup
        self._dispatcher = Dispatcher(
            options, process=number, budget=budget, channel=channel, announce=self._announce
        )
        self._thread = threading.Thread(
            target=self._run_dispatcher, name="workqueue-dispatcher", daemon=True
        )
        self._code: int | None = None
        self._draining = False
        # It holds nothing, so it may sleep longer than a beat.
        self._resting = False
        # What is still to be done in a drain: at which time, and what.
        self._agenda: list[tuple[float, Callable[[], None]]] = []
        self._orders: dict[str, Callable[..., None]] = {
            "wake": self._dispatcher.wake,
            "renewed": self._renewed,
            "lost": self._lost,
            "cancel": self._cancel,
            "drain": self._drain,
        }

    @property
    def busy(self) -> bool:
        """True while a handler runs."""
        return bool(self._dispatcher.slots.running())

    def run(self, heard: list[Message]) -> int:
        """Work until drained; return the exit code. *heard*: messages to begin with."""
        self._thread.start()
        self._obey(heard)
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            self._say("ready")
            connected = True
            while self._code is None:
                selector.select(self._patience())
                # Before listening: a handler may take the interpreter at any point from here
                # on, and a lease is judged by what was told until then.
                now = time.monotonic()
                if self._wakeup.take():
                    self._drain(self._options.stop_timeout, SHUTDOWN)
                if connected and not self._listen():
                    connected = False
                    selector.unregister(self._channel)
                self._say("beat")
                self._watch_the_clock(now)
        return self._code

    def _run_dispatcher(self) -> None:
        code = EXIT_CRASHED
        try:
            self._dispatcher.run()
            code = 0
        except BaseException:
            logger.exception("worker process failed: process=%s", self._number)
        finally:
            self._code = code
            self._wakeup.nudge()

    # Messages.

    def _say(self, kind: str, *parts: Any) -> None:
        with contextlib.suppress(ChannelClosedError):  # `_listen` sees it
            self._channel.send(kind, *parts)

    def _announce(self, held: Held) -> None:
        self._channel.send("started", held.job_id, held.fence)
        if self._resting or held.item.timeout_seconds is not None:
            self._wakeup.nudge()  # it is to beat; the clock has one more time to watch

    def _listen(self) -> bool:
        """Carry out what the supervisor says; False once it is gone."""
        try:
            self._obey(self._channel.receive())
        except ChannelClosedError:
            logger.warning("supervisor gone: process=%s", self._number)
            self._drain(min(ORPHAN_TIMEOUT, self._options.stop_timeout), SHUTDOWN)
            return False
        return True

    def _obey(self, messages: list[Message]) -> None:
        for kind, *parts in messages:
            self._orders[kind](*parts)

    def _renewed(self, at: float, claims: list[tuple[int, int]]) -> None:
        for job_id, fence in claims:
            if held := self._dispatcher.held(job_id, fence):
                held.confirmed = max(held.confirmed, at)

    def _lost(self, claims: list[tuple[int, int, str]]) -> None:
        for job_id, fence, reason in claims:
            if held := self._dispatcher.held(job_id, fence):
                self._dispatcher.slots.stop(held, reason)

    def _cancel(self, claims: list[tuple[int, int]]) -> None:
        for job_id, fence in claims:
            if held := self._dispatcher.held(job_id, fence):
                self._dispatcher.slots.stop(held, CANCELLED)

    # Time.

    def _patience(self) -> float:
        now = time.monotonic()
        # Said before it is looked: whoever takes something from here on nudges.
        self._resting = True
        self._resting = not self._dispatcher.holds
        beat = RESTING_BEAT if self._resting else BEAT
        times = [now + beat, *(at for at, _ in self._agenda)]
        times += [at for held in self._running() if (at := _time_limit(held)) is not None]
        return max(0.0, min(times) - now)

    def _running(self) -> list[Held]:
        return self._dispatcher.slots.running()

    def _watch_the_clock(self, now: float) -> None:
        for held in self._running():
            limit = _time_limit(held)
            if limit is not None and limit <= now:
                self._dispatcher.slots.stop(held, TIMEOUT)
            if held.lapsed(now) and not held.lost:
                self._dispatcher.slots.stop(held, EXPIRED)
        due = [do for at, do in self._agenda if at <= now]
        self._agenda = [(at, do) for at, do in self._agenda if at > now]
        for do in due:
            do()

    def _drain(self, timeout: float, reason: str) -> None:
        """Finish what runs within *timeout* seconds, cut the rest for that *reason*, and end."""
        if self._draining:
            return
        self._draining = True
        self._say("leaving")
        self._dispatcher.drain()
        stop = time.monotonic() + timeout
        self._agenda = [
            (stop, partial(self._stop_running, reason)),
            (stop + CANCEL_GRACE, self._dispatcher.abandon),
            (stop + CANCEL_GRACE + SETTLE_GRACE, self._give_up),
        ]

    def _stop_running(self, reason: str) -> None:
        for held in self._running():
            self._dispatcher.slots.stop(held, reason)

    def _give_up(self) -> None:
        logger.error("ends not stored: process=%s", self._number)
        self._code = EXIT_UNSETTLED


def _time_limit(held: Held) -> float | None:
    """When to stop the handler of *held*, if it is limited and runs unstopped."""
    if held.started is None or held.item.timeout_seconds is None or held.stopped:
        return None
    return held.started + held.item.timeout_seconds
