"""Standard output as a process has it: it may end early, or lack characters."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable
from typing import Final

from django.core.management.base import OutputWrapper

#: What a shell tells of a process that wrote to a pipe which nobody reads any more.
BROKEN_PIPE: Final = 128 + signal.SIGPIPE


class StandardOutput(OutputWrapper):
    """
    Writes to `sys.stdout`, and what that can't encode as escapes. Once nobody reads it
    (``| head -1``) `is_broken`, and says nothing: the work that has begun goes on.
    """

    def __init__(self) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")
        super().__init__(sys.stdout or io.StringIO())  # a shell can close it: ``>&-``
        self.is_broken = False

    def write(  # type: ignore[override]  # as the class itself has it
        self,
        msg: str = "",
        style_func: Callable[[str], str] | None = None,
        ending: str | None = None,
    ) -> None:
        try:
            super().write(msg, style_func, ending)
        except BrokenPipeError:
            self.silence()

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            self.silence()

    def silence(self) -> None:
        """Write nowhere from now on, also what Python itself writes out at its end."""
        self.is_broken = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
