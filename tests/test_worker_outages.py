"""Workers whose database is away, stands still, refuses, or takes a word and doesn't answer."""

import re
import signal
import time

import pytest
from django.db import connections, transaction

from django_workqueue import QueuePolicy, WorkItem, WorkState
from django_workqueue.doctor import examine
from django_workqueue.models import Failure
from django_workqueue.queues import DatabaseWorkQueue
from django_workqueue.worker.trouble import FIRST_WAIT, LONGEST_WAIT
from tests.project import Project
from tests.proxy import Proxy, redirect
from tests.workers import PATIENCE, Scene, eventually

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

ALIAS = "postgresql"
ROLE = "workqueue_worker"
#: The connections of a worker with one process.
OWN = ("workqueue upkeep", "workqueue renewal", "workqueue process 1")
#: Seconds after which work goes on once the database is back.
PROMISED = 5.0
#: Statements that a try may take on a database that lets in and then refuses: those that
#: Django begins a session with, and what is asked before something is written.
STATEMENTS_PER_TRY = 8


def sql(text, alias=ALIAS):
    with connections[alias].cursor() as cursor:
        cursor.execute(text)
        return cursor.fetchall() if cursor.description else None


@pytest.fixture
def role():
    """A role that is no superuser, so that limits and rights bind it; the workers' own."""
    sql(f"create role {ROLE} login")
    sql(f"grant all on all tables in schema public to {ROLE}")
    sql(f"grant all on all sequences in schema public to {ROLE}")
    yield ROLE
    sql(f"drop owned by {ROLE}")
    sql(f"drop role {ROLE}")


@pytest.fixture
def proxied(scene, request):
    """Makes the scene of a test whose processes reach the database through a proxy."""
    with Proxy(int(connections.settings[ALIAS]["PORT"])) as proxy:

        def make(policy=None):
            it = scene(ALIAS, policy)
            redirect(it.environment, PORT=proxy.port)
            return it, proxy

        yield make


class Outage:
    """What a worker's log and the proxy tell of an outage since it began."""

    def __init__(self, worker, proxy):
        self._worker = worker
        self._proxy = proxy
        self._connects = proxy.connects
        self._statements = len(proxy.statements)
        self._lines = len(self._troubles())

    def _troubles(self):
        found = re.findall(
            r"(\w+) +database trouble: (\S+) retry_in=([\d.]+)s error=(.*)", self._worker.log
        )
        return found

    def troubles(self, who=""):
        return [line for line in self._troubles()[self._lines :] if who in line[1]]

    def lasts(self, tries=3):
        """Wait until upkeep and the process have tried so often in vain."""
        eventually(
            lambda: all(len(self.troubles(who)) >= tries for who in ("duty=upkeep", "process=1"))
        )

    def check_that_every_try_was_followed_by_its_pause(self, connects_per_try):
        connects = self._proxy.connects - self._connects
        statements = len(self._proxy.statements) - self._statements
        troubles = self.troubles()
        for who in {line[1] for line in troubles}:
            for number, line in enumerate(self.troubles(who)):
                longest = min(FIRST_WAIT * 2**number, LONGEST_WAIT)
                assert longest / 2 - 0.05 <= float(line[2]) <= longest + 0.05, line
        # Those that aren't answered yet, of each connection one, come on top.
        tries = len(troubles) + len(OWN)
        assert connects <= connects_per_try * tries
        assert statements <= STATEMENTS_PER_TRY * tries
        print(f"{len(troubles)} tries, {connects} connections, {statements} statements")


def busy_worker(it):
    """Start a worker: one handler runs, and two items wait for its slot."""
    it.queue.enqueue_many(WorkItem(tenant="t", handler="nothing", priority=1) for _ in range(60))
    for id in ("running", "held-1", "held-2"):
        it.enqueue("wait_without_trace", id)
    it.environment["WORKQUEUE_TEST_PREFETCH_PATIENCE"] = "3600"
    worker = it.start("--processes", "1", "--concurrency", "1")
    eventually(lambda: it.file("running.started").exists() and it.leases().count() == 3)
    return worker


