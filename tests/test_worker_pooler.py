"""Workers behind PgBouncer in transaction mode, with ``WORKQUEUE = {"POOLER": True}``."""

import inspect
import signal
from contextlib import ExitStack

import psycopg
import pytest
from django.db import connections, transaction

from django_workqueue.doctor import examine
from django_workqueue.queues import DatabaseWorkQueue
from django_workqueue.testing import make_queue
from django_workqueue.worker.connection import own_connection
from tests import test_worker_boots as boots
from tests import test_worker_deaths as deaths
from tests import test_worker_drains as drains
from tests import test_worker_freezes as freezes
from tests import test_worker_limits as limits
from tests import test_workers as working
from tests.pgbouncer import SERVER_CONNECTIONS, PgBouncer
from tests.project import Project
from tests.proxy import Proxy, redirect
from tests.test_worker_outages import HURRY, ride_out
from tests.workers import Scene, eventually

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

ALIAS = "postgresql"
#: What a client may set on its session: PgBouncer takes it along to every server connection.
TAKEN_ALONG = (
    "application_name",
    "client_encoding",
    "DateStyle",
    "standard_conforming_strings",
    "TimeZone",
)


class PooledScene(Scene):
    """A scene whose workers know that there is a pooler."""

    def start(self, *options, settings=None, **more):
        pooled = (settings or {}) | {"POOLER": True}
        return super().start(*options, settings=pooled, **more)


@pytest.fixture
def pooler(postgres):
    with PgBouncer(connections.settings[ALIAS]) as pooler:
        yield pooler


@pytest.fixture
def scene(pooler, process_environment, tmp_path):
    """Makes the scene of a test whose processes reach the database through the pooler."""
    scenes = []
    redirect(process_environment, PORT=pooler.port, DISABLE_SERVER_SIDE_CURSORS=True)

    def make(backend, policy=None):
        scenes.append(PooledScene(make_queue(backend, policy), process_environment, tmp_path))
        return scenes[-1]

    yield make
    for each in scenes:
        each.close()
        assert examine(each.alias) == []


PROMISES = [
    working.test_until_empty_drains_sync_and_async_items_with_two_processes,
    working.test_how_an_attempt_ends_decides_where_its_item_goes,
    working.test_an_idle_worker_finds_new_work_and_what_becomes_due,
    working.test_an_atomic_handler_and_its_completion_are_stored_together_or_not_at_all,
    working.test_nothing_that_a_handler_does_to_its_connection_hurts_the_next,
    working.test_a_worker_survives_the_end_of_every_connection,
    deaths.test_what_a_killed_process_had_begun_runs_elsewhere_within_about_a_second,
    deaths.test_what_a_killed_process_only_held_is_given_back_unspent,
    deaths.test_a_handler_that_ends_its_process_is_started_exactly_max_attempts_times,
    deaths.test_what_is_left_when_everything_is_killed_comes_back_with_its_lease,
    boots.test_a_worker_that_comes_back_under_its_name_adopts_what_it_held,
    freezes.test_a_stopped_process_loses_its_leases_and_is_refused_whatever_it_writes,
    freezes.test_a_calculation_that_holds_the_interpreter_for_some_leases_costs_its_process_none,
    limits.test_a_handler_hears_that_its_item_is_to_be_cancelled,
    drains.test_a_drain_finishes_what_it_can_gives_back_the_rest_and_exits_0,
    drains.test_what_a_drain_cuts_is_due_again_at_once,
    drains.test_leases_are_renewed_throughout_a_drain,
]
#: Of those that are given more.
GIVEN = {"handler": "die", "number": signal.SIGTERM}
GIVEN_CALCULATION = {"handler": "hold_interpreter"}


@pytest.mark.parametrize("promise", PROMISES, ids=lambda each: each.__name__.removeprefix("test_"))
def test_what_workers_promise_holds_behind_a_pooler(promise, scene):
    given = GIVEN | (GIVEN_CALCULATION if "calculation" in promise.__name__ else {})
    wanted = inspect.signature(promise).parameters.keys() - {"backend", "scene"}
    promise(backend=ALIAS, scene=scene, **{name: given[name] for name in wanted})


