"""What an idle worker costs, and that one which rests can be told from one that is stuck."""

import json
import re
import select
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest.mock import Mock

import pytest
from django.db import connections

from django_workqueue import WorkItem
from django_workqueue.models import Counter, Turn, Waiting
from django_workqueue.moves import TURNS_KEPT
from django_workqueue.queues import DatabaseWorkQueue
from django_workqueue.testing import make_queue
from django_workqueue.worker.channel import RESTING_BEAT
from django_workqueue.worker.children import Child, HeldLease, start_child
from django_workqueue.worker.options import BEAT, SILENCE, WorkerOptions
from django_workqueue.worker.process import Process
from django_workqueue.worker.reasons import SHUTDOWN
from django_workqueue.worker.upkeep import Upkeep
from tests.test_worker_parts import held
from tests.workers import Scene, eventually

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")
ADDRESS = ("NAME", "USER", "PASSWORD", "HOST", "PORT")
#: A second of a worker with default settings, which asks once in each. All periods are a
#: fifth of the defaults, but of what is only done every five seconds or more.
POLL = 0.2
QUICK = {"poll_seconds": POLL, "reap_seconds": 5 * POLL, "stop_timeout_seconds": 5}
POLLS = 40


class Log:
    """The statements that the server of a test is sent, as (session, text)."""

    def __init__(self, server):
        self._file = server._log
        with connections["private"].cursor() as cursor:
            cursor.execute("alter system set log_line_prefix = '[%a] '")
            cursor.execute("alter system set log_statement = 'all'")
            cursor.execute("select pg_reload_conf()")

    def statements(self):
        text = self._file.read_text()
        form = r"^\[workqueue (.*?)\] LOG:  (?:statement|execute [^:]*): (.*)$"
        return re.findall(form, text, re.MULTILINE)

    def polls(self):
        """Where among the statements the questions are whether anything is due."""
        return [n for n, (_, text) in enumerate(self.statements()) if "_hold" in text[:5000]]


def processor_seconds(pids):
    """What processes have used so far; only Linux tells."""
    tasks = [task for pid in pids for task in Path("/proc").glob(f"{pid}/task/*/schedstat")]
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


@pytest.mark.parametrize(
    ("processes", "queues"), [pytest.param(16, 1, marks=pytest.mark.slow), (2, 12)]
)
def test_idle_processes_send_nothing_and_their_supervisor_four_statements_per_poll_at_most(
    processes, queues, private_postgres, private_database, process_environment, tmp_path
):
    databases = json.loads(process_environment["WORKQUEUE_TEST_DATABASES"])
    address = {key: connections.settings[private_database][key] for key in ADDRESS}
    databases["postgresql"] = address
    process_environment["WORKQUEUE_TEST_DATABASES"] = json.dumps(databases)
    log = Log(private_postgres)
    settings = {"WORKER": QUICK, "QUEUES": {f"q{n}": {} for n in range(queues)}}
    queue = DatabaseWorkQueue(private_database)
    it = Scene(queue, process_environment, tmp_path, theirs="postgresql")
    try:
        worker = it.start("--processes", str(processes), settings=settings)
        idle = {f"process {n + 1}" for n in range(processes)}

        def have_looked_and_rest():
            statements, polls = log.statements(), log.polls()
            looked = idle <= {session for session, _ in statements}
            late = {session for session, _ in statements[polls[-4] :]} if polls[3:] else idle
            return looked and not late & idle

        eventually(have_looked_and_rest, 120)
        pids = [worker.pid, *worker.children()]
        began, used = time.monotonic(), processor_seconds(pids)
        first = len(log.polls())
        eventually(lambda: len(log.polls()) >= first + POLLS, timeout=120)
        took, used = time.monotonic() - began, processor_seconds(pids) - used
        polls = log.polls()[first : first + POLLS]
        sent = log.statements()[polls[0] : polls[-1]]
        print(f"{len(sent)} statements in {POLLS - 1} polls, {used / took:.2%} of a core")
        assert {session for session, _ in sent} <= {"upkeep", "renewal"}
        assert len(sent) <= 4 * (POLLS - 1)
    finally:
        it.close()


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
def test_an_upkeep_with_nothing_to_do_only_looks(backend, django_assert_max_num_queries):
    queue = make_queue(backend)
    later = queue.moves.now() + timedelta(days=1)
    queue.enqueue_many(WorkItem(tenant="t", available_at=later) for _ in range(3))
    options = WorkerOptions(name="w", boot="b", alias=queue.using, queues=("default", "mail"))
    upkeep = Upkeep(options, Mock())
    turns, waiting = Turn.objects.using(queue.using), Waiting.objects.using(queue.using)
    turns.bulk_create(
        Turn(queue="default", number=n, item=n, tenant="t") for n in range(TURNS_KEPT + 1)
    )
    counters = Counter.objects.using(queue.using).count()
    looks = 3  # for what is late, for counters and for turns, whatever the number of queues
    with django_assert_max_num_queries(looks, connection=connections[queue.using]):
        upkeep._tidy()
    assert (turns.count(), waiting.count()) == (TURNS_KEPT + 1, 3)
    assert Counter.objects.using(queue.using).count() == counters
    # But what there is to do, it does.
    turns.create(queue="default", number=TURNS_KEPT + 1, item=1, tenant="t")
    waiting.update(due_at=queue.moves.now() - timedelta(seconds=1))
    upkeep._tidy()
    assert (turns.count(), waiting.count()) == (TURNS_KEPT + 1, 0)


