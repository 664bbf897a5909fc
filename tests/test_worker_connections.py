"""A worker's connections: what handlers do to theirs, how many there are, how long they live."""

import json

import pytest
from django.db import connections

from django_workqueue import QueuePolicy, WorkState
from tests.misuse import MISUSES
from tests.project import Project
from tests.proxy import Proxy, redirect
from tests.workerapp.models import Trace
from tests.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

ALIAS = "postgresql"
OPEN = "UnfinishedTransactionError: the handler left a transaction open on database '{}'"
BROKEN = "UnfinishedTransactionError: the handler ended or broke the transaction"
RAISED = "ValueError: in a block"

#: How an attempt ends that did so with a connection. What isn't here: completed.
ENDS = {
    "raise_in_a_block": RAISED,
    "stay_in_a_block": OPEN,
    "begin": OPEN,
    "autocommit_off_and_write": OPEN,
}
#: And in the transaction that an atomic handler shares with its completion.
ENDS_ATOMIC = {
    "close": BROKEN,
    "close_driver": BROKEN,
    "send_commit": BROKEN,
    "send_rollback": BROKEN,
    "rollback_of_the_driver": BROKEN,
    "stay_in_a_block": BROKEN,
    "raise_in_a_block": RAISED,
    "autocommit_off": "TransactionManagementError: ",
    "autocommit_off_and_write": "TransactionManagementError: ",
}


def keep_connections(it, age):
    databases = json.loads(it.environment["WORKQUEUE_TEST_DATABASES"])
    for database in databases.values():
        database["CONN_MAX_AGE"] = age
    it.environment["WORKQUEUE_TEST_DATABASES"] = json.dumps(databases)


def traces(alias, what):
    return list(Trace.objects.using(alias).filter(what=what).order_by("pk"))


def ends_of(kind, backend, on):
    if kind != "atomic" or on != backend:
        return ENDS
    # A failed statement breaks no transaction of SQLite.
    return ENDS_ATOMIC | ({"swallow_an_error": BROKEN} if backend == ALIAS else {})


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
def test_whatever_a_handler_does_to_a_connection_the_next_finds_all_of_them_sound(backend, scene):
    it = scene(backend, QueuePolicy(max_attempts=1))
    Project(it, "import tests.misuse")
    keep_connections(it, 600)
    done = [
        (kind, on, how)
        for kind in ("sync", "async", "atomic")
        for on in (ALIAS, "default")
        for how in MISUSES
    ]
    for each in done:
        kind, on, how = each
        it.enqueue(f"misuse.{kind}", "-".join(each), payload={"on": on, "how": how})
        it.enqueue(f"use.{kind}", "after-" + "-".join(each), payload={"uses": [ALIAS, "default"]})
    # One slot, so that each has the connections that the one before it had.
    assert it.drain("--processes", "1", "--concurrency", "1") == 0
    for each in done:
        kind, on, how = each
        item, end = it.item("-".join(each)), ends_of(kind, it.alias, on).get(how)
        if end is None:
            assert item.state is WorkState.COMPLETED, item
        else:
            assert item.failures[0].startswith(end.format(on)), item
        assert item.attempts == (end is not None)
        assert it.state("after-" + "-".join(each)) is WorkState.COMPLETED
    left = [each.item for alias in (ALIAS, "default") for each in traces(alias, "left")]
    # To begin what has begun is nothing, so this one is stored with its completion.
    assert left == [f"atomic-{it.alias}-begin"]
    assert len(traces(ALIAS, "ran")) == len(traces("default", "ran")) == len(done)


@pytest.fixture
def counted(scene):
    """Makes the scene of a test that counts the connections of its worker."""
    with Proxy(int(connections.settings[ALIAS]["PORT"])) as proxy:

        def make(age, policy=None):
            it = scene(ALIAS, policy)
            Project(it, "import tests.misuse")
            redirect(it.environment, PORT=proxy.port)
            keep_connections(it, age)
            return it, proxy

        yield make


def sessions(it, *ids):
    """Which sessions of the server the handlers of the items had."""
    it.completed(*ids)
    return [trace.pid for id in ids for trace in it.traces("ran", id)]


def use(it, *ids, handler="use.sync", **payload):
    for id in ids:
        it.enqueue(handler, id, payload={"uses": [it.alias], **payload})
        it.completed(id)


