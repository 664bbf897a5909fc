"""The figures of a queue: exact counts, the age of a long backlog, samples, and max_depth."""

import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from functools import partial
from typing import Any

import pytest
from django.db import connections, transaction

from django_workqueue import QueueFullError, QueuePolicy, WorkItem
from django_workqueue.doctor import examine
from django_workqueue.figures import EXACT_UP_TO, SAMPLE_LAPSE, SAMPLES_KEPT, Figures
from django_workqueue.models import Counter, Ready, Sample, Waiting
from django_workqueue.moves import FOLDED_EVERY
from django_workqueue.queues import DatabaseWorkQueue
from django_workqueue.testing import DatabaseTestQueue, make_queue
from tests.elsewhere import Elsewhere, crowd

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

POSTGRES = "postgresql"


@pytest.fixture(params=["sqlite", POSTGRES])
def queue(request: pytest.FixtureRequest) -> DatabaseTestQueue:
    return make_queue(request.param)


@pytest.fixture
def figures(queue: DatabaseTestQueue) -> Figures:
    return Figures(queue.using, queue.moves)


def put(store: DatabaseWorkQueue, number: int, /, **fields: Any) -> None:
    store.enqueue_many(WorkItem(tenant="acme", **fields) for _ in range(number))


def finish(queue: DatabaseWorkQueue, number: int) -> None:
    for item in queue.claim_many(worker="w", limit=number):
        queue.complete(item.id, tenant=item.tenant, worker="w", fence=item.fence)


