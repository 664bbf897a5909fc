"""What a process can't run: items without a handler here, and payloads that can't be read."""

import json
import re
import time
from datetime import timedelta
from io import StringIO
from unittest.mock import Mock

import pytest
from django.core.management import call_command
from django.db import connections, transaction
from django.db.models import Sum

from django_workqueue import WorkItem, WorkState
from django_workqueue.doctor import examine
from django_workqueue.items import stored_item
from django_workqueue.models import (
    DeadLetter,
    Failure,
    QueueItem,
    Ready,
    Waiting,
    WorkerProcess,
)
from django_workqueue.moves import RECALL_BATCH, ClaimRequest, Recall, Release
from django_workqueue.sql import WORKER_OPTIONS, recalling
from django_workqueue.testing import make_queue
from django_workqueue.worker.options import WorkerOptions
from django_workqueue.worker.unknown import DELAY, RATE, UnknownHandlers
from django_workqueue.worker.upkeep import Upkeep
from tests.elsewhere import Elsewhere
from tests.workers import eventually

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")
BOTH = pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
POSTGRESQL = pytest.mark.parametrize("backend", ["postgresql"])
UNKNOWN = Waiting.Cause.UNKNOWN_HANDLER


def items(*handlers, **fields):
    return [
        WorkItem(**{"tenant": "t", "id": f"{n}-{handler}", "handler": handler} | fields)
        for n, handler in enumerate(handlers)
    ]


def pass_on(queue, given, *, cause=UNKNOWN, deployment=None):
    """Have these items, which are all that are due, wait for an hour."""
    queue.enqueue_many(given)
    name = given[0].queue
    claimed = queue.claim_many(worker="w", limit=len(given), queue=name, deployment_id=deployment)
    told = [Release(item=c.job_id, fence=c.fence, delay=3600, cause=cause) for c in claimed]
    assert len(queue.moves.release("w", told)) == len(given)


def waiting(it):
    return Waiting.objects.using(it.alias).filter(cause=UNKNOWN)


# The move.


@pytest.fixture(params=["sqlite", "postgresql"])
def queue(request):
    queue = make_queue(request.param)
    yield queue
    assert examine(queue.using) == []


def recall(queue, *handlers, name="default", lanes=("",), **more):
    return queue.moves.recall(name, lanes, handlers, **more)


def due(queue, **claim):
    return [item.id for item in queue.claim_many(worker="w", limit=100, **claim)]


def test_a_recall_makes_due_what_waits_for_a_known_handler(queue):
    pass_on(queue, items("mail", "sms", "mail", ""))
    assert recall(queue, "mail", "fax") == Recall(recalled=2, seen=None)
    assert due(queue) == ["0-mail", "2-mail"]
    assert recall(queue, "").recalled == 1
    assert due(queue) == ["3-"]
    assert recall(queue, "mail").recalled == 0


def test_a_recall_leaves_what_waits_for_another_reason(queue):
    pass_on(queue, items("mail"), cause="released")
    assert recall(queue, "mail").recalled == 0


def test_a_recall_leaves_other_queues_and_what_is_pinned_elsewhere(queue):
    pass_on(queue, items("mail", queue="other", tenant="u"))
    pass_on(queue, items("mail", deployment_id="green"), deployment="green")
    assert recall(queue, "mail", lanes=["", "blue"]).recalled == 0
    assert recall(queue, "mail", lanes=["", "green"]).recalled == 1
    assert due(queue, deployment_id="green") == ["0-mail"]
    assert queue.stats(queue="other").due == 0


def test_recalls_one_after_the_other_see_each_item_once(queue):
    pass_on(queue, items(*["sms", "mail"] * 10))
    # Of one time more than are looked at together, and each of those once too.
    rows = Waiting.objects.using(queue.using)
    first = list(rows.order_by("item_id").values_list("pk", flat=True)[:8])
    rows.filter(pk__in=first).update(since=queue.moves.now() - timedelta(hours=1))
    recalled, after, calls = 0, None, 0
    while calls == 0 or after is not None:
        answer = recall(queue, "mail", after=after, limit=3)
        recalled, after, calls = recalled + answer.recalled, answer.seen, calls + 1
        assert calls <= 8, "it doesn't get on"
    assert recalled == 10
    assert rows.count() == 10


