"""`workqueue doctor` finds, explains and repairs each way in which the tables can disagree."""

import json
from datetime import timedelta
from functools import partial

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connections

from django_workqueue import LeaseLostError, QueuePolicy, WorkItem, WorkState
from django_workqueue.doctor import examine, find
from django_workqueue.doctor.base import MovedError
from django_workqueue.doctor.findings import EXPLAINED, Kind
from django_workqueue.doctor.placing import FENCE_MARGIN
from django_workqueue.doctor.repair import repair
from django_workqueue.models import (
    AuditEntry,
    DeadLetter,
    Failure,
    Finished,
    Lease,
    QueueItem,
    Ready,
    Waiting,
)
from django_workqueue.testing import make_queue
from tests.elsewhere import Elsewhere

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

BACKENDS = ["sqlite", "postgresql"]
#: Burying what has ended, or items that never were.
STRAY = (
    "insert into django_workqueue_deadletter (item, tenant, queue, deployment_id, fence,"
    " attempts, dead_at, settled_by, reason, error_class, fingerprint)"
    " select {item}, tenant, queue, '', 1, 0, finished_at, '', 'exhausted', '', ''"
    " from django_workqueue_finished"
)
#: What a careless hand does to the tables: the kind of finding, and what the doctor says of it.
DAMAGE = {
    "delete from django_workqueue_lease": (Kind.NO_PLACE, "is in no place"),
    "delete from django_workqueue_finished": (Kind.NO_PLACE, "is in no place"),
    "delete from django_workqueue_deadletter": (Kind.NO_PLACE, "is in no place"),
    "delete from django_workqueue_ready": (Kind.NO_PLACE, "is in no place"),
    "delete from django_workqueue_waiting": (Kind.NO_PLACE, "is in no place"),
    STRAY.format(item="item"): (Kind.SEVERAL_PLACES, "is in 2 places: DeadLetter, Finished"),
    STRAY.format(item="item + 1000"): (Kind.NO_BODY, "but there is no item"),
    "delete from django_workqueue_queueitem where item_id = 'ready'": (
        Kind.NO_BODY,
        "has a row in Ready, queue 'default', but there is no item",
    ),
    "update django_workqueue_lease set tenant = 'other'": (
        Kind.UNLIKE_BODY,
        "('held' of tenant 'acme') has a row in Lease, queue 'default', but is unlike",
    ),
    "update django_workqueue_finished set queue = 'other'": (Kind.UNLIKE_BODY, "row in Finished"),
    "update django_workqueue_waiting set rank = 3": (Kind.UNLIKE_BODY, "row in Waiting"),
    "update django_workqueue_queueitem set priority = 7": (Kind.UNLIKE_BODY, "row in Ready"),
    "update django_workqueue_queueitem set id_freed = true where item_id = 'ready'": (
        Kind.NAMES_FREED,
        "its id or key is free",
    ),
    "update django_workqueue_queueitem set key_freed = true": (
        Kind.NAMES_FREED,
        "its id or key is free",
    ),
    "update django_workqueue_queueitem set id_freed = true where item_id = 'dead'": (
        Kind.ID_UNHELD,
        "is the newest of its id, but no item holds that",
    ),
    "delete from django_workqueue_failure": (
        Kind.ATTEMPTS,
        "counts 1 attempts, but has 0 failures",
    ),
    "update django_workqueue_failure set number = 2": (
        Kind.ATTEMPTS,
        "counts 1 attempts, but has 1 failures, the last of them number 2",
    ),
    "update django_workqueue_failure set fence = 99": (Kind.FENCE, "but a failure of fence 99"),
    "delete from django_workqueue_counter": (Kind.COUNTER, "queue 'default' counts None"),
    "update django_workqueue_counter set ready = ready + 1": (Kind.COUNTER, "queue 'default'"),
}


