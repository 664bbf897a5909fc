"""`workqueue list`: the items of a state, with what an operator needs to go on."""

import json
import re
from datetime import timedelta

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from django_workqueue import QueuePolicy, WorkItem
from django_workqueue.management.console import places
from django_workqueue.models import Lease, Waiting
from django_workqueue.testing import make_queue
from tests.console import HOSTILE, Shell, all_of, bury, put_aside, spoil

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

STATES = ("dead_lettered", "paused", "claimed", "queued")
MOMENT = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+05:45"


@pytest.fixture(params=["sqlite", "postgresql"])
def queue(request):
    return make_queue(request.param, QueuePolicy(max_attempts=2, backoff_seconds=0))


@pytest.fixture
def shell(queue, capsys):
    return Shell(queue, capsys)


def ids(shell, *arguments):
    return [item["id"] for item in json.loads(shell.run("list", *arguments, "--json"))["items"]]


def claim(queue, /, *names, tenant="acme", **item):
    for name in names:
        queue.enqueue(WorkItem(tenant=tenant, id=name, **item))
        queue.claim(worker="w", queue=item.get("queue", "default"))


def wait(queue, /, *names, seconds=60, tenant="acme", **item):
    for number, name in enumerate(names):
        due = queue.moves.now() + timedelta(seconds=seconds + number)
        queue.enqueue(WorkItem(tenant=tenant, id=name, available_at=due, **item))


def one_of_each(queue, /, suffix="", **item):
    """Leave an item in each state, named after it."""
    for make, state in ((bury, "dead_lettered"), (put_aside, "paused"), (claim, "claimed")):
        make(queue, state + suffix, priority=1, **item)
    queue.enqueue(WorkItem(tenant="acme", id=f"queued{suffix}", **item))


class TestWhatIsTold:
    def test_a_dead_letter_has_the_first_line_of_its_last_failure(self, queue, shell):
        queue.enqueue(WorkItem(tenant="acme", id="one", queue="mail", handler="sms"))
        for error in ("first", "second\nand more"):
            queue.claim(worker="w", queue="mail")
            queue.fail("one", tenant="acme", worker="w", error=error)
        heading, line = shell.run("list", "dead_lettered").splitlines()
        told = [*("tenant", "id", "job id", "queue", "handler"), "attempts", "dead since"]
        assert re.split("  +", heading) == [*told, "last failure"]
        job_id = queue.get("one", tenant="acme").job_id
        assert re.fullmatch(rf"acme +one +{job_id} +mail +sms +2/2 +{MOMENT}  second", line)

    def test_a_paused_item_has_who_paused_it_and_when(self, queue, shell):
        put_aside(queue, "one")
        heading, line = shell.run("list", "paused").splitlines()
        assert re.split("  +", heading)[-2:] == ["paused since", "by"]
        assert re.fullmatch(rf"acme +one +\d+ +default +– +0/2 +{MOMENT}  w", line)

    def test_a_claimed_item_has_its_worker_and_whether_that_still_holds_it(self, queue, shell):
        claim(queue, "one")
        assert re.search(rf" {MOMENT} +w$", shell.run("list", "claimed"), re.M)
        queue.cancel("one", tenant="acme")
        all_of(queue, Lease).update(expires_at=queue.moves.now() - timedelta(seconds=1))
        assert shell.run("list", "claimed").endswith(" w, lease lapsed, asked to cancel\n")

    def test_a_queued_item_has_when_it_is_due_and_why_it_waits(self, queue, shell):
        queue.enqueue(WorkItem(tenant="acme", id="pinned", deployment_id="blue"))
        queue.enqueue(WorkItem(tenant="acme", id="failed"))
        queue.claim(worker="w")
        queue.fail("failed", tenant="acme", worker="w", error="no\nwhy", delay_seconds=60)
        wait(queue, "later", seconds=99)
        lines = shell.run("list", "queued").splitlines()[1:]
        assert re.fullmatch(r"acme +pinned .* now +pinned to blue", lines[0])
        assert re.fullmatch(rf".* failed .* {MOMENT}  backing off, last failure: no", lines[1])
        assert re.fullmatch(rf".* later .* {MOMENT}  scheduled", lines[2])

    @pytest.mark.parametrize("state", STATES)
    def test_nothing_is_told_by_what_was_asked_for(self, queue, shell, state):
        queue.enqueue(WorkItem(tenant="other", queue="mail"))
        one_of_each(queue)
        assert shell.run("list", state, "--queue", "mail", "--tenant", "acme") == (
            f"no item of queue 'mail' of tenant 'acme' is {state}\n"
        )
        assert shell.run("list", state, "--tenant", "nobody") == (
            f"no item of tenant 'nobody' is {state}\n"
        )

    def test_the_json_has_the_same_for_machines(self, queue, shell):
        one_of_each(queue, handler="sms")
        told = {state: json.loads(shell.run("list", state, "--json")) for state in STATES}
        own = {
            "dead_lettered": ["dead_at", "reason", "error_class"],
            "paused": ["since", "settled_by"],
            "claimed": ["claimed_at", "worker", "fence", "expires_at", "cancel_requested"],
            "queued": ["enqueued_at", "due_at", "cause", "deployment_id"],
        }
        for state, page in told.items():
            [item] = page.pop("items")
            assert page == {"state": state, "more": False, "is_capped": False}
            assert [*item] == [
                *("tenant", "id", "job_id", "queue", "handler", "attempts", "max_attempts"),
                *("error", *own[state]),
            ]
            assert (item["id"], item["handler"]) == (state, "sms")
            times = [value for name, value in item.items() if name.endswith(("_at", "since"))]
            assert all(value is None or value.endswith("+00:00") for value in times)


