"""Handlers that don't stop when they are told to, or only in their later attempts."""

import asyncio
import contextlib
import time
from pathlib import Path

from asgiref.sync import sync_to_async

from django_workqueue import handler
from tests.workerapp.handlers import hold_interpreter, trace, wait_for


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
    hold_interpreter(payload | {"seconds": 3600}, context)


@handler("deaf_async_at_first")
async def deaf_async_at_first(payload, context):
    """As `deaf_async_for_ever` in the first attempt; a later one returns at once."""
    if context.attempt == 1:
        await deaf_async_for_ever(payload, context)
    else:
        await sync_to_async(trace)("started", payload, context)
