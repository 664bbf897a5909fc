"""The errors: one tree, each made from a message alone, each with its facts."""

import inspect
import pickle

import pytest

from django_workqueue import exceptions
from django_workqueue.exceptions import (
    InvalidFieldError,
    InvalidTransitionError,
    LeaseLostError,
    LiveTwinError,
    PayloadError,
    QueueFullError,
    QueueUnavailableError,
    WorkItemNotFoundError,
    WorkQueueError,
)
from django_workqueue.items import WorkItem

ERRORS = [
    member
    for member in vars(exceptions).values()
    if inspect.isclass(member) and issubclass(member, Exception)
]


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_can_be_made_from_a_message_alone(error):
    """R52."""
    assert str(error("what happened")) == "what happened"
    assert isinstance(error(), WorkQueueError)


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_survives_pickling(error):
    copy = pickle.loads(pickle.dumps(error("what happened")))
    assert (type(copy), str(copy)) == (error, "what happened")


def test_only_trouble_of_the_store_is_retryable():
    """T51, T93, R46-R49."""
    retryable = {error for error in ERRORS if error.retryable}
    assert retryable == {QueueUnavailableError, QueueFullError}


def test_an_unavailable_queue_is_named_with_the_operation():
    """T94."""
    error = QueueUnavailableError(queue="mail", operation="claim")
    assert (error.queue, error.operation) == ("mail", "claim")
    assert str(error) == "claim on queue 'mail': the store is unavailable"


def test_a_full_queue_shows_its_limit():
    error = QueueFullError(queue="mail", depth=10, limit=10)
    assert (error.queue, error.depth, error.limit) == ("mail", 10, 10)
    assert str(error) == "queue 'mail' is full: depth 10, max_depth 10"


def test_a_missing_item_is_named_with_its_tenant():
    """R47."""
    error = WorkItemNotFoundError(item_id="i-1", tenant="acme")
    assert (error.item_id, error.tenant) == ("i-1", "acme")
    assert str(error) == "tenant 'acme' has no item 'i-1'"


def test_a_lost_lease_says_who_holds_the_item():
    """R48, R50."""
    error = LeaseLostError(item_id="i-1", worker="w1", holder="w2", reason="taken")
    assert (error.item_id, error.worker, error.holder, error.reason) == ("i-1", "w1", "w2", "taken")
    assert str(error) == "worker 'w1' has lost item 'i-1': taken, held by 'w2'"
    assert (LeaseLostError().holder, LeaseLostError().reason) == (None, "expired")


def test_a_refused_value_is_a_value_error_that_names_its_field():
    assert issubclass(PayloadError, InvalidFieldError)
    error = InvalidFieldError("must not be empty", field="tenant")
    assert isinstance(error, ValueError)
    assert (error.field, str(error)) == ("tenant", "tenant: must not be empty")


def test_an_illegal_move_names_item_state_and_verb():
    error = InvalidTransitionError(item_id="i-1", state="completed", verb="requeue")
    assert (error.item_id, error.state, error.verb) == ("i-1", "completed", "requeue")
    assert str(error) == "item 'i-1' is completed: requeue is not possible"


def test_a_live_twin_is_an_illegal_move_that_shows_the_twin():
    twin = WorkItem(tenant="acme", id="i-2", payload={"secret": 1})
    error = LiveTwinError(item_id="i-1", state="dead_lettered", twin=twin)
    assert isinstance(error, InvalidTransitionError)
    assert (error.twin, error.verb) == (twin, "requeue")
    assert str(error) == "item 'i-1' can't come back: live item 'i-2' has its id or key"