@pytest.fixture(params=BACKENDS)
def queue(request):
    """A queue with an item in every place."""
    queue = make_queue(request.param, QueuePolicy(max_attempts=1, backoff_seconds=0))
    for name in ("completed", "dead", "cancelled", "paused", "held", "ready"):
        queue.enqueue(WorkItem(tenant="acme", id=name, dedupe_key=f"key of {name}"))
    later = queue.moves.now() + timedelta(days=1)
    queue.enqueue(WorkItem(tenant="acme", id="waits", available_at=later))
    for verb in (
        partial(queue.complete),
        partial(queue.fail, error="broken"),
        partial(queue.release),
        partial(queue.pause),
        None,
    ):
        item = queue.claim(worker="w")
        if item.id == "cancelled":
            queue.cancel("cancelled", tenant="acme")
        if verb is not None:
            verb(item.id, tenant="acme", worker="w")
    assert examine(queue.using) == []
    return queue


@pytest.fixture(params=BACKENDS)
def empty(request):
    return make_queue(request.param, QueuePolicy(max_attempts=3, backoff_seconds=0))


def damage(queue, statement):
    with connections[queue.using].cursor() as cursor:
        cursor.execute(statement)


def rows(queue, model):
    return model._base_manager.using(queue.using)


def mend(queue):
    """Repair, and return the outcomes; all is well then."""
    outcomes = [*repair(queue.using, "ann")]
    assert examine(queue.using) == []
    return outcomes


def work_off(queue):
    """Bring every item to its end, as operators and workers would."""
    queue.advance(86_400)
    queue.reap()
    for body in rows(queue, QueueItem).filter(id_freed=False):
        item = queue.get(body.item_id, tenant=body.tenant)
        verbs = {WorkState.PAUSED: queue.resume, WorkState.DEAD_LETTERED: queue.requeue}
        if item.state in verbs:
            verbs[item.state](item.id, tenant=item.tenant)
    for item in queue.claim_many(worker="last", limit=100):
        queue.complete(item.id, tenant=item.tenant, worker="last", fence=item.fence)
    left = {state.value for state in (WorkState.COMPLETED, WorkState.CANCELLED)}
    assert set(QueueItem.objects.using(queue.using).with_state().values_list("state")) <= {
        (state,) for state in left
    }
    assert examine(queue.using) == []


def test_a_sound_queue_has_no_findings_and_needs_no_repair(queue, capsys):
    call_command("workqueue", "doctor", database=queue.using)
    assert "every item is in one place" in capsys.readouterr().out
    assert mend(queue) == []
    assert not rows(queue, AuditEntry).filter(verb="repair").exists()


def test_every_kind_of_finding_is_explained_and_tried_here():
    assert set(EXPLAINED) == {kind for kind, _ in DAMAGE.values()} == set(Kind)


@pytest.mark.parametrize("statement", DAMAGE)
def test_damage_is_found_explained_repaired_audited_and_the_items_go_on(queue, statement, capsys):
    kind, told = DAMAGE[statement]
    damage(queue, statement)
    with pytest.raises(CommandError, match="finding") as failed:
        call_command("workqueue", "doctor", database=queue.using)
    assert failed.value.returncode == 1
    explained = capsys.readouterr().out
    assert told in explained
    assert all(text in explained for text in EXPLAINED[kind])
    assert kind in {finding.kind for finding in find(queue.using)}
    call_command("workqueue", "doctor", "--repair", "--by", "ann", database=queue.using)
    assert "repaired: " in capsys.readouterr().out
    audited = rows(queue, AuditEntry).filter(verb="repair", actor="ann")
    assert {entry.reason.partition(":")[0] for entry in audited} >= {kind}
    assert all(entry.detail["done"] for entry in audited)
    work_off(queue)


