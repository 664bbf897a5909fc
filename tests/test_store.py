"""What only a database can show: transactions, statements, and trouble."""

import asyncio
from datetime import timedelta

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.db.utils import IntegrityError
from django.test.utils import CaptureQueriesContext

from django_workqueue import (
    InvalidFieldError,
    PayloadError,
    QueueFullError,
    QueuePolicy,
    QueueUnavailableError,
    WorkItem,
    WorkState,
    get_queue,
)
from django_workqueue.doctor import examine
from django_workqueue.models import Lease, QueueItem, Ready
from django_workqueue.moves import FOLDED_EVERY, Completion
from django_workqueue.queues import DatabaseWorkQueue
from django_workqueue.testing import DatabaseTestQueue, is_test_database, make_queue

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


@pytest.fixture(params=["sqlite", "postgresql"])
def queue(request: pytest.FixtureRequest) -> DatabaseTestQueue:
    return make_queue(request.param)


class TestTransactions:
    def test_enqueue_joins_the_callers_transaction(self, queue):
        with transaction.atomic(using=queue.using):
            queue.enqueue(WorkItem(tenant="acme", id="gone"))
            queue.enqueue_many([WorkItem(tenant="acme") for _ in range(3)])
            transaction.set_rollback(True, using=queue.using)
        assert queue.stats().depth == 0
        assert not QueueItem.objects.using(queue.using).exists()

    def test_an_inner_savepoint_taken_back_takes_its_items_back(self, queue):
        with transaction.atomic(using=queue.using):
            queue.enqueue(WorkItem(tenant="acme", id="kept"))
            with transaction.atomic(using=queue.using):
                queue.enqueue(WorkItem(tenant="acme", id="gone"))
                transaction.set_rollback(True, using=queue.using)
        assert queue.claim(worker="w").id == "kept"
        assert queue.claim(worker="w") is None

    def test_aenqueue_joins_the_transaction_of_async_orm_calls(self, queue):
        async def enqueue_and_take_back() -> None:
            atomic = transaction.atomic(using=queue.using)
            await sync_to_async(atomic.__enter__)()
            await queue.aenqueue(WorkItem(tenant="acme"))
            await queue.aenqueue_many([WorkItem(tenant="acme")])
            assert (await queue.astats()).depth == 2
            error = RuntimeError("taken back")
            await sync_to_async(atomic.__exit__)(type(error), error, None)
            assert (await queue.astats()).depth == 0
            await sync_to_async(connections.close_all)()

        asyncio.run(enqueue_and_take_back())
        assert queue.stats().depth == 0

    def test_a_refused_item_of_a_batch_stores_none_of_it(self, queue):
        batch = [WorkItem(tenant="acme"), WorkItem(tenant="acme", payload={"bad": float("nan")})]
        with pytest.raises(PayloadError, match=r"payload\.bad"):
            queue.enqueue_many(batch)
        assert queue.stats().depth == 0

    def test_a_full_queue_refuses_inside_a_transaction_that_then_goes_on(self, queue):
        full = DatabaseWorkQueue(queue.using, policy=QueuePolicy(max_depth=2))
        with transaction.atomic(using=queue.using):
            full.enqueue_many([WorkItem(tenant="acme"), WorkItem(tenant="acme")])
            with pytest.raises(QueueFullError) as refused:
                full.enqueue(WorkItem(tenant="acme"))
            assert full.stats().depth == 2
        assert (refused.value.queue, refused.value.depth, refused.value.limit) == ("default", 2, 2)
        assert full.stats().depth == 2
        assert examine(queue.using) == []


