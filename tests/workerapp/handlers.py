"""Handlers for the tests. The payload's `alias` is the database in which they leave traces."""

import asyncio
import contextlib
import math
import os
import re
import threading
import time
from pathlib import Path

from asgiref.sync import sync_to_async
from django.db import connections, transaction

from django_workqueue import Pause, Reject, Retry, handler
from tests.workerapp.models import Trace


def trace(what, payload, context):
    Trace.objects.using(payload["alias"]).create(
        what=what, item=context.item.id, pid=os.getpid(), fence=context.fence
    )


def wait_for(path):
    """Wait until the test makes the file *path*."""
    while not Path(path).exists():
        time.sleep(0.01)


@handler("nothing")
def nothing(payload, context):
    return None


@handler("return_one")
def return_one(payload, context):
    return 1


@handler("leave_trace")
def leave_trace(payload, context):
    trace("ran", payload, context)
    return {"fence": context.fence}


@handler("leave_trace_async")
async def leave_trace_async(payload, context):
    await sync_to_async(trace)("ran", payload, context)
    await asyncio.sleep(0)
    return {"thread": threading.current_thread().name}


@handler("wait")
def wait(payload, context):
    """Run until the test makes a file, deaf to everything else."""
    trace("started", payload, context)
    wait_for(payload["until"])
    trace("ran", payload, context)


@handler("wait_without_trace")
def wait_without_trace(payload, context):
    """As `wait`, without a database."""
    Path(payload["until"] + ".started").touch()
    wait_for(payload["until"])


@handler("wait_politely")
def wait_politely(payload, context):
    trace("started", payload, context)
    while not Path(payload["until"]).exists():
        context.check()
        time.sleep(0.01)
    trace("ran", payload, context)


@handler("wait_async")
async def wait_async(payload, context):
    await sync_to_async(trace)("started", payload, context)
    while not Path(payload["until"]).exists():
        await asyncio.sleep(0.01)
    await sync_to_async(trace)("ran", payload, context)


@handler("die")
def die(payload, context):
    trace("started", payload, context)
    os._exit(9)


@handler("die_once")
def die_once(payload, context):
    trace("started", payload, context)
    if context.attempt == 1:
        os._exit(9)


@handler("hold_interpreter")
def hold_interpreter(payload, context):
    """Keep the interpreter's lock for some seconds in a single call of C code."""
    trace("started", payload, context)
    took = backtrack(payload["seconds"])
    trace("ran", payload, context)
    return took


def backtrack(seconds):
    """Match so many seconds, in the last of a few calls."""
    length, took = 18, 0.0
    while took < seconds:
        # Each further letter doubles the time; guessed from the call before.
        length += math.ceil(math.log2(seconds / took)) if took > 0.01 else 1
        began = time.monotonic()
        re.match(r"(a+)+$", "a" * length + "b")
        took = time.monotonic() - began
    return took


@handler("deaf_async")
async def deaf_async(payload, context):
    """Swallow the cancellation, and return as if nothing had been."""
    await sync_to_async(trace)("started", payload, context)
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()


@handler("exit")
def exit_quietly(payload, context):
    raise SystemExit("not the end of the process")


@handler("reject")
def reject(payload, context):
    raise Reject("of no use")


@handler("pause_once")
def pause_once(payload, context):
    trace("ran", payload, context)
    if "answer" not in payload:
        raise Pause("a person must say how to go on")
    return payload["answer"]


@handler("pause_async")
async def pause_async(payload, context):
    raise Pause


@handler("pause_atomic", atomic=True)
def pause_atomic(payload, context):
    trace("undone", payload, context)
    raise Pause


@handler("retry_at_once")
def retry_at_once(payload, context):
    trace("started", payload, context)
    raise Retry(0.0)


@handler("return_rubbish")
def return_rubbish(payload, context):
    return object()


@handler("atomic", atomic=True)
def atomic(payload, context):
    trace("ran", payload, context)
    if "started" in payload:
        Path(payload["started"]).touch()
        wait_for(payload["until"])
    if "raise" in payload:
        raise ValueError(payload["raise"])
    return {"fence": context.fence}


@handler("atomic_misused", atomic=True)
def atomic_misused(payload, context):
    misuse(payload["how"], payload, context)


@handler("misused")
def misused(payload, context):
    misuse(payload["how"], payload, context)


def misuse(how, payload, context):
    """Do with a connection what a handler should not."""
    alias = payload["alias"]
    connection = connections[alias]
    connection.ensure_connection()
    if how == "close":
        connection.close()
    elif how == "close_driver":
        connection.connection.close()
    elif how == "commit":
        with connection.cursor() as cursor:
            cursor.execute("COMMIT")
    elif how == "rollback":
        with connection.cursor() as cursor:
            cursor.execute("ROLLBACK")
    elif how == "set_rollback":
        transaction.set_rollback(True, using=alias)
    elif how == "enter_block":
        block = transaction.atomic(using=alias)
        block.__enter__()
        trace("ran", payload, context)
    elif how == "begin":
        with connection.cursor() as cursor:
            cursor.execute("BEGIN")
        trace("ran", payload, context)
    elif how == "broken":
        with connection.cursor() as cursor, contextlib.suppress(Exception):
            cursor.execute("select * from no_such_table")


@handler("wait_and_die")
def wait_and_die(payload, context):
    """As `wait`, and end the process."""
    trace("started", payload, context)
    wait_for(payload["until"])
    os._exit(9)


@handler("end_late")
def end_late(payload, context):
    """Wait, and end as the payload says; a later attempt waits for another file, and returns."""
    began = Path(f"{payload['until']}.{context.attempt}")
    began.with_name(began.name + ".new").write_text(str(os.getpid()))
    began.with_name(began.name + ".new").rename(began)
    if context.attempt > 1:
        return wait_for(payload["until"] + ".again")
    wait_for(payload["until"])
    trace("ran", payload, context)
    ends = {"fail": ValueError(), "reject": Reject("no"), "retry": Retry(0.0), "pause": Pause()}
    if payload["how"] in ends:
        raise ends[payload["how"]]


@handler("end_late_atomic", atomic=True)
def end_late_atomic(payload, context):
    end_late(payload, context)


@handler("exit_tidily")
def exit_tidily(payload, context):
    """End the process as if all was well."""
    trace("started", payload, context)
    os._exit(0)
