"""Handlers that do with their connections what they should not, and one that uses them well."""

import contextlib
import time

from asgiref.sync import sync_to_async
from django.db import connections, transaction

from django_workqueue import handler
from tests.workerapp.models import Trace

#: By name, what is done with a connection. What *leave* leaves there must not be stored.
MISUSES = {}


def misuse(function):
    MISUSES[function.__name__] = function
    return function


@misuse
def close(connection, leave):
    connection.close()


@misuse
def close_driver(connection, leave):
    connection.connection.close()


@misuse
def send_commit(connection, leave):
    _send(connection, "COMMIT")


@misuse
def send_rollback(connection, leave):
    _send(connection, "ROLLBACK")


@misuse
def rollback_of_the_driver(connection, leave):
    connection.connection.rollback()


@misuse
def swallow_an_error(connection, leave):
    _send(connection, "select * from no_such_table")


@misuse
def swallow_an_error_in_a_block(connection, leave):
    with transaction.atomic(using=connection.alias):
        leave()
        _send(connection, "select * from no_such_table")
        transaction.set_rollback(True, using=connection.alias)


@misuse
def raise_in_a_block(connection, leave):
    with transaction.atomic(using=connection.alias):
        leave()
        raise ValueError("in a block")


@misuse
def stay_in_a_block(connection, leave):
    transaction.atomic(using=connection.alias).__enter__()
    leave()


@misuse
def begin(connection, leave):
    _send(connection, "BEGIN")
    leave()


@misuse
def autocommit_off(connection, leave):
    transaction.set_autocommit(False, using=connection.alias)


@misuse
def autocommit_off_and_write(connection, leave):
    transaction.set_autocommit(False, using=connection.alias)
    leave()


def _send(connection, text):
    with connection.cursor() as cursor, contextlib.suppress(Exception):
        cursor.execute(text)


def _misuse(payload, context):
    connection = connections[payload["on"]]
    connection.ensure_connection()
    MISUSES[payload["how"]](connection, lambda: _trace(connection.alias, "left", context))


def _trace(alias, what, context):
    Trace.objects.using(alias).create(
        what=what, item=context.item.id, pid=_session(alias), fence=context.fence
    )


def _session(alias):
    """Which session of the server this is; 0 on SQLite."""
    if connections[alias].vendor != "postgresql":
        return 0
    with connections[alias].cursor() as cursor:
        cursor.execute("select pg_backend_pid()")
        return cursor.fetchone()[0]


def _use(payload, context):
    for alias in payload["uses"]:
        _trace(alias, "ran", context)
    end = time.monotonic() + payload.get("seconds", 0)
    while time.monotonic() < end:
        context.check()
        time.sleep(0.01)


@handler("misuse.sync")
def misuse_sync(payload, context):
    _misuse(payload, context)


@handler("misuse.async")
async def misuse_async(payload, context):
    await sync_to_async(_misuse)(payload, context)


@handler("misuse.atomic", atomic=True)
def misuse_atomic(payload, context):
    _misuse(payload, context)


@handler("use.sync")
def use_sync(payload, context):
    _use(payload, context)


@handler("use.async")
async def use_async(payload, context):
    await sync_to_async(_use)(payload, context)


@handler("use.atomic", atomic=True)
def use_atomic(payload, context):
    _use(payload, context)