class TestStatements:
    def test_ten_thousand_items_are_stored_in_a_few_statements(self, queue):
        items = [WorkItem(tenant=f"t{n % 7}", payload={"n": n}) for n in range(10_000)]
        with CaptureQueriesContext(connections[queue.using]) as statements:
            stored = queue.enqueue_many(items)
        assert [item.id for item in stored] == [item.id for item in items]
        assert [item.job_id for item in stored] == sorted(item.job_id for item in stored)
        assert queue.stats().depth == 10_000
        # Five batches, each of which folds the counters; SQLite allows few parameters a statement.
        most = {"postgresql": 15, "sqlite": 430}[connections[queue.using].vendor]
        assert len(statements) <= most

    def test_one_item_is_one_statement_on_postgresql(self):
        queue = make_queue("postgresql")
        with CaptureQueriesContext(connections["postgresql"]) as statements:
            stored = queue.enqueue(WorkItem(tenant="acme", dedupe_key="k"))
        assert len(statements) == 1 + (stored.job_id % FOLDED_EVERY == 0)

    def test_times_are_kept_to_the_microsecond_and_in_any_zone(self, queue):
        from datetime import UTC, datetime, timezone

        moment = datetime(2026, 3, 29, 1, 59, 59, 999_999, tzinfo=timezone(timedelta(hours=5.75)))
        stored = queue.enqueue(WorkItem(tenant="acme", enqueued_at=moment, available_at=moment))
        read = queue.get(stored.id, tenant="acme")
        assert stored.enqueued_at == read.enqueued_at == read.available_at == moment
        assert read.enqueued_at.tzinfo == UTC

    def test_the_database_refuses_nonsense_by_name(self, queue):
        item = queue.enqueue(WorkItem(tenant="acme"))
        bodies = QueueItem._base_manager.using(queue.using)
        with pytest.raises(IntegrityError, match="priority_in_range"):
            bodies.filter(pk=item.job_id).update(priority=101)

    def test_items_can_only_be_read_through_their_manager(self, queue):
        for verb in ("create", "update", "delete", "bulk_create"):
            with pytest.raises(TypeError, match="only reads"):
                getattr(QueueItem.objects.using(queue.using), verb)()

    def test_finished_ids_and_keys_are_taken_over_in_a_few_statements(self):
        queue = make_queue("postgresql")
        items = [WorkItem(tenant="acme", id=f"i{n}", dedupe_key=f"k{n}") for n in range(1000)]
        queue.enqueue_many(items)
        for item in queue.claim_many(worker="w", limit=1000):
            queue.moves.complete("w", [Completion(item=item.job_id, fence=item.fence)])
        with CaptureQueriesContext(connections["postgresql"]) as statements:
            again = queue.enqueue_many(items)
        assert {item.fence for item in again} == {1}
        assert len(statements) <= 60
        assert examine("postgresql") == []


class TestTrouble:
    def test_a_stopped_server_is_unavailable_for_every_verb_and_nothing_is_half_done(
        self, private_database, private_postgres
    ):
        queue = DatabaseTestQueue(private_database, policy=QueuePolicy())
        item = queue.enqueue(WorkItem(tenant="acme", id="one"))
        held = queue.claim(worker="w")
        private_postgres.stop("immediate")
        names = {"tenant": "acme", "worker": "w"}
        calls = {
            "enqueue": lambda: queue.enqueue_many([WorkItem(tenant="acme"), WorkItem(tenant="b")]),
            "claim": lambda: queue.claim(worker="w"),
            "heartbeat": lambda: queue.heartbeat("one", **names),
            "complete": lambda: queue.complete("one", **names),
            "fail": lambda: queue.fail("one", error="x", **names),
            "release": lambda: queue.release("one", **names),
            "reap": queue.reap,
            "adopt": lambda: queue.adopt(worker="w"),
            "get": lambda: queue.get("one", tenant="acme"),
            "dead_letters": lambda: queue.dead_letters(tenant="acme"),
            "stats": queue.stats,
        }
        for operation, call in calls.items():
            with pytest.raises(QueueUnavailableError) as refused:
                call()
            assert refused.value.operation == operation
            assert refused.value.retryable
        private_postgres.start()
        assert queue.get("one", tenant="acme").fence == held.fence
        assert queue.stats().depth == 0
        assert queue.complete("one", **names).job_id == item.job_id
        assert examine(private_database) == []

    def test_a_connection_cut_in_a_transaction_stores_nothing_of_it(
        self, private_database, private_postgres
    ):
        queue = DatabaseTestQueue(private_database, policy=QueuePolicy())
        with pytest.raises(QueueUnavailableError):
            self._enqueue_around_a_restart(queue, private_postgres)
        connections[private_database].close()
        assert queue.stats().depth == 0

    def _enqueue_around_a_restart(self, queue, server):
        with transaction.atomic(using=queue.using):
            queue.enqueue(WorkItem(tenant="acme"))
            server.stop("immediate")
            server.start()
            queue.enqueue(WorkItem(tenant="acme"))

    def test_missing_tables_are_unavailable_and_not_an_empty_queue(self, private_database):
        with connections[private_database].cursor() as cursor:
            cursor.execute("drop table django_workqueue_queueitem cascade")
        queue = DatabaseTestQueue(private_database, policy=QueuePolicy())
        for command in (("workqueue", "doctor"), ("runworkers",)):
            with pytest.raises(CommandError, match=r"run manage\.py migrate"):
                call_command(*command, database=private_database, skip_checks=True)
        for call in (
            lambda: queue.get("one", tenant="acme"),
            lambda: queue.enqueue(WorkItem(tenant="acme")),
        ):
            with pytest.raises(QueueUnavailableError, match="does not exist"):
                call()