class TestOldestAge:
    """Rows without bodies, which the figures don't read."""

    def fill(
        self, queue: DatabaseTestQueue, place: str, rows: int, seconds: float, *, start: int = 0
    ) -> None:
        """Add *rows* that have waited for so many seconds."""
        names = "queue, deployment_id, tenant, rank, item, fence, attempts, settled_by, enqueued_at"
        values = "'default', '', 't' || n, 0, n, 0, 0, '', %s"
        now = queue.moves.now()
        times = [now - timedelta(seconds=seconds)]
        if place == "waiting":
            names += ", due_at, since, cause"
            values += ", %s, %s, 'scheduled'"
            times += [now + timedelta(days=1), now]
        connection = connections[queue.using]
        adapted = [connection.ops.adapt_datetimefield_value(each) for each in times]
        with connection.cursor() as cursor:
            cursor.execute(
                f"""
                with recursive numbers (n) as (
                  select %s + 1 union all select n + 1 from numbers where n < %s + %s
                )
                insert into django_workqueue_{place} ({names})
                select {values} from numbers
                """,
                [start, start, rows, *adapted],
            )
        figure = {"ready": "ready", "waiting": "waiting"}[place]
        Counter.objects.using(queue.using).create(queue="default", **{figure: rows})

    @pytest.mark.parametrize("place", ["ready", "waiting"])
    @pytest.mark.parametrize("first", [True, False], ids=["first", "last"])
    def test_it_is_exact_up_to_a_hundred_thousand_items(self, queue, place, first):
        half = EXACT_UP_TO // 2
        other = {"ready": "waiting", "waiting": "ready"}[place]
        self.fill(queue, other, half, 100)
        if first:
            self.fill(queue, place, 1, 9000, start=half)
        self.fill(queue, place, half - 1, 200, start=half + 1)
        if not first:
            self.fill(queue, place, 1, 9000, start=EXACT_UP_TO)
        minute = queue.moves.now().replace(second=0, microsecond=0)
        Sample.objects.using(queue.using).create(
            queue="default", at=minute, oldest_age_seconds=77_777
        )
        stats = queue.stats()
        assert stats.depth == EXACT_UP_TO
        assert 9000 <= stats.oldest_age_seconds < 9100
        assert abs(queue.moves.now() - stats.as_of) < timedelta(minutes=1)

    def test_beyond_it_is_the_samples_as_of_its_minute(self, queue, figures):
        self.fill(queue, "ready", EXACT_UP_TO, 50)
        self.fill(queue, "waiting", 1, 9000, start=EXACT_UP_TO)
        without = queue.stats()
        assert 9000 <= without.oldest_age_seconds < 9100  # each place so far by itself
        figures.take_samples()
        sample = Sample.objects.using(queue.using).get()
        assert (sample.at.second, sample.at.microsecond) == (0, 0)
        assert 8900 < sample.oldest_age_seconds < 9100
        stats = queue.stats()
        assert (stats.as_of, stats.oldest_age_seconds) == (sample.at, sample.oldest_age_seconds)
        # Counts are of now all the same.
        put(queue, 3)
        assert queue.stats().depth == EXACT_UP_TO + 4

    def test_a_sample_is_of_all_items(self, queue, figures):
        self.fill(queue, "ready", EXACT_UP_TO, 50)
        self.fill(queue, "ready", 1, 9000, start=EXACT_UP_TO)
        figures.take_samples()
        assert 8900 < queue.stats().oldest_age_seconds < 9100

    def test_an_old_sample_is_not_used_and_what_is_told_without_is_a_lower_bound(
        self, queue, figures
    ):
        self.fill(queue, "ready", EXACT_UP_TO, 50)
        self.fill(queue, "ready", 1, 9000, start=EXACT_UP_TO)
        samples = Sample.objects.using(queue.using)
        figures.take_samples()
        assert samples.get().at == queue.stats().as_of
        samples.update(at=queue.moves.now() - SAMPLE_LAPSE)
        stats = queue.stats()
        assert 50 <= stats.oldest_age_seconds < 9100
        assert abs(queue.moves.now() - stats.as_of) < timedelta(minutes=1)
        samples.update(at=queue.moves.now() - SAMPLE_LAPSE + timedelta(seconds=30))
        assert queue.stats().oldest_age_seconds == samples.get().oldest_age_seconds

    def test_of_several_recent_samples_the_latest_is_told(self, queue, figures):
        self.fill(queue, "ready", EXACT_UP_TO + 1, 50)
        now = queue.moves.now()
        for minutes in (1, 3, 2):
            Sample.objects.using(queue.using).create(
                queue="default", at=now - timedelta(minutes=minutes), oldest_age_seconds=minutes
            )
        Sample.objects.using(queue.using).create(queue="mail", at=now, oldest_age_seconds=9)
        assert queue.stats().oldest_age_seconds == 1

    def test_paused_items_have_no_age(self, queue):
        put(queue, 2)
        item = queue.claim(worker="w")
        queue.pause(item.id, tenant="acme", worker="w")
        Waiting.objects.using(queue.using).update(
            enqueued_at=queue.moves.now() - timedelta(seconds=9000)
        )
        stats = queue.stats()
        assert (stats.depth, stats.paused) == (1, 1)
        assert stats.oldest_age_seconds < 60

    def test_other_queues_are_not_read(self, queue):
        put(queue, 1, queue="mail", enqueued_at=queue.moves.now() - timedelta(seconds=9000))
        put(queue, 1)
        assert queue.stats().oldest_age_seconds < 60

    @pytest.mark.parametrize("open_already", [False, True])
    def test_the_callers_session_keeps_its_options(self, open_already):
        queue = make_queue(POSTGRES)
        put(queue, 1)

        def options() -> list[Any]:
            with connections[POSTGRES].cursor() as cursor:
                cursor.execute("select name, setting from pg_settings where source = 'session'")
                return sorted(cursor.fetchall())

        before = options()
        if open_already:
            with transaction.atomic(using=POSTGRES):
                put(queue, 1)
                assert queue.stats().depth == 2
                assert options() == before
                put(queue, 1)
        else:
            queue.stats()
        assert options() == before
        assert queue.stats().depth == (3 if open_already else 1)


