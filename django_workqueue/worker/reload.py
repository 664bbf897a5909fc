"""
`runworkers --reload`: a worker for development, which starts anew when a file has changed.

The process that was started only watches the files. It runs the worker as a process of its
own, by the same command line, since what was imported can't be imported anew. It ends that
one by closing its end of a pipe: so the worker also ends when the watching process does,
however that comes about.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import threading
from functools import partial
from pathlib import Path
from typing import Any, Final

from django.apps import apps
from django.utils import autoreload

from django_workqueue.worker.supervisor import EXIT_PROCESS_DIED, Supervisor
from django_workqueue.worker.wakeup import Wakeup

logger: Final = logging.getLogger("django_workqueue")

#: Seconds that handlers get to finish when their code has changed.
RELOAD_TIMEOUT: Final = 2.0
#: Names the descriptor of the worker's end of the pipe.
_ENVIRONMENT: Final = "DJANGO_WORKQUEUE_RELOADER"
#: Exit codes of a worker that has ended in order.
_IN_ORDER: Final = (0, EXIT_PROCESS_DIED)


class Reloader:
    """Runs the worker, again and again. `run` belongs into the main thread."""

    def __init__(self) -> None:
        self._wakeup = Wakeup([signal.SIGINT, signal.SIGTERM, signal.SIGCHLD])
        self._changed: list[Path] = []
        self._stops: list[int] = []

    def run(self) -> int:
        """Run the worker until it is told to stop, or ends in order; return its exit code."""
        with self._wakeup:
            threading.Thread(target=self._watch, name="workqueue-reloader", daemon=True).start()
            while True:
                code = self._run_once()
                if not self._stops and not self._changed:
                    if code in _IN_ORDER:
                        return code
                    logger.error("worker failed: code=%d; a change starts it again", code)
                    while not self._stops and not self._changed:
                        self._wait()
                    code = 0
                if self._stops:
                    return self._stopped(code)
                logger.info("starting again: changed=%s", self._changed[0])
                self._changed.clear()

    def _run_once(self) -> int:
        reader, writer = os.pipe()
        with open(writer, "wb") as ours, open(reader, "rb") as theirs:
            worker = subprocess.Popen(
                autoreload.get_child_arguments(),
                env=os.environ | {_ENVIRONMENT: str(reader)},
                pass_fds=[reader],
                stdin=subprocess.DEVNULL,
                process_group=0,  # or Ctrl-C would reach it beside what we send it
            )
            theirs.close()
            while worker.poll() is None:
                for _ in range(self._wait()):
                    worker.terminate()  # unlike SIGINT, it says nothing while Python starts
                if self._changed:
                    ours.close()
        return worker.returncode

    def _wait(self) -> int:
        """Wait until something happens; return how many signals to stop have come."""
        select.select([self._wakeup], [], [])
        stops = [number for number in self._wakeup.take() if number != signal.SIGCHLD]
        self._stops += stops
        return len(stops)

    def _stopped(self, code: int) -> int:
        """The exit code after a signal, if that of the worker is *code*."""
        if len(self._stops) > 1:
            return 128 + self._stops[1]
        return 0 if code == -signal.SIGTERM else code  # it had not begun

    # The thread that watches.

    def _watch(self) -> None:
        reloader = autoreload.get_reloader()
        autoreload.file_changed.connect(self._note)
        # Others add what they want to be watched: templates, translations.
        autoreload.autoreload_started.send(sender=reloader)
        watch_apps(reloader)
        logger.info("watching files: reloader=%s", type(reloader).__name__)
        reloader.run_loop()

    def _note(self, file_path: Path, **kwargs: Any) -> bool:
        self._changed.append(file_path)
        self._wakeup.nudge()
        return True  # we see to it


def watch_apps(reloader: autoreload.BaseReloader) -> None:
    """Have all Python files of the project's own apps watched, also those not imported yet."""
    for app in apps.get_app_configs():
        if "site-packages" not in Path(app.path).parts:
            reloader.watch_dir(app.path, "**/*.py")


def is_reloaded() -> bool:
    """True if this process is the worker of a `Reloader`."""
    return _ENVIRONMENT in os.environ


def end_with_reloader(supervisor: Supervisor) -> None:
    """Have the worker of a `Reloader` end when it is told to, or left alone."""
    descriptor = int(os.environ.pop(_ENVIRONMENT))
    os.set_inheritable(descriptor, False)
    end = partial(supervisor.drain, "reload", RELOAD_TIMEOUT)

    def listen() -> None:
        os.read(descriptor, 1)  # nothing is ever written: it returns at the end of the pipe
        supervisor.post(end)

    threading.Thread(target=listen, name="workqueue-reload", daemon=True).start()
