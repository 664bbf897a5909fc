"""Values: what an item and its payload may be, without any store."""

import dataclasses
import json
import time
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from django_workqueue.exceptions import InvalidFieldError, PayloadError
from django_workqueue.items import (
    MAX_SECONDS,
    QueueStats,
    WorkItem,
    WorkPriority,
    WorkState,
    encode_payload,
    encode_result,
    nested_deeper,
    new_item_id,
    require_integer,
    require_seconds,
    require_text,
    stored_item,
)

# Longer than Python is willing to print.
HUGE = pytest.param(10**5000, id="huge")
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)


def seconds(number: float) -> datetime:
    return NOON + timedelta(seconds=number)


def claimed(**fields) -> WorkItem:
    return WorkItem(**{"tenant": "acme", "state": WorkState.CLAIMED, "worker": "w1"} | fields)


class TestWorkItem:
    def test_a_new_item_is_queued(self):
        """T17."""
        assert WorkItem(tenant="acme").state is WorkState.QUEUED

    def test_an_unclaimed_item_is_not_held(self):
        """T18, T20."""
        item = WorkItem(tenant="acme")
        assert not item.held
        assert item.first_claimed_at is None

    @pytest.mark.parametrize("worker", [None, "", " "])
    def test_a_claimed_item_names_its_worker(self, worker):
        """T19, R5."""
        with pytest.raises(InvalidFieldError, match=r"^worker: "):
            claimed(worker=worker)

    def test_a_claimed_item_reports_its_claim(self):
        """T21."""
        item = claimed(first_claimed_at=NOON)
        assert item.held
        assert item.first_claimed_at == NOON

    @pytest.mark.parametrize("state", WorkState)
    def test_a_state_is_either_live_or_terminal(self, state):
        """T22, T23, T24."""
        worker = "w1" if state is WorkState.CLAIMED else None
        item = WorkItem(tenant="acme", state=state, worker=worker)
        live = state in {"queued", "claimed", "paused"}
        assert (item.live, item.terminal) == (live, not live)

    def test_an_unclaimed_item_has_not_lapsed_at_any_time(self):
        """T25."""
        item = WorkItem(tenant="acme", lease_expires_at=NOON)
        assert not item.lapsed_at(seconds(1e9))

    @pytest.mark.parametrize(("after", "lapsed"), [(9, False), (10, True), (11, True)])
    def test_a_lease_has_lapsed_from_its_expiry_on(self, after, lapsed):
        """T26, R8."""
        assert claimed(lease_expires_at=seconds(10)).lapsed_at(seconds(after)) is lapsed

    def test_a_claim_without_an_expiry_never_lapses(self):
        """T27."""
        assert not claimed().lapsed_at(seconds(1e9))

    @pytest.mark.parametrize(
        ("state", "attempt"),
        [("queued", 2), ("paused", 2), ("dead_lettered", 2), ("cancelled", 2), ("completed", 3)],
    )
    def test_the_attempt_is_the_running_or_the_successful_one(self, state, attempt):
        assert WorkItem(tenant="acme", state=state, attempts=2).attempt == attempt
        assert claimed(attempts=2).attempt == 3

    def test_an_item_is_immutable(self):
        with pytest.raises(dataclasses.FrozenInstanceError):
            WorkItem(tenant="acme").state = WorkState.COMPLETED

    def test_equal_fields_make_equal_items_that_can_be_in_a_set(self):
        one, two = (WorkItem(tenant="acme", id="i-1", payload={"n": [1]}) for _ in range(2))
        assert one == two
        assert len({one, two}) == 1

    def test_ids_are_generated_in_order_of_time(self):
        first = WorkItem(tenant="acme").id
        time.sleep(0.002)  # the ids tell milliseconds apart
        assert first < WorkItem(tenant="acme").id

    def test_a_generated_id_is_a_version_7_uuid_of_now(self):
        value = uuid.UUID(new_item_id())
        assert (value.version, value.variant) == (7, uuid.RFC_4122)
        assert abs((value.int >> 80) / 1000 - time.time()) < 60

    def test_states_are_taken_by_name(self):
        assert WorkItem(tenant="acme", state="completed").state is WorkState.COMPLETED
        with pytest.raises(InvalidFieldError, match=r"^state: "):
            WorkItem(tenant="acme", state="running")

    def test_priorities_have_names(self):
        assert [int(priority) for priority in WorkPriority] == [-50, 0, 50, 100]

    @pytest.mark.parametrize("name", ["first_claimed_at", "lease_expires_at"])
    def test_naive_times_are_refused(self, name):
        with pytest.raises(InvalidFieldError, match=rf"^{name}: "):
            WorkItem(tenant="acme", **{name: NOON.replace(tzinfo=None)})

    def test_refusals_are_value_errors_that_name_the_field(self):
        with pytest.raises(ValueError, match=r"^tenant: ") as refusal:
            WorkItem(tenant="")
        assert refusal.value.field == "tenant"


