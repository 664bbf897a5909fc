"""A bar that shows how far the work is."""

import shutil
import time

from django.core.management.base import OutputWrapper

WIDTH = 40


class ProgressBar:
    """
    A line on a terminal that is drawn again and again; elsewhere a plain line now and then.
    """

    def __init__(self, out: OutputWrapper, total: int) -> None:
        self._out = out
        self._total = total
        self._live = out.isatty()
        self._full, self._empty = _signs(out)
        self._started = time.monotonic()
        self._next_tenth = 0

    def show(self, done: int, dead: int) -> None:
        """Say that *done* items have ended, *dead* of them as dead letters."""
        tenth = 10 * done // self._total
        if not self._live and tenth < self._next_tenth:
            return
        self._next_tenth = tenth + 1
        seconds = time.monotonic() - self._started
        text = f"{done:,} of {self._total:,}, {dead} dead letters, {seconds:.0f} s"
        if self._live:
            room = max(0, min(WIDTH, shutil.get_terminal_size().columns - len(text) - 4))
            full = room * done // self._total
            bar = self._full * full + self._empty * (room - full)
            self._write(f"\r\x1b[K  {bar} {text}")
        else:
            self._write(f"  {text}\n")

    def say(self, text: str) -> None:
        """Write a line of its own above the bar."""
        self._write(f"\r\x1b[K{text}\n" if self._live else f"{text}\n")

    def end(self) -> None:
        """Leave the bar's line."""
        if self._live:
            self._write("\n")

    def _write(self, text: str) -> None:
        self._out.write(text, ending="")
        self._out.flush()


def _signs(out: OutputWrapper) -> tuple[str, str]:
    try:
        "█░".encode(out.encoding or "ascii")
    except UnicodeError:
        return "#", "."
    return "█", "░"
