"""A worker that starts under a name which another has or had."""

import signal
from datetime import timedelta

import pytest
from django.utils import timezone

from django_workqueue import QueuePolicy, WorkState
from django_workqueue.models import Failure, WorkerProcess
from django_workqueue.policy import WORKER_RESTARTED
from django_workqueue.worker.presence import PRESENCE_LAPSE
from tests.project import Project
from tests.workers import eventually, kill

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")
POSTGRESQL = pytest.mark.parametrize("backend", ["postgresql"])
TWIN = "a newer start has the same name"
#: Handlers of a project whose workers look for twins more often.
HURRY = """
from django_workqueue.worker import upkeep

upkeep.PRESENCE_PERIOD = 1.0
"""


def present(it):
    return WorkerProcess.objects.using(it.alias)


def booted(worker):
    """Wait until a worker has adopted what it was to adopt, and may claim."""
    eventually(lambda: "process started" in worker.log)


def begin(it, *options):
    """Have a worker of the name "stable" run the item "one"; return it and its boot."""
    it.enqueue("wait", "one")
    worker = it.start("--name", "stable", "--processes", "1", *options)
    it.started("one")
    return worker, it.leases().get().boot


def kill_all(worker):
    for pid in [*worker.children(), worker.pid]:
        kill(pid)
    worker.process.wait()


def move_elsewhere(it, boot, **fields):
    """Make it the worker of another host, of which only its signs of presence tell."""
    present(it).filter(boot=boot).update(host="elsewhere", **fields)


def stale():
    return timezone.now() - timedelta(seconds=PRESENCE_LAPSE + 5)


@POSTGRESQL
def test_a_worker_that_comes_back_under_its_name_adopts_what_it_held(backend, scene):
    it = scene(backend)
    worker = it.start("--name", "stable", "--processes", "1")
    it.enqueue("wait", "one")
    it.started("one")
    for pid in [*worker.children(), worker.pid]:
        kill(pid)
    worker.process.wait()
    it.file("one").touch()
    assert it.drain("--name", "another", "--max-items", "1", settings={"QUEUES": {"none": {}}}) == 0
    assert it.state("one") is WorkState.CLAIMED  # nobody else's to adopt, and its lease stands
    assert it.drain("--name", "stable") == 0
    assert it.item("one").failures == (WORKER_RESTARTED,)
    assert it.state("one") is WorkState.COMPLETED


@POSTGRESQL
def test_what_an_older_start_left_is_adopted_before_the_first_claim(backend, scene):
    it = scene(backend, QueuePolicy(backoff_seconds=0))
    it.enqueue("wait", "one", priority=1)
    worker = it.start("--name", "stable", "--processes", "1", "--concurrency", "1")
    it.started("one")
    it.enqueue("leave_trace", "two")
    kill_all(worker)
    # Of its presence nothing tells that it is gone but its process, which isn't there.
    assert present(it).get().seen_at > timezone.now() - timedelta(seconds=PRESENCE_LAPSE)
    it.file("one").touch()
    assert it.drain("--name", "stable", "--processes", "1", "--concurrency", "1") == 0
    failure = Failure.objects.using(it.alias).get()
    assert (failure.kind, failure.message) == ("restarted", WORKER_RESTARTED)
    assert it.item("one").attempts == 1
    one, two = it.traces("ran", "one")[0].at, it.traces("ran", "two")[0].at
    assert failure.failed_at < one < two


@POSTGRESQL
def test_of_living_workers_with_one_name_the_newest_goes_on_and_the_older_ones_finish(
    backend, scene
):
    it = scene(backend)
    older = [
        begin(it, "--stop-timeout", "40")[0],
        it.start("--name", "stable", "--processes", "1"),
    ]
    booted(older[1])
    newest = it.start("--name", "stable", "--processes", "1")
    booted(newest)
    eventually(lambda: all(TWIN in worker.log for worker in older))
    assert older[1].wait() == 0
    it.enqueue("leave_trace", "two")
    it.completed("two")
    assert it.traces("ran", "two")[0].pid in newest.children()
    assert it.state("one") is WorkState.CLAIMED
    it.file("one").touch()
    assert older[0].wait() == 0
    it.completed("one")
    # Spared by the newer ones: its first claim is its last.
    assert (it.item("one").fence, it.item("one").attempts) == (1, 0)
    assert len(it.traces("started", "one")) == len(it.traces("ran", "one")) == 1
    assert newest.process.poll() is None
    assert TWIN not in newest.log
    assert "adopted" not in newest.log


