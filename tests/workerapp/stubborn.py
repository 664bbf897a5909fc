"""Handlers that don't stop when they are told to, or only in their later attempts."""

import asyncio
import contextlib
import ctypes
import math
import os
import signal
import threading
import time
from pathlib import Path

from asgiref.sync import sync_to_async

from django_workqueue import handler
from tests.workerapp.handlers import backtrack, trace, wait_for


@handler("deaf_at_first")
def deaf_at_first(payload, context):
    """As `wait` in the first attempt; a later one returns at once."""
    trace("started", payload, context)
    if context.attempt == 1:
        wait_for(payload["until"])
    trace("ran", payload, context)


@handler("polite_at_first")
def polite_at_first(payload, context):
    """Watch the flag in the first attempt, and return as if nothing had been; later at once."""
    trace("started", payload, context)
    while context.attempt == 1 and not context.cancelled:
        time.sleep(0.01)
    trace("ran", payload, context)


@handler("deaf_async_for_ever")
async def deaf_async_for_ever(payload, context):
    """Swallow the cancellation, and go on as if nothing had been."""
    await sync_to_async(trace)("started", payload, context)
    while not Path(payload["until"]).exists():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0.01)
    await sync_to_async(trace)("ran", payload, context)


@handler("seize_interpreter")
def seize_interpreter(payload, context):
    """Once the test makes a file, keep the interpreter's lock for longer than any test."""
    trace("started", payload, context)
    wait_for(payload["until"])
    backtrack(3600)


@handler("deaf_async_at_first")
async def deaf_async_at_first(payload, context):
    """As `deaf_async_for_ever` in the first attempt; a later one returns at once."""
    if context.attempt == 1:
        await deaf_async_for_ever(payload, context)
    else:
        await sync_to_async(trace)("started", payload, context)


@handler("kill_itself")
def kill_itself(payload, context):
    """End as what runs out of memory does."""
    trace("started", payload, context)
    os.kill(os.getpid(), signal.SIGKILL)


@handler("raise_to_a_power")
def raise_to_a_power(payload, context):
    """Keep the interpreter's lock for some seconds in one calculation with a big integer."""
    trace("started", payload, context)
    exponent, took = 10_000, 0.0
    while took < payload["seconds"]:
        # It costs about the exponent to the power of 1.6; guessed from the call before.
        exponent = math.ceil(
            exponent * min(8.0, (payload["seconds"] / took) ** 0.7) if took > 0.01 else exponent * 2
        )
        began = time.monotonic()
        3**exponent
        took = time.monotonic() - began
    trace("ran", payload, context)
    return took


@handler("lock_up")
def lock_up(payload, context):
    """Hold the interpreter's lock and do nothing, as a process that is deadlocked in C does."""
    trace("started", payload, context)
    if context.attempt == 1:
        ctypes.PyDLL(None).sleep(3600)
    trace("ran", payload, context)


_LOCKS = threading.Lock(), threading.Lock()
_BOTH_BEGAN = threading.Barrier(2)


@handler("lock_each_other_out")
def lock_each_other_out(payload, context):
    """Of two: wait for ever for what the other has."""
    trace("started", payload, context)
    if context.attempt == 1:
        mine, others = _LOCKS if context.item.id == "a" else _LOCKS[::-1]
        with mine:
            _BOTH_BEGAN.wait()
            others.acquire()
    trace("ran", payload, context)


@handler("wait_and_exit_tidily")
def wait_and_exit_tidily(payload, context):
    """Once the test makes a file, end the process as if all was well."""
    trace("started", payload, context)
    wait_for(payload["until"])
    os._exit(0)
