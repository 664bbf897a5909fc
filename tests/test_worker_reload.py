"""`runworkers --reload`: what a changed file, a mistake in it, and the end of it all mean."""

import itertools
import os
import signal
from pathlib import Path

import pytest
from django.utils.autoreload import BaseReloader

import django_workqueue
from django_workqueue import WorkState
from django_workqueue.policy import WORKER_SHUTDOWN
from django_workqueue.worker.reload import watch_apps
from tests.project import Project
from tests.workers import ROOT, children_of, eventually, kill, runs

pytestmark = [
    pytest.mark.django_db(transaction=True, databases="__all__"),
    pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="no /proc"),
]
BOTH = pytest.mark.parametrize("backend", ["sqlite", "postgresql"])

HANDLERS = """
from tests.workerapp.handlers import trace, wait_for

from django_workqueue import handler


@handler("shop.tell")
def tell(payload, context):
    return 'old'


@handler("shop.wait")
def wait(payload, context):
    trace("started", payload, context)
    wait_for(payload["until"])
    return 'old'
"""


def descendants(pid):
    return [each for child in children_of(pid) for each in (child, *descendants(child))]


@pytest.fixture
def shop(scene):
    """Starts a worker with --reload on a project of its own; nothing of it outlives the test."""
    workers = []

    def start(backend, *options, **more):
        it = scene(backend)
        it.environment["WORKQUEUE_TEST_PREFETCH_PATIENCE"] = "3600"
        project = Project(it, HANDLERS)
        worker = it.start("--reload", "--processes", "1", *options, **more)
        workers.append(worker)
        return it, project, worker

    yield start
    for worker in workers:
        for pid in descendants(worker.pid):
            kill(pid)


def change(project, old, new):
    text = project.handlers.read_text()
    assert old in text
    project.handlers.write_text(text.replace(old, new))


def answers(it, expected):
    """Wait until the code that runs is the one that returns *expected*."""
    ids = (f"{expected}-{n}" for n in itertools.count())

    def ask():
        it.enqueue("shop.tell", id := next(ids))
        it.completed(id)
        return it.item(id).result == expected

    eventually(ask)


@BOTH
def test_a_change_starts_the_worker_anew_after_all_leases_were_given_back(backend, shop):
    it, project, worker = shop(backend, "--concurrency", "2", "--stop-timeout", "30")
    for id in ("short", "long"):
        it.enqueue("shop.wait", id)
        it.started(id)
    it.enqueue("shop.wait", "held")
    eventually(lambda: it.leases().count() == 3)
    before = descendants(worker.pid)
    change(project, "old", "new")
    eventually(lambda: it.leases().count() == 2)
    it.file("short").touch()
    eventually(lambda: "starting again" in worker.log)
    assert not it.leases().exists()
    assert not any(map(runs, before))
    assert (it.state("short"), it.item("short").result) == (WorkState.COMPLETED, "old")
    assert (it.item("long").failures, it.item("held").failures) == ((WORKER_SHUTDOWN,), ())
    for id in ("long", "held"):
        it.file(id).touch()
    it.completed("long", "held")
    assert (it.item("long").result, it.item("held").result) == ("new", "new")
    assert len(it.traces("started", "held")) == 1
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0


def test_a_mistake_is_shown_and_the_worker_starts_once_it_is_mended(shop):
    it, project, worker = shop("sqlite")
    answers(it, "old")
    change(project, "return 'old'", "return (")
    eventually(lambda: "a change starts it again" in worker.log)
    assert "SyntaxError" in worker.log
    change(project, "return (", "return 'mended'")
    answers(it, "mended")
    change(project, "return 'mended'", "return (")
    eventually(lambda: worker.log.count("a change starts it again") == 2)
    worker.send(signal.SIGINT)
    assert worker.wait() == 0
    assert "KeyboardInterrupt" not in worker.log


#: As a shell does it: whatever is started from the terminal is in a group, which Ctrl-C reaches.
MANAGE = """
import os, sys
if "DJANGO_WORKQUEUE_RELOADER" not in os.environ:
    os.setpgid(0, 0)
from django.core.management import execute_from_command_line
execute_from_command_line(sys.argv)
"""


def test_ctrl_c_ends_all_of_it_in_order(shop, tmp_path):
    (tmp_path / "manage.py").write_text(MANAGE)
    it, _, worker = shop("sqlite", command=(str(tmp_path / "manage.py"),))
    it.enqueue("shop.wait", "one")
    it.started("one")
    everybody = descendants(worker.pid)
    os.killpg(worker.pid, signal.SIGINT)
    eventually(lambda: "draining" in worker.log)
    it.file("one").touch()
    assert worker.wait() == 0
    assert not any(map(runs, everybody))
    assert it.state("one") is WorkState.COMPLETED
    assert "Traceback" not in worker.log


def test_ctrl_c_while_the_worker_still_starts_says_nothing(shop):
    _, _, worker = shop("sqlite")
    (starting,) = eventually(lambda: descendants(worker.pid))
    worker.send(signal.SIGINT)
    assert worker.wait() == 0
    assert not runs(starting)
    assert "Traceback" not in worker.log


def test_a_second_signal_ends_all_of_it_at_once(shop):
    it, _, worker = shop("sqlite", "--stop-timeout", "30")
    it.enqueue("shop.wait", "one")
    it.started("one")
    everybody = descendants(worker.pid)
    worker.send(signal.SIGINT)
    eventually(lambda: "draining" in worker.log)
    worker.send(signal.SIGINT)
    assert worker.wait(10) == 128 + signal.SIGINT
    assert not any(map(runs, everybody))
    assert it.item("one").failures == (WORKER_SHUTDOWN,)


def test_the_worker_ends_in_order_when_the_process_that_watches_is_killed(shop):
    it, _, worker = shop("sqlite", "--stop-timeout", "30")
    it.enqueue("shop.wait", "one")
    it.started("one")
    everybody = descendants(worker.pid)
    worker.process.kill()
    eventually(lambda: not any(map(runs, everybody)))
    assert it.item("one").failures == (WORKER_SHUTDOWN,)
    assert not it.leases().exists()


def test_all_files_of_the_apps_are_watched_but_not_those_of_installed_packages():
    reloader = BaseReloader()
    watch_apps(reloader)
    files = {*reloader.watched_files()}
    assert ROOT / "tests" / "workerapp" / "apps.py" in files
    assert Path(django_workqueue.__file__).parent / "migrations" / "0001_initial.py" in files
    assert not [each for each in reloader.directory_globs if "site-packages" in each.parts]


def test_a_worker_that_ends_by_itself_ends_the_watching_too(shop):
    assert shop("sqlite", "--until-empty")[-1].wait() == 0
