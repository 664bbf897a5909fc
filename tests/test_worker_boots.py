"""A worker that starts under a name which another has or had."""

import pytest

from django_workqueue import WorkState
from django_workqueue.policy import WORKER_RESTARTED
from tests.workers import eventually, kill

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")
POSTGRESQL = pytest.mark.parametrize("backend", ["postgresql"])


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
def test_of_two_living_workers_with_one_name_the_older_drains(backend, scene):
    it = scene(backend)
    older = it.start("--name", "twin")
    it.enqueue("wait", "one")
    it.started("one")
    newer = it.start("--name", "twin")
    eventually(lambda: "a newer start has the same name" in older.log)
    it.file("one").touch()
    assert older.wait() == 0
    it.completed("one")
    assert it.item("one").attempts == 0  # spared by the newer one
    assert newer.process.poll() is None