class TestNoPlace:
    @pytest.fixture
    def lost(self, empty):
        """An item whose third claim is lost: one failed, one was released, one is held."""
        empty.enqueue(WorkItem(tenant="acme", id="lost", payload={"n": 1}))
        names = {"tenant": "acme", "worker": "w"}
        empty.claim(worker="w")
        empty.fail("lost", **names, error="first")
        empty.claim(worker="w")
        empty.release("lost", **names)
        empty.claim(worker="w")
        damage(empty, "delete from django_workqueue_lease")
        return empty

    def test_an_item_with_attempts_left_is_queued_again_due_now_and_one_is_counted(self, lost):
        mend(lost)
        item = lost.get("lost", tenant="acme")
        assert (item.state, item.attempts) == (WorkState.QUEUED, 2)
        assert item.failures[0] == "first"
        assert "found in no place" in item.failures[1]
        assert lost.claim(worker="x").payload == {"n": 1}

    def test_no_late_worker_can_be_taken_for_the_next_holder(self, lost):
        mend(lost)
        # The very same name, and the fence that the lost claim had.
        item = lost.claim(worker="w")
        assert item.fence > FENCE_MARGIN
        with pytest.raises(LeaseLostError):
            lost.complete("lost", tenant="acme", worker="w", fence=3)
        work_off(lost)

    def test_at_its_last_attempt_it_goes_into_the_dead_letter(self, lost):
        rows(lost, QueueItem).update(max_attempts=2)
        mend(lost)
        [letter] = lost.dead_letters(tenant="acme")
        assert (letter.attempts, rows(lost, DeadLetter).get().reason) == (2, "exhausted")
        assert lost.dead_letters(tenant="acme", after=letter.job_id) == ()
        assert lost.claim(worker="x") is None
        work_off(lost)

    def test_an_item_that_may_run_once_only_never_runs_by_itself(self, empty):
        empty.enqueue(WorkItem(tenant="acme", id="once", max_attempts=1))
        damage(empty, "delete from django_workqueue_ready")
        mend(empty)
        assert empty.get("once", tenant="acme").state is WorkState.DEAD_LETTERED

    def test_what_was_dead_is_dead_again_with_nothing_counted(self, empty):
        empty.enqueue(WorkItem(tenant="acme", id="rejected"))
        empty.claim(worker="w")
        names = {"tenant": "acme", "worker": "w"}
        before = empty.fail("rejected", **names, error="no address", retryable=False)
        damage(empty, "delete from django_workqueue_deadletter")
        mend(empty)
        after = empty.get("rejected", tenant="acme")
        assert (after.state, after.failures) == (before.state, before.failures)
        assert rows(empty, DeadLetter).get().reason == "rejected"
        work_off(empty)

    def test_what_may_have_ended_does_not_run_again(self, empty):
        for name in ("done", "ready"):
            empty.enqueue(WorkItem(tenant="acme", id=name))
        empty.claim(worker="w")
        empty.complete("done", tenant="acme", worker="w")
        damage(empty, "delete from django_workqueue_finished")
        mend(empty)
        assert empty.get("done", tenant="acme").state is WorkState.DEAD_LETTERED
        assert [item.id for item in empty.claim_many(worker="w", limit=9)] == ["ready"]

    def test_an_older_acceptance_does_not_run_again(self, empty):
        for _ in range(2):
            old = empty.enqueue(WorkItem(tenant="acme", id="again"))
            empty.claim(worker="w")
            empty.complete("again", tenant="acme", worker="w")
        empty.enqueue(WorkItem(tenant="acme", id="again"))
        damage(empty, f"delete from django_workqueue_finished where item = {old.job_id}")
        damage(empty, "update django_workqueue_counter set completed = 0")
        mend(empty)
        named = {"tenant": "acme", "job_id": old.job_id}
        assert empty.get("again", **named).state is WorkState.DEAD_LETTERED
        empty.discard("again", **named, by="ann", reason="it was done")
        work_off(empty)


PLACES = {
    "completed": (
        Finished,
        {"state": "completed", "finished_at": "now"},
    ),
    "dead": (DeadLetter, {"deployment_id": "", "dead_at": "now", "reason": "rejected"}),
    "cancelled": (Finished, {"state": "cancelled", "finished_at": "now"}),
    "lease": (
        Lease,
        {
            "rank": 0,
            "max_attempts": 3,
            "lease_seconds": 60,
            "worker": "w",
            "enqueued_at": "now",
            "claimed_at": "now",
            "expires_at": "later",
            "renewable_until": "later",
        },
    ),
    "paused": (Waiting, {"rank": 0, "enqueued_at": "now", "since": "now", "cause": "paused"}),
    "ready": (Ready, {"rank": 0, "enqueued_at": "now"}),
}
#: Most careful first.
ORDER = [*PLACES]