@POSTGRESQL
def test_an_older_start_that_drains_is_left_alone(backend, scene):
    it = scene(backend)
    Project(it, HURRY)
    older, boot = begin(it, "--stop-timeout", "40")
    older.send(signal.SIGTERM)
    eventually(lambda: "draining" in older.log)
    present(it).update(state="draining")  # as its next sign of presence will tell
    newer = it.start("--name", "stable", "--processes", "1")
    booted(newer)
    # Nor at its second look.
    seen = present(it).exclude(boot=boot).get().seen_at
    eventually(lambda: present(it).exclude(boot=boot).get().seen_at > seen)
    assert it.leases().get().boot == boot
    it.file("one").touch()
    assert older.wait() == 0
    assert (it.state("one"), it.item("one").fence) == (WorkState.COMPLETED, 1)
    assert len(it.traces("started", "one")) == 1
    it.enqueue("leave_trace", "two")
    it.completed("two")
    assert TWIN not in newer.log


@POSTGRESQL
def test_an_older_start_elsewhere_keeps_what_it_holds_until_it_is_stale(backend, scene):
    it = scene(backend)
    Project(it, HURRY)
    older, boot = begin(it)
    kill_all(older)
    move_elsewhere(it, boot, seen_at=timezone.now())
    it.file("one").touch()
    newer = it.start("--name", "stable", "--processes", "1")
    booted(newer)
    it.enqueue("leave_trace", "two")
    it.completed("two")
    assert it.leases().get().boot == boot
    move_elsewhere(it, boot, seen_at=stale())
    it.completed("one")
    assert (it.item("one").failures, it.item("one").fence) == ((WORKER_RESTARTED,), 2)
    assert "adopted: worker=stable items=1" in newer.log


@POSTGRESQL
def test_an_older_start_that_wakes_after_it_was_adopted_is_refused_and_drains(backend, scene):
    it = scene(backend, QueuePolicy(backoff_seconds=0))
    Project(it, HURRY)
    older, boot = begin(it)
    frozen = [older.pid, *older.children()]
    for pid in frozen:
        kill(pid, signal.SIGSTOP)
    move_elsewhere(it, boot, seen_at=stale())
    newer = it.start("--name", "stable", "--processes", "1")
    assert it.started("one", times=2) in newer.children()
    it.file("one").touch()
    it.completed("one")
    for pid in frozen:
        kill(pid, signal.SIGCONT)
    assert older.wait() == 0
    assert "claim lost" in older.log
    assert TWIN in older.log
    assert (it.item("one").fence, it.item("one").failures) == (2, (WORKER_RESTARTED,))
    assert len(it.traces("ran", "one")) == 2
    assert newer.process.poll() is None
    assert TWIN not in newer.log


@POSTGRESQL
def test_workers_without_a_name_never_have_the_same_and_none_drains(backend, scene):
    it = scene(backend)
    Project(it, HURRY)
    workers = [it.start("--processes", "1") for _ in range(3)]
    for worker in workers:
        booted(worker)
    newest = max(row.started_at for row in present(it).all())
    # Each has looked for twins when all were there.
    eventually(lambda: present(it).filter(seen_at__gt=newest).count() == 3)
    assert len({row.name for row in present(it).all()}) == 3
    assert {row.state for row in present(it).all()} == {"running"}
    assert not any("draining" in worker.log for worker in workers)
    assert {worker.process.poll() for worker in workers} == {None}
