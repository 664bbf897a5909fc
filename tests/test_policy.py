"""The rules: policy, backoff, legal moves, what becomes of a failed attempt."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from django_workqueue.exceptions import InvalidFieldError, InvalidTransitionError
from django_workqueue.items import WorkItem, WorkState
from django_workqueue.policy import MOVES, QueuePolicy, after_attempt, check_move

SECONDS = st.floats(min_value=0, max_value=1e9)


class TestQueuePolicy:
    def test_the_defaults_are_those_of_the_specification(self):
        """SPEC 3."""
        assert dataclasses.asdict(QueuePolicy()) == {
            "lease_seconds": 60,
            "max_attempts": 5,
            "backoff_seconds": 1,
            "backoff_cap_seconds": 300,
            "max_lease_seconds": 3600,
            "timeout_seconds": None,
            "retention_seconds": 86_400,
            "dead_letter_retention_seconds": None,
            "max_depth": None,
            "max_payload_bytes": 262_144,
        }

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            *(("lease_seconds", value) for value in (0, -1, None, "60", float("nan"), True)),
            *(("max_attempts", value) for value in (0, -1, 1.5, "5", None, 2**31, True)),
            *(("backoff_seconds", value) for value in (-1, None, float("inf"), "1")),
            *(("backoff_cap_seconds", value) for value in (-1, float("inf"))),
            *(("max_lease_seconds", value) for value in (0, -1, None)),
            *(("timeout_seconds", value) for value in (0, -1)),
            *(("retention_seconds", value) for value in (-1, "1")),
            *(("dead_letter_retention_seconds", value) for value in (-1, 10**12)),
            *(("max_depth", value) for value in (0, -1, 1.0)),
            *(("max_payload_bytes", value) for value in (1, 2**31, None)),
        ],
    )
    def test_a_wrong_value_is_refused_by_name(self, field, value):
        with pytest.raises(InvalidFieldError, match=rf"^{field}: "):
            QueuePolicy(**{field: value})

    def test_a_lease_may_be_longer_than_its_cap(self):
        """R10: no rule across fields."""
        assert QueuePolicy(lease_seconds=100, max_lease_seconds=60).lease_for(None) == 60

    @pytest.mark.parametrize(("asked", "length"), [(None, 30), (10, 10), (60, 60), (61, 60)])
    def test_a_claim_is_as_long_as_asked_up_to_the_cap(self, asked, length):
        policy = QueuePolicy(lease_seconds=30, max_lease_seconds=60)
        assert policy.lease_for(asked) == length

    def test_an_item_brings_its_own_wishes(self):
        policy = QueuePolicy(max_attempts=5, timeout_seconds=60, lease_seconds=7)
        stamped = policy.for_item(WorkItem(tenant="acme", max_attempts=1, timeout_seconds=2))
        assert (stamped.max_attempts, stamped.timeout_seconds) == (1, 2)
        assert stamped.lease_seconds == 7
        assert policy.for_item(WorkItem(tenant="acme")) == policy

    @pytest.mark.parametrize(
        ("base", "cap", "attempts", "wait"),
        [
            (1, 300, 1, 1),  # T28
            (2, 300, 3, 8),  # T29
            (2, 5, 9, 5),  # T30
            (2, 300, 0, 0),  # T31
            (2, 300, -1, 0),
            (0, 300, 7, 0),
            (1, 300, 9, 256),
            (1, 300, 10, 300),
            (1, 300, 2**31, 300),  # V13
        ],
    )
    def test_the_backoff_doubles_up_to_its_cap(self, base, cap, attempts, wait):
        """R11."""
        policy = QueuePolicy(backoff_seconds=base, backoff_cap_seconds=cap)
        assert policy.backoff(attempts) == wait

    @settings(max_examples=50, deadline=None)
    @given(SECONDS, SECONDS, st.integers(min_value=1, max_value=2**31))
    def test_the_backoff_never_shrinks_nor_passes_its_cap(self, base, cap, attempts):
        """R11, V13."""
        policy = QueuePolicy(backoff_seconds=base, backoff_cap_seconds=cap)
        assert policy.backoff(attempts) <= policy.backoff(attempts + 1) <= cap

    def test_attempts_are_exhausted_at_their_number(self):
        """T32, R12."""
        policy = QueuePolicy(max_attempts=2)
        assert [policy.exhausted(attempts) for attempts in (0, 1, 2, 3)] == [
            False,
            False,
            True,
            True,
        ]


class TestAfterAttempt:
    @pytest.mark.parametrize(
        ("attempts", "retryable", "cancel_requested", "state"),
        [
            (1, True, False, WorkState.QUEUED),
            (2, True, False, WorkState.QUEUED),
            (3, True, False, WorkState.DEAD_LETTERED),
            (4, True, False, WorkState.DEAD_LETTERED),
            (1, False, False, WorkState.DEAD_LETTERED),
            (1, True, True, WorkState.CANCELLED),
            (3, True, True, WorkState.CANCELLED),
            (1, False, True, WorkState.CANCELLED),
        ],
    )
    def test_a_failed_attempt_is_retried_buried_or_cancelled(
        self, attempts, retryable, cancel_requested, state
    ):
        """R30, SPEC 4."""
        to = after_attempt(
            attempts=attempts,
            max_attempts=3,
            retryable=retryable,
            cancel_requested=cancel_requested,
        )
        assert to is state


class TestMoves:
    def test_every_state_has_its_moves(self):
        assert set(MOVES) == set(WorkState)

    def test_only_legal_moves_are_let_through(self):
        """Reference 3.3."""
        verbs = {verb for moves in MOVES.values() for verb in moves}
        for state in WorkState:
            for verb in verbs | {"steal"}:
                for to in WorkState:
                    if to in MOVES[state].get(verb, ()):
                        check_move("i-1", state, verb, to)
                    else:
                        with pytest.raises(InvalidTransitionError) as refusal:
                            check_move("i-1", state, verb, to)
                        assert (refusal.value.state, refusal.value.verb) == (state, verb)

    @pytest.mark.parametrize(
        ("state", "verb", "to"),
        [
            ("completed", "requeue", "queued"),
            ("queued", "complete", "completed"),
            ("paused", "claim", "claimed"),
            ("claimed", "claim", "claimed"),
            ("dead_lettered", "cancel", "cancelled"),
            ("queued", "discard", "cancelled"),
            ("claimed", "cancel", "cancelled"),
        ],
    )
    def test_moves_that_would_break_a_promise_are_refused(self, state, verb, to):
        with pytest.raises(InvalidTransitionError, match=f"'i-1' is {state}: {verb} is not"):
            check_move("i-1", WorkState(state), verb, WorkState(to))

    def test_nothing_leads_out_of_completed(self):
        """SPEC 1.3: one result."""
        assert MOVES[WorkState.COMPLETED] == {}
