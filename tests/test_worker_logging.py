"""What code in a handler, and every line that it logs, knows of the item."""

import asyncio
import json
import logging
import re

import pytest

from django_workqueue import Context, WorkItem, current_context
from django_workqueue.log import FIELDS, ContextFilter
from django_workqueue.worker.options import configure_logging
from tests.project import Project
from tests.test_docs import DOCS, blocks
from tests.test_worker_parts import Bench, held

HANDLERS = """
import asyncio
import contextvars
import logging
import threading

from asgiref.sync import async_to_sync, sync_to_async

from django_workqueue import Retry, handler

logger = logging.getLogger("shop")


def say(what):
    logger.info(what)


async def say_later(what):
    await asyncio.sleep(0.01)
    logger.info(what)


@handler("sync")
def sync(payload, context):
    say("handler")
    async_to_sync(say_later)("async_to_sync")
    for what, run in (("own thread", say), ("copied", contextvars.copy_context().run)):
        arguments = [what] if run is say else [say, what]
        thread = threading.Thread(target=run, args=arguments)
        thread.start()
        thread.join()
    if context.attempt == 1:
        raise Retry(0)


@handler("async")
async def asynchronous(payload, context):
    say("handler")
    await sync_to_async(say)("sync_to_async")
    await asyncio.to_thread(say, "to_thread")
    await asyncio.gather(asyncio.create_task(say_later("task")), say_later("gathered"))
    if context.attempt == 1:
        raise Retry(0)
"""
SAID = {
    "sync": {"handler", "async_to_sync", "copied"},
    "async": {"handler", "sync_to_async", "to_thread", "task", "gathered"},
}


# The context.


class Looking(Bench):
    """Notes what the runtime itself sees right after a handler, where it ran."""

    after = ()

    def report(self, held, settlement):
        self.after += (current_context(),)
        super().report(held, settlement)


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize("fails", [False, True])
def test_the_context_is_there_during_the_handler_and_gone_after_it(how, fails):
    seen = []

    def sync(payload, context):
        seen.append(current_context())
        if fails:
            raise ValueError

    async def asynchronous(payload, context):
        await asyncio.sleep(0)
        sync(payload, context)

    bench = Looking(concurrency=1)
    items = [held(sync if how == "sync" else asynchronous, number) for number in (1, 2)]
    for each in items:
        bench.slots.offer([each])
        bench.end_of(each)
    assert seen == [each.context for each in items]
    assert bench.after == (None, None)
    assert current_context() is None


def test_async_handlers_in_one_loop_see_their_own_context_each():
    together, seen = [], {}

    async def handler(payload, context):
        together.append(context)
        while len(together) < 2:
            await asyncio.sleep(0.001)
        seen[context.item.id] = current_context()

    bench = Bench()
    items = [held(handler, number) for number in (1, 2)]
    bench.slots.offer(items)
    for each in items:
        bench.end_of(each)
    assert seen == {each.item.id: each.context for each in items}


def test_a_handler_that_calls_another_has_its_own_context_back_afterwards():
    inner = held(lambda payload, context: current_context(), 1)
    outer = Context(WorkItem(tenant="t"))

    def call(payload, context):
        return inner.handler(payload, inner.context), current_context()

    async def own(payload, context):
        return current_context()

    async def call_async(payload, context):
        return await held(own, 3).handler(payload, inner.context), current_context()

    assert held(call, 2).handler({}, outer) == (inner.context, outer)
    assert asyncio.run(held(call_async, 4).handler({}, outer)) == (inner.context, outer)


# Records.


def record(**extra):
    return logging.getLogger("shop").makeRecord(
        "shop", logging.INFO, "file", 1, "text", (), None, extra=extra
    )


def test_a_record_outside_of_handlers_has_empty_fields_and_keeps_its_own():
    one = record(tenant="mine")
    assert ContextFilter().filter(one)
    values = {field: getattr(one, field) for field in FIELDS}
    assert values == dict.fromkeys(FIELDS, "") | {"tenant": "mine"}


def shown_logging():
    """The LOGGING of the manual."""
    (text,) = [text for _, text in blocks(DOCS / "logging.md") if text.startswith("LOGGING")]
    return text


@pytest.mark.django_db(transaction=True, databases="__all__")
@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
def test_with_the_logging_of_the_manual_every_line_is_json_and_names_the_item(backend, scene):
    it = scene(backend)
    Project(it, HANDLERS, shown_logging())
    items = [
        it.queue.enqueue(
            WorkItem(tenant=f"tenant {n}", handler=kind, id=f"{kind}-{n}", max_attempts=2)
        )
        for n in range(4)
        for kind in SAID
    ]
    worker = it.start("--until-empty", "--processes", "1", "--name", "w", "--verbosity", "2")
    assert worker.wait() == 0
    lines = [json.loads(line) for line in worker.log.splitlines()]
    assert all({*FIELDS, "asctime", "levelname", "message"} <= {*line} for line in lines)
    told = {
        (*(line[field] for field in FIELDS), line["message"])
        for line in lines
        if line["name"] == "shop"
    }
    assert told == {
        ("default", item.tenant, item.id, item.job_id, attempt, "w", what)
        for item in items
        for attempt in (1, 2)
        for what in SAID[item.handler]
    } | {("",) * len(FIELDS) + ("own thread",)}
    assert {line["item"] for line in lines if line["name"] == "django_workqueue"} == {""}


# The worker's own lines.


@pytest.mark.django_db(transaction=True, databases="__all__")
@pytest.mark.parametrize(
    ("verbosity", "phrases"),
    [
        (0, {"failed for good"}),
        (1, {"failed for good", "failed", "life"}),
        (2, {"failed for good", "failed", "life", "succeeded"}),
    ],
)
def test_the_verbosity_decides_what_is_told(verbosity, phrases, scene):
    it = scene("sqlite")
    it.enqueue("nothing", "good")
    it.enqueue("retry_at_once", "bad", max_attempts=2)
    worker = it.start("--until-empty", "--processes", "1", "--verbosity", str(verbosity))
    assert worker.wait() == 0
    patterns = {
        "failed for good": r"WARNING attempt failed: .* item=bad attempt=2 .* now=dead_lettered",
        "failed": r"INFO    attempt failed: .* item=bad attempt=1 .* now=queued",
        "life": r"INFO    (worker|process) (started|ended): |INFO    draining: ",
        "succeeded": r"DEBUG   attempt succeeded: "
        r"queue=default tenant=t item=good attempt=1 seconds=\d+\.\d{3}$",
    }
    told = [
        {phrase for phrase, pattern in patterns.items() if re.search(pattern, line)}
        for line in worker.log.splitlines()
    ]
    assert all(told), worker.log
    assert set().union(*told) == phrases


@pytest.fixture
def logger():
    logger = logging.getLogger("django_workqueue")
    before = (logger.level, [*logger.handlers])
    yield logger
    logger.setLevel(before[0])
    logger.handlers = before[1]


def test_a_level_of_the_project_stands_whatever_the_verbosity(logger):
    logger.setLevel(logging.ERROR)
    configure_logging(2)
    assert logger.level == logging.ERROR
    logger.setLevel(logging.NOTSET)
    configure_logging(2)
    assert logger.level == logging.DEBUG
