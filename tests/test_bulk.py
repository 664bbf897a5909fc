"""Requeueing many items at once: as `requeue` would, in a few statements, each by itself."""

from functools import partial

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from django_workqueue import (
    InvalidFieldError,
    QueuePolicy,
    WorkItem,
    WorkItemNotFoundError,
    WorkState,
)
from django_workqueue.bulk import _ENDED
from django_workqueue.doctor import examine
from django_workqueue.exceptions import InvalidTransitionError
from django_workqueue.models import AuditEntry, Counter, DeadLetter, Failure, QueueItem, Ready
from django_workqueue.operating import audited
from django_workqueue.policy import check_move
from django_workqueue.testing import make_queue
from tests.elsewhere import Elsewhere

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


@pytest.fixture(params=["sqlite", "postgresql"])
def queue(request):
    queue = make_queue(request.param, QueuePolicy(max_attempts=1))
    yield queue
    assert examine(queue.using) == []


def bury(queue, *ids, **fields):
    """Have items fail for good; return their job ids."""
    for id in ids:
        queue.enqueue(WorkItem(tenant="t", id=id, **fields))
    claimed = queue.claim_many(worker="w", limit=len(ids))
    for item in claimed:
        queue.fail(item.id, tenant="t", worker="w", error="no")
    return [item.job_id for item in claimed]


def test_what_can_be_requeued_in_bulk_is_what_can_be_requeued():
    for state in WorkState:
        allowed = state.value in _ENDED
        try:
            check_move("one", state, "requeue", WorkState.QUEUED)
        except InvalidTransitionError:
            assert not allowed, state
        else:
            assert allowed, state


def test_each_item_is_requeued_as_one_by_itself_would_be(queue):
    alone, *many = bury(queue, "alone", "a", "b", priority=7)
    queue.requeue("alone", tenant="t", by="ann", reason="mended")
    cancelled = queue.enqueue(WorkItem(tenant="t", id="c", priority=7)).job_id
    queue.cancel("c", tenant="t")
    with audited(request_id="r-1"):
        outcome = queue.requeue_many([*many, cancelled], by="ann", reason="mended")
    assert (outcome.done, outcome.skipped) == ([*many, cancelled], {})
    rows = Ready.objects.using(queue.using).order_by("item_id")
    shapes = {row.item_id: (row.rank, row.attempts, row.fence) for row in rows}
    assert shapes == {alone: (-7, 1, 1)} | dict.fromkeys(many, (-7, 1, 1)) | {cancelled: (-7, 0, 0)}
    assert [queue.get(id, tenant="t").max_attempts for id in ("alone", "a", "c")] == [2, 2, 1]
    entries = AuditEntry.objects.using(queue.using).filter(verb="requeue").order_by("pk")
    told = [(e.actor, e.reason, e.item, e.detail["state"]) for e in entries]
    assert told[:2] == [("ann", "mended", job, "dead_lettered") for job in (alone, many[0])]
    assert told[-1] == ("ann", "mended", cancelled, "cancelled")
    assert [entry.detail.get("request_id") for entry in entries] == [None, *["r-1"] * 3]


def test_what_can_not_be_requeued_is_skipped_and_told_by_why(queue):
    dead, replaced, keyed = bury(queue, "dead", "replaced", "keyed", dedupe_key=None)
    twins = bury(queue, "twin-1", dedupe_key="k") + bury(queue, "twin-2", dedupe_key="k")
    queue.enqueue(WorkItem(tenant="t", id="replaced"))
    live = queue.enqueue(WorkItem(tenant="t", id="live")).job_id
    outcome = queue.requeue_many([dead, replaced, keyed, *twins, live, 10**9])
    # Of two with one key the older is as good as the younger: the one that still holds it.
    assert sorted(outcome.done) == [dead, keyed, twins[1]]
    assert outcome.skipped == {
        "live_twin": [replaced, twins[0]],
        "wrong_state": [live],
        "not_found": [10**9],
    }


def test_a_superseded_item_comes_back_once_nobody_live_has_its_names(queue):
    [old] = bury(queue, "one")
    [new] = bury(queue, "one")
    assert queue.requeue_many([old]).done == [old]
    assert queue.get("one", tenant="t").job_id == old
    assert queue.requeue_many([new]).skipped == {"live_twin": [new]}


def test_two_hundred_take_a_few_statements(queue):
    jobs = bury(queue, *(f"item-{n}" for n in range(200)))
    connection = connections[queue.using]
    with CaptureQueriesContext(connection) as queries:
        assert queue.requeue_many(jobs).done == jobs
    written = [q for q in queries if not q["sql"].startswith(("BEGIN", "COMMIT", "SAVEPOINT"))]
    assert len(written) <= 20, [q["sql"][:80] for q in written]


def test_a_place_that_is_damaged_stops_only_its_own_item(queue):
    jobs = bury(queue, "a", "b", "c")
    DeadLetter.objects.using(queue.using).filter(item_id=jobs[1]).delete()
    outcome = queue.requeue_many(jobs)
    assert outcome.done == [jobs[0], jobs[2]]
    assert outcome.skipped == {"wrong_state": [jobs[1]]}
    QueueItem.bodies.using(queue.using).filter(pk=jobs[1]).delete()
    Failure.objects.using(queue.using).filter(item_id=jobs[1]).delete()
    Counter.objects.using(queue.using).create(queue="default", dead_lettered=-1)


def test_of_two_operators_at_once_one_requeues_each_item():
    queue = make_queue("postgresql", QueuePolicy(max_attempts=1))
    jobs = bury(queue, "a", "b", "c")
    with Elsewhere(queue.using) as other:
        other.begin()
        assert other.call(partial(queue.requeue_many, jobs[:2])).done == jobs[:2]
        with Elsewhere(queue.using) as third:
            waits = third.start(partial(queue.requeue_many, jobs))
            third.wait_until_blocked(waits)
            other.commit()
            outcome = waits.result(20)
    assert (outcome.done, outcome.skipped) == ([jobs[2]], {"wrong_state": jobs[:2]})
    assert Ready.objects.using(queue.using).count() == 3
    assert examine(queue.using) == []


def test_a_number_that_is_none_and_too_many_are_refused(queue):
    for wrong, field in (["1"], "job_ids"), ([True], "job_ids"), ([-1], "job_ids"):
        with pytest.raises(InvalidFieldError, match=field):
            queue.requeue_many(wrong)
    with pytest.raises(InvalidFieldError, match="number of job_ids"):
        queue.requeue_many(range(10_001))


def test_what_retention_has_taken_is_not_found(queue):
    [job] = bury(queue, "one")
    queue.discard("one", tenant="t", by="ann", reason="old")
    queue.advance(86_401)
    assert queue.prune() == 1
    with pytest.raises(WorkItemNotFoundError):
        queue.get("one", tenant="t")
    assert queue.requeue_many([job]).skipped == {"not_found": [job]}
