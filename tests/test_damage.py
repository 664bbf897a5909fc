"""
Damage that somebody did by SQL: what is lost stays told, and nothing else goes with it. Counters
stay a recount of the tables, and what is left the doctor explains and repairs.
"""

from dataclasses import replace
from functools import partial

import pytest
from django.db import connections, transaction
from django.db.models import Sum
from django.db.transaction import TransactionManagementError

from django_workqueue import (
    LeaseLostError,
    QueuePolicy,
    QueueUnavailableError,
    WorkItem,
    WorkItemNotFoundError,
    WorkState,
)
from django_workqueue.doctor import examine, find
from django_workqueue.doctor.findings import Kind
from django_workqueue.doctor.repair import Repairer, repair
from django_workqueue.failures import FailureKind, describe
from django_workqueue.models import (
    COUNTED,
    Counter,
    DeadLetter,
    Failure,
    Finished,
    Lease,
    QueueItem,
    Ready,
    Waiting,
)
from django_workqueue.moves import Completion, EndedAttempt, Release
from django_workqueue.reading import ItemReader
from django_workqueue.testing import make_queue
from tests.elsewhere import Elsewhere

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

PLACES = (Ready, Waiting, Lease, DeadLetter, Finished)


@pytest.fixture(params=["sqlite", "postgresql"])
def queue(request):
    policy = QueuePolicy(max_attempts=3, backoff_seconds=0, dead_letter_retention_seconds=60)
    return make_queue(request.param, policy)


def rows(queue, model):
    return model._base_manager.using(queue.using)


def run(queue, statement, *given):
    with connections[queue.using].cursor() as cursor:
        cursor.execute(statement, given)


def counts(queue):
    return rows(queue, Counter).aggregate(**{name: Sum(name) for name in COUNTED})


def failed(kind=FailureKind.ERROR, **fields):
    return partial(EndedAttempt, kind=kind, text=describe("boom"), **fields)


#: How a claim may end by its holder: the settlement, and the wish to cancel.
SETTLEMENTS = {
    "complete": (Completion, False),
    "release": (Release, False),
    "release with a delay": (partial(Release, delay=60), False),
    "pause": (partial(Release, cause="paused"), False),
    "fail": (failed(), False),
    "fail with a delay": (failed(delay=60), False),
    "fail for good": (failed(retryable=False), False),
    "release, cancelled": (Release, True),
    "fail, cancelled": (failed(), True),
}


class TestClaimsOfDeletedItems:
    """Of a deleted item only the claim is ended: there is no place that it could go to."""

    def claim(self, queue, *, cancelled=False):
        """Return the claim of an item that has failed once, and is then deleted."""
        queue.enqueue_many(WorkItem(tenant="acme", id=name) for name in ("gone", "beside"))
        queue.claim(worker="w")
        queue.fail("gone", tenant="acme", worker="w", error="first")
        gone, _ = queue.claim_many(worker="w", limit=2)
        if cancelled:
            queue.cancel("gone", tenant="acme")
        rows(queue, QueueItem).filter(item_id="gone")._raw_delete(queue.using)
        return gone

    def check(self, queue, before):
        """Nothing was counted but that the claim is over; the doctor finds no more than that."""
        assert counts(queue) == before | {"claimed": before["claimed"] - 1}
        assert not [place for place in PLACES if rows(queue, place).filter(item_id=self.item)]
        # Its first failure is left of it.
        [finding] = find(queue.using)
        assert (finding.kind, finding.job_id) == (Kind.NO_BODY, self.item)
        [outcome] = repair(queue.using)
        assert outcome.done == "deleted its row in Failure"
        assert examine(queue.using) == []

    @pytest.mark.parametrize("name", SETTLEMENTS)
    def test_one_that_its_holder_settles_is_gone_and_is_not_answered(self, queue, name):
        settlement, cancelled = SETTLEMENTS[name]
        gone = self.claim(queue, cancelled=cancelled)
        self.item, before = gone.job_id, counts(queue)
        verb = {Completion: queue.moves.complete, Release: queue.moves.release}
        told = settlement(item=gone.job_id, fence=gone.fence)
        assert verb.get(type(told), queue.moves.fail)("w", [told]) == {}
        self.check(queue, before)

    @pytest.mark.parametrize("name", ["complete", "release", "fail"])
    def test_those_of_the_same_batch_are_settled(self, queue, name):
        settlement, _ = SETTLEMENTS[name]
        gone = self.claim(queue)
        self.item, before = gone.job_id, counts(queue)
        beside = queue.get("beside", tenant="acme")
        told = [settlement(item=each.job_id, fence=each.fence) for each in (gone, beside)]
        assert [*getattr(queue.moves, name)("w", told)] == [beside.job_id]
        assert queue.get("beside", tenant="acme").state is not WorkState.CLAIMED
        assert counts(queue)["claimed"] == before["claimed"] - 2
        assert [finding.kind for finding in find(queue.using)] == [Kind.NO_BODY]

    @pytest.mark.parametrize("verb", ["reap", "adopt"])
    def test_one_that_others_end_is_gone_and_is_not_answered(self, queue, verb):
        gone = self.claim(queue)
        self.item = gone.job_id
        queue.complete("beside", tenant="acme", worker="w")
        before = counts(queue)
        queue.advance(61)
        given = {"limit": 5} if verb == "reap" else {"worker": "w"}
        assert getattr(queue.moves, verb)(**given) == {}
        self.check(queue, before)


