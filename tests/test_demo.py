"""The demo: its parts, and the whole run as a user runs it, in processes of its own."""

import io
import json
import os
import re
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.urls import reverse
from library.handlers import report
from library.management.commands import serve as serve_module
from library.models import Report
from library.outcome import problems
from library.run import Run
from library.source import Module, figures, poison, standard_library
from library.workers import Kill

from django_workqueue import get_queue

MANAGE = Path(__file__).parent.parent / "testproject" / "manage.py"
LIMIT = 150
POISON = 4
# The demo takes some seconds; a machine may be busy.
PATIENCE = 200

SOURCE = """\
# -*- coding: latin-1 -*-
class Outer:
    class Inner:
        def short(self): pass

    async def long(self):
        greeting = "Gr\xfc\xdfe"
        return greeting
"""


# Its parts.


def test_a_report_has_lines_classes_functions_and_the_longest_function(tmp_path):
    path = tmp_path / "sample.py"
    path.write_bytes(SOURCE.encode("latin-1"))
    assert figures(path) == {
        "lines": 8,
        "classes": 2,
        "functions": 2,
        "longest_function": "long",
        "longest_function_lines": 3,
    }


def test_an_empty_module_has_a_report(tmp_path):
    path = tmp_path / "empty.py"
    path.touch()
    assert set(figures(path).values()) == {0, ""}


def test_the_modules_are_the_standard_librarys_alone_each_with_its_own_name():
    modules = standard_library()
    assert {"argparse", "json", "json.decoder", "this"} <= {module.name for module in modules}
    assert len({module.name for module in modules}) == len(modules) > 500
    parts = {part for module in modules for part in module.path.parts}
    assert not parts & {"site-packages", "dist-packages"}
    decoder = next(module for module in modules if module.name == "json.decoder")
    assert decoder.package == "json"


@pytest.mark.parametrize("module", poison(), ids=lambda module: module.name)
def test_no_poison_can_be_read(module):
    with pytest.raises((SyntaxError, MemoryError, RecursionError, FileNotFoundError)):
        figures(module.path)


def sample(tmp_path, *sizes):
    """Return a module of as many lines for each of *sizes*."""
    modules = []
    for place, size in enumerate(sizes):
        path = tmp_path / f"module{place}.py"
        path.write_text("pass\n" * size)
        modules.append(Module(path, f"sample.module{place}", path.stat().st_size))
    return modules


def work_off(handler=report):
    """Do what is due, in this process and without the workers."""
    queue = get_queue()
    for item in queue.claim_many(worker="test", queue="demo", limit=100):
        handler(item.payload, FakeContext(item))
        queue.complete(item.id, tenant=item.tenant, worker="test", fence=item.fence)


class FakeContext:
    def __init__(self, item):
        self.item = item
        self.tenant = item.tenant


@pytest.mark.django_db
def test_larger_files_have_a_higher_priority(tmp_path):
    run = Run(sample(tmp_path, 5, 1000, 0))
    priorities = dict(run.items.values_list("item_id", "priority"))
    assert priorities == {
        f"{run.name}/sample.module1": 100,
        f"{run.name}/sample.module0": 0,
        f"{run.name}/sample.module2": -100,
    }
    assert set(run.items.values_list("tenant", flat=True)) == {"sample"}


@pytest.mark.django_db
def test_the_figures_are_of_this_run_alone(tmp_path):
    Run(sample(tmp_path, 1, 2))
    work_off()
    run = Run(sample(tmp_path, 1, 2, 3))
    assert run.figures() == {
        "enqueued": 3,
        "completed": 0,
        "dead_lettered": 0,
        "redelivered": 0,
        "lost": 3,
    }
    work_off()
    assert run.figures() == {
        "enqueued": 3,
        "completed": 3,
        "dead_lettered": 0,
        "redelivered": 0,
        "lost": 0,
    }


KILL = Kill(pid=1, held=[1])