def test_a_recalled_item_keeps_its_place_its_fence_and_its_attempts(queue):
    pass_on(queue, items("mail", priority=7))
    recall(queue, "mail")
    queue.enqueue_many([*items("sms", priority=5), *items("fax", priority=9)])
    first, second, third = queue.claim_many(worker="w", limit=3)
    assert [first.handler, second.handler, third.handler] == ["fax", "mail", "sms"]
    assert (second.fence, second.attempts) == (2, 0)


def test_a_recall_passes_over_what_somebody_has_locked():
    queue = make_queue("postgresql")
    pass_on(queue, items("mail", "mail"))
    rows = Waiting.objects.using(queue.using).order_by("pk")
    with Elsewhere(queue.using) as other, transaction.atomic(using=queue.using):
        list(rows.select_for_update()[:1])
        assert other.call(lambda: recall(queue, "mail")).recalled == 1
    assert recall(queue, "mail").recalled == 1


class Planned:
    """A statement that a worker prepares while the tables are empty."""

    def __init__(self, text, given):
        self._connection = connections["postgresql"]
        self._given = given
        self._execute = f"execute planned ({', '.join(['%s'] * len(given))})"
        for number in range(len(given)):
            text = text.replace("%s", f"${number + 1}", 1)
        with self._connection.cursor() as cursor:
            for option, value in WORKER_OPTIONS.items():
                cursor.execute(f"set {option} = {value}")
            cursor.execute(f"prepare planned as {text.replace('%%', '%')}")
            cursor.execute(self._execute, given)

    def pages(self):
        """Run it; return how many pages it touches."""
        with self._connection.cursor() as cursor:
            cursor.execute(f"explain (analyze, buffers, format json) {self._execute}", self._given)
            [[answer]] = cursor.fetchall()
        [plan] = json.loads(answer) if isinstance(answer, str) else answer
        pages = plan["Plan"]["Shared Hit Blocks"] + plan["Plan"]["Shared Read Blocks"]
        print(f"pages: {pages}")
        return pages

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._connection.close()


def test_a_recall_planned_while_the_tables_were_empty_reads_its_batch_and_no_more():
    queue = make_queue("postgresql")
    given = {"queue": "default", "lanes": [""], "handlers": ["mail"], "after": None, "limit": 100}
    names = re.findall(r"%\((\w+)\)s", recalling.RECALL)
    text = re.sub(r"%\(\w+\)s", "%s", recalling.RECALL)
    with Planned(text, [given[name] for name in names]) as recall:
        pass_on(queue, items(*["sms"] * 3000))
        # A row, its index entry and a body by its index, for each of the 100.
        assert recall.pages() <= 100 * 8


def test_a_poll_planned_while_the_tables_were_empty_reads_nothing_that_waits():
    queue = make_queue("postgresql")
    options = WorkerOptions(name="w", boot="b", alias="postgresql", queues=("default", "mail"))
    WorkerProcess.objects.using(queue.using).create(
        **{name: getattr(options, name) for name in ("name", "boot", "queues")},
        host="h",
        pid=1,
        started_at=queue.moves.now(),
        seen_at=queue.moves.now(),
    )
    text, given = Upkeep(options, Mock())._question
    with Planned(text, given) as poll:
        later = queue.moves.now() + timedelta(days=1)
        for _ in range(5):
            queue.enqueue_many(WorkItem(tenant="t", available_at=later) for _ in range(1000))
        assert poll.pages() <= 40


# What a process does about them.


@pytest.fixture
def handlers(queue):
    options = WorkerOptions(name="w", boot="b", alias=queue.using, queues=("default",))
    return UnknownHandlers(queue, options)


def test_what_a_process_passes_on_comes_back_one_after_the_other_and_not_at_once(handlers):
    claimed = stored_item(id="x", tenant="t", payload={}, handler="absent", job_id=1, fence=1)
    number, began = 3000, time.monotonic()
    delays = [handlers.pass_on(claimed).delay for _ in range(number)]
    took = time.monotonic() - began
    assert delays[0] == DELAY
    assert DELAY + number / RATE - took - 1 <= delays[-1] <= DELAY + number / RATE