class TestPruningDeletedItems:
    @pytest.mark.parametrize("place", [Finished, DeadLetter])
    def test_what_is_left_of_them_goes_and_keeps_nothing_from_going(self, queue, place):
        names = [f"i{number}" for number in range(5)]
        queue.enqueue_many(WorkItem(tenant="acme", id=name) for name in names)
        for name in names:
            queue.claim(worker="w")
            queue.fail(name, tenant="acme", worker="w", error="boom", retryable=False)
            if place is Finished:
                queue.discard(name, tenant="acme", by="ann", reason="no use")
        rows(queue, QueueItem).filter(item_id__in=names[:4])._raw_delete(queue.using)
        assert queue.prune() == 0
        queue.advance(86_400 + 1)
        assert [queue.moves.prune(limit=2) for _ in range(4)] == [2, 2, 1, 0]
        assert not any(rows(queue, model).exists() for model in (place, QueueItem, Failure))
        assert examine(queue.using) == []


class TestItemsInNoPlace:
    """Nobody can know whether they have ended, so nobody takes their names from them."""

    #: What was done to the item "lost", and what becomes of it once the doctor has placed it.
    DAMAGE = {
        "delete from django_workqueue_ready": WorkState.QUEUED,
        # It may have ended.
        "delete from django_workqueue_finished": WorkState.DEAD_LETTERED,
        # Its row is there, but under another key: a claim would find it.
        "update django_workqueue_queueitem set priority = 7": WorkState.QUEUED,
    }

    @pytest.fixture(params=DAMAGE)
    def damaged(self, request, queue):
        """A queue that lost an item; the state that the doctor gives to it."""
        queue.enqueue(WorkItem(tenant="acme", id="lost", dedupe_key="k"))
        if "finished" in request.param:
            queue.claim(worker="w")
            queue.complete("lost", tenant="acme", worker="w")
        run(queue, request.param)
        return queue, self.DAMAGE[request.param]

    @pytest.mark.parametrize("names", [{"id": "lost"}, {"dedupe_key": "k"}])
    def test_their_names_are_refused_until_the_doctor_has_placed_them(self, damaged, names):
        queue, state = damaged
        item, other = WorkItem(tenant="acme", **names), WorkItem(tenant="acme", id="other")
        for items in ([item], [other, item]):
            with pytest.raises(QueueUnavailableError, match="workqueue doctor") as refused:
                queue.enqueue_many(items)
            assert (refused.value.operation, refused.value.queue) == ("enqueue", "default")
        assert [body.item_id for body in rows(queue, QueueItem)] == ["lost"]
        assert all(outcome.done for outcome in repair(queue.using))
        lost = queue.get("lost", tenant="acme")
        assert lost.state is state
        new = queue.enqueue(item)
        assert (new.job_id == lost.job_id) == lost.live
        # A late worker of the old one can't be taken for that of the new one.
        assert "id" not in names or new.fence == lost.fence
        assert examine(queue.using) == []

    def test_a_live_twin_by_the_key_is_answered_all_the_same(self, queue):
        queue.enqueue(WorkItem(tenant="acme", id="lost"))
        run(queue, "delete from django_workqueue_ready")
        twin = queue.enqueue(WorkItem(tenant="acme", id="twin", dedupe_key="k"))
        assert queue.enqueue(WorkItem(tenant="acme", id="lost", dedupe_key="k")) == twin


