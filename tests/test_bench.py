"""The benchmark: what it prints, that it notices a wrong outcome, and that it leaves nothing."""

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path

import psycopg
import pytest
from bench import tables
from bench.claim import Claim
from bench.outcome import bare_problems, queue_problems
from bench.scenarios import SCENARIOS
from bench.sizes import OPTIONS, Size, flag
from django.core.management import CommandError, call_command
from django.db import connections

from django_workqueue import WorkItem, get_queue
from django_workqueue.models import Counter, Finished, QueueItem
from django_workqueue.testing import make_queue
from tests.postgres import DATABASE_URL
from tests.test_docs import DOCS, plain, rows

MANAGE = Path(__file__).parent.parent / "testproject" / "manage.py"
POSTGRES = "postgresql"
ITEMS = 200
PATIENCE = 60

SIDE = {
    "items_per_s",
    "rounds",
    "p50_ms",
    "p95_ms",
    "p99_ms",
    "commits_per_item",
    "wal_bytes_per_item",
    "cpu_ms_per_item",
    "server_cpu_ms_per_item",
    "peak_mib",
}
ASKED = {"scenario", *(spec.name for spec in fields(Size) if spec.name != "rounds")}
OTHERS = {"ratio", "baseline", "environment"}


@pytest.fixture(scope="module")
def url(postgres):
    """The address of the suite's server, by way of a database that exists there."""
    settings = postgres.settings()
    own = f"postgres://{settings['USER']}@{settings['HOST']}:{settings['PORT']}/postgres"
    return os.environ.get(DATABASE_URL, own)


def databases_of(url, pid):
    """The databases that the benchmark of this process has made, and not dropped."""
    with psycopg.connect(url) as connection:
        found = connection.execute("select datname from pg_database").fetchall()
    return [name for (name,) in found if name.startswith(f"workqueue_bench_{pid}_")]


def start(url, *options):
    """Start the command as a user does."""
    return subprocess.Popen(
        [sys.executable, str(MANAGE), "bench", *options],
        env=os.environ | {"DATABASE_URL": url, "DJANGO_SETTINGS_MODULE": "testproject.settings"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@contextmanager
def without_autovacuum(url):
    """Its commits count too, and so few items have few of their own."""
    if os.environ.get(DATABASE_URL):  # somebody's server is left as it is
        yield
        return
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("alter system set autovacuum = off")
        connection.execute("select pg_reload_conf()")
    yield
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("alter system reset autovacuum")
        connection.execute("select pg_reload_conf()")


@pytest.fixture(scope="module")
def lines(url):
    """What all scenarios have printed, by name."""
    options = ("--items", str(ITEMS), "--rounds", "1")
    with without_autovacuum(url), start(url, *SCENARIOS, *options) as process:
        output, progress = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, progress
    assert databases_of(url, process.pid) == []
    parsed = [json.loads(line) for line in output.splitlines()]
    assert [line["scenario"] for line in parsed] == [*SCENARIOS]
    return {line["scenario"]: line for line in parsed}


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_scenario_prints_its_figures_in_one_line(lines, name):
    line = lines[name]
    assert set(line) == ASKED | SIDE | OTHERS
    assert line["items"] == ITEMS
    assert set(line["environment"]) == {"python", "django", "psycopg", "postgresql", "cores"}
    sides = [line]
    if name == "raw":
        assert line["ratio"] is line["baseline"] is None
    else:
        assert set(line["baseline"]) == SIDE | {"name"}
        assert line["ratio"] > 0
        sides.append(line["baseline"])
    for side in sides:
        assert side["rounds"] == [side["items_per_s"]]
        assert 0 < side["p50_ms"] <= side["p95_ms"] <= side["p99_ms"]
        assert side["wal_bytes_per_item"] > 100
        assert side["cpu_ms_per_item"] > 0
        assert side["peak_mib"] > 10


def test_commits_are_those_of_the_clients_alone(lines):
    told = {name: line["commits_per_item"] for name, line in lines.items()}
    if None not in told.values():  # PostgreSQL 14
        assert told["enqueue"] == pytest.approx(1, abs=0.1)
        assert told["bulk"] < 0.1
        # A commit for each batch of 50, and one more for each of two clients that finds nothing.
        assert told["claim"] == pytest.approx(1 / 50 + 2 / ITEMS, abs=0.02)


def test_what_is_interrupted_leaves_no_database(url):
    with start(url, "raw", "--items", "200000") as process:
        told = process.stderr.readline()
        while not told.startswith("raw:"):
            assert told, "ended before the scenario began"
            told = process.stderr.readline()
        assert len(databases_of(url, process.pid)) == 1
        process.terminate()
        output, told = process.communicate(timeout=PATIENCE)
    assert (process.returncode, output) == (1, "")
    assert "Traceback" not in told
    assert databases_of(url, process.pid) == []


# A wrong outcome.


@pytest.mark.usefixtures("django_db_setup")
def test_a_row_that_is_lost_behind_its_back_fails_the_command(
    url, monkeypatch, capsys, django_db_blocker
):
    judge = Claim.problems

    def spoilt(self, size):
        Finished.objects.using("bench").order_by("pk")[0].delete()
        return judge(self, size)

    monkeypatch.setattr(Claim, "problems", spoilt)
    monkeypatch.setenv("DATABASE_URL", url)
    wrong = r"claim: the outcome is wrong\n.*1 nowhere"
    with django_db_blocker.unblock(), pytest.raises(CommandError, match=wrong) as failed:
        call_command("bench", "claim", "--items=20", "--rounds=1", "--processes=1")
    assert failed.value.returncode == 1
    assert capsys.readouterr().out == ""
    assert databases_of(url, os.getpid()) == []
    assert "bench" not in connections.settings


def lose_one():
    Finished.objects.using(POSTGRES).order_by("pk")[0].delete()


def lose_one_without_a_trace():
    first = QueueItem.objects.using(POSTGRES).order_by("pk")[0].pk
    Finished.objects.using(POSTGRES).filter(pk=first).delete()
    QueueItem.bodies.using(POSTGRES).filter(pk=first).delete()
    Counter.objects.using(POSTGRES).create(queue="bench", completed=-1)


def claim_one_twice():
    first = Finished.objects.using(POSTGRES).order_by("pk")[0]
    Finished.objects.using(POSTGRES).filter(pk=first.pk).update(fence=2)


def accept_one_more():
    get_queue(POSTGRES).enqueue(WorkItem(tenant="late", queue="bench"))


def leave_one_claimed():
    accept_one_more()
    get_queue(POSTGRES).claim(worker="w", queue="bench")


def count_wrongly():
    Counter.objects.using(POSTGRES).create(queue="bench", completed=1)


@pytest.mark.django_db(transaction=True, databases="__all__")
@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (None, None),
        (lose_one, "1 nowhere, 2 completed"),
        (lose_one_without_a_trace, "must be 3 completed items, and there are: 2 completed"),
        (claim_one_twice, "1 items were not claimed 1 times"),
        (accept_one_more, "1 queued"),
        (leave_one_claimed, "1 claimed"),
        (count_wrongly, "counts 4 completed, but has 3"),
    ],
)
def test_the_check_finds_every_damage(damage, told):
    queue = make_queue(POSTGRES)
    queue.enqueue_many(WorkItem(tenant="acme", queue="bench") for _ in range(3))
    for item in queue.claim_many(worker="w", queue="bench", limit=3):
        queue.complete(item.id, tenant=item.tenant, worker="w", fence=item.fence)
    if damage:
        damage()
    wrong = queue_problems(POSTGRES, 3, "completed", claims=1)
    assert told in "\n".join(wrong) if told else wrong == []


