"""Starting and watching `manage.py runworkers` in tests."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from django_workqueue import WorkItem, WorkState

ROOT = Path(__file__).parent.parent
#: Seconds after which a condition that ought to come true never will.
PATIENCE = 30.0

#: Short periods, so that tests end soon. Leases are those of the items.
QUICK = {"poll_seconds": 0.1, "reap_seconds": 0.2, "stop_timeout_seconds": 5}


def eventually(condition: Callable[[], Any], timeout: float = PATIENCE) -> Any:
    """Return the first true answer of *condition*; fail if there is none in time."""
    end = time.monotonic() + timeout
    while True:
        if answer := condition():
            return answer
        assert time.monotonic() < end, f"not within {timeout} s: {condition}"
        time.sleep(0.01)


class Worker:
    """A `runworkers` process, whose log is kept in a file."""

    def __init__(
        self,
        environment: dict[str, str],
        log: Path,
        *options: str,
        settings: dict[str, Any] | None = None,
        command: tuple[str, ...] = ("-m", "django"),
        cwd: Path = ROOT,
    ) -> None:
        self._log = log
        wanted = {"WORKER": QUICK} | (settings or {})
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                (sys.executable, *command, "runworkers", *options),
                env=environment | {"WORKQUEUE_TEST_SETTINGS": json.dumps(wanted)},
                stderr=file,
                stdout=file,
                cwd=cwd,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def log(self) -> str:
        """What the worker has logged so far."""
        return self._log.read_text()

    def children(self) -> list[int]:
        """Return the process ids of the worker's living processes."""
        return children_of(self.pid)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self, timeout: float = PATIENCE) -> int:
        """Return the exit code, once the worker has ended."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker goes on:\n{self.log}") from None

    def close(self) -> None:
        """End it and its processes, whatever they do."""
        for pid in [*self.children(), self.pid]:
            kill(pid)
        self.process.wait()


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def children_of(pid: int) -> list[int]:
    try:
        tasks = [*Path(f"/proc/{pid}/task").iterdir()]
        texts = [(task / "children").read_text() for task in tasks]
    except OSError:
        return []
    return [int(child) for text in texts for child in text.split() if runs(int(child))]


def runs(pid: int) -> bool:
    """Return whether there is such a process, and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


class Scene:
    """A queue, the workers that a test starts on it, and what their handlers leave behind."""

    def __init__(self, queue, environment, folder, theirs=None):
        self.queue = queue
        self.alias = queue.using
        #: The alias of the same database in the processes.
        self.theirs = theirs or self.alias
        self.folder = folder
        self.environment = environment
        self._workers = []

    def enqueue(self, handler, id, **fields):
        payload = {"alias": self.theirs, "until": str(self.file(id))} | fields.pop("payload", {})
        item = WorkItem(tenant="t", id=id, handler=handler, payload=payload, **fields)
        return self.queue.enqueue(item)

    def start(self, *options, **more):
        log = self.folder / f"worker-{len(self._workers)}.log"
        worker = Worker(self.environment, log, "--database", self.theirs, *options, **more)
        self._workers.append(worker)
        return worker

    def drain(self, *options, **more):
        """Have a worker work the queue off; return its exit code."""
        return self.start("--until-empty", *options, **more).wait()

    def file(self, id):
        """The file for which the handler of the item *id* waits."""
        return self.folder / id

    def item(self, id):
        return self.queue.get(id, tenant="t")

    def state(self, id):
        return self.item(id).state

    def traces(self, what, id):
        from tests.workerapp.models import Trace

        return list(Trace.objects.using(self.alias).filter(what=what, item=id).order_by("pk"))

    def started(self, id, times=1):
        """Wait until the item *id* was started so often; return who did it last."""
        return eventually(lambda: self.traces("started", id)[times - 1 :])[-1].pid

    def completed(self, *ids):
        """Wait until the items are completed."""
        eventually(lambda: all(self.state(id) is WorkState.COMPLETED for id in ids))

    def leases(self):
        from django_workqueue.models import Lease

        return Lease.objects.using(self.alias)

    def prefetched(self, slots, *ids, stop_timeout=5, patience=3600):
        """Have waiting items in the hands of one process with so many slots.

        Items that last no time come first, so that the process begins to prefetch.
        """
        quick = [WorkItem(tenant="t", handler="nothing", priority=1) for _ in range(60)]
        self.queue.enqueue_many(quick)
        for id in ids:
            self.enqueue("wait", id)
        self.environment["WORKQUEUE_TEST_PREFETCH_PATIENCE"] = str(patience)
        options = ("--concurrency", str(slots), "--stop-timeout", str(stop_timeout))
        worker = self.start("--processes", "1", *options)
        for id in ids[:slots]:
            self.started(id)
        if patience > PATIENCE:
            eventually(lambda: self.leases().count() == len(ids))
        return worker

    def close(self):
        for worker in self._workers:
            worker.close()
            print(worker.log)