@pytest.mark.parametrize("age", [None, 600])
@pytest.mark.parametrize("handler", ["use.sync", "use.atomic"])
def test_a_connection_within_its_age_serves_the_next_item_too(age, handler, counted):
    it, _ = counted(age)
    it.start("--processes", "1", "--concurrency", "1")
    use(it, "a", "b", "c", handler=handler)
    assert len({*sessions(it, "a", "b", "c")}) == 1


@pytest.mark.parametrize(("age", "seconds"), [(0, 0), (1, 1.1)])
def test_a_connection_beyond_its_age_is_closed_after_the_item(age, seconds, counted):
    it, proxy = counted(age)
    it.start("--processes", "1", "--concurrency", "1")
    use(it, "a", "b", seconds=seconds)
    assert len({*sessions(it, "a", "b")}) == 2
    eventually(lambda: not proxy.links(""))


def test_an_async_handlers_connection_ends_with_it_whatever_the_age(counted):
    it, proxy = counted(None)
    it.start("--processes", "1", "--concurrency", "1")
    use(it, "a", "b", handler="use.async")
    assert len({*sessions(it, "a", "b")}) == 2
    eventually(lambda: not proxy.links(""))


def test_a_connection_that_ended_while_nobody_used_it_is_not_given_to_a_handler(counted):
    it, proxy = counted(None, QueuePolicy(max_attempts=1))
    it.start("--processes", "1", "--concurrency", "1")
    ids = [f"item-{number}" for number in range(4)]
    for number, id in enumerate(ids):
        use(it, id, handler=("use.sync", "use.atomic")[number % 2])
        with connections[ALIAS].cursor() as cursor:
            cursor.execute("select pg_terminate_backend(%s, 20000)", sessions(it, id))
        eventually(lambda: not proxy.links(""))
    assert len({*sessions(it, *ids)}) == 4
    assert {it.item(id).attempts for id in ids} == {0}


def test_a_session_on_which_something_failed_is_not_given_to_the_next_handler(counted):
    it, _ = counted(None)
    it.start("--processes", "1", "--concurrency", "1")
    use(it, "a")
    it.enqueue("misuse.sync", "bad", payload={"on": ALIAS, "how": "swallow_an_error"})
    use(it, "b", "c")
    a, b, c = sessions(it, "a", "b", "c")
    assert a != b == c


# How many.

PROCESSES, CONCURRENCY = 2, 3
#: The command's own: it checks, looks for the tables, and closes it.
CONNECTIONS_OF_THE_START = 1


def most_connections(kinds):
    """The number in the manual, docs/databases.md."""
    return PROCESSES * (1 + kinds * CONCURRENCY) + 2


def start_and_fill(it, handler, name):
    ids = [f"{name}-{number}" for number in range(PROCESSES * CONCURRENCY)]
    for id in ids:
        it.enqueue(handler, id)
    for id in ids:
        it.started(id)
    return ids


def let_end(it, ids):
    for id in ids:
        it.file(id).touch()
    it.completed(*ids)


@pytest.mark.parametrize("age", [None, 0])
def test_the_number_of_connections_is_the_one_in_the_manual(age, counted):
    it, proxy = counted(age, QueuePolicy(lease_seconds=3))
    options = ("--processes", str(PROCESSES), "--concurrency", str(CONCURRENCY))
    it.start(*options, "--stop-timeout", "2")
    # The renewal connects when it renews for the first time.
    ids = start_and_fill(it, "wait", "sync")
    eventually(lambda: len(proxy.links()) == most_connections(kinds=1))
    let_end(it, ids)
    # Those of the threads stay, if their age lets them.
    ids = start_and_fill(it, "wait_async", "async")
    eventually(lambda: len(proxy.links()) == most_connections(kinds=1 if age == 0 else 2))
    let_end(it, ids)
    eventually(lambda: len(proxy.links()) == most_connections(kinds=0 if age == 0 else 1))


def test_there_are_never_more_connections_however_much_there_is_to_do(counted):
    it, proxy = counted(None)
    ids = [f"item-{number}" for number in range(100)]
    for number, id in enumerate(ids):
        handler = ("use.sync", "use.atomic")[number % 2]
        it.enqueue(handler, id, payload={"uses": [ALIAS]})
    assert it.drain("--processes", str(PROCESSES), "--concurrency", str(CONCURRENCY)) == 0
    it.completed(*ids)
    # That of the start, which is over when the first of the others is made, is not one more.
    print(f"{proxy.connects} connections made, at most {proxy.most_open} open")
    assert PROCESSES + 2 <= proxy.most_open <= most_connections(kinds=1)
    assert proxy.connects <= most_connections(kinds=1) + CONNECTIONS_OF_THE_START