def ride_out(it, proxy, begin, end, connects_per_try=1):
    worker = busy_worker(it)
    outage = Outage(worker, proxy)
    begin()
    it.file("running").touch()  # it ends, and the next begins, while there is no database
    eventually(lambda: it.file("held-1.started").exists())
    outage.lasts()
    outage.check_that_every_try_was_followed_by_its_pause(connects_per_try)
    end()
    began = time.monotonic()
    it.completed("running")
    took = time.monotonic() - began
    print(f"completed {took:.2f} s after the return")
    for id in ("held-1", "held-2"):
        it.file(id).touch()
    it.enqueue("leave_trace", "next")
    it.completed("held-1", "held-2", "next")
    for id in ("running", "held-1", "held-2"):
        assert (it.item(id).attempts, it.item(id).fence) == (0, 1)
    assert it.queue.stats().completed == 64
    assert took < PROMISED
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    return outage


def terminate():
    """End the sessions of the workers' role."""
    sql(f"select pg_terminate_backend(pid) from pg_stat_activity where usename = '{ROLE}'")


def forbid_writing():
    sql(f"alter role {ROLE} set default_transaction_read_only = on")
    terminate()


def allow_writing():
    sql(f"alter role {ROLE} reset default_transaction_read_only")


def allow_no_connection():
    sql(f"alter role {ROLE} connection limit 0")
    terminate()


def allow_connections():
    sql(f"alter role {ROLE} connection limit -1")


OUTAGES = {
    "read-only": (forbid_writing, allow_writing, "cannot execute .* in a read-only transaction"),
    "too many connections": (allow_no_connection, allow_connections, "too many connections"),
    "no rights": (
        lambda: sql(f"revoke all on all tables in schema public from {ROLE}"),
        lambda: sql(f"grant all on all tables in schema public to {ROLE}"),
        "permission denied for table",
    ),
    "no table": (
        lambda: sql("alter table django_workqueue_lease rename to away"),
        lambda: sql("alter table if exists away rename to django_workqueue_lease"),
        'relation "django_workqueue_lease" does not exist',
    ),
}


@pytest.mark.parametrize("kind", OUTAGES)
def test_a_worker_rides_out_a_database_that_refuses(kind, proxied, role):
    begin, end, told = OUTAGES[kind]
    it, proxy = proxied()
    redirect(it.environment, USER=role)
    try:
        outage = ride_out(it, proxy, begin, end)
    finally:
        end()
    levels = {level for level, _, _, error in outage.troubles() if re.search(told, error)}
    # Somebody has to act: so loudly.
    assert levels == {"ERROR" if kind in ("no rights", "no table") else "WARNING"}


def test_a_worker_rides_out_a_database_that_can_not_be_reached(proxied):
    it, proxy = proxied()
    ride_out(it, proxy, proxy.refuse, proxy.accept)


def test_a_worker_rides_out_a_crash_of_its_database(
    private_postgres, private_database, process_environment, tmp_path
):
    queue = DatabaseWorkQueue(private_database)
    it = Scene(queue, process_environment, tmp_path, theirs=ALIAS)

    def crash():
        private_postgres.stop(mode="immediate")
        connections[private_database].close()

    with Proxy(private_postgres.port) as proxy:
        name = connections.settings[private_database]["NAME"]
        redirect(it.environment, PORT=proxy.port, NAME=name)
        try:
            ride_out(it, proxy, crash, private_postgres.start)
            assert examine(private_database) == []
        finally:
            it.close()


# Words that get no answer.


def unanswered_commit(proxy, act, stored):
    """*Act*, and have the process not hear of the commit by which it becomes *stored*."""
    trap = proxy.trap("COMMIT", "workqueue process 1")
    act()
    trap.wait()
    while not stored():  # that was one that came too early for it
        early, trap = trap, proxy.trap("COMMIT", "workqueue process 1")
        early.let_go()
        trap.wait()
    return trap


def unanswered_claim(it, proxy, id):
    trap = unanswered_commit(
        proxy,
        lambda: it.enqueue("wait_without_trace", id),
        lambda: it.state(id) is WorkState.CLAIMED,
    )
    assert not it.file(f"{id}.started").exists()
    return trap