class TestSamples:
    def test_one_is_taken_a_minute_however_many_supervisors_there_are(self, queue):
        put(queue, 2)
        put(queue, 1, queue="mail")
        queue.claim(worker="w")
        several = [Figures(queue.using, queue.moves) for _ in range(3)]
        # Not across the end of a minute.
        now = queue.moves.now()
        queue.advance(60 - now.second)
        several = [Figures(queue.using, queue.moves) for _ in range(3)]
        for each in several * 2:
            each.take_samples()
        taken = Sample.objects.using(queue.using).order_by("queue")
        figures = [(each.queue, each.depth, each.claimed) for each in taken]
        assert figures == [("default", 1, 1), ("mail", 1, 0)]
        put(queue, 1)
        queue.advance(60)
        Figures(queue.using, queue.moves).take_samples()
        depths = taken.filter(queue="default").order_by("at").values_list("depth", flat=True)
        assert [*depths] == [1, 2]

    def test_supervisors_that_take_one_at_the_same_time_keep_one(self):
        queue = make_queue(POSTGRES)
        put(queue, 1)
        moment = queue.moves.now().replace(second=30)
        moves = _At(queue.moves, moment)
        gate = threading.Barrier(4)

        def take() -> None:
            gate.wait(20)
            Figures(POSTGRES, moves).take_samples()

        with crowd(POSTGRES, 4) as supervisors:
            for run in [each.start(take) for each in supervisors]:
                run.result(20)
        # And one that looked before the others had written.
        with Elsewhere(POSTGRES) as other:
            other.begin()
            other.call(partial(Figures(POSTGRES, _At(moves, moment)).take_samples))
            late = _At(queue.moves, moment + timedelta(minutes=1))
            other.call(Figures(POSTGRES, late).take_samples)
            with Elsewhere(POSTGRES) as third:
                waiting = third.start(Figures(POSTGRES, late).take_samples)
                third.wait_until_blocked(waiting)
                other.commit()
                waiting.result(20)
        assert Sample.objects.using(POSTGRES).count() == 2

    def test_old_ones_are_deleted(self, queue, figures):
        put(queue, 1)
        minute = queue.moves.now().replace(second=0, microsecond=0)
        samples = Sample.objects.using(queue.using)
        for age in (timedelta(minutes=1), SAMPLES_KEPT - timedelta(minutes=5)):
            samples.create(queue="default", at=minute - age)
        for age in (SAMPLES_KEPT + timedelta(minutes=5), 2 * SAMPLES_KEPT):
            samples.create(queue="gone", at=minute - age)
        figures.take_samples()
        assert samples.count() == 3
        assert not samples.filter(queue="gone").exists()

    def test_what_has_ended_is_counted_for_ever(self, queue):
        queue = DatabaseTestQueue(queue.using, policy=QueuePolicy(retention_seconds=0))
        put(queue, 5)
        [failed, *_] = queue.claim_many(worker="w", limit=2)
        queue.fail(failed.id, tenant="acme", worker="w", error="x", retryable=False)
        finish(queue, 3)
        assert queue.prune() == 3
        queue.moves.fold_counters()
        assert queue.stats().completed == 0
        put(queue, 1)
        finish(queue, 1)
        Figures(queue.using, queue.moves).take_samples()
        sample = Sample.objects.using(queue.using).get()
        assert (sample.completions, sample.failures) == (4, 1)
        assert (sample.depth, sample.claimed, sample.dead_lettered) == (0, 1, 1)


class _At:
    """The moves, at a time that stands still."""

    def __init__(self, moves: Any, moment: datetime) -> None:
        self._moves = moves
        self._moment = moment

    def now(self) -> datetime:
        return self._moment


