"""The system checks of the queue's database. Those of the setting: test_conf."""

import pytest
from django.core.checks import run_checks
from django.db import NotSupportedError, OperationalError, connections
from psycopg import IsolationLevel

from django_workqueue import checks
from django_workqueue.checks import check_database

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


@pytest.fixture
def postgresql(settings, monkeypatch):
    """The PostgreSQL database as the queue's own; its settings may be changed."""
    settings.WORKQUEUE = {"DATABASE": "postgresql"}
    connection = connections["postgresql"]
    own = {**connection.settings_dict, "OPTIONS": {**connection.settings_dict["OPTIONS"]}}
    monkeypatch.setattr(connection, "settings_dict", own)
    yield connection
    connection.close()


def ids(*databases):
    return [each.id for each in check_database(None, databases=databases)]


@pytest.mark.parametrize("alias", ["default", "postgresql"])
def test_the_databases_of_the_suite_pass_all_checks(settings, alias):
    settings.WORKQUEUE = {"DATABASE": alias}
    assert run_checks(databases=[alias]) == []


def test_a_database_is_checked_only_where_it_is_asked_for(monkeypatch):
    monkeypatch.setitem(connections["default"].settings_dict, "OPTIONS", {})
    assert ids() == ids("postgresql") == []
    assert ids("default") == ["django_workqueue.W001"]


def test_every_message_has_a_hint(monkeypatch):
    monkeypatch.setitem(connections["default"].settings_dict, "OPTIONS", {})
    monkeypatch.setitem(connections["default"].settings_dict, "AUTOCOMMIT", False)
    assert all(each.hint for each in check_database(None, databases=["default"]))


def test_an_unknown_kind_of_database_is_an_error(monkeypatch):
    monkeypatch.setattr(connections["default"], "vendor", "oracle")
    assert ids("default") == ["django_workqueue.E003"]


def test_sqlite_without_the_options_for_several_processes_is_warned_of(monkeypatch):
    monkeypatch.setitem(connections["default"].settings_dict, "OPTIONS", {})
    [warning] = run_checks(databases=["default"])
    assert (warning.id, "IMMEDIATE" in warning.hint) == ("django_workqueue.W001", True)


def test_a_sqlite_before_returning_is_an_error(monkeypatch):
    monkeypatch.setattr(connections["default"].Database, "sqlite_version_info", (3, 34, 1))
    [error] = check_database(None, databases=["default"])
    assert error.id == "django_workqueue.E006"
    assert "needs SQLite 3.35 or newer: this is 3.34.1" in error.msg


def test_a_postgresql_that_is_too_old_is_an_error(postgresql, monkeypatch):
    monkeypatch.setattr(postgresql, "get_database_version", lambda: (13, 9))
    [error] = check_database(None, databases=["postgresql"])
    assert error.id == "django_workqueue.E006"
    assert "needs PostgreSQL 14 or newer: this is 13.9" in error.msg


def test_a_postgresql_that_django_refuses_is_the_same_error(postgresql, monkeypatch):
    def refuse():
        raise NotSupportedError("PostgreSQL 15 or later is required (found 14.1).")

    monkeypatch.setattr(postgresql, "ensure_connection", refuse)
    [error] = check_database(None, databases=["postgresql"])
    assert error.id == "django_workqueue.E006"
    assert "found 14.1" in error.msg


def test_a_server_that_cannot_be_reached_is_no_mistake_of_the_settings(postgresql, monkeypatch):
    def fail():
        raise OperationalError("connection refused")

    monkeypatch.setattr(postgresql, "ensure_connection", fail)
    assert ids("postgresql") == []


def test_an_engine_with_psycopg2_is_an_error(postgresql, monkeypatch):
    monkeypatch.setattr(postgresql.Database, "__name__", "psycopg2")
    assert ids("postgresql") == ["django_workqueue.E007"]


@pytest.mark.parametrize("level", IsolationLevel)
def test_only_read_committed_will_do(postgresql, level):
    postgresql.settings_dict["OPTIONS"]["isolation_level"] = level
    stricter = level in (IsolationLevel.REPEATABLE_READ, IsolationLevel.SERIALIZABLE)
    assert ids("postgresql") == (["django_workqueue.E008"] if stricter else [])


def test_the_servers_default_counts_unless_the_options_say_otherwise(postgresql):
    postgresql.close()
    options = postgresql.settings_dict["OPTIONS"]
    options["options"] = "-c default_transaction_isolation=serializable"
    [error] = check_database(None, databases=["postgresql"])
    assert error.id == "django_workqueue.E008"
    assert "SERIALIZABLE: the server's" in error.msg
    options["isolation_level"] = IsolationLevel.READ_COMMITTED
    postgresql.close()
    assert ids("postgresql") == []


@pytest.mark.parametrize("alias", ["default", "postgresql"])
def test_without_autocommit_workers_would_never_commit(settings, monkeypatch, alias):
    settings.WORKQUEUE = {"DATABASE": alias}
    monkeypatch.setitem(connections[alias].settings_dict, "AUTOCOMMIT", False)
    assert ids(alias) == ["django_workqueue.E009"]


def test_a_pooler_and_server_side_cursors_are_warned_of(settings, postgresql):
    settings.WORKQUEUE = {"DATABASE": "postgresql", "POOLER": True}
    assert ids("postgresql") == ["django_workqueue.W002"]
    postgresql.settings_dict["DISABLE_SERVER_SIDE_CURSORS"] = True
    assert ids("postgresql") == []


def test_the_bounds_are_those_of_the_oldest_django():
    assert connections["postgresql"].features.minimum_database_version >= checks.OLDEST_POSTGRESQL