class TestIdsThatNobodyHolds:
    @pytest.fixture
    def ended(self, queue):
        """The three items of an id, in the order of their acceptance; they have ended."""
        items = []
        for retryable in (False, False, True):
            queue.enqueue(WorkItem(tenant="acme", id="one"))
            queue.claim(worker="w")
            names = {"tenant": "acme", "worker": "w"}
            if retryable:
                queue.complete("one", **names)
            else:
                queue.fail("one", **names, error="boom", retryable=False)
            items.append(queue.get("one", tenant="acme"))
        return items

    def test_the_newest_is_found_and_takes_it_back_with_the_fence(self, queue, ended):
        queue.requeue("one", tenant="acme", job_id=ended[0].job_id)
        last = queue.claim(worker="w")
        queue.complete("one", tenant="acme", worker="w")
        queue.enqueue(WorkItem(tenant="other", id="one"))
        run(queue, "update django_workqueue_queueitem set id_freed = true where tenant = 'acme'")
        [finding] = find(queue.using)
        assert (finding.kind, finding.job_id) == (Kind.ID_UNHELD, ended[2].job_id)
        [outcome] = repair(queue.using)
        assert outcome.done == "took its id back"
        assert examine(queue.using) == []
        item = queue.get("one", tenant="acme")
        assert (item.job_id, item.fence) == (ended[2].job_id, last.fence)
        with pytest.raises(LeaseLostError):  # it was the older one that ended so
            queue.complete("one", tenant="acme", worker="w", fence=last.fence)
        assert queue.enqueue(WorkItem(tenant="acme", id="one")).fence == last.fence

    def test_one_that_is_live_takes_it_before_the_newest(self, queue, ended):
        queue.requeue("one", tenant="acme", job_id=ended[0].job_id)
        run(queue, "update django_workqueue_queueitem set id_freed = true")
        assert [outcome.finding.kind for outcome in repair(queue.using)] == [Kind.NAMES_FREED]
        assert queue.get("one", tenant="acme").job_id == ended[0].job_id
        assert examine(queue.using) == []

    def test_one_that_somebody_took_meanwhile_is_left_alone(self, queue, ended):
        run(queue, "update django_workqueue_queueitem set id_freed = true")
        [finding] = find(queue.using)
        new = queue.enqueue(WorkItem(tenant="acme", id="one"))
        repairer = Repairer(queue.using, "ann")
        assert repairer._repair(finding, repairer._take_id_back).done == "is all right by now"
        assert queue.get("one", tenant="acme").job_id == new.job_id


#: Makes the job id that is given next follow a given one.
_LATEST_ID = {
    "sqlite": "update sqlite_sequence set seq = %s where name = 'django_workqueue_queueitem'",
    "postgresql": "select setval(pg_get_serial_sequence('django_workqueue_queueitem', 'id'), %s)",
}


