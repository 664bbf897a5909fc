"""What a worker does about each error of the database, raised by a server."""

import logging
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest
from django.db import (
    DataError,
    Error,
    IntegrityError,
    InterfaceError,
    NotSupportedError,
    OperationalError,
    ProgrammingError,
    connections,
)

from django_workqueue import WorkItem, WorkState
from django_workqueue.exceptions import QueueUnavailableError
from django_workqueue.handlers import Handler
from django_workqueue.moves import Completion
from django_workqueue.moves import Renewal as Renewed
from django_workqueue.testing import make_queue
from django_workqueue.worker import trouble
from django_workqueue.worker.attempts import Held, claim_of
from django_workqueue.worker.children import Child, HeldLease
from django_workqueue.worker.connection import wait_for_database
from django_workqueue.worker.duty import DutyThread
from django_workqueue.worker.options import WorkerOptions
from django_workqueue.worker.renewal import Renewal
from django_workqueue.worker.settling import Settling
from django_workqueue.worker.trouble import (
    FIRST_WAIT,
    LONGEST_WAIT,
    REMEDIES,
    Backoff,
    Remedy,
    remedy_for,
)
from tests.proxy import Proxy
from tests.workers import PATIENCE, eventually

DATABASE = pytest.mark.django_db(transaction=True, databases="__all__")
ALIAS = "postgresql"

#: What a duty does: goes on quietly on its connection, goes on with a warning on a new one,
#: does that loudly, or ends.
QUIETLY, ANEW, LOUDLY, ENDS = "quietly", "anew", "loudly", "ends"
POLICY = {
    "08000": ANEW,
    "08003": ANEW,
    "08006": ANEW,
    "08P01": ANEW,
    "0A000": ANEW,
    "22003": ANEW,
    "22P02": ANEW,
    "22P05": ANEW,
    "23505": ANEW,
    "25006": ANEW,
    "25P02": ANEW,
    "25P03": ANEW,
    "26000": ENDS,
    "28P01": ANEW,
    "3D000": ENDS,
    "3F000": LOUDLY,
    "40001": QUIETLY,
    "40003": ANEW,
    "40P01": QUIETLY,
    "42501": LOUDLY,
    "42601": ENDS,
    "42703": LOUDLY,
    "42883": ENDS,
    "42P01": LOUDLY,
    "42P05": ENDS,
    "53100": ANEW,
    "53200": ANEW,
    "53300": ANEW,
    "54001": ENDS,
    "55006": ANEW,
    "55P03": QUIETLY,
    "57014": QUIETLY,
    "57P01": ANEW,
    "57P02": ANEW,
    "57P03": ANEW,
    "57P05": ANEW,
    "58030": ANEW,
    "XX000": ANEW,
}
LEVELS = {
    QUIETLY: logging.INFO,
    ANEW: logging.WARNING,
    LOUDLY: logging.ERROR,
    ENDS: logging.ERROR,
}


def fail(sqlstate):
    """Have the server raise an error."""
    with connections[ALIAS].cursor() as cursor:
        cursor.execute(f"do $$ begin raise exception 'told' using errcode = '{sqlstate}'; end $$")


class Duty(DutyThread):
    """One that fails in its first turn, and remembers the session of each turn."""

    def __init__(self, sqlstate, crew):
        super().__init__("test", ALIAS, crew)
        self._sqlstate = sqlstate
        self.sessions = []

    def turn(self):
        with connections[ALIAS].cursor() as cursor:
            cursor.execute("select pg_backend_pid()")
            self.sessions.append(cursor.fetchone())
        if len(self.sessions) == 1:
            fail(self._sqlstate)


class Crew:
    def __init__(self):
        self.failures = 0

    def post(self, call):
        call()

    def failed(self):
        self.failures += 1


@DATABASE
@pytest.mark.parametrize("sqlstate", POLICY)
def test_a_duty_does_what_the_policy_says(sqlstate, caplog):
    caplog.set_level(logging.INFO, "django_workqueue")
    does, crew = POLICY[sqlstate], Crew()
    duty = Duty(sqlstate, crew)
    duty.start()
    eventually(lambda: crew.failures or len(duty.sessions) == 2)
    duty.end(PATIENCE)
    assert crew.failures == (does == ENDS)
    if does != ENDS:
        first, second = duty.sessions
        assert (first == second) == (does == QUIETLY)
    [told, *_] = [record for record in caplog.records if record.name == "django_workqueue"]
    assert told.levelno == LEVELS[does]
    assert ("duties failed" if does == ENDS else "database trouble") in told.getMessage()


