"""The worker processes of the demo, and the end of one of them."""

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from django_workqueue.conf import get_settings
from library.handlers import report
from library.run import Run

MANAGE = Path(__file__).parent.parent / "manage.py"
SECONDS_TO_CARRY_OUT = 0.1


@dataclass(frozen=True)
class Kill:
    """The end of a worker process: who, and which items it held at that moment."""

    pid: int
    held: list[int]

    @property
    def load(self) -> str:
        """How much that was, in words."""
        return f"{len(self.held)} item{'' if len(self.held) == 1 else 's'}"


class Workers:
    """``manage.py runworkers`` for a run of the demo, stopped whatever happens."""

    def __init__(self, run: Run, processes: int, log: Path) -> None:
        self._run = run
        self._name = f"demo-{run.name}"
        self._command = [sys.executable, str(MANAGE), "runworkers", "--name", self._name]
        self._command += ["--queues", report.queue, "--processes", str(processes), "--until-empty"]
        self._log = log
        self._handlers: dict[signal.Signals, Any] = {}
        #: True once this process was told to end, by Ctrl-C or SIGTERM.
        self.told_to_stop = False

    def __enter__(self) -> Self:
        # An exception out of a signal's handler could come between the start of the workers
        # and the moment when they are known here, and nobody would ever stop them.
        for number in (signal.SIGINT, signal.SIGTERM):
            self._handlers[number] = signal.signal(number, self._note)
        with self._log.open("w") as log:
            self._supervisor = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # A group of its own: Ctrl-C reaches this process alone, which then stops the
                # workers, and can end all of them at once if they don't.
                process_group=0,
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.running:
            self._supervisor.terminate()
            try:
                self._supervisor.wait(get_settings().worker.stop_timeout_seconds + 5)
            except subprocess.TimeoutExpired:
                os.killpg(self._supervisor.pid, signal.SIGKILL)
                self._supervisor.wait()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: object) -> None:
        self.told_to_stop = True

    @property
    def running(self) -> bool:
        """True until the supervisor has ended."""
        return self._supervisor.poll() is None

    def kill_one(self) -> Kill | None:
        """Kill a process that holds items at this very moment; None if there is none."""
        for number, pid in self._processes():
            if not self._is_ours(pid):
                continue
            # Stopped first, so that what it holds is what it will have held; what it had sent
            # to the database before may still be carried out.
            try:
                os.kill(pid, signal.SIGSTOP)
            except ProcessLookupError:  # it has ended of its own accord
                continue
            time.sleep(SECONDS_TO_CARRY_OUT)
            held = self._run.leases.filter(worker=self._name, process=number)
            if jobs := sorted(held.values_list("item", flat=True)):
                os.kill(pid, signal.SIGKILL)
                return Kill(pid, jobs)
            os.kill(pid, signal.SIGCONT)
        return None

    def _processes(self) -> list[tuple[int, int]]:
        """The number and the pid of each process, as the supervisor's log tells them."""
        told = re.findall(r"process started: process=(\d+) pid=(\d+)", self._log.read_text())
        return [(int(number), int(pid)) for number, pid in told]

    def _is_ours(self, pid: int) -> bool:
        # A process that has ended may have left its pid to a stranger's.
        asked = subprocess.run(
            ["ps", "-o", "ppid=", "-p", str(pid)], capture_output=True, text=True, check=False
        )
        return asked.stdout.strip() == str(self._supervisor.pid)