@pytest.mark.django_db
def test_an_item_that_was_completed_without_a_report_is_lost(tmp_path):
    run = Run(sample(tmp_path, 1))
    work_off(handler=lambda payload, context: None)
    counted = run.figures()
    assert counted["lost"] == 1
    [lost, none_again] = problems(run, counted, KILL)
    assert "sample.module0" in lost
    assert "nothing was redelivered" in none_again


@pytest.mark.django_db
def test_a_report_that_was_written_twice_is_a_problem(tmp_path):
    run = Run(sample(tmp_path, 1))

    def twice(payload, context):
        report(payload, context)
        report(payload, context)

    work_off(handler=twice)
    assert Report.objects.get().times_written == 2
    assert any("written 2 times" in problem for problem in problems(run, run.figures(), KILL))


@pytest.mark.django_db
def test_items_that_have_not_ended_are_a_problem(tmp_path):
    run = Run(sample(tmp_path, 1, 1))
    assert any(
        "2 items were enqueued, and 0 ended" in each for each in problems(run, run.figures(), KILL)
    )


@pytest.mark.django_db
def test_redelivered_is_what_a_worker_lost_and_not_what_its_handler_failed(tmp_path):
    run = Run(sample(tmp_path, 1, 1, 1, 1))
    queue = get_queue()
    items = queue.claim_many(worker="dies", queue="demo", limit=4)
    for item, end in zip(items, ("fail", "release", "nothing", "complete"), strict=True):
        mine = {"tenant": item.tenant, "worker": "dies", "fence": item.fence}
        if end == "fail":
            queue.fail(item.id, error="its own", delay_seconds=0, **mine)
        elif end == "release":
            queue.release(item.id, **mine)
        elif end == "complete":
            queue.complete(item.id, **mine)
    queue.adopt(worker="dies")
    work_off()
    assert run.redelivered() == sorted([items[1].job_id, items[2].job_id])


# The whole.


@pytest.fixture
def sqlite_environment(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "DATABASE_URL"}
    environment.pop("DJANGO_SETTINGS_MODULE", None)
    return environment | {
        "WORKQUEUE_DEMO_DB": str(tmp_path / "demo.sqlite3"),
        "TMPDIR": str(tmp_path),  # for the workers' log
    }


@pytest.fixture
def postgres_environment(postgres, sqlite_environment):
    """A database of the demo's own on the suite's server."""
    server = postgres.settings()
    name = f"demo_{secrets.token_hex(4)}"
    place = {"host": server["HOST"], "port": server["PORT"], "user": server["USER"]}
    login = {**place, "password": server["PASSWORD"], "dbname": "postgres"}
    with psycopg.connect(**login, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}")
        user = f"{server['USER']}:{server['PASSWORD']}"
        url = f"postgres://{user}@{server['HOST']}:{server['PORT']}/{name}"
        yield sqlite_environment | {"DATABASE_URL": url}
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", "postgres"])
def environment(request):
    return request.getfixturevalue(f"{request.param}_environment")