class TestMakeQueue:
    def test_it_makes_an_empty_queue_each_time(self, queue):
        queue.enqueue(WorkItem(tenant="acme"))
        fresh = make_queue(connections[queue.using].vendor)
        assert fresh.stats().depth == 0
        assert fresh.claim(worker="w") is None

    def test_it_refuses_a_database_that_is_no_test_database(self, monkeypatch):
        queue = make_queue("postgresql")
        queue.enqueue(WorkItem(tenant="acme"))
        monkeypatch.setitem(connections["postgresql"].settings_dict, "NAME", "production")
        with pytest.raises(ImproperlyConfigured, match="not a test database"):
            make_queue("postgresql")
        monkeypatch.undo()
        assert is_test_database(connections["postgresql"])
        assert queue.stats().depth == 1

    def test_a_kind_that_is_not_configured_is_refused(self):
        with pytest.raises(ImproperlyConfigured, match="mysql"):
            make_queue("mysql")

    def test_it_takes_a_policy_and_moves_the_clock(self):
        for backend in ("memory", "sqlite", "postgresql"):
            queue = make_queue(backend, QueuePolicy(lease_seconds=10, max_attempts=1))
            queue.enqueue(WorkItem(tenant="acme"))
            queue.claim(worker="w")
            assert queue.reap() == ()
            queue.advance(11)
            [lapsed] = queue.reap()
            assert lapsed.state is WorkState.DEAD_LETTERED


def test_get_queue_works_in_the_database_of_the_setting(settings):
    settings.WORKQUEUE = {"DATABASE": "postgresql", "POLICY": {"lease_seconds": 45}}
    make_queue("postgresql")
    queue = get_queue()
    assert queue.using == "postgresql"
    assert queue.policy.lease_seconds == 45
    queue.enqueue(WorkItem(tenant="acme"))
    queue.claim(worker="w")
    assert Lease.objects.using("postgresql").get().lease_seconds == 45
    assert get_queue("default").using == "default"


def test_items_carry_the_deployment_of_the_process_that_enqueues(settings):
    settings.WORKQUEUE = {"DEPLOYMENT_ID": "blue"}
    for backend in ("sqlite", "postgresql"):
        queue = make_queue(backend)
        pinned = queue.enqueue(WorkItem(tenant="acme"))
        unpinned = queue.enqueue(WorkItem(tenant="acme", deployment_id=""))
        other = queue.enqueue(WorkItem(tenant="acme", deployment_id="green"))
        pins = [item.deployment_id for item in (pinned, unpinned, other)]
        assert pins == ["blue", None, "green"]


def test_later_settings_do_not_touch_accepted_items(settings):
    queue = make_queue("postgresql")
    settings.WORKQUEUE = {"QUEUES": {"default": {"max_attempts": 2, "lease_seconds": 50}}}
    item = get_queue("postgresql").enqueue(WorkItem(tenant="acme"))
    settings.WORKQUEUE = {"QUEUES": {"default": {"max_attempts": 9, "lease_seconds": 500}}}
    claimed = queue.claim(worker="w")
    assert (item.max_attempts, claimed.max_attempts) == (2, 2)
    assert claimed.lease_expires_at - claimed.first_claimed_at == timedelta(seconds=50)


def test_a_refused_argument_is_named():
    queue = make_queue("sqlite")
    with pytest.raises(InvalidFieldError) as refused:
        queue.claim(worker="w\x00")
    assert refused.value.field == "worker"
    assert not Ready.objects.using("default").exists()