def test_a_new_process_searches_all_that_waits_and_then_a_step_at_a_time(queue, handlers):
    pass_on(queue, items(*["absent"] * RECALL_BATCH))
    pass_on(queue, items("nothing"))
    assert handlers.searching
    assert handlers.recall() == []
    assert handlers.searching
    assert handlers.recall() == ["default"]
    assert not handlers.searching
    assert len(due(queue)) == 1
    handlers.search(["default"])  # the last look was none in vain
    assert handlers.recall() == []
    assert not handlers.searching
    handlers.search(["default"])
    assert not handlers.searching


def test_a_row_that_stands_in_the_way_of_a_recall_stops_nothing_else(queue, handlers, caplog):
    pass_on(queue, items("nothing"))
    place = Waiting.objects.using(queue.using).values(
        "item_id", "queue", "deployment_id", "tenant", "rank", "enqueued_at"
    )
    forged = Ready.objects.using(queue.using).create(**place.get())
    assert handlers.recall() == []
    assert not handlers.searching
    assert "a row stands in the way" in caplog.text
    forged.delete()


# Workers.


def start(it, *, without=None, **settings):
    """Start a worker of one process, whose code has not the handler *without*."""
    it.environment.pop("WORKQUEUE_TEST_ABSENT", None)
    if without:
        it.environment["WORKQUEUE_TEST_ABSENT"] = without
    return it.start("--processes", "1", **settings)


def traced(it, ids):
    return [len(it.traces("ran", id)) for id in ids]


@POSTGRESQL
def test_an_old_worker_beside_a_new_one_loses_counts_and_repeats_nothing(backend, scene):
    it = scene(backend)
    ids = [f"new-{n}" for n in range(60)]
    old = start(it, without="leave_trace")
    for id in ids[:30]:
        it.enqueue("leave_trace", id)
    eventually(lambda: waiting(it).count() == 30)
    start(it)
    for id in ids[30:]:
        it.enqueue("leave_trace", id)
    it.completed(*ids)
    assert traced(it, ids) == [1] * len(ids)
    assert not Failure.objects.using(it.alias).exists()
    assert old.log.count("unknown handler: queue=default handler=leave_trace\n") == 1
    assert old.log.count("unknown handler") == 1


@POSTGRESQL
def test_what_nobody_can_run_waits_and_shows_and_runs_once_a_worker_boots_that_can(backend, scene):
    it = scene(backend)
    then = it.queue.moves.now() - timedelta(hours=1)
    ids = [f"new-{n}" for n in range(5)]
    old = start(it, without="leave_trace")
    for id in ids:
        it.enqueue("leave_trace", id, enqueued_at=then)
    # Again and again: it is the item that grows old, not its latest return.
    for fence in (1, 2, 3):
        eventually(lambda fence=fence: waiting(it).filter(fence=fence).count() == 5)
        waiting(it).update(due_at=it.queue.moves.now())
    eventually(lambda: waiting(it).count() == 5)
    it.queue.enqueue(WorkItem(tenant="t", id="good", handler="nothing"))
    it.completed("good")
    out = StringIO()
    call_command("workqueue", "status", "--json", "--database", it.alias, stdout=out)
    [told] = json.loads(out.getvalue())["unknown_handlers"]
    assert (told["handler"], told["number"]) == ("leave_trace", 5)
    assert told["oldest_age_seconds"] > 3600
    old.send(15)
    assert old.wait() == 0
    waiting(it).update(due_at=it.queue.moves.now() + timedelta(hours=1))
    new = start(it)
    eventually(lambda: "process started" in new.log)
    began = time.monotonic()
    it.completed(*ids)
    print(f"run {time.monotonic() - began:.2f} s after the process was started")
    assert "recalled: queue=default items=5" in new.log
    assert traced(it, ids) == [1] * 5
    assert not Failure.objects.using(it.alias).exists()


@BOTH
def test_an_idle_worker_takes_in_time_what_another_could_not_run(backend, scene):
    it = scene(backend)
    start(it)
    it.enqueue("leave_trace", "first")
    it.completed("first")
    later = WorkItem(tenant="t", id="later", handler="leave_trace", payload={"alias": it.theirs})
    with transaction.atomic(using=it.alias):  # or it would take it at once
        pass_on(it.queue, [later])
    it.completed("later")