@pytest.mark.parametrize(
    ("kept", "other"),
    [
        (kept, other)
        for number, kept in enumerate(ORDER)
        for other in ORDER[number + 1 :]
        if PLACES[kept][0] is not PLACES[other][0]
    ],
)
def test_of_several_places_the_most_careful_one_is_kept(empty, kept, other):
    body = empty.enqueue(WorkItem(tenant="acme", id="twice"))
    damage(empty, "delete from django_workqueue_ready")
    damage(empty, "delete from django_workqueue_counter")
    now = empty.moves.now()
    times = {"now": now, "later": now + timedelta(hours=1)}
    for fence, name in enumerate((kept, other), 5):
        model, fields = PLACES[name]
        filled = {field: times.get(value, value) for field, value in fields.items()}
        rows(empty, model).create(
            item_id=body.job_id, queue="default", tenant="acme", fence=fence, **filled
        )
    mend(empty)
    [(state, fence)] = (
        QueueItem.objects.using(empty.using).with_state().values_list("state", "fence")
    )
    states = {"dead": "dead_lettered", "lease": "claimed", "ready": "queued"}
    assert state == states.get(kept, kept)
    # Whoever held it by the other's fence is not taken for the next; a holder keeps its own.
    assert fence == (5 if kept == "lease" else 6)
    work_off(empty)


class TestUnlikeItsBody:
    def test_an_item_whose_priority_was_changed_by_hand_is_served_by_the_new_one(self, empty):
        for name in ("first", "second"):
            empty.enqueue(WorkItem(tenant="acme", id=name))
        damage(empty, "update django_workqueue_queueitem set priority = 9 where item_id = 'second'")
        # It is not lost: its row is there, if not where it is looked for.
        assert {finding.kind for finding in find(empty.using)} == {Kind.UNLIKE_BODY}
        mend(empty)
        assert [item.id for item in empty.claim_many(worker="w", limit=2)] == ["second", "first"]

    def test_a_second_ready_row_of_an_item_goes(self, empty):
        item = empty.enqueue(WorkItem(tenant="acme", id="one"))
        damage(
            empty,
            "insert into django_workqueue_ready (queue, deployment_id, tenant, rank, item, fence,"
            " attempts, settled_by, enqueued_at) select queue, '', 'other', 5, item, 0, 0, '',"
            " enqueued_at from django_workqueue_ready",
        )
        [outcome] = mend(empty)[:1]
        assert outcome.done == "deleted a second row in Ready"
        assert [row.tenant for row in rows(empty, Ready).filter(item_id=item.job_id)] == ["acme"]
        work_off(empty)

    def test_more_rows_than_are_looked_for_at_a_time_are_all_repaired(self, empty, monkeypatch):
        monkeypatch.setattr("django_workqueue.doctor.repair.BATCH", 2)
        for number in range(5):
            empty.enqueue(WorkItem(tenant=f"t{number % 2}", id=f"i{number}"))
        damage(empty, "update django_workqueue_ready set rank = 3")
        assert len(mend(empty)) == 5
        damage(empty, "delete from django_workqueue_ready")
        assert sum(outcome.finding.kind is Kind.NO_PLACE for outcome in mend(empty)) == 5
        work_off(empty)