@pytest.mark.django_db(databases="__all__")
def test_the_bare_tables_have_the_shape_of_the_queues_and_are_counted(monkeypatch):
    monkeypatch.setattr(tables, "ALIAS", POSTGRES)
    tables.create_bare_tables()
    columns = "select attname, atttypid from pg_attribute where attrelid = %s::regclass order by 1"
    for place in ("queueitem", "ready", "lease", "finished"):
        own = tables.execute(columns, [f"django_workqueue_{place}"])
        assert tables.execute(columns, [f"bench_{place}"]) == own
    assert bare_problems(ready=0, finished=0) == []
    [wrong] = bare_problems(ready=0, finished=1)
    assert wrong == "there must be 1 rows in bench_finished, and there are 0"


# Options.


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["claim", "--items=0"], "--items must be 1 to 10000000, not 0"),
        (["claim", "--tenants=-1"], "--tenants must be"),
        (["raw", "--rounds=0"], "--rounds must be"),
        (["raw", "--payload-bytes=-1"], "--payload-bytes must be 0 to"),
        (["bulk", "claim", "--batch=201"], "--batch must be 1 to 200 for claim, not 201"),
        (["raw", "--items=3", "--processes=4"], "--processes must be at most --items"),
        (["raw", "--items=many"], "--items: invalid int value"),
        (["row"], "SCENARIO: invalid choice: 'row'"),
        ([], "required: SCENARIO"),
    ],
)
def test_a_wrong_option_is_named(options, told):
    with pytest.raises(CommandError, match=re.escape(told)):
        call_command("bench", *options)


@pytest.mark.parametrize(
    "url", ["sqlite:///file.sqlite3", "nonsense", "postgres://nobody@127.0.0.1:1/nothing"]
)
def test_a_database_url_that_is_of_no_use_is_told(url, monkeypatch):
    monkeypatch.setenv("DATABASE_URL", url)
    with pytest.raises(CommandError, match=r"DATABASE_URL|create database"):
        call_command("bench", "raw")


def test_the_clients_shares_are_all_items_once():
    for processes in (1, 2, 3, 7):
        size = Size(items=20, processes=processes, batch=4)
        shares = [number for client in range(processes) for number in size.share(client)]
        batches = [piece for client in range(processes) for piece in size.batches(client)]
        assert shares == [number for piece in batches for number in piece] == [*range(20)]
        assert max(map(len, batches)) <= 4


# The page.


def test_the_page_has_every_figure_option_and_scenario():
    page = DOCS / "bench.md"
    told = [name for row in rows(page, "Figures") for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(told) == sorted(ASKED | SIDE | OTHERS)
    assert {plain(row[0]) for row in rows(page, "Scenarios")} == set(SCENARIOS)
    assert {plain(row[0]) for row in rows(page, "Options")} == {*map(flag, OPTIONS), "--human"}
    for option, default, _ in rows(page, "Options")[:-1]:
        name = plain(option)[2:].replace("-", "_")
        values = {getattr(each.defaults, name) for each in SCENARIOS.values()}
        assert default == (str(*values) if len(values) == 1 else "by scenario")