class TestWhatTheStoreRefuses:
    """It is trouble of the store as any other: one error, which says what it was."""

    def test_an_item_behind_the_last_job_id(self, queue):
        before = queue.enqueue(WorkItem(tenant="acme"))
        latest_id = _LATEST_ID[connections[queue.using].vendor]
        run(queue, latest_id, 2**63 - 1)
        try:
            for number in (1, 2):
                items = [WorkItem(tenant="acme", id=f"i{n}") for n in range(number)]
                with pytest.raises(QueueUnavailableError, match="enqueue: the store") as refused:
                    queue.enqueue_many(items)
                assert refused.value.__cause__ is not None
        finally:
            run(queue, latest_id, before.job_id)
        assert queue.enqueue(WorkItem(tenant="acme", id="i0")).job_id == before.job_id + 1
        assert queue.stats().depth == 2
        assert examine(queue.using) == []

    def test_a_claim_of_what_is_claimed_already_according_to_the_tables(self, queue):
        queue.enqueue(WorkItem(tenant="acme", id="one"))
        [row] = rows(queue, Ready)
        queue.claim(worker="w")
        rows(queue, Ready).bulk_create([row])
        with pytest.raises(QueueUnavailableError, match=r"claim: .*(?i:unique)"):
            queue.claim(worker="x")
        repaired = [outcome.done for outcome in repair(queue.using)]
        assert "kept Lease, deleted Ready" in repaired
        assert queue.claim(worker="x") is None
        assert queue.complete("one", tenant="acme", worker="w").state is WorkState.COMPLETED

    def test_an_attempt_that_cannot_be_counted(self, queue):
        queue.enqueue(WorkItem(tenant="acme", id="one"))
        queue.claim(worker="w")
        most = {"postgresql": 2**31 - 1, "sqlite": 2**63 - 1}[connections[queue.using].vendor]
        run(queue, "update django_workqueue_lease set attempts = %s", most)
        calls = {
            "fail": partial(queue.fail, "one", tenant="acme", worker="w", error="boom"),
            "adopt": partial(queue.adopt, worker="w"),
            "reap": queue.reap,
        }
        for operation, call in calls.items():
            if operation == "reap":
                queue.advance(61)
            with pytest.raises(QueueUnavailableError, match=f"^{operation}: ") as refused:
                call()
            assert refused.value.operation == operation
        assert queue.get("one", tenant="acme").state is WorkState.CLAIMED

    def test_a_database_user_without_rights_and_a_column_that_is_not_there(self):
        queue = make_queue("postgresql")
        queue.enqueue(WorkItem(tenant="acme", id="one"))
        with transaction.atomic(using=queue.using):
            run(queue, "create role powerless")
            run(queue, "set local role powerless")
            denied = pytest.raises(QueueUnavailableError, match="permission denied")
            with denied, transaction.atomic(using=queue.using):
                queue.get("one", tenant="acme")
            run(queue, "reset role")
            run(queue, "alter table django_workqueue_lease drop column process")
            missing = pytest.raises(QueueUnavailableError, match='column "process"')
            with missing, transaction.atomic(using=queue.using):
                queue.claim(worker="w")
            transaction.set_rollback(True, using=queue.using)

    def test_a_broken_transaction_of_the_callers_is_told_by_django(self, queue):
        with transaction.atomic(using=queue.using):
            transaction.set_rollback(True, using=queue.using)
            with pytest.raises(TransactionManagementError):
                queue.enqueue(WorkItem(tenant="acme"))


class TestReadingWhileItMoves:
    """An item and its failures are read one after the other, and tell one story."""

    @pytest.fixture
    def between(self, queue, monkeypatch):
        """Has others do something once, after an item was read and before its failures are."""
        read = ItemReader.failure_texts

        def do(move):
            def moved_first(reader, job_ids):
                monkeypatch.setattr(ItemReader, "failure_texts", read)
                with Elsewhere(queue.using) as others:
                    others.call(move)
                return read(reader, job_ids)

            monkeypatch.setattr(ItemReader, "failure_texts", moved_first)

        return do

    def dead(self, queue):
        queue.enqueue(WorkItem(tenant="acme", id="one"))
        queue.claim(worker="w")
        return queue.fail("one", tenant="acme", worker="w", error="first", retryable=False)

    @pytest.mark.parametrize("read", ["get", "dead_letters"])
    def test_a_further_attempt_is_not_told_of_an_item_that_had_fewer(self, queue, between, read):
        item = self.dead(queue)

        def fail_again():
            queue.requeue("one", tenant="acme")
            queue.claim(worker="w")
            queue.fail("one", tenant="acme", worker="w", error="second")

        between(fail_again)
        letters = read == "dead_letters"
        [seen] = queue.dead_letters(tenant="acme") if letters else [queue.get("one", tenant="acme")]
        assert seen == item
        assert queue.get("one", tenant="acme").failures == ("first", "second")

    def test_what_retention_deletes_meanwhile_is_not_found(self, queue, between):
        self.dead(queue)
        queue.advance(61)
        between(queue.prune)
        with pytest.raises(WorkItemNotFoundError):
            queue.get("one", tenant="acme")

    def test_one_whose_failures_are_missing_is_shown_all_the_same(self, queue):
        item = self.dead(queue)
        run(queue, "delete from django_workqueue_failure")
        assert queue.get("one", tenant="acme") == replace(item, failures=())