class TestStoredItem:
    def test_a_stored_item_equals_one_made_by_hand(self):
        assert stored_item(id="i", tenant="t", payload={}) == WorkItem(id="i", tenant="t")

    def test_a_stored_row_is_shown_however_odd_it_is(self):
        item = stored_item(id="", tenant="x" * 999, payload=[], state=WorkState.CLAIMED)
        assert (item.id, item.payload, item.worker) == ("", [], None)


class TestQueueStats:
    def test_figures_start_at_zero(self):
        figures = dataclasses.asdict(QueueStats(as_of=NOON))
        assert figures.pop("as_of") == NOON
        assert set(figures.values()) == {0}


quickly = settings(max_examples=50, deadline=None)

INTEGERS = st.integers(min_value=-(2**63), max_value=2**63 - 1)
TEXTS = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]))
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | INTEGERS | FLOATS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


class TestPayload:
    @quickly
    @given(st.dictionaries(TEXTS, JSON, max_size=5))
    def test_what_is_encoded_comes_back_unchanged(self, payload):
        assert repr(json.loads(encode_payload(payload, 2**30))) == repr(payload)

    @quickly
    @given(JSON)
    def test_a_result_may_be_any_json_value(self, result):
        text = encode_result(result, 2**30)
        assert (None if text is None else repr(json.loads(text))) == (
            None if result is None else repr(result)
        )

    @quickly
    @given(st.dictionaries(TEXTS, JSON, max_size=5))
    def test_the_size_is_of_the_encoded_bytes(self, payload):
        size = len(encode_payload(payload, 2**30).encode())
        encode_payload(payload, size)
        with pytest.raises(PayloadError, match=r"^payload: "):
            encode_payload(payload, size - 1)

    def test_the_text_is_compact(self):
        assert encode_payload({"a": [1, "é"]}, 100) == '{"a":[1,"é"]}'

    def test_a_refusal_says_where(self):
        with pytest.raises(PayloadError) as refusal:
            encode_payload({"a": {"b": [1, {"c": float("nan")}]}}, 100)
        assert refusal.value.field == "payload.a.b.c"

    def test_a_long_key_is_cut_where_it_is_named(self):
        with pytest.raises(PayloadError) as refusal:
            encode_payload({"k" * 5000: {"n": float("nan")}}, 10_000)
        assert refusal.value.field == "payload." + "k" * 50 + ".n"

    def test_a_refusal_shows_no_value(self):
        for payload in ({"a": "secret\x00"}, {"a": "secret" * 20}, {"a": [b"secret"]}):
            with pytest.raises(PayloadError) as refusal:
                encode_payload(payload, 100)
            assert "secret" not in str(refusal.value)


class TestRequirements:
    @pytest.mark.parametrize("value", [1.0, True, None, "1", 10, -1, HUGE])
    def test_an_integer_is_one_in_its_range(self, value):
        assert require_integer("n", 0, 0, 9) == 0
        assert require_integer("n", 9, 0, 9) == 9
        with pytest.raises(InvalidFieldError, match=r"^n: "):
            require_integer("n", value, 0, 9)

    @pytest.mark.parametrize(
        "value", [True, None, "1", -0.1, float("nan"), float("inf"), HUGE, MAX_SECONDS + 1]
    )
    def test_seconds_are_a_finite_span(self, value):
        assert require_seconds("s", 0) == 0.0
        assert require_seconds("s", MAX_SECONDS) == MAX_SECONDS
        with pytest.raises(InvalidFieldError, match=r"^s: "):
            require_seconds("s", value)

    def test_seconds_may_have_to_be_more_than_none(self):
        with pytest.raises(InvalidFieldError, match=r"^s: must be a microsecond or more"):
            require_seconds("s", 0, positive=True)

    @pytest.mark.parametrize("value", ["", "xxxx", "a\x00", "\udc80", None, 5, b"x"])
    def test_text_is_short_and_plain(self, value):
        assert require_text("t", "😀😀😀", 3) == "😀😀😀"
        with pytest.raises(InvalidFieldError, match=r"^t: "):
            require_text("t", value, 3)

    def test_text_may_be_empty_where_that_means_something(self):
        assert require_text("t", "", 3, empty=True) == ""


@pytest.mark.parametrize("empty", [dict, list])
def test_nesting_counts_every_level_down_to_empty_containers(empty):
    value = empty()
    for levels in range(1, 150):
        assert nested_deeper(value, 100) is (levels > 100)
        value = {"a": value, "b": 1} if levels % 2 else [0, value]