def test_nothing_of_a_workers_sessions_is_left_for_others(scene, pooler):
    it = scene(ALIAS)
    for n in range(30):
        it.enqueue("leave_trace" if n % 2 else "atomic", f"item-{n}")
    worker = it.start("--processes", "2", "--concurrency", "2")
    it.completed(*(f"item-{n}" for n in range(30)))
    name = connections.settings[ALIAS]["NAME"]
    address = {"host": "127.0.0.1", "port": pooler.port, "dbname": name}
    with ExitStack() as stack:
        # A transaction each, so that each has another server connection.
        for _ in range(SERVER_CONNECTIONS):
            client = stack.enter_context(psycopg.connect(**address, user="anybody"))
            left = {
                "prepared": "select name from pg_prepared_statements",
                "set": "select name, setting from pg_settings where source = 'session'"
                f" and name not in {TAKEN_ALONG}",
                "listening": "select pg_listening_channels()",
                "locks": "select objid from pg_locks where locktype = 'advisory'",
            }
            for what, statement in left.items():
                assert client.execute(statement).fetchall() == [], what
    assert "database trouble" not in worker.log


def test_a_lease_that_somebody_has_locked_holds_up_no_other_end(scene):
    it = scene(ALIAS)
    it.start("--processes", "1")
    for id in ("locked", "other"):
        it.enqueue("wait_without_trace", id)
        eventually(it.file(f"{id}.started").exists)
    with transaction.atomic(using=ALIAS):
        it.leases().select_for_update().get(pk=it.item("locked").job_id)
        for id in ("locked", "other"):
            it.file(id).touch()
        it.completed("other")
    it.completed("locked")


def test_a_worker_rides_out_a_crash_of_the_database_behind_its_pooler(
    private_postgres, private_database, process_environment, tmp_path
):
    queue = DatabaseWorkQueue(private_database)
    it = PooledScene(queue, process_environment, tmp_path, theirs=ALIAS)
    # Who was in the pooler already is kept waiting by it.
    Project(it, HURRY)

    def crash():
        private_postgres.stop(mode="immediate")
        connections[private_database].close()

    with PgBouncer(private_postgres.settings()) as pooler, Proxy(pooler.port) as proxy:
        name = connections.settings[private_database]["NAME"]
        redirect(it.environment, PORT=proxy.port, NAME=name, DISABLE_SERVER_SIDE_CURSORS=True)
        try:
            # It lets in whoever comes, and refuses at the first statement. Django connects anew
            # right after a transaction that could not even be rolled back.
            ride_out(it, proxy, crash, private_postgres.start, connects_per_try=2)
            assert examine(private_database) == []
        finally:
            it.close()


# What a statement brings along.


@pytest.fixture
def own(settings):
    """The connection of a runtime's thread behind a pooler."""
    settings.WORKQUEUE = {"POOLER": True}
    before = connections[ALIAS]
    own_connection(ALIAS, "test")
    yield connections[ALIAS]
    connections[ALIAS].close()
    connections[ALIAS] = before


def limits(cursor):
    cursor.execute("select current_setting('lock_timeout'), current_setting('enable_seqscan')")
    return cursor.fetchone()


def test_each_statement_brings_its_limits_along_and_takes_them_away(own):
    with own.cursor() as cursor:
        assert limits(cursor) == ("1s", "off")
        cursor.execute("select %s::int + 1", [1])
        assert (cursor.fetchone(), cursor.rowcount) == ((2,), 1)
    assert own.connection.prepare_threshold is None
    with psycopg.ClientCursor(own.connection) as cursor:
        assert limits(cursor) == ("0", "on")
    with transaction.atomic(using=ALIAS), own.cursor() as cursor:
        assert limits(cursor) == ("1s", "off")