class TestNames:
    @pytest.fixture
    def twins(self, empty):
        """A live item without its id, due tomorrow, and a second one that has it now."""
        later = empty.moves.now() + timedelta(days=1)
        empty.enqueue(WorkItem(tenant="acme", id="twin", dedupe_key="k", available_at=later))
        damage(empty, "update django_workqueue_queueitem set id_freed = true, key_freed = true")
        empty.enqueue(WorkItem(tenant="acme", id="twin"))
        return empty

    def test_a_second_live_item_is_the_operators_to_cancel(self, twins):
        [outcome] = repair(twins.using)
        assert not outcome.done
        assert "cancel one of the two" in outcome.why
        with pytest.raises(CommandError, match="1 finding"):
            call_command("workqueue", "doctor", "--repair", database=twins.using)
        twins.cancel("twin", tenant="acme")
        assert [outcome.done for outcome in mend(twins)] == ["took its id and its key back"]
        work_off(twins)

    def test_what_has_ended_gives_the_id_back_and_its_fence(self, twins):
        first, second = rows(twins, QueueItem).order_by("pk")
        names = {"tenant": "acme", "worker": "w"}
        twins.claim(worker="w")
        twins.release("twin", **names)
        assert twins.claim(worker="w").job_id == second.pk
        twins.complete("twin", **names)
        mend(twins)
        item = twins.get("twin", tenant="acme")
        assert (item.job_id, item.fence) == (first.pk, 2)
        assert twins.get("twin", tenant="acme", job_id=second.pk).state is WorkState.COMPLETED
        work_off(twins)


class TestAttempts:
    @pytest.fixture
    def failed(self, empty):
        """A queued item that has failed twice."""
        empty.enqueue(WorkItem(tenant="acme", id="failed"))
        for error in ("first", "second"):
            empty.claim(worker="w")
            empty.fail("failed", tenant="acme", worker="w", error=error)
        return empty

    def test_a_missing_failure_gets_a_placeholder_in_its_place(self, failed):
        damage(failed, "delete from django_workqueue_failure where number = 1")
        mend(failed)
        item = failed.get("failed", tenant="acme")
        assert item.attempts == 2
        assert "missing" in item.failures[0]
        assert item.failures[1] == "second"

    def test_attempts_are_never_fewer_than_the_failures(self, failed):
        damage(failed, "update django_workqueue_ready set attempts = 0")
        mend(failed)
        assert failed.get("failed", tenant="acme").attempts == 2
        failed.claim(worker="w")
        # The number of this failure is free, and it was the last attempt.
        names = {"tenant": "acme", "worker": "w"}
        assert failed.fail("failed", **names, error="third").state is WorkState.DEAD_LETTERED
        work_off(failed)

    def test_a_dead_letter_with_a_placeholder_can_be_paged_from(self, failed):
        failed.claim(worker="w")
        failed.fail("failed", tenant="acme", worker="w", error="third")
        damage(failed, "delete from django_workqueue_failure where number = 3")
        mend(failed)
        [letter] = failed.dead_letters(tenant="acme")
        assert failed.dead_letters(tenant="acme", after=letter.job_id) == ()

    @pytest.mark.parametrize(
        ("statement", "why"),
        [
            ("update django_workqueue_ready set attempts = 1000000", "more than 100 failures"),
            ("update django_workqueue_ready set attempts = -1", "below the first"),
            ("update django_workqueue_failure set number = 0 where number = 1", "below the first"),
        ],
    )
    def test_what_makes_no_sense_is_reported_and_left(self, failed, statement, why):
        damage(failed, statement)
        [outcome] = repair(failed.using)
        assert why in outcome.why
        assert [finding.kind for finding in find(failed.using)] == [Kind.ATTEMPTS]


def test_a_fence_is_not_raised_while_a_worker_holds_the_item(empty):
    empty.enqueue(WorkItem(tenant="acme", id="behind"))
    names = {"tenant": "acme", "worker": "w"}
    empty.claim(worker="w")
    empty.fail("behind", **names, error="first")
    item = empty.claim(worker="w")
    damage(empty, "update django_workqueue_failure set fence = 99")
    [outcome] = repair(empty.using)
    assert "worker 'w' holds it" in outcome.why
    empty.release("behind", **names, fence=item.fence)
    assert [outcome.done for outcome in mend(empty)] == ["raised its fence to 99"]
    assert empty.claim(worker="w").fence == 100
    work_off(empty)


def test_wrong_counters_are_corrected_by_what_they_are_off(empty):
    for number in range(3):
        empty.enqueue(WorkItem(tenant="acme", queue="mail", id=str(number)))
    damage(empty, "update django_workqueue_counter set ready = 9, paused = 2")
    before = empty.stats(queue="mail")
    mend(empty)
    after = empty.stats(queue="mail")
    assert (before.depth, before.paused) != (after.depth, after.paused) == (3, 0)