class TestOrder:
    def test_the_latest_dead_letter_comes_first(self, queue, shell):
        bury(queue, "one", "two", "three")
        assert ids(shell, "dead_lettered") == ["three", "two", "one"]
        assert ids(shell, "dead_lettered", "--tenant", "acme") == ["three", "two", "one"]

    def test_what_is_claimed_or_paused_the_longest_comes_first(self, queue, shell):
        put_aside(queue, "a", "b", "c")
        rows = all_of(queue, Waiting)
        rows.filter(item__item_id="b").update(since=queue.moves.now() - timedelta(days=1))
        assert ids(shell, "paused") == ["b", "a", "c"]
        claim(queue, "d", "e", "f")
        rows = all_of(queue, Lease)
        rows.filter(item__item_id="e").update(claimed_at=queue.moves.now() - timedelta(days=1))
        assert ids(shell, "claimed") == ["e", "d", "f"]

    def test_what_is_due_comes_in_the_order_of_service_and_then_what_is_due_next(
        self, queue, shell
    ):
        wait(queue, "late", "later")
        wait(queue, "soon", seconds=30, queue="mail")
        for name, fields in {
            "z": {"tenant": "zoe"},
            "blue": {"deployment_id": "blue"},
            "plain": {},
            "urgent": {"priority": 50},
            "mail": {"queue": "mail"},
        }.items():
            queue.enqueue(WorkItem(**{"tenant": "acme", "id": name} | fields))
        due = ["urgent", "plain", "z", "blue", "mail"]
        assert ids(shell, "queued") == [*due, "soon", "late", "later"]
        assert ids(shell, "queued", "--queue", "default") == [*due[:-1], "late", "later"]
        assert ids(shell, "queued", "--tenant", "zoe") == ["z"]
        for number in range(1, 9):
            assert len(ids(shell, "queued", "--limit", str(number))) == number


