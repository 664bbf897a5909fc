"""The parts of a worker, each for itself: channel, slots, endings of attempts, the command."""

import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from django.core.management import CommandError, call_command
from django.core.management.base import SystemCheckError

from django_workqueue import QueuePolicy, Reject, Retry, WorkState
from django_workqueue.exceptions import ClaimLostError
from django_workqueue.failures import FailureKind
from django_workqueue.handlers import Handler
from django_workqueue.items import stored_item
from django_workqueue.moves import Completion, EndedAttempt, Release
from django_workqueue.worker import children
from django_workqueue.worker.attempts import Held, cut
from django_workqueue.worker.channel import Channel, ChannelClosedError
from django_workqueue.worker.children import Child
from django_workqueue.worker.reasons import CANCELLED, RETIRED, SHUTDOWN, TIMEOUT
from django_workqueue.worker.slots import Slots
from django_workqueue.worker.trouble import Backoff
from django_workqueue.worker.wakeup import Wakeup
from tests.workers import PATIENCE, eventually

# The channel.


@pytest.fixture
def ends():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), Channel(theirs)


def test_what_was_sent_before_the_end_is_read_and_then_the_channel_is_closed(ends):
    ours, theirs = ends
    theirs.send("started", 1, 2)
    theirs.send("gone", [1])
    theirs.close()
    assert ours.receive() == [["started", 1, 2], ["gone", [1]]]
    with pytest.raises(ChannelClosedError):
        ours.receive()
    with pytest.raises(ChannelClosedError):
        ours.send("wake")
    ours.post("wake")  # never raises: reading tells


def test_posting_never_waits_for_a_side_that_does_not_read(ends):
    ours, theirs = ends
    words = ["x" * 1000] * 2000
    ours.post("long", *words)
    assert ours.flush()  # the kernel took a part only
    heard = []
    while not heard:
        heard = theirs.receive()
        ours.flush()
    assert heard == [["long", *words]]
    assert not ours.flush()


def test_receiving_returns_nothing_where_nothing_has_come(ends):
    assert ends[0].receive() == []


# Waiting.


def test_waits_double_with_jitter_up_to_a_limit_and_end_with_a_success():
    backoff = Backoff(first=1.0, longest=5.0)
    waits = [backoff.failed() for _ in range(5)]
    for wait, full in zip(waits, [1, 2, 4, 5, 5], strict=True):
        assert full / 2 <= wait <= full
    assert 0 < backoff.remaining <= 5
    assert backoff.over()
    assert backoff.remaining == 0
    assert not backoff.over()
    assert backoff.failed() <= 1


def test_a_signal_or_a_nudge_wakes_whoever_waits():
    before = signal.getsignal(signal.SIGUSR1)
    with Wakeup([signal.SIGUSR1]) as wakeup:
        wakeup.nudge()
        assert select.select([wakeup], [], [], 0)[0]
        assert wakeup.take() == []
        assert not select.select([wakeup], [], [], 0)[0]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert select.select([wakeup], [], [], PATIENCE)[0]
        assert wakeup.take() == [signal.SIGUSR1]
    assert signal.getsignal(signal.SIGUSR1) is before


# Slots.


class Queue:
    """As much of a queue as handlers that are not atomic need."""

    def policy_for(self, queue):
        return QueuePolicy(max_payload_bytes=1000)


class Bench:
    """Slots, and what they announced and reported."""

    def __init__(self, concurrency=2):
        self.announced = []
        self.ends = {}
        self.ended = threading.Condition()
        self.slots = Slots(Queue(), concurrency, announce=self.announce, report=self.report)
        self.refuse = False

    def announce(self, held):
        if self.refuse:
            raise ChannelClosedError
        self.announced.append(held.job_id)

    def report(self, held, settlement):
        with self.ended:
            assert held.job_id not in self.ends
            self.ends[held.job_id] = settlement
            self.ended.notify_all()

    def end_of(self, held):
        with self.ended:
            assert self.ended.wait_for(lambda: held.job_id in self.ends, PATIENCE)
        return self.ends[held.job_id]