#: What becomes of one bad end among good ones: its item fails, it is tried again later, or all
#: of them are.
FAILS, LATER, ALL = "fails", "later", "all"
SETTLING = dict.fromkeys(POLICY, ALL) | {
    "22003": FAILS,
    "22P02": FAILS,
    "22P05": FAILS,
    "23505": FAILS,
    "54001": FAILS,
    "55P03": LATER,
}


@DATABASE
@pytest.mark.parametrize("sqlstate", SETTLING)
def test_one_end_that_can_not_be_stored_holds_up_the_others_only_if_it_must(sqlstate, monkeypatch):
    queue = make_queue(ALIAS)
    queue.enqueue_many(WorkItem(tenant="t", id=id) for id in ("bad", "good"))
    items = {item.id: item for item in queue.claim_many(worker="w", limit=2)}
    moves, bad = queue.moves, items["bad"].job_id
    complete = type(moves).complete

    def refuse(self, worker, settlements):
        if any(each.item == bad for each in settlements):
            fail(sqlstate)
        return complete(self, worker, settlements)

    monkeypatch.setattr(type(moves), "complete", refuse)
    settling = Settling(queue, "w")
    handler = Handler(function=lambda payload, context: None, name="h")
    for item in items.values():
        held = Held(item, handler, lease_seconds=60, confirmed=1e9)
        settling.add(Completion(item=item.job_id, fence=item.fence), held)
    batch = settling.due()
    if SETTLING[sqlstate] == ALL:
        with pytest.raises(Error, match="told"):
            settling.store_singly(batch)
        return
    settling.done(batch, settling.store_singly(batch))
    assert queue.get("good", tenant="t").state is WorkState.COMPLETED
    item, claim = queue.get("bad", tenant="t"), claim_of(items["bad"])
    if SETTLING[sqlstate] == LATER:
        assert (item.state, claim in settling) == (WorkState.CLAIMED, True)
    else:
        assert (item.attempts, claim in settling) == (1, False)
        assert item.failures[0].startswith("the end of the attempt could not be stored: told")


# Without a SQLSTATE.


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (OperationalError("no SQLSTATE while connecting"), Remedy.RECONNECT),
        (InterfaceError("connection already closed"), Remedy.RECONNECT),
        (DataError("bad"), Remedy.ROW),
        (IntegrityError("bad"), Remedy.ROW),
        (ProgrammingError("wrong"), Remedy.STOP),
        (NotSupportedError("wrong"), Remedy.STOP),
    ],
)
def test_where_the_server_told_no_sqlstate_the_type_decides(error, remedy):
    assert remedy_for(error) is remedy
    unavailable = QueueUnavailableError(operation="claim")
    unavailable.__cause__ = error
    assert remedy_for(unavailable) is remedy


def test_an_error_that_nobody_has_met_yet_is_waited_for():
    assert remedy_for(psycopg.errors.lookup("HV000")("told")) is Remedy.RECONNECT
    assert remedy_for(QueueUnavailableError(operation="claim")) is Remedy.RECONNECT


def test_what_should_pass_and_does_not_gets_louder(caplog):
    caplog.set_level(logging.INFO, "django_workqueue")
    backoff = Backoff(first=0.0)
    for _ in range(5):
        trouble.back_off(backoff, ALIAS, "test", psycopg.errors.DeadlockDetected("told"))
    levels = [record.levelno for record in caplog.records]
    assert levels == [logging.INFO] * 3 + [logging.WARNING] * 2


def test_tries_become_rare_and_yet_leave_time_to_be_back_within_five_seconds():
    assert LONGEST_WAIT + 2 <= 5
    longest = [min(FIRST_WAIT * 2**n, LONGEST_WAIT) for n in range(20)]
    # In the first minute of an outage, were every wait the shortest that jitter allows.
    assert sum(1 for n in range(20) if sum(longest[:n]) / 2 < 60) == 20
    assert min(longest[4:]) / 2 >= 1.5


