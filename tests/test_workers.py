"""`manage.py runworkers` with real processes: what ends it, and what no end may lose."""

import json
import signal
import time

import pytest
from django.db import connections

from django_workqueue import QueuePolicy, WorkState
from django_workqueue.doctor import examine
from django_workqueue.models import Waiting, WorkerProcess
from django_workqueue.policy import WORKER_DIED
from django_workqueue.queues import DatabaseWorkQueue
from tests.workers import ROOT, Scene, eventually, kill

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")
BOTH = pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
ADDRESS = ("NAME", "USER", "PASSWORD", "HOST", "PORT")
POSTGRESQL = pytest.mark.parametrize("backend", ["postgresql"])


# Working.


@BOTH
def test_until_empty_drains_sync_and_async_items_with_two_processes(backend, scene):
    it = scene(backend)
    sync = [f"sync-{n}" for n in range(60)]
    asynchronous = [f"async-{n}" for n in range(12)]
    for id in sync:
        it.enqueue("leave_trace", id)
    for id in asynchronous:
        it.enqueue("leave_trace_async", id)
    assert it.drain("--processes", "2", "--concurrency", "4") == 0
    for id in sync + asynchronous:
        assert (it.state(id), len(it.traces("ran", id))) == (WorkState.COMPLETED, 1)
    assert it.item("sync-0").result == {"fence": 1}
    assert it.item("async-0").result == {"thread": "workqueue-loop"}
    assert not WorkerProcess.objects.using(it.alias).exists()


@BOTH
def test_how_an_attempt_ends_decides_where_its_item_goes(backend, scene):
    it = scene(backend, QueuePolicy(max_attempts=2, backoff_seconds=0))
    for handler in ("exit", "reject", "retry_at_once", "return_rubbish"):
        it.enqueue(handler, handler)
    it.enqueue("absent", "unknown", priority=100)
    it.enqueue("leave_trace", "good", priority=-100)
    assert it.drain("--concurrency", "1", "--processes", "1") == 0
    failures = {id: it.item(id).failures for id in ("exit", "reject", "retry_at_once")}
    assert failures == {
        "exit": ("SystemExit: not the end of the process",) * 2,
        "reject": ("Reject: of no use",),
        "retry_at_once": ("Retry: asked to be retried",) * 2,
    }
    assert "object is not a JSON type" in it.item("return_rubbish").failures[0]
    assert {it.state(id) for id in (*failures, "return_rubbish")} == {WorkState.DEAD_LETTERED}
    # Unspent, and out of the way of the item behind it.
    assert (it.state("unknown"), it.item("unknown").attempts) == (WorkState.QUEUED, 0)
    waiting = Waiting.objects.using(it.alias).get(cause="unknown_handler")
    assert waiting.item_id == it.item("unknown").job_id
    assert it.state("good") is WorkState.COMPLETED


@POSTGRESQL
def test_max_items_ends_the_worker_after_so_many(backend, scene):
    it = scene(backend)
    for n in range(12):
        it.enqueue("leave_trace", f"item-{n}")
    assert it.start("--max-items", "5", "--processes", "2").wait() == 0
    assert (it.queue.stats().completed, it.queue.stats().depth) == (5, 7)


@POSTGRESQL
def test_a_worker_takes_the_items_of_its_queues_and_its_deployment_only(backend, scene):
    it = scene(backend)
    it.enqueue("leave_trace", "elsewhere", queue="elsewhere")
    it.enqueue("leave_trace", "pinned", deployment_id="v2")
    for queue in ("default", "mail"):
        it.enqueue("leave_trace", queue, queue=queue)
    assert it.drain("--queues", "default,mail") == 0
    states = {id: str(it.state(id)) for id in ("default", "mail", "elsewhere", "pinned")}
    assert states == {
        "default": "completed",
        "mail": "completed",
        "elsewhere": "queued",
        "pinned": "queued",
    }
    assert it.drain("--deployment-id", "v2") == 0
    assert it.state("pinned") is WorkState.COMPLETED


@POSTGRESQL
def test_an_idle_worker_finds_new_work_and_what_becomes_due(backend, scene):
    it = scene(backend, QueuePolicy(backoff_seconds=0.3))
    worker = it.start("--processes", "2")
    eventually(lambda: len(worker.children()) == 2)
    it.enqueue("leave_trace", "new")
    it.completed("new")
    it.enqueue("return_rubbish", "again", max_attempts=2)
    eventually(lambda: it.state("again") is WorkState.DEAD_LETTERED)


def test_the_path_and_the_arguments_of_a_manage_py_reach_its_processes(
    scene, process_environment, tmp_path
):
    it = scene("sqlite")
    it.enqueue("leave_trace", "one")
    project = tmp_path / "project"
    project.mkdir()
    # Without the guard: a process that ran it again would start workers of its own.
    (project / "manage.py").write_text(
        "import os, sys\n"
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'testproject')!r}]\n"
        "from django.core.management import execute_from_command_line\n"
        "execute_from_command_line(sys.argv)\n"
    )
    (project / "settings_of_the_project.py").write_text(
        "import sys\nassert 'runworkers' in sys.argv, sys.argv\nfrom tests.settings import *\n"
    )
    process_environment["DJANGO_SETTINGS_MODULE"] = "settings_of_the_project"
    del process_environment["PYTHONPATH"]
    assert it.drain(command=(str(project / "manage.py"),), cwd=tmp_path) == 0
    assert it.state("one") is WorkState.COMPLETED