def held(function, number=1, *, lapsed=False, timeout=None):
    item = stored_item(
        id=f"item-{number}",
        tenant="t",
        payload={},
        state=WorkState.CLAIMED,
        worker="w",
        fence=7,
        job_id=number,
        timeout_seconds=timeout,
    )
    confirmed = time.monotonic() - 60 * lapsed
    handler = Handler(function=function, name=f"test-{number}")
    return Held(item, handler, lease_seconds=60, confirmed=confirmed)


class Gate:
    """Sync and async handlers that wait until the gate is opened, and how many do."""

    def __init__(self):
        self.opened = threading.Event()
        self.inside = 0

    def sync(self, payload, context):
        self.inside += 1
        self.opened.wait(PATIENCE)

    async def asynchronous(self, payload, context):
        self.inside += 1
        while not self.opened.is_set():
            await asyncio.sleep(0.01)


def test_sync_and_async_handlers_together_fill_the_slots_and_the_rest_waits_in_order():
    bench, gate = Bench(concurrency=3), Gate()
    functions = [gate.sync, gate.asynchronous, gate.sync, gate.asynchronous, gate.sync]
    items = [held(function, number) for number, function in enumerate(functions)]
    bench.slots.offer(items)
    eventually(lambda: gate.inside == 3)
    assert sorted(bench.announced) == [0, 1, 2]
    assert bench.slots.backlog
    assert bench.slots.withdraw() == items[3:]
    assert not bench.slots.backlog
    gate.opened.set()
    for each in items[:3]:
        assert bench.end_of(each) == Completion(item=each.job_id, fence=7)
    assert not bench.slots.running()


def test_a_slot_that_becomes_free_goes_on_with_what_waits():
    bench = Bench(concurrency=1)
    items = [held(lambda payload, context: 1, number) for number in range(20)]
    bench.slots.offer(items)
    for each in items:
        assert bench.end_of(each) == Completion(item=each.job_id, fence=7, result="1")
    assert bench.announced == list(range(20))


def test_attempts_count_as_long_while_no_slot_gets_free():
    bench, gate = Bench(concurrency=1), Gate()
    quick = [held(lambda payload, context: None, number) for number in range(60)]
    bench.slots.offer(quick)
    bench.end_of(quick[-1])
    assert bench.slots.attempt_seconds() < 0.005
    bench.slots.offer([held(gate.sync, 60)])
    eventually(lambda: bench.slots.attempt_seconds() > 0.005)
    gate.opened.set()


@pytest.mark.parametrize("reason", ["no supervisor", "lapsed", "cancelled"])
def test_what_may_not_start_is_given_back_unspent(reason):
    bench = Bench()
    each = held(lambda payload, context: pytest.fail("it ran"), lapsed=reason == "lapsed")
    bench.refuse = reason == "no supervisor"
    if reason == "cancelled":
        bench.slots.stop(each, CANCELLED)
    bench.slots.offer([each])
    assert bench.end_of(each) == Release(item=1, fence=7)
    assert each.started is None
    assert not bench.announced


@pytest.mark.parametrize(
    ("error", "message", "retryable", "delay"),
    [
        (ValueError("bad"), "ValueError: bad", True, None),
        (Reject("no"), "Reject: no", False, None),
        (Retry(3.0), "Retry: asked to be retried", True, 3.0),
        (SystemExit(1), "SystemExit: 1", True, None),
        (KeyboardInterrupt(), "KeyboardInterrupt", True, None),
        (GeneratorExit(), "GeneratorExit", True, None),
        (ClaimLostError("its own"), "ClaimLostError: its own", True, None),
        (asyncio.CancelledError(), "CancelledError", True, None),
    ],
)
@pytest.mark.parametrize("kind", ["sync", "async"])
def test_an_error_of_a_handler_ends_the_attempt_and_nothing_else(
    kind, error, message, retryable, delay
):
    def sync(payload, context):
        raise error

    async def asynchronous(payload, context):
        raise error

    bench = Bench()
    first, second = (held(sync if kind == "sync" else asynchronous, n) for n in (1, 2))
    for each in (first, second):
        bench.slots.offer([each])
        end = bench.end_of(each)
        assert isinstance(end, EndedAttempt)
        assert (end.kind, end.text.message) == (FailureKind.ERROR, message)
        assert (end.retryable, end.delay) == (retryable, delay)