# Resting.


@pytest.fixture
def process():
    """A process whose main thread the test plays."""
    options = WorkerOptions(name="w", boot="b", alias="default", queues=("default",))
    return Process(options, 1, None, Mock(), Mock())


def test_a_process_beats_seldom_while_it_holds_nothing(process):
    assert BEAT < process._patience() <= RESTING_BEAT
    process._dispatcher._held[1] = held(print)
    assert process._patience() <= BEAT


def test_a_process_that_rests_is_woken_by_the_start_of_a_handler(process):
    process._patience()
    process._announce(held(print))
    assert process._wakeup.nudge.called
    process._wakeup.nudge.reset_mock()
    process._dispatcher._held[1] = held(print)
    process._patience()
    process._announce(held(print))
    assert not process._wakeup.nudge.called


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc")
def test_a_process_that_holds_nothing_may_be_silent_for_longer():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as popen:
        child = Child(1, None, popen, Mock())

        def responsive_after(silence):
            now = time.monotonic()
            child._heard = child._worked_at = now - silence
            return child.responsive()

        # Once it is there, and waits.
        eventually(lambda: child.responsive() and not responsive_after(60))
        assert responsive_after(RESTING_BEAT + 1)
        child.leases[1] = HeldLease(1, 1, 60.0, None, look_at=0.0)
        assert responsive_after(BEAT)
        assert not responsive_after(SILENCE + 1)


class Said:
    """What a process has said, and when it came."""

    def __init__(self, channel):
        self._channel = channel
        self.words = []

    def hear(self, kind):
        """Wait for the next word of a kind, and return when it came."""
        heard = len(self.words)

        def come():
            select.select([self._channel], [], [], 0.1)
            self.words += [(word[0], time.monotonic()) for word in self._channel.receive()]
            return [at for word, at in self.words[heard:] if word == kind]

        return eventually(come)[0]


def test_a_process_that_gets_work_after_a_rest_beats_while_it_works(
    process_environment, monkeypatch, tmp_path
):
    queue = make_queue("postgresql")
    for name, value in process_environment.items():
        monkeypatch.setenv(name, value)
    options = WorkerOptions(name="w", boot="b", alias=queue.using, queues=("default",))
    child = start_child(options, 1, None)
    try:
        said = Said(child.channel)
        said.hear("ready")
        child.channel.post("wake", ["default"])
        said.hear("hungry")
        payload = {"until": str(tmp_path / "until")}
        queue.enqueue(WorkItem(tenant="t", id="x", handler="wait_without_trace", payload=payload))
        child.channel.post("wake", ["default"])
        at = said.hear("started")
        for _ in range(3):
            next_beat = said.hear("beat")
            assert next_beat - at < SILENCE
            at = next_beat
        (tmp_path / "until").touch()
        said.hear("gone")
        child.channel.post("drain", 5.0, SHUTDOWN)
        assert child.popen.wait(30) == 0
    finally:
        child.kill()
        child.popen.wait()
        child.channel.close()