class TestCounters:
    """Where only producers run, too."""

    def most_rows(self, queue: DatabaseTestQueue, number: int, step: Callable[[], Any]) -> int:
        """The most counter rows that there ever were while *step* was repeated."""
        rows = Counter.objects.using(queue.using)
        most = 0
        with transaction.atomic(using=queue.using):  # only to be quick
            for _ in range(number):
                step()
                most = max(most, rows.count())
        return most

    def test_single_enqueues_leave_few_rows(self, queue):
        most = self.most_rows(queue, 1000, lambda: queue.enqueue(WorkItem(tenant="acme")))
        assert queue.stats().depth == 1000
        assert most <= FOLDED_EVERY + 1
        assert examine(queue.using) == []

    def test_suppressed_duplicates_leave_few_rows(self, queue):
        item = WorkItem(tenant="acme", dedupe_key="k")
        most = self.most_rows(queue, 500, lambda: queue.enqueue(item))
        stats = queue.stats()
        assert (stats.depth, stats.duplicates_suppressed) == (1, 499)
        assert most <= 2 * FOLDED_EVERY
        assert examine(queue.using) == []

    def test_claims_and_settlements_leave_few_rows(self, queue):
        put(queue, 210)
        most = self.most_rows(queue, 210, lambda: finish(queue, 1))
        assert most <= 350  # folded with every 100th turn
        assert queue.stats().completed == 210
        assert examine(queue.using) == []

    def test_each_queue_is_folded_by_itself(self, queue):
        for name in ("a", "b", "c"):
            for _ in range(3):
                put(queue, 2, queue=name)
        queue.claim(worker="w", queue="b")
        queue.moves.fold_counters()
        rows = Counter.objects.using(queue.using).order_by("queue")
        figures = [(each.queue, each.ready, each.claimed) for each in rows]
        assert figures == [("a", 6, 0), ("b", 5, 1), ("c", 6, 0)]
        queue.moves.fold_counters()
        assert rows.count() == 3

    @pytest.mark.parametrize("kept", [True, False])
    def test_a_fold_that_isnt_committed_stops_nobody_and_changes_no_sum(self, kept):
        queue = make_queue(POSTGRES)
        for _ in range(5):
            put(queue, 1)
        with Elsewhere(POSTGRES) as other:
            other.begin()
            other.call(queue.moves.fold_counters)
            assert Counter.objects.using(POSTGRES).count() == 5
            put(queue, 2)
            queue.moves.fold_counters()
            queue.claim(worker="w")
            assert queue.stats().depth == 6
            if kept:
                other.commit()
            else:
                other.rollback()
        queue.moves.fold_counters()
        stats = queue.stats()
        assert (stats.depth, stats.claimed) == (6, 1)
        assert Counter.objects.using(POSTGRES).count() == 1
        assert examine(POSTGRES) == []

    def test_sums_are_exact_at_any_moment_while_all_move_and_fold(self):
        queue = make_queue(POSTGRES)
        put(queue, 50)
        ended = threading.Event()

        def work(name: str) -> int:
            done = 0
            for _ in range(25):
                put(queue, 2)
                for item in queue.claim_many(worker=name, limit=2):
                    queue.complete(item.id, tenant="acme", worker=name, fence=item.fence)
                    done += 1
            return done

        def fold() -> None:
            while not ended.is_set():
                queue.moves.fold_counters()

        with crowd(POSTGRES, 5) as (folder, second, *workers):
            folding = [folder.start(fold), second.start(fold)]
            runs = [each.start(partial(work, f"w{n}")) for n, each in enumerate(workers)]
            while not all(run.done() for run in runs):
                assert examine(POSTGRES) == []
            ended.set()
            for each in folding:
                each.result(20)
            done = sum(run.result(60) for run in runs)
        stats = queue.stats()
        assert (stats.completed, stats.depth) == (done, 50 + 3 * 25 * 2 - done)
        assert done == 150
        queue.moves.fold_counters()
        assert Counter.objects.using(POSTGRES).count() == 1
        assert examine(POSTGRES) == []


