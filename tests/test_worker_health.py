"""`runworkers --health-file`: whether a worker lives, and whether it can do its work."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connections

from django_workqueue.management.commands import runworkers
from django_workqueue.queues import DatabaseWorkQueue
from django_workqueue.worker import health
from django_workqueue.worker.duty import DutyThread
from django_workqueue.worker.health import READY, Health, HealthFile
from tests.project import Project
from tests.workers import PATIENCE, Scene, eventually, kill

DATABASE = pytest.mark.django_db(transaction=True, databases="__all__")
#: A worker's code with short times, so that a test needn't wait.
HURRY = """
from django_workqueue.worker import health

health.PERIOD, health.STALLED = 0.1, 1.0
"""


class Told:
    """What the health file says."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self) -> str:
        try:
            return self.path.read_text().removesuffix("\n")
        except FileNotFoundError:
            return "nothing"

    def become(self, text: str) -> None:
        eventually(lambda: self().startswith(text))

    def be_written_again(self) -> None:
        os.utime(self.path, (0, 0))
        eventually(lambda: self.path.stat().st_mtime > time.time() - PATIENCE)


@pytest.fixture
def told(tmp_path) -> Told:
    return Told(tmp_path / "health")


# Workers.


@DATABASE
@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
def test_a_worker_is_ready_until_it_drains_and_its_file_goes_with_it(backend, scene, told):
    it = scene(backend)
    Project(it, HURRY)
    worker = it.start("--processes", "1", "--health-file", str(told.path))
    told.become(READY)
    it.enqueue("wait", "one")
    it.started("one")
    worker.send(signal.SIGTERM)
    told.become("not ready: draining")
    told.be_written_again()
    it.file("one").touch()
    assert worker.wait() == 0
    assert told() == "nothing"
    assert [*told.path.parent.glob("health*")] == []


@DATABASE
def test_a_worker_of_which_no_process_responds_is_not_ready_and_yet_alive(scene, told):
    it = scene("sqlite")
    Project(it, HURRY)
    worker = it.start("--processes", "2", "--health-file", str(told.path))
    told.become(READY)
    processes = eventually(lambda: (found := worker.children())[1:] and found)
    kill(processes[0], signal.SIGSTOP)
    told.be_written_again()
    told.become(READY)
    kill(processes[1], signal.SIGSTOP)
    told.become("not ready: no process responds")
    told.be_written_again()
    kill(processes[0], signal.SIGCONT)
    told.become(READY)


def test_a_worker_without_its_database_is_not_ready_and_yet_alive(
    private_postgres, private_database, process_environment, tmp_path, told
):
    keys = ("NAME", "USER", "PASSWORD", "HOST", "PORT")
    address = {key: connections.settings[private_database][key] for key in keys}
    databases = json.loads(process_environment["WORKQUEUE_TEST_DATABASES"])
    process_environment["WORKQUEUE_TEST_DATABASES"] = json.dumps(
        databases | {"postgresql": address}
    )
    queue = DatabaseWorkQueue(private_database)
    it = Scene(queue, process_environment, tmp_path, theirs="postgresql")
    Project(it, HURRY)
    try:
        worker = it.start("--processes", "1", "--health-file", str(told.path))
        told.become(READY)
        private_postgres.stop(mode="immediate")
        connections[private_database].close()
        told.become("not ready: no upkeep for ")
        told.be_written_again()
        assert worker.process.poll() is None
        private_postgres.start()
        told.become(READY)
    finally:
        it.close()


# What is told of the duties.


class Work(DutyThread):
    """A duty that does what the test says."""

    def __init__(self, turns):
        super().__init__("test", "default", crew=type("Crew", (), {"post": None}))
        self.turns = iter(turns)

    def turn(self):
        return next(self.turns)()

    def do(self):
        return self._guarded(self.turn)


def fails():
    raise OperationalError("the database is away")