def demo(environment, *options):
    return subprocess.run(
        [sys.executable, MANAGE, "demo", *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )


def last_line(answer):
    assert answer.returncode == 0, f"{answer.stdout}\n{answer.stderr}"
    return json.loads(answer.stdout.splitlines()[-1].removeprefix("demo: "))


def test_the_demo_loses_nothing_though_a_worker_is_killed_and_can_be_repeated(environment):
    for _ in range(2):
        answer = demo(environment, "--limit", str(LIMIT))
        counted = last_line(answer)
        assert counted["enqueued"] == LIMIT + POISON
        assert counted["completed"] + counted["dead_lettered"] == LIMIT + POISON
        assert counted["dead_lettered"] >= POISON
        assert counted["redelivered"] > 0
        assert counted["lost"] == 0
        assert re.search(r"Worker process \d+ is killed \(SIGKILL\), holding [1-9]", answer.stdout)
        # Two, if it was one of those that the killed process had in hand.
        assert re.search(r"poison\.no_python +[12] attempts? ", answer.stdout)
        assert re.search(r"poison\.vanished +3 attempts ", answer.stdout)
        assert "Reject: not Python: invalid syntax" in answer.stdout
        assert "FileNotFoundError" in answer.stdout
        assert "\x1b" not in answer.stdout
        assert answer.stderr == ""


def started(environment, *options, **streams):
    return subprocess.Popen(
        [sys.executable, MANAGE, "demo", *options], env=environment, text=True, **streams
    )


def processes_of(environment):
    """The running processes that work on the demo database of *environment*."""
    mark = f"WORKQUEUE_DEMO_DB={environment['WORKQUEUE_DEMO_DB']}"
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (folder / "environ").read_bytes().decode(errors="replace").split("\0"):
                found.append(int(folder.name))
        except OSError:
            pass
    return found


@pytest.mark.parametrize(
    ("number", "waits_for"),
    [(signal.SIGINT, "worker processes take"), (signal.SIGTERM, r"  [1-9]\d* of 304,")],
)
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_a_demo_that_is_stopped_stops_its_workers_and_the_next_one_goes_on(
    number, waits_for, sqlite_environment
):
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with started(sqlite_environment, "--limit", "300", **streams) as process:
        while not re.search(waits_for, line := process.stdout.readline()):
            assert line, process.stderr.read()
        process.send_signal(number)
        _out, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "Stopped" in error
    assert processes_of(sqlite_environment) == []
    answer = demo(sqlite_environment, "--limit", "30")
    assert last_line(answer)["enqueued"] == 30 + POISON
    assert re.search(r"An earlier run left [\d,]+ items", answer.stdout)


def test_on_a_terminal_the_bar_stays_on_its_line_and_no_color_is_honoured(sqlite_environment):
    ours, theirs = os.openpty()
    environment = sqlite_environment | {"NO_COLOR": "1", "TERM": "xterm", "COLUMNS": "100"}
    streams = {"stdout": theirs, "stderr": subprocess.STDOUT}
    with started(environment, "--limit", "40", **streams) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                said += os.read(ours, 4096)
            except OSError:  # the other end is closed
                break
    os.close(ours)
    assert process.wait(PATIENCE) == 0
    text = said.decode()
    assert text.count("\r\x1b[K") > 3
    assert set(re.findall(r"\x1b\[[\d;]*([A-Za-z])", text)) == {"K"}
    assert "█" in text
    bars = [part for part in re.split(r"[\r\n]", text.replace("\x1b[K", "")) if "█" in part]
    assert max(len(bar) for bar in bars) <= 100
    assert len([line for line in text.split("\n") if "█" in line]) <= 3
    assert text.rstrip().splitlines()[-1].startswith("demo: {")


# The admin afterwards.


@pytest.fixture
def serve(monkeypatch):
    """Run the command without its server; return what it said and what it would have run."""
    ran = []
    monkeypatch.setattr(serve_module, "call_command", lambda *names, **options: ran.append(names))

    def run(*options):
        out = io.StringIO()
        call_command("serve", *options, stdout=out)
        return out.getvalue(), ran

    return run


@pytest.mark.django_db
def test_serve_prints_a_login_that_works_and_a_new_one_each_time(serve, client):
    passwords = []
    for _ in range(2):
        said, ran = serve("--port", "8765")
        assert "http://127.0.0.1:8765/admin/" in said
        assert ran[-1] == ("runserver", "127.0.0.1:8765")
        login = re.search(r"User: (\S+) +Password: (\S+)", said)
        passwords.append(login[2])
        assert client.login(username=login[1], password=login[2])
        assert client.get(reverse("admin:index")).status_code == 200
    assert not client.login(username=login[1], password=passwords[0])


@pytest.mark.django_db
def test_serve_leaves_a_superuser_of_the_database_alone(serve, client):
    get_user_model().objects.create_superuser("boss", password="secret")
    said, _ran = serve()
    assert "Password" not in said
    assert get_user_model().objects.count() == 1
    assert client.login(username="boss", password="secret")