class TestBounds:
    @pytest.mark.parametrize("state", STATES)
    def test_that_there_are_more_is_told_without_counting_them(self, queue, shell, state):
        make = {"dead_lettered": bury, "paused": put_aside, "claimed": claim, "queued": wait}
        make[state](queue, "one", "two", "three")
        shown = shell.run("list", state, "--limit", "2").splitlines()
        assert len(shown) == 4
        assert shown[-1] == "there are more: raise --limit"
        assert json.loads(shell.run("list", state, "--limit", "2", "--json"))["more"] is True
        assert len(shell.run("list", state, "--limit", "3").splitlines()) == 4
        assert json.loads(shell.run("list", state, "--limit", "3", "--json"))["more"] is False

    @pytest.mark.parametrize(
        ("state", "make", "narrow"),
        [
            ("dead_lettered", bury, ("--queue", "mail")),
            ("paused", put_aside, ("--tenant", "other")),
            ("queued", wait, ("--tenant", "other")),
        ],
    )
    def test_what_no_index_has_is_looked_for_so_far_and_no_further(
        self, queue, shell, monkeypatch, state, make, narrow
    ):
        monkeypatch.setattr(places, "LOOKED_AT", 3)
        make(queue, "hit", tenant="other", queue="mail")
        others = {"queue": "default" if state == "dead_lettered" else "mail"}
        make(queue, "one", **others)
        told = json.loads(shell.run("list", state, *narrow, "--json"))
        assert ([item["id"] for item in told["items"]], told["is_capped"]) == (["hit"], False)
        make(queue, "two", "three", **others)
        assert json.loads(shell.run("list", state, *narrow, "--json"))["is_capped"] is True
        shown = shell.run("list", state, *narrow).splitlines()
        assert shown[-1] == "there may be more: of a queue 3 rows are looked at"

    @pytest.mark.parametrize("limit", ["0", "10001"])
    def test_a_limit_that_is_none_is_refused(self, shell, limit):
        _, told = shell.fails(2, "list", "queued", "--limit", limit)
        assert told == "--limit: must be between 1 and 10000"

    def test_a_queue_or_a_tenant_that_cannot_be_is_refused(self, shell):
        _, told = shell.fails(2, "list", "queued", "--queue", "mial")
        assert told == "--queue: there is no queue 'mial'; there are 'default'"
        _, told = shell.fails(2, "list", "queued", "--tenant", "x" * 201)
        assert told == "--tenant: 201 characters are more than 200"

    def test_a_long_list_takes_no_more_statements_and_no_payload(self, queue, shell):
        numbers = []
        for number in (1, 20):
            for each in range(number):
                one_of_each(queue, suffix=f" {number} {each}")
            with CaptureQueriesContext(connections[queue.using]) as statements:
                assert [len(ids(shell, state)) for state in STATES] == [1 + number // 2 * 2] * 4
            numbers.append(len(statements))
            assert not any("payload" in each["sql"] for each in statements)
        assert numbers[0] == numbers[1]

    @pytest.mark.parametrize("narrow", [(), ("--queue", "default"), ("--tenant", "acme")])
    @pytest.mark.parametrize("state", ["dead_lettered", "paused", "queued"])
    def test_it_goes_along_indexes_and_sorts_only_what_they_leave_open(
        self, queue, shell, state, narrow
    ):
        one_of_each(queue)
        with CaptureQueriesContext(connections[queue.using]) as statements:
            shell.run("list", state, *narrow)
        place = r'FROM "django_workqueue_(deadletter|waiting|ready|queueitem|failure)"'
        asked = [each["sql"] for each in statements if re.search(place, each["sql"])]
        assert asked
        for sql in asked:
            plan = planned(queue, sql)
            whole = re.search(r"Seq Scan|SCAN \S+$|-> +Sort$|B-TREE FOR ORDER BY", plan, re.M)
            assert not whole, f"{sql}\n{plan}"


def planned(queue, statement):
    """The plan of *statement* if the tables were large."""
    connection = connections[queue.using]
    if connection.vendor == "sqlite":
        explain, column = "explain query plan", 3
    else:
        explain, column = "explain (costs off)", 0
    with transaction.atomic(using=queue.using), connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute("set local enable_seqscan = off; set local enable_sort = off")
        cursor.execute(f"{explain} {statement}")
        return "\n".join(row[column] for row in cursor.fetchall())


class TestOddities:
    def test_names_and_errors_cannot_forge_lines(self, queue, shell):
        queue.enqueue(WorkItem(tenant=HOSTILE, id=HOSTILE, queue=HOSTILE, handler=HOSTILE))
        queue.claim(worker=HOSTILE, queue=HOSTILE)
        shown = [shell.run("list", "claimed")]
        error = HOSTILE.replace("\n", " ")
        queue.fail(HOSTILE, tenant=HOSTILE, worker=HOSTILE, error=error, retryable=False)
        shown.append(shell.run("list", "dead_lettered"))
        shown.append(shell.run("list", "dead_lettered", "--tenant", HOSTILE, "--json"))
        shown.append(shell.run("list", "paused", "--tenant", HOSTILE))
        assert [output.count("\n") for output in (*shown[:2], shown[3])] == [2, 2, 1]
        for output in shown:
            assert "\x1b" not in output
            assert "\u202e" not in output
            assert "[31mb" in output

    def test_a_long_error_is_cut(self, queue, shell):
        queue.enqueue(WorkItem(tenant="acme", id="one"))
        queue.claim(worker="w")
        queue.fail("one", tenant="acme", worker="w", error="x" * 5000, retryable=False)
        assert "  " + "x" * 200 + "…\n" in shell.run("list", "dead_lettered")

    def test_a_row_whose_item_was_deleted_is_passed_over(self, queue, shell):
        bury(queue, "one", "two")
        with connections[queue.using].cursor() as cursor:
            cursor.execute("delete from django_workqueue_queueitem where item_id = 'two'")
        assert ids(shell, "dead_lettered") == ["one"]


def test_bytes_that_are_no_text_hide_nothing_of_a_list(capsys):
    queue = make_queue("sqlite")  # PostgreSQL doesn't take them
    one_of_each(queue)
    spoil(queue, payload=b'{"a": "\xff"}', failure=b"no \xff text")
    shell = Shell(queue, capsys)
    assert "no \\udcff text" in shell.run("list", "dead_lettered")
    assert [ids(shell, state) for state in STATES] == [[state] for state in STATES]
