"""What a worker was asked to do, and where its log goes."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Final

#: Seconds that handlers get to end once a drain has told them to stop, and seconds to
#: store how they ended.
CANCEL_GRACE: Final = 1.0
SETTLE_GRACE: Final = 4.0
#: Seconds between two signs of life of a process, and without which it counts as silent.
BEAT: Final = 1.0
SILENCE: Final = 3.0

_LEVELS: Final = {0: logging.WARNING, 1: logging.INFO, 2: logging.DEBUG, 3: logging.DEBUG}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """One start of a worker. Times are seconds; `boot` is unique per start."""

    name: str
    boot: str
    alias: str
    queues: tuple[str, ...]
    deployment_id: str = ""
    processes: int = 1
    concurrency: int = 8
    stop_timeout: float = 30.0
    poll_seconds: float = 1.0
    reap_seconds: float = 5.0
    retention_sweep_seconds: float = 3600.0
    until_empty: bool = False
    max_items: int | None = None
    #: Absolute path of the file that tells whether the worker is well.
    health_file: str | None = None
    verbosity: int = 1


def exceeded(timeout: float | None) -> str:
    """Say that an attempt went on beyond its limit of *timeout* seconds."""
    return f"exceeded its time limit of {timeout or 0.0:g} s"


class _OneLineFormatter(logging.Formatter):
    """Shows control characters as escapes: a tenant's name must not forge a line."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        record.message = "".join(
            char if char.isprintable() else char.encode("unicode_escape").decode()
            for char in record.message
        )
        return super().formatMessage(record)


def configure_logging(verbosity: int) -> None:
    """
    Let the package's logger tell as much as *verbosity* (0 to 3) asks for, on stderr,
    unless the project's LOGGING has given it a level or a handler.
    """
    logger = logging.getLogger("django_workqueue")
    if logger.level == logging.NOTSET:
        logger.setLevel(_LEVELS[verbosity])
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        form = "%(asctime)s.%(msecs)03d %(process)d %(levelname)-7s %(message)s"
        handler.setFormatter(_OneLineFormatter(form, datefmt="%H:%M:%S"))
        logger.addHandler(handler)