@POSTGRESQL
def test_a_worker_ends_though_items_without_a_handler_become_due_all_the_time(backend, scene):
    it = scene(backend)
    pass_on(it.queue, items(*["absent"] * 500))
    now = it.queue.moves.now()
    for n, pk in enumerate(waiting(it).values_list("pk", flat=True)):
        waiting(it).filter(pk=pk).update(due_at=now + timedelta(seconds=n / 50))
    # Seldom enough that no duty makes them ready in between.
    slow = {"WORKER": {"poll_seconds": 0.1, "reap_seconds": 3600, "stop_timeout_seconds": 5}}
    assert it.drain("--processes", "1", settings=slow) == 0
    assert it.queue.stats().depth == 500


@pytest.mark.slow
@POSTGRESQL
def test_many_items_without_a_handler_cost_those_behind_them_one_look_each(backend, scene):
    it = scene(backend)
    unknown, good = 20_000, 200
    for _ in range(unknown // 1000):
        it.queue.enqueue_many(WorkItem(tenant="t", handler="absent") for _ in range(1000))
    it.queue.enqueue_many(WorkItem(tenant="t", handler="nothing") for _ in range(good))
    most = unknown + 60 * RATE  # what comes back in a minute

    def looks():
        return waiting(it).aggregate(looks=Sum("fence"))["looks"] or 0

    began = time.monotonic()
    start(it)
    eventually(lambda: it.queue.stats().completed == good or looks() > most, timeout=120)
    took, number = time.monotonic() - began, looks()
    print(f"{number} looks at {unknown} items in {took:.1f} s until the {good} were done")
    assert it.queue.stats().completed == good
    assert number <= most
    # And they don't come back faster than so many a second.
    times = sorted(waiting(it).values_list("due_at", flat=True))
    tens = [late - early for early, late in zip(times, times[10 * RATE :], strict=False)]
    print(f"1,000 of them within {min(tens).total_seconds():.1f} s at least")
    assert min(tens) >= timedelta(seconds=8)


@POSTGRESQL
def test_payloads_that_cannot_be_read_end_and_keep_nobody_waiting(backend, scene):
    it = scene(backend)
    bad = it.queue.enqueue_many(WorkItem(tenant="t", handler="nothing") for _ in range(1000))
    bodies = QueueItem.bodies.using(it.alias).filter(pk__in=[item.job_id for item in bad])
    assert bodies.update(payload=["no", "object"]) == 1000
    for tenant in ("t", "u"):
        it.queue.enqueue_many(WorkItem(tenant=tenant, handler="nothing") for _ in range(50))
    start(it)
    eventually(lambda: it.queue.stats().completed == 100)
    dead = DeadLetter.objects.using(it.alias)
    eventually(lambda: dead.count() == 1000)
    assert {(row.fence, row.attempts, row.reason) for row in dead} == {(1, 1, "rejected")}
    kinds = Failure.objects.using(it.alias).values_list("kind", "number", "outcome")
    assert set(kinds) == {("undecodable", 1, WorkState.DEAD_LETTERED)}
    assert it.queue.stats().depth == 0


@BOTH
def test_a_claim_of_a_worker_does_not_hold_what_is_good_until_all_that_is_bad_has_ended(backend):
    queue = make_queue(backend)
    bad = queue.enqueue_many(items(*["x"] * 60))
    QueueItem.bodies.using(queue.using).filter(pk__in=[i.job_id for i in bad]).update(payload=[])
    queue.enqueue_many(WorkItem(tenant="u", id=f"good-{n}") for n in range(3))
    request = ClaimRequest(queue="default", worker="w", limit=8)
    claimed, more = queue.claim_for(request)
    assert ([item.id for item in claimed], more) == (["good-0", "good-1", "good-2"], True)
    assert queue.stats().dead_lettered in (4, 5)
    # Whereas the verb is full unless nothing more is due.
    queue.enqueue_many(WorkItem(tenant="t", id=f"behind-{n}") for n in range(9))
    assert len(queue.claim_many(worker="w", limit=8)) == 8
    assert examine(queue.using) == []
