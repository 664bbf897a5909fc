"""The benchmark's own database: on the server of DATABASE_URL, else on one that it starts."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

import psycopg
from django.db import connections
from django.db.utils import ConnectionHandler
from psycopg import sql

from bench import BenchError

#: The alias of the benchmark's database, in this process and in the clients.
ALIAS: Final = "bench"
# Options that Django understands and PostgreSQL doesn't.
_OF_DJANGO: Final = {"assume_role", "isolation_level", "pool", "server_side_binding"}

Settings = dict[str, Any]


@contextmanager
def own_database() -> Iterator[tuple[Settings, Settings]]:
    """
    Make an empty database under `ALIAS`, and drop it at the end.

    Yield Django's settings of it, and those of the one by way of which it is made.
    """
    with _server() as server:
        name = f"workqueue_bench_{os.getpid()}_{secrets.token_hex(3)}"
        _administer(server, "create database {}", name)
        try:
            settings = {**server, "NAME": name, "CONN_MAX_AGE": None}
            register(settings)
            yield settings, server
        finally:
            _forget()
            _administer(server, "drop database {} with (force)", name)


def register(settings: Settings) -> None:
    """Let `ALIAS` lead to the database of these settings, in this process."""
    connections.settings[ALIAS] = ConnectionHandler({"default": settings}).settings["default"]


def connect(settings: Settings, options: Mapping[str, str] = {}) -> psycopg.Connection[Any]:
    """Return a bare connection that commits by itself; *options*: the session's settings."""
    given = {key: value for key, value in settings["OPTIONS"].items() if key not in _OF_DJANGO}
    session = " ".join(f"-c {name}={value}" for name, value in options.items())
    given["options"] = f"{given.get('options', '')} {session}".strip()
    keys = {
        "NAME": "dbname",
        "USER": "user",
        "PASSWORD": "password",
        "HOST": "host",
        "PORT": "port",
    }
    where = {name: settings[key] for key, name in keys.items() if settings[key]}
    return psycopg.connect(**where, **given, autocommit=True)


@contextmanager
def _server() -> Iterator[Settings]:
    """Yield how to reach the server, by way of a database that exists on it."""
    if url := os.environ.get("DATABASE_URL"):
        yield _parsed(url)
        return
    try:
        # The server of the suite, which stops and deletes itself whatever happens.
        from tests.postgres import PostgresError, PostgresServer
    except ImportError as error:
        raise BenchError(f"No PostgreSQL can be started ({error}): set DATABASE_URL") from None
    try:
        server = PostgresServer()
    except PostgresError as error:
        raise BenchError(f"{error}\nOr set DATABASE_URL to a server that runs.") from None
    with server:
        settings = server.settings()
        del settings["TEST"]
        yield settings | {"ENGINE": "django.db.backends.postgresql", "NAME": "postgres"}


def _parsed(url: str) -> Settings:
    import dj_database_url

    try:
        parsed: Settings = dict(dj_database_url.parse(url))
    except ValueError as error:
        raise BenchError(f"DATABASE_URL can't be read: {error}") from None
    if parsed["ENGINE"] != "django.db.backends.postgresql":
        raise BenchError("DATABASE_URL must name a PostgreSQL database (postgres://…)")
    return {"OPTIONS": {}} | parsed


def _administer(server: Settings, statement: str, name: str) -> None:
    try:
        with connect(server) as connection:
            connection.execute(sql.SQL(statement).format(sql.Identifier(name)))
    except psycopg.Error as error:
        raise BenchError(f"{statement.format(name)}: {str(error).strip()}") from None


def _forget() -> None:
    with contextlib.suppress(AttributeError):  # never connected
        connections[ALIAS].close()
        del connections[ALIAS]
    del connections.settings[ALIAS]
