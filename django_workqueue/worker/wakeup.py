"""What interrupts a main thread's waiting: a signal, or another thread that asks for it."""

from __future__ import annotations

import contextlib
import signal
import socket
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Final, Self

_BYTES: Final = 4096


class Wakeup:
    """
    Takes signals for the main thread while it is entered, and wakes its selector.

    A handler that did more than note the signal could run in the middle of anything.
    """

    def __init__(self, signals: Iterable[signal.Signals]) -> None:
        self._signals = frozenset(signals)
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._before: dict[int, Any] = {}
        self._descriptor_before = -1
        self._noted: list[int] = []

    def __enter__(self) -> Self:
        self._descriptor_before = signal.set_wakeup_fd(
            self._writer.fileno(), warn_on_full_buffer=False
        )
        for number in self._signals:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._descriptor_before)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """Return the descriptor that becomes readable, for a selector."""
        return self._reader.fileno()

    def nudge(self) -> None:
        """Wake the main thread; from any thread."""
        with contextlib.suppress(OSError):  # full: it is awake anyway
            self._writer.send(b"\0")

    def take(self) -> list[int]:
        """Be asleep again; return the numbers of the signals that came, in order."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(_BYTES):
                pass
        noted, self._noted = self._noted, []
        return noted

    def _note(self, number: int, frame: object) -> None:
        self._noted.append(number)