def ends_once(it, worker, outage, trap):
    """Cut the connection on which the answer would come; return the item when all is settled."""
    trap.swallow()
    it.enqueue("leave_trace", "next")
    it.completed("next")
    eventually(lambda: it.queue.stats().claimed == 0 and it.queue.stats().due == 0)
    assert len(outage.troubles()) == 1
    assert "claim lost" not in worker.log
    return it.item("one")


def test_a_claim_that_was_carried_out_and_not_answered_is_given_back_unspent(proxied):
    it, proxy = proxied()
    worker = it.start("--processes", "1")
    trap = unanswered_claim(it, proxy, "one")
    it.file("one").touch()
    item = ends_once(it, worker, Outage(worker, proxy), trap)
    assert (item.state, item.attempts, item.fence) == (WorkState.COMPLETED, 0, 2)


def test_a_completion_that_was_carried_out_and_not_answered_counts_once(proxied):
    it, proxy = proxied()
    worker = it.start("--processes", "1")
    it.enqueue("wait_without_trace", "one")
    eventually(it.file("one.started").exists)
    trap = unanswered_commit(
        proxy, it.file("one").touch, lambda: it.state("one") is WorkState.COMPLETED
    )
    item = ends_once(it, worker, Outage(worker, proxy), trap)
    assert (item.state, item.attempts, item.fence) == (WorkState.COMPLETED, 0, 1)
    assert it.queue.stats().completed == 2


def test_a_failure_that_was_carried_out_and_not_answered_counts_once(proxied):
    it, proxy = proxied(QueuePolicy(max_attempts=2, backoff_seconds=3600))
    worker = it.start("--processes", "1")
    files = {name: str(it.file(name)) for name in ("started", "until")}
    it.enqueue("atomic", "one", payload=files | {"raise": "no"})
    eventually(it.file("started").exists)
    failures = Failure.objects.using(ALIAS)
    trap = unanswered_commit(proxy, it.file("until").touch, failures.exists)
    item = ends_once(it, worker, Outage(worker, proxy), trap)
    assert (item.state, item.attempts, item.failures) == (WorkState.QUEUED, 1, ("ValueError: no",))
    assert failures.count() == 1


def test_an_atomic_handler_whose_commit_was_not_answered_is_stored_once(proxied):
    it, proxy = proxied()
    worker = it.start("--processes", "1")
    trap = proxy.trap("COMMIT", "")
    it.enqueue("atomic", "one")
    trap.wait()
    trap.swallow()
    it.enqueue("leave_trace", "next")
    it.completed("one", "next")
    assert len(it.traces("ran", "one")) == 1
    assert (it.item("one").attempts, it.item("one").fence) == (0, 1)
    assert "claim lost" not in worker.log


@pytest.mark.parametrize("answer", ["comes late", "never comes"])
def test_a_stop_during_the_commit_of_a_claim_leaves_nothing_claimed(answer, proxied):
    it, proxy = proxied()
    worker = it.start("--processes", "1", "--stop-timeout", "0.2")
    trap = unanswered_claim(it, proxy, "one")
    worker.send(signal.SIGTERM)
    eventually(lambda: "draining" in worker.log)
    if answer == "comes late":
        trap.let_go()
    # Without an answer the process can't end in order; what it held is given back for it.
    assert worker.wait() == (0 if answer == "comes late" else 3)
    assert (it.state("one"), it.item("one").attempts) == (WorkState.QUEUED, 0)
    assert not it.file("one.started").exists()
    assert not it.leases().exists()


# Connections that end, or stand still.


def test_a_connection_may_end_at_any_time_and_nothing_is_charged(proxied, role):
    it, proxy = proxied()
    redirect(it.environment, USER=role)
    worker = it.start("--processes", "2")
    eventually(lambda: len(worker.children()) == 2)
    children, outage, connects = worker.children(), Outage(worker, proxy), proxy.connects
    ids = [f"item-{n}" for n in range(30)]
    for number, id in enumerate(ids):
        it.file(id).touch()
        it.enqueue("wait_without_trace", id)
        pids = eventually(
            lambda: sql(f"select pid from pg_stat_activity where usename = '{role}' order by pid")
        )
        [pid] = pids[number % len(pids)]
        sql(f"select pg_terminate_backend({pid}, {PATIENCE * 1000:.0f})")
    it.completed(*ids)
    assert {it.item(id).attempts for id in ids} == {0}
    assert it.queue.stats().completed == len(ids)
    assert worker.children() == children
    # Four are made anyhow. Each end makes one necessary, and Django may try one more, right
    # after a transaction that could not even be rolled back.
    assert proxy.connects - connects <= 4 + 2 * len(ids)
    print(f"{len(ids)} connections ended, {len(outage.troubles())} tries in vain")