def test_a_duty_is_in_trouble_from_its_first_bad_turn_to_its_next_good_one():
    duty = Work([lambda: 7.0, fails, fails, lambda: None])
    assert duty.do() == 7.0
    assert duty.troubled_for == 0.0
    duty.do()
    began = duty._troubled_at
    assert duty.troubled_for > 0.0
    duty.do()
    assert duty._troubled_at == began
    duty.do()
    assert duty.troubled_for == 0.0


def test_a_duty_that_hangs_is_in_trouble_too():
    entered, gate = threading.Event(), threading.Event()

    def hangs():
        entered.set()
        gate.wait(PATIENCE)

    duty = Work([hangs])
    thread = threading.Thread(target=duty.do)
    thread.start()
    assert entered.wait(PATIENCE)
    eventually(lambda: duty.troubled_for > 0.01)
    gate.set()
    thread.join()
    assert duty.troubled_for == 0.0


class Stub:
    """Stands for a duty, or for a process."""

    def __init__(self, trouble=0.0, serving=True, responds=True):
        self.troubled_for, self.serving = trouble, serving
        self.responsive = lambda: responds


@pytest.mark.parametrize(
    ("duty", "processes", "says"),
    [
        (Stub(14.0), [Stub(serving=False), Stub()], "ready"),
        (Stub(15.4), [Stub()], "not ready: no renewal for 15 s"),
        (Stub(), [], "not ready: no process responds"),
        (Stub(), [Stub(serving=False), Stub(responds=False)], "not ready: no process responds"),
    ],
)
def test_a_worker_is_ready_if_its_duties_are_done_and_a_process_serves(
    duty, processes, says, told, monkeypatch
):
    monkeypatch.setattr(health, "PERIOD", 0.0)
    it = Health(str(told.path), {"renewal": duty})
    it.tell("", processes)
    assert told() == says
    it.tell("draining", processes)
    assert told() == "not ready: draining"
    it.end()
    assert told() == "nothing"


def test_the_file_is_written_in_its_period_only_and_never_without_a_path(told):
    began = time.monotonic()
    it = Health(str(told.path), {})
    it.tell("one", [])
    it.tell("two", [])
    assert told() == "not ready: one"
    assert began + health.PERIOD <= it.next_at <= time.monotonic() + health.PERIOD
    assert Health(None, {}).next_at == float("inf")


# The file.


def test_the_file_is_replaced_so_that_no_reader_sees_a_half_of_it(told):
    file = HealthFile(str(told.path))
    file.write("first")
    with told.path.open() as reader:
        file.write("second")
        assert reader.read() == "first\n"
    assert told() == "second"


def test_trouble_with_the_disk_is_told_once_and_the_file_comes_back(told, monkeypatch, caplog):
    monkeypatch.setattr(health, "PERIOD", 0.0)
    folder = told.path.parent / "folder"
    it = Health(str(folder / "health"), {})
    for _ in range(3):
        it.tell("no disk", [])
    assert caplog.text.count("health file can't be written") == 1
    folder.mkdir()
    it.tell("there", [])
    assert (folder / "health").read_text() == "not ready: there\n"


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("absent/health", r"--health-file: /.*/absent/health can't be written: No such file"),
        (".", "--health-file: /.* can't be written: Is a directory"),
        ("", "--health-file: must not be empty"),
        ("a\0b", "--health-file: "),
    ],
)
def test_a_health_file_that_can_not_be_written_is_refused_by_name(
    path, message, tmp_path, monkeypatch
):
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with pytest.raises(CommandError, match=message):
        call_command("runworkers", health_file=path)
    assert [*tmp_path.iterdir()] == [folder]
    assert [*folder.iterdir()] == []


@pytest.mark.django_db
def test_what_a_worker_that_was_killed_has_left_is_written_over_at_the_start(told, monkeypatch):
    told.path.write_text("ready\n")
    seen = []
    monkeypatch.setattr(runworkers, "_run", lambda worker: seen.append(told()))
    call_command("runworkers", health_file=str(told.path), verbosity=0)
    assert seen == ["not ready: starting"]
