import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread

import psycopg
import pytest
from django.contrib.auth.models import Group
from django.db import OperationalError, connections

from tests.postgres import (
    DATABASE_URL,
    POSTGRES_BIN,
    ExternalPostgres,
    NoBinariesError,
    PostgresServer,
    find_binaries,
    free_port,
)

ROOT = Path(__file__).parent.parent
BOTH = pytest.mark.parametrize("alias", ["default", "postgresql"])
both_databases = pytest.mark.django_db(transaction=True, databases="__all__")


def ask(server: PostgresServer, question: str, database: str = "postgres"):
    with psycopg.connect(server.dsn(database), autocommit=True) as connection:
        cursor = connection.execute(question)
        return cursor.fetchone() if cursor.description else None


def in_another_thread(work):
    answers = []

    def run():
        try:
            answers.append(work())
        finally:
            connections.close_all()

    thread = Thread(target=run)
    thread.start()
    thread.join(timeout=30)
    return answers[0]


def wait_until_gone(path: Path) -> None:
    deadline = time.monotonic() + 30
    while path.exists():
        assert time.monotonic() < deadline, f"{path} is still there"
        time.sleep(0.05)


def test_server_answers_on_loopback_only_and_keeps_its_promises_on_disk(private_postgres):
    assert ask(private_postgres, "SHOW listen_addresses") == ("127.0.0.1",)
    assert ask(private_postgres, "SHOW fsync") == ("on",)
    assert ask(private_postgres, "SELECT current_setting('server_version_num')::int >= 140000") == (
        True,
    )


@pytest.mark.skipif(not Path("/proc").exists(), reason="asks /proc whose process it is")
def test_server_never_runs_as_root(private_postgres):
    assert Path(f"/proc/{private_postgres.pid()}").stat().st_uid != 0


def test_a_crashed_server_starts_again_with_all_it_had_committed(private_postgres):
    ask(private_postgres, "CREATE TABLE kept AS SELECT 1 AS number")
    port = private_postgres.port

    private_postgres.stop(mode="immediate")
    with pytest.raises(psycopg.OperationalError):
        ask(private_postgres, "SELECT 1")

    private_postgres.start()
    assert (private_postgres.port, ask(private_postgres, "SELECT number FROM kept")) == (port, (1,))


def test_two_servers_run_side_by_side_and_closing_one_leaves_the_other(private_postgres):
    with PostgresServer() as second:
        ask(second, "CREATE DATABASE only_here")
        assert ask(second, "SELECT 1", database="only_here") == (1,)
        with pytest.raises(psycopg.OperationalError, match="only_here"):
            ask(private_postgres, "SELECT 1", database="only_here")
    assert not second.folder.exists()
    with pytest.raises(psycopg.OperationalError):
        ask(second, "SELECT 1")
    assert ask(private_postgres, "SELECT 1") == (1,)


def test_a_port_that_another_run_took_meanwhile_is_given_up_for_the_next(monkeypatch):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken, free = other.getsockname()[1], free_port()
        ports = iter([taken, free])
        monkeypatch.setattr("tests.postgres.free_port", lambda: next(ports))
        with PostgresServer() as server:
            assert (server.port, ask(server, "SELECT 1")) == (free, (1,))


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_server_stops_and_its_folder_goes_when_the_run_is_ended_by(ending):
    program = (
        "import sys; from tests.postgres import PostgresServer; server = PostgresServer();"
        "print(server.folder, server.port, flush=True); sys.stdin.read()"
    )
    run = subprocess.Popen(
        (sys.executable, "-c", program),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with run:
        folder, port = run.stdout.readline().split()
        assert Path(folder).exists()
        run.send_signal(ending)
    wait_until_gone(Path(folder))
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(f"host=127.0.0.1 port={port} user=workqueue dbname=postgres")


def test_missing_binaries_are_an_error_that_names_both_ways_out(monkeypatch, tmp_path):
    monkeypatch.setenv(POSTGRES_BIN, str(tmp_path))
    with pytest.raises(NoBinariesError, match=f"{POSTGRES_BIN}.*{DATABASE_URL}") as caught:
        find_binaries()
    assert str(tmp_path) in str(caught.value)


def test_an_external_server_is_taken_from_its_url_with_a_test_database_of_this_run():
    server = ExternalPostgres("postgres://me:a%20secret@db.example:5433/main?sslmode=require")
    assert server.settings() == {
        "NAME": "main",
        "USER": "me",
        "PASSWORD": "a secret",
        "HOST": "db.example",
        "PORT": "5433",
        "OPTIONS": {"sslmode": "require"},
        "TEST": {"NAME": f"test_main_{os.getpid()}"},
    }


def test_a_test_without_a_database_starts_no_server(tmp_path):
    test = tmp_path / "test_pure.py"
    test.write_text("def test_pure():\n    pass\n")
    options = ("-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "-c", "pyproject.toml")
    done = subprocess.run(
        (sys.executable, "-m", "pytest", *options, test),
        cwd=ROOT,
        env=os.environ | {POSTGRES_BIN: str(tmp_path)} | {DATABASE_URL: ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout


@both_databases
def test_the_two_aliases_are_test_databases_on_sqlite_and_postgresql():
    found = {alias: connections[alias].vendor for alias in ("default", "postgresql")}
    assert found == {"default": "sqlite", "postgresql": "postgresql"}
    for alias in found:
        assert Path(connections[alias].settings_dict["NAME"]).name.startswith("test_")


@BOTH
@both_databases
def test_another_thread_has_its_own_connection_to_the_same_database(alias):
    Group.objects.using(alias).create(name="seen")

    def look():
        return id(connections[alias]), list(
            Group.objects.using(alias).values_list("name", flat=True)
        )

    theirs, names = in_another_thread(look)
    assert (theirs != id(connections[alias]), names) == (True, ["seen"])


@BOTH
@both_databases
def test_a_process_that_a_test_starts_works_on_the_same_database(alias, process_environment):
    program = (
        "import django; django.setup(); from django.contrib.auth.models import Group;"
        f"Group.objects.using({alias!r}).create(name='by a process')"
    )
    subprocess.run((sys.executable, "-c", program), env=process_environment, check=True, timeout=60)
    assert Group.objects.using(alias).get().name == "by a process"


@both_databases
def test_a_private_database_is_migrated_and_can_be_lost_and_found(
    private_postgres, private_database
):
    groups = Group.objects.using(private_database)
    groups.create(name="kept")

    private_postgres.stop(mode="immediate")
    connections[private_database].close()
    with pytest.raises(OperationalError):
        groups.get()

    private_postgres.start()
    connections[private_database].close()
    assert groups.get().name == "kept"
