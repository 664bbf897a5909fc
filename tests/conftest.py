"""The suite's databases. Nothing here starts before a test asks for a database."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.db import connections

from tests.postgres import ExternalPostgres, NoBinariesError, PostgresServer, open_server

# The suite that others subclass explains its own failures too.
pytest.register_assert_rewrite("django_workqueue.conformance")

ROOT = Path(__file__).parent.parent

# In a shell's background job it is ignored, and would be by what the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer | ExternalPostgres]:
    """The server behind the alias "postgresql"."""
    server = open_server()
    yield server
    server.close()


@pytest.fixture(scope="session")
def django_db_modify_db_settings(
    postgres: PostgresServer | ExternalPostgres,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> None:
    """Tell Django where the test databases are, just before it makes them."""
    sqlite = tmp_path_factory.mktemp("sqlite") / "test_workqueue.sqlite3"
    # In place: connections that exist already hold these very dictionaries.
    connections.settings["default"]["TEST"]["NAME"] = str(sqlite)
    settings = postgres.settings()
    connections.settings["postgresql"]["TEST"].update(settings.pop("TEST"))
    connections.settings["postgresql"].update(settings)
    request.getfixturevalue("django_db_modify_db_settings_parallel_suffix")


@pytest.fixture
def private_postgres() -> Iterator[PostgresServer]:
    """A server of this test alone, which it may stop."""
    try:
        server = PostgresServer()
    except NoBinariesError as error:
        pytest.skip(str(error))
    with server:
        yield server


@pytest.fixture
def private_database(private_postgres: PostgresServer, django_db_blocker) -> Iterator[str]:
    """The alias of a migrated test database on a server that this test may stop."""
    alias = "private"
    common, own = connections.settings["postgresql"], private_postgres.settings()
    own["TEST"] = common["TEST"] | own["TEST"]
    connections.settings[alias] = common | own
    try:
        with django_db_blocker.unblock():
            connections[alias].creation.create_test_db(verbosity=0, autoclobber=True)
            yield alias
    finally:
        connections[alias].close()
        del connections[alias], connections.settings[alias]


@pytest.fixture
def process_environment() -> dict[str, str]:
    """The environment in which a process that the test starts works on the test databases."""
    keys = ("NAME", "USER", "PASSWORD", "HOST", "PORT")
    databases = {
        alias: {key: str(connections.settings[alias].get(key, "")) for key in keys}
        for alias in ("default", "postgresql")
    }
    return os.environ | {
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "PYTHONPATH": os.pathsep.join((str(ROOT / "testproject"), str(ROOT))),
        "WORKQUEUE_TEST_DATABASES": json.dumps(databases),
    }


@pytest.fixture
def scene(process_environment: dict[str, str], tmp_path: Path) -> Iterator[Any]:
    """Makes the scene of a test with worker processes, and clears it away."""
    from django_workqueue.doctor import examine
    from django_workqueue.testing import make_queue
    from tests.workers import Scene

    scenes = []

    def make(backend: Any, policy: Any = None) -> Scene:
        scenes.append(Scene(make_queue(backend, policy), process_environment, tmp_path))
        return scenes[-1]

    yield make
    for each in scenes:
        each.close()
        assert examine(each.alias) == []


MEASURED: list[str] = []


@pytest.fixture
def record() -> Callable[[str], None]:
    """Takes a line with what a test has measured, for the end of the run."""
    return MEASURED.append


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Show what was measured."""
    if MEASURED:
        terminalreporter.section("measured")
        for line in MEASURED:
            terminalreporter.write_line(line)