def test_the_manual_names_every_sqlstate_with_what_is_done_about_it():
    page = Path(__file__).parent.parent / "docs" / "databases.md"
    rows = re.findall(r"^\| (`[0-9A-Z`, ]+).*?\| (.*) \|$", page.read_text(), re.MULTILINE)
    told = {state: done for states, done in rows for state in re.findall(r"`(\w+)`", states)}
    assert told.keys() == REMEDIES.keys()
    words = {
        Remedy.RECONNECT: "tries again on a new connection",
        Remedy.AWAIT: "tries again on a new connection, loudly",
        Remedy.REPEAT: "tries again on the same connection, quietly at first",
        Remedy.ROW | Remedy.REPEAT: "settles one by one, and tries the locked ones again",
        Remedy.ROW: "settles one by one, and fails what can't be stored; elsewhere tries again",
        Remedy.ROW
        | Remedy.STOP: "settles one by one, and fails what can't be stored; elsewhere ends",
        Remedy.STOP: "ends",
    }
    assert told == {state: words[remedy] for state, remedy in REMEDIES.items()}


# Renewal.


def test_a_renewal_that_failed_is_tried_again_as_soon_as_the_pause_is_over():
    options = WorkerOptions(name="w", boot="b", alias=ALIAS, queues=("default",))
    lease = HeldLease(1, 1, 60.0, None, look_at=0.0)
    child = Child(1, None, None, None)
    child.leases[1] = lease
    child.responsive = lambda: True
    crew = SimpleNamespace(children=lambda: [child], post=print, tell=print)
    answers = iter([OperationalError("away"), {}])
    tries = []

    def renew(worker, claims, *, wait):
        tries.append(claims)
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return {1: Renewed(expires_at=None, cancel_requested=False, renewable_for=3600.0)}

    renewal = Renewal(options, crew)
    renewal._moves = SimpleNamespace(renew=renew)
    with pytest.raises(OperationalError):
        renewal.turn()
    assert 19 < renewal.turn() <= 20
    assert tries == [[(1, 1)]] * 2
    assert 19 < renewal.turn() <= 20
    assert len(tries) == 2


# The start.


@pytest.fixture
def elsewhere(monkeypatch):
    """Has new connections to the database go another way."""

    def change(**changes):
        connections[ALIAS].ensure_connection()  # the test's own stays
        for key, value in changes.items():
            monkeypatch.setitem(connections.settings[ALIAS], key, str(value))

    return change


@pytest.fixture
def waiting():
    """Waits for the database in a thread, and fails if that doesn't end with the test."""
    threads = []

    def start(alias=ALIAS):
        threads.append(threading.Thread(target=wait_for_database, args=[alias], daemon=True))
        threads[-1].start()
        return threads[-1]

    yield start
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()


@DATABASE
def test_a_database_that_is_away_at_the_start_is_waited_for_and_asked_for_seldom(
    elsewhere, waiting, caplog
):
    caplog.set_level(logging.INFO, "django_workqueue")
    with Proxy(int(connections.settings[ALIAS]["PORT"])) as proxy:
        elsewhere(PORT=proxy.port)
        proxy.refuse()
        thread = waiting()
        eventually(lambda: caplog.text.count("database trouble: duty=start") == 4)
        assert proxy.connects <= 5
        proxy.accept()
        thread.join(PATIENCE)
        assert not proxy.sent("django_workqueue")
        # Nothing of it stays open.
        eventually(lambda: not proxy.links())
    assert caplog.messages[-1] == "database back: duty=start"


@DATABASE
def test_a_database_that_is_made_while_it_is_waited_for_ends_the_wait(elsewhere, waiting, caplog):
    elsewhere(NAME="not_there_yet")
    thread = waiting()
    eventually(lambda: 'database "not_there_yet" does not exist' in caplog.text)
    with connections[ALIAS].cursor() as cursor:
        cursor.execute("create database not_there_yet")
        thread.join(PATIENCE)
        cursor.execute("drop database not_there_yet with (force)")


@DATABASE
def test_a_database_that_is_there_is_not_waited_for(caplog):
    for alias in ("default", ALIAS):
        wait_for_database(alias)
    assert not caplog.records