def test_a_result_that_can_not_be_stored_is_a_failure():
    bench = Bench()
    for number, result in enumerate([object(), float("nan"), "x" * 2000]):
        each = held(lambda payload, context, result=result: result, number)
        bench.slots.offer([each])
        end = bench.end_of(each)
        assert end.text.message.startswith("PayloadError: result: ")


STOPPED = [
    (TIMEOUT, FailureKind.TIMEOUT, "exceeded its time limit of 2 s", None),
    (SHUTDOWN, FailureKind.SHUTDOWN, "interrupted by worker shutdown", 0.0),
    (RETIRED, FailureKind.DIED, "worker process died", 0.0),
]


def stopped_handlers():
    entered = threading.Event()

    def sync(payload, context):
        entered.set()
        while True:
            context.check()
            time.sleep(0.001)

    async def asynchronous(payload, context):
        entered.set()
        await asyncio.Event().wait()

    return entered, {"sync": sync, "async": asynchronous}


@pytest.mark.parametrize("how", ["sync", "async"])
@pytest.mark.parametrize(("reason", "kind", "message", "delay"), STOPPED)
def test_a_handler_that_heeds_the_word_to_stop_fails_for_its_reason(
    how, reason, kind, message, delay
):
    bench, (entered, functions) = Bench(), stopped_handlers()
    each = held(functions[how], timeout=2)
    bench.slots.offer([each])
    assert entered.wait(PATIENCE)
    bench.slots.stop(each, reason)
    end = bench.end_of(each)
    assert (end.kind, end.text.message, end.delay) == (kind, message, delay)


@pytest.mark.parametrize(("reason", "kind", "message", "delay"), STOPPED)
def test_an_attempt_that_is_cut_is_settled_by_the_reason_it_was_stopped_for(
    reason, kind, message, delay
):
    each = held(lambda payload, context: None, timeout=2)
    each.stopped = reason
    end = cut(each)
    assert (end.kind, end.text.message, end.delay) == (kind, message, delay)


def test_of_an_attempt_that_is_cut_a_wish_to_cancel_is_heeded_and_a_loss_settles_nothing():
    each = held(lambda payload, context: None)
    each.stopped = CANCELLED
    assert cut(each) == Release(item=1, fence=7)
    each.stopped = "taken"
    assert cut(each) is None


@pytest.mark.parametrize("how", ["sync", "async"])
def test_a_handler_that_heeds_a_wish_to_cancel_gives_its_item_back(how):
    bench, (entered, functions) = Bench(), stopped_handlers()
    each = held(functions[how])
    bench.slots.offer([each])
    assert entered.wait(PATIENCE)
    bench.slots.stop(each, CANCELLED)
    assert bench.end_of(each) == Release(item=1, fence=7)


@pytest.mark.parametrize("how", ["sync", "async"])
def test_nothing_is_settled_of_a_claim_that_is_lost(how):
    bench, (entered, functions) = Bench(), stopped_handlers()
    each = held(functions[how])
    bench.slots.offer([each])
    assert entered.wait(PATIENCE)
    bench.slots.stop(each, "taken")
    assert bench.end_of(each) is None


def test_a_loss_replaces_every_other_reason_to_stop_and_the_first_of_the_others_stays():
    bench = Bench()
    each = held(lambda payload, context: None)
    bench.slots.stop(each, TIMEOUT)
    bench.slots.stop(each, SHUTDOWN)
    assert (each.stopped, each.lost) == (TIMEOUT, False)
    bench.slots.stop(each, "expired")
    bench.slots.stop(each, CANCELLED)
    assert (each.stopped, each.lost) == ("expired", True)


def test_success_after_the_time_limit_is_a_timeout_but_after_a_shutdown_a_success():
    for reason, expected in ((TIMEOUT, EndedAttempt), (SHUTDOWN, Completion)):
        bench, gate = Bench(), Gate()
        each = held(gate.sync, timeout=1)
        bench.slots.offer([each])
        eventually(lambda gate=gate: gate.inside)
        bench.slots.stop(each, reason)
        gate.opened.set()
        assert isinstance(bench.end_of(each), expected)