def test_a_word_of_an_administrator_is_no_more_than_a_pause(proxied):
    it, proxy = proxied()
    worker = it.start("--processes", "1")
    eventually(lambda: proxy.links("workqueue process 1"))
    connects = proxy.connects
    with transaction.atomic(using=ALIAS):
        sql("lock table django_workqueue_ready, django_workqueue_waiting")
        cancel = (
            "select pg_cancel_backend(pid) from pg_stat_activity"
            " where application_name = 'workqueue upkeep' and wait_event_type = 'Lock'"
        )
        eventually(lambda: sql(cancel) and "canceling statement due to user request" in worker.log)
    it.enqueue("leave_trace", "next")
    it.completed("next")
    assert "WARNING" not in worker.log
    assert [link.name for link in proxy.links()].count("workqueue upkeep") == 1
    # The connection of the handler alone is new.
    assert proxy.connects == connects + 1


def test_while_all_stands_still_handlers_end_and_are_settled_when_it_goes_on(proxied):
    it, proxy = proxied()
    worker = busy_worker(it)
    connects = proxy.connects
    proxy.stall()
    it.file("running").touch()
    eventually(it.file("held-1.started").exists)
    proxy.resume()
    for id in ("held-1", "held-2"):
        it.file(id).touch()
    it.completed("running", "held-1", "held-2")
    assert {it.item(id).fence for id in ("running", "held-1", "held-2")} == {1}
    assert proxy.connects == connects
    assert "database trouble" not in worker.log


HURRY = """
from django_workqueue.worker import connection

connection.ANSWER_WITHIN = 1.5
"""


@pytest.mark.parametrize("name", OWN)
def test_a_connection_that_stands_still_is_given_up(name, proxied):
    it, proxy = proxied(QueuePolicy(lease_seconds=6))
    Project(it, HURRY)
    worker = it.start("--processes", "1", "--stop-timeout", "5")
    it.enqueue("wait_without_trace", "one")
    eventually(it.file("one.started").exists)

    def renewed():
        before = it.leases().get().expires_at
        eventually(lambda: it.leases().get().expires_at > before)

    renewed()
    proxy.stall(name)
    renewed()
    it.file("one").touch()
    it.enqueue("leave_trace", "next")
    it.completed("one", "next")
    assert (it.item("one").attempts, it.item("one").fence) == (0, 1)
    assert "no answer within 1.5 s" in worker.log


def test_a_transaction_of_a_user_on_one_lease_stops_the_renewal_of_no_other(scene):
    it = scene(ALIAS, QueuePolicy(lease_seconds=3))
    it.start("--processes", "1", settings={"WORKER": {"stop_timeout_seconds": 1}})
    for id in ("locked", "other"):
        it.enqueue("wait_without_trace", id)
        eventually(it.file(f"{id}.started").exists)
    rows = {id: it.leases().filter(pk=it.item(id).job_id) for id in ("locked", "other")}
    first = rows["other"].get().expires_at
    with transaction.atomic(using=ALIAS):
        before = rows["locked"].select_for_update().get().expires_at
        eventually(lambda: rows["other"].get().expires_at > first)
        assert rows["locked"].get().expires_at == before
    eventually(lambda: rows["locked"].get().expires_at > before)
    for id in rows:
        it.file(id).touch()
    it.completed(*rows)
    assert {it.item(id).attempts for id in rows} == {0}


def test_a_drain_without_a_database_ends_in_time_and_says_what_it_left(proxied):
    it, proxy = proxied()
    worker = it.start("--processes", "1", "--stop-timeout", "0.2")
    it.enqueue("wait_without_trace", "one")
    eventually(it.file("one.started").exists)
    proxy.refuse()
    it.file("one").touch()
    eventually(lambda: "database trouble: process=1" in worker.log)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 3
    assert "ends not stored" in worker.log
    assert it.state("one") is WorkState.CLAIMED  # until its lease lapses