@POSTGRESQL
def test_prefetched_items_do_not_wait_behind_attempts_that_last(backend, scene):
    it = scene(backend)
    ids = ["slow", "held-1", "held-2"]
    it.prefetched(1, *ids, patience=0.5)
    for id in ids[1:]:
        it.file(id).touch()
    assert it.start("--max-items", "2", "--processes", "1").wait() == 0
    it.completed(*ids[1:])
    assert [it.item(id).attempts for id in ids] == [0, 0, 0]
    assert it.state("slow") is WorkState.CLAIMED


# Connections.


@BOTH
def test_an_atomic_handler_and_its_completion_are_stored_together_or_not_at_all(backend, scene):
    it = scene(backend, QueuePolicy(max_attempts=2, backoff_seconds=0))
    it.enqueue("atomic", "good")
    it.enqueue("atomic", "bad", payload={"raise": "no"}, max_attempts=1)
    worker = it.start("--processes", "1")
    it.completed("good")
    eventually(lambda: it.state("bad") is WorkState.DEAD_LETTERED)
    files = {name: str(it.folder / name) for name in ("started", "until")}
    it.enqueue("atomic", "killed", payload=files)
    eventually(lambda: it.file("started").exists())
    kill(worker.children()[0])
    it.file("until").touch()
    it.completed("killed")
    assert {id: len(it.traces("ran", id)) for id in ("good", "bad", "killed")} == {
        "good": 1,
        "bad": 0,
        "killed": 1,
    }
    assert it.item("killed").failures == (WORKER_DIED,)
    assert it.item("killed").result == {"fence": 2}


@BOTH
def test_nothing_that_a_handler_does_to_its_connection_hurts_the_next(backend, scene):
    it = scene(backend, QueuePolicy(max_attempts=1))
    ends = {
        ("misused", "close"): "completed",
        ("misused", "close_driver"): "completed",
        ("misused", "broken"): "completed",
        ("misused", "enter_block"): "left a transaction open",
        ("misused", "begin"): "left a transaction open",
        ("atomic_misused", "close"): "ended or broke the transaction",
        ("atomic_misused", "close_driver"): "ended or broke the transaction",
        ("atomic_misused", "commit"): "ended or broke the transaction",
        ("atomic_misused", "rollback"): "ended or broke the transaction",
        ("atomic_misused", "set_rollback"): "ended or broke the transaction",
    }
    if backend == "postgresql":  # a failed statement breaks no transaction of SQLite
        ends["atomic_misused", "broken"] = "ended or broke the transaction"
    for handler, how in ends:
        it.enqueue(handler, f"{handler}-{how}", payload={"how": how})
        it.enqueue("leave_trace", f"after-{handler}-{how}")
        it.enqueue("atomic", f"later-{handler}-{how}")
    # One slot, so that each has the connection that the one before it had.
    databases = json.loads(it.environment["WORKQUEUE_TEST_DATABASES"])
    databases[it.alias]["CONN_MAX_AGE"] = 600
    it.environment["WORKQUEUE_TEST_DATABASES"] = json.dumps(databases)
    assert it.drain("--processes", "1", "--concurrency", "1") == 0
    for (handler, how), end in ends.items():
        item = it.item(f"{handler}-{how}")
        assert end in (str(item.state), *item.failures) or end in item.failures[0], item
        assert not it.traces("ran", item.id)
        assert it.state(f"after-{handler}-{how}") is WorkState.COMPLETED
        assert it.state(f"later-{handler}-{how}") is WorkState.COMPLETED


@POSTGRESQL
def test_a_worker_survives_the_end_of_every_connection(backend, scene):
    it = scene(backend)
    worker = it.start("--processes", "1")
    it.enqueue("wait", "running")
    it.started("running")
    with connections[it.alias].cursor() as cursor:
        cursor.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity"
            " where pid <> pg_backend_pid() and datname = current_database()"
        )
    it.enqueue("leave_trace", "next")
    it.completed("next")
    assert it.state("running") is WorkState.CLAIMED
    assert worker.process.poll() is None


def test_a_worker_rides_out_a_restart_of_its_database(
    private_postgres, private_database, process_environment, tmp_path
):
    address = {key: connections.settings[private_database][key] for key in ADDRESS}
    databases = json.loads(process_environment["WORKQUEUE_TEST_DATABASES"])
    process_environment["WORKQUEUE_TEST_DATABASES"] = json.dumps(
        databases | {"postgresql": address}
    )
    queue = DatabaseWorkQueue(private_database)
    it = Scene(queue, process_environment, tmp_path, theirs="postgresql")
    try:
        worker = it.start("--processes", "1")
        it.enqueue("wait_without_trace", "running")
        eventually(lambda: it.file("running.started").exists())
        private_postgres.stop(mode="immediate")
        connections[private_database].close()
        it.file("running").touch()  # it ends while there is no database
        eventually(lambda: worker.log.count("database trouble") >= 3)
        private_postgres.start()
        began = time.monotonic()
        it.completed("running")
        print(f"settled {time.monotonic() - began:.3f} s after the return")
        it.enqueue("leave_trace", "next")
        it.completed("next")
        assert (it.item("running").attempts, it.item("running").fence) == (0, 1)
        worker.send(signal.SIGTERM)
        assert worker.wait() == 0
        assert examine(private_database) == []
    finally:
        it.close()