class TestMaxDepth:
    def bounded(self, queue: DatabaseTestQueue, limit: int) -> DatabaseWorkQueue:
        return DatabaseWorkQueue(queue.using, policy=QueuePolicy(max_depth=limit))

    def test_the_refusal_names_queue_depth_and_limit(self, queue):
        full = self.bounded(queue, 3)
        put(full, 2, queue="mail")
        put(full, 3)
        with pytest.raises(QueueFullError) as refused:
            put(full, 2, queue="mail")
        error = refused.value
        assert (error.queue, error.depth, error.limit) == ("mail", 2, 3)
        for told in ("mail", "2", "3"):
            assert told in str(error)
        assert full.stats(queue="mail").depth == 2

    def test_it_counts_what_is_queued_and_nothing_else(self, queue):
        full = self.bounded(queue, 3)
        put(full, 1, available_at=queue.moves.now() + timedelta(days=1))
        put(full, 2)
        with pytest.raises(QueueFullError):
            put(full, 1)
        queue.claim(worker="w")
        put(full, 1)
        with pytest.raises(QueueFullError):
            put(full, 1)

    def test_a_full_queue_still_answers_with_the_twin(self, queue):
        full = self.bounded(queue, 1)
        stored = full.enqueue(WorkItem(tenant="acme", dedupe_key="k"))
        assert full.enqueue(WorkItem(tenant="acme", dedupe_key="k")) == stored
        with pytest.raises(QueueFullError):
            full.enqueue_many([WorkItem(tenant="acme", dedupe_key="k"), WorkItem(tenant="acme")])
        assert queue.stats().depth == 1

    def test_a_batch_over_several_queues_is_refused_as_a_whole(self, queue):
        full = self.bounded(queue, 2)
        put(full, 2, queue="mail")
        with pytest.raises(QueueFullError) as refused:
            full.enqueue_many(WorkItem(tenant="acme", queue=name) for name in ("sms", "mail"))
        assert refused.value.queue == "mail"
        assert full.stats(queue="sms").depth == 0

    def test_producers_one_after_the_other_never_exceed_it(self, queue):
        full = self.bounded(queue, 25)
        for batch, depth in ((10, 10), (10, 20), (10, 20), (4, 24), (1, 25), (1, 25), (2, 25)):
            before = queue.stats().depth
            if before + batch > 25:
                with pytest.raises(QueueFullError) as refused:
                    put(full, batch)
                assert refused.value.depth == before
            else:
                put(full, batch)
            assert queue.stats().depth == depth

    @pytest.mark.parametrize("batch", [1, 10])
    def test_eight_producers_at_once_overshoot_by_their_batches_at_most(self, batch):
        queue = make_queue(POSTGRES)
        limit = 2 * batch
        full = self.bounded(queue, limit)
        put(queue, batch)
        with crowd(POSTGRES, 8) as producers:
            for each in producers:
                each.begin()
                each.call(partial(put, full, batch))
                with pytest.raises(QueueFullError):  # its own, not committed, count
                    each.call(partial(put, full, batch))
            for each in producers:
                each.commit()
        depth = queue.stats().depth
        assert depth == batch + 8 * batch  # the worst that there is
        assert depth <= limit + 8 * batch
        with pytest.raises(QueueFullError):
            put(full, 1)
        assert examine(POSTGRES) == []

    def test_eight_producers_that_press_on_overshoot_once(self):
        queue = make_queue(POSTGRES)
        full = self.bounded(queue, 200)
        together = threading.Barrier(8)

        def produce() -> int:
            together.wait(20)
            accepted = 0
            for _ in range(12):
                try:
                    put(full, 5)
                    accepted += 5
                except QueueFullError:
                    pass
            return accepted

        with crowd(POSTGRES, 8) as producers:
            runs: Iterator[Any] = iter([each.start(produce) for each in producers])
            accepted = sum(run.result(60) for run in runs)
        depth = queue.stats().depth
        assert depth == accepted == Ready.objects.using(POSTGRES).count()
        assert 200 <= depth <= 200 + 8 * 5