def test_an_async_handler_is_cancelled_once_so_that_its_cleaning_up_is_not_cut():
    bench, gate, entered = Bench(), Gate(), threading.Event()

    async def handler(payload, context):
        try:
            entered.set()
            await asyncio.Event().wait()
        finally:
            await gate.asynchronous(payload, context)

    each = held(handler, timeout=1)
    bench.slots.offer([each])
    assert entered.wait(PATIENCE)
    bench.slots.stop(each, TIMEOUT)
    eventually(lambda: gate.inside)
    for reason in (SHUTDOWN, "expired"):
        bench.slots.stop(each, reason)
    # In the loop's thread, so after the words to stop.
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0.05), bench.slots._loop).result(PATIENCE)
    assert not bench.ends
    gate.opened.set()
    assert bench.end_of(each) is None


# Signs of life.


@pytest.fixture
def child():
    """Makes a child whose process does nothing, or works without a word."""
    started, sockets = [], []

    def start(program):
        command = [sys.executable, "-c", f"print(1, flush=True)\n{program}"]
        popen = subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
        started.append(popen)
        assert popen.stdout.readline()
        ours, theirs = socket.socketpair()
        theirs.close()
        sockets.append(ours)
        return Child(1, None, popen, Channel(ours))

    yield start
    for end in sockets:
        end.close()
    for popen in started:
        popen.kill()
        popen.communicate()


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="no /proc")
def test_a_process_is_responsive_while_it_is_heard_or_computes_and_is_not_stopped(
    child, monkeypatch
):
    monkeypatch.setattr(children, "SILENCE", 0.5)
    monkeypatch.setattr(children, "LOOK", 0.1)
    silent = child("import sys; sys.stdin.read()")
    silent.leases[1] = children.HeldLease(1, 1, 60.0, None, look_at=0.0)
    silent.heard()
    assert silent.responsive()
    eventually(lambda: not silent.responsive())
    silent.heard()
    assert silent.responsive()

    busy = child("while True: pass")
    end = time.monotonic() + 1
    while time.monotonic() < end:
        assert busy.responsive()
        select.select([], [], [], 0.05)

    # Threads that wait for a lock by asking again and again use the processor, but none works.
    waiting = child(
        "import threading, time\n"
        "def wait():\n    while True: time.sleep(0.02)\n"
        "for _ in range(20): threading.Thread(target=wait).start()\n"
    )
    eventually(lambda: not waiting.responsive())

    busy.popen.send_signal(signal.SIGSTOP)
    eventually(lambda: children._state_of(busy.popen.pid) == "T")
    busy.heard()
    assert not busy.responsive()


# The command.


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stop_timeout": 60.0}, r"stop timeout of 60 s .* queue 'default', 60 s"),
        ({"queues": ["a,b"], "stop_timeout": 61.0}, "lease_seconds of queue 'a'"),
        ({"queues": ["a,,b"]}, "--queues: must not be empty"),
        ({"processes": 0}, "--processes: must be between 1 and 1000"),
        ({"concurrency": 0}, "--concurrency: must be between"),
        ({"name": "x" * 201}, "--name: 201 characters are more than 200"),
        ({"max_items": 0}, "--max-items: must be between"),
        ({"deployment_id": "x" * 101}, "--deployment-id: 101 characters are more than 100"),
        ({"database": "absent"}, "--database: there is no database 'absent'"),
        ({"name": " "}, "--name: must be printable text, and not blank"),
        ({"name": ""}, "--name: must be printable text, and not blank"),
        ({"name": "a\nb"}, "--name: must be printable text, and not blank"),
    ],
)
def test_options_that_can_not_work_are_refused_by_name(options, message):
    with pytest.raises(CommandError, match=message):
        call_command("runworkers", skip_checks=True, **options)


@pytest.mark.django_db
def test_a_queue_that_is_switched_off_is_not_worked_on(settings):
    settings.WORKQUEUE = {"ENABLED": False}
    with pytest.raises(CommandError, match="switched off"):
        call_command("runworkers")


@pytest.mark.django_db
def test_wrong_settings_stop_the_command(settings):
    settings.WORKQUEUE = {"WORKER": {"proceses": 2}}
    with pytest.raises(SystemCheckError, match=r"no key 'proceses'\. Did you mean 'processes'"):
        call_command("runworkers", skip_checks=False)
