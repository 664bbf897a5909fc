"""Whether a worker is well: told in a file, for whoever watches it from outside."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from django_workqueue.worker.children import Child
from django_workqueue.worker.duty import DutyThread
from django_workqueue.worker.presence import PRESENCE_LAPSE

logger: Final = logging.getLogger("django_workqueue")

#: Seconds between two writings of the file.
PERIOD: Final = 5.0
#: Seconds for which a duty may fail or hang in a worker that is ready: without presence for
#: so long, it counts as dead for all others.
STALLED: Final = PRESENCE_LAPSE

READY: Final = "ready"
STARTING: Final = "not ready: starting"


class HealthFile:
    """The file. It is replaced, so that nobody reads a half of it. Raises `OSError`."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def write(self, text: str) -> None:
        """Have it say *text*, as of now."""
        new = self._path.with_name(f"{self._path.name}.new")
        try:
            new.write_text(f"{text}\n")
            os.replace(new, self._path)
        except OSError:
            with suppress(OSError):
                new.unlink()
            raise

    def remove(self) -> None:
        """Leave nothing behind."""
        self._path.unlink(missing_ok=True)


class Health:
    """
    What the supervisor's main thread tells of the worker, every few seconds.

    That the file is young says that the worker lives: this thread waits for no database and
    for no handler. That it says `READY` says that the worker can do its work.
    """

    def __init__(self, path: str | None, duties: dict[str, DutyThread]) -> None:
        self._file = None if path is None else HealthFile(path)
        self._duties = duties
        self._failing = False
        #: When it is to be told again, by the monotonic clock.
        self.next_at = float("inf") if path is None else 0.0

    def tell(self, obstacle: str, children: Sequence[Child]) -> None:
        """Write the file if it is time to. *obstacle*: why the worker claims nothing, or empty."""
        now = time.monotonic()
        if self._file is None or now < self.next_at:
            return
        self.next_at = now + PERIOD
        obstacle = obstacle or self._obstacle(children)
        try:
            self._file.write(f"not ready: {obstacle}" if obstacle else READY)
        except OSError as error:
            if not self._failing:
                logger.warning("health file can't be written: %s", error)
            self._failing = True
        else:
            self._failing = False

    def end(self) -> None:
        """Remove the file."""
        if self._file is not None:
            with suppress(OSError):
                self._file.remove()

    def _obstacle(self, children: Sequence[Child]) -> str:
        for name, duty in self._duties.items():
            if duty.troubled_for >= STALLED:
                return f"no {name} for {duty.troubled_for:.0f} s"
        if not any(child.serving and child.responsive() for child in children):
            return "no process responds"
        return ""