def test_what_is_all_right_by_the_time_of_its_repair_is_left_alone(empty):
    for name in ("first", "second"):
        empty.enqueue(WorkItem(tenant="acme", id=name))
    [_, kept] = rows(empty, Ready).order_by("item_id")
    damage(empty, "delete from django_workqueue_ready")
    repairs = repair(empty.using)
    assert next(repairs).finding.item_id == "first"
    rows(empty, Ready).bulk_create([kept])  # by somebody else, meanwhile
    assert next(repairs).done == "is all right by now"
    assert [*repairs] == []
    assert rows(empty, AuditEntry).filter(item_id="second").count() == 0
    assert rows(empty, Ready).filter(item_id=kept.item_id).get().fence == 0


def test_a_worker_at_the_same_moment_is_waited_for_and_seen():
    queue = make_queue("postgresql", QueuePolicy(max_attempts=3))
    item = queue.enqueue(WorkItem(tenant="acme", id="one"))
    damage(
        queue,
        "insert into django_workqueue_waiting (item, queue, deployment_id, tenant, rank, fence,"
        " attempts, settled_by, enqueued_at, since, cause) select item, queue, deployment_id,"
        " tenant, rank, 3, 0, '', enqueued_at, enqueued_at, 'paused' from django_workqueue_ready",
    )
    with Elsewhere(queue.using) as worker, Elsewhere(queue.using) as doctor:
        worker.begin()
        worker.call(partial(queue.claim, worker="w"))
        repairing = doctor.start(lambda: [*repair(queue.using)])
        doctor.wait_until_blocked(repairing)
        worker.commit()
        [first, *_] = repairing.result(20)
    # Not the ready row that it saw at first, but the lease that took its place.
    assert first.done == "kept Lease, deleted Waiting"
    assert examine(queue.using) == []
    assert queue.complete("one", tenant="acme", worker="w").job_id == item.job_id


def test_a_repair_that_others_undo_again_and_again_says_so(empty, monkeypatch):
    empty.enqueue(WorkItem(tenant="acme", id="one"))
    damage(empty, "delete from django_workqueue_ready")
    monkeypatch.setattr("django_workqueue.doctor.placing.Placing._case", _moved)
    [outcome, *_] = repair(empty.using)
    assert outcome.why == "others move the item too fast"


def _moved(*args):
    raise MovedError


def test_findings_and_repairs_are_told_to_machines_too(empty, capsys):
    empty.enqueue(WorkItem(tenant="acme", id="one"))
    damage(empty, "delete from django_workqueue_ready")
    with pytest.raises(CommandError):
        call_command("workqueue", "doctor", "--json", database=empty.using)
    told = json.loads(capsys.readouterr().out)
    assert (told["sound"], told["repairs"]) == (False, [])
    assert {finding["kind"] for finding in told["findings"]} == {"no_place", "counter"}
    assert told["findings"][0]["id"] == "one"
    call_command("workqueue", "doctor", "--repair", "--json", database=empty.using)
    told = json.loads(capsys.readouterr().out)
    assert (told["sound"], told["findings"]) == (True, [])
    assert all(each["repaired"] and each["done"] for each in told["repairs"])


def test_at_most_so_many_findings_of_a_kind_are_named(empty):
    empty.enqueue_many(WorkItem(tenant="acme") for _ in range(25))
    damage(empty, "delete from django_workqueue_ready")
    with pytest.raises(CommandError, match="21 findings, at most 20 of a kind"):
        call_command("workqueue", "doctor", database=empty.using)
    mend(empty)
    assert rows(empty, Failure).count() == 25


def test_looking_leaves_the_write_lock_of_sqlite_to_others():
    queue = make_queue("sqlite")
    queue.enqueue(WorkItem(tenant="acme"))
    with Elsewhere(queue.using) as other:
        other.begin()
        other.call(partial(queue.hold, queue="another"))
        assert examine(queue.using) == []
        other.commit()
