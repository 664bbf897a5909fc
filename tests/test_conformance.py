"""The suite itself: it can't be switched off, and it finds a queue that breaks a rule."""

import unittest
from collections import Counter

import pytest

from django_workqueue.conformance import WorkQueueConformance
from django_workqueue.memory import MemoryWorkQueue

THEMES = [theme for theme in WorkQueueConformance.__mro__ if theme is not object]


def own_names(theme: type) -> list[str]:
    return [name for name in vars(theme) if not name.startswith("__")]


def test_no_two_themes_share_a_name():
    """The second would hide the first."""
    counts = Counter(name for theme in THEMES for name in own_names(theme))
    assert [name for name, count in counts.items() if count > 1] == []


def test_the_suite_hides_nothing_of_a_test_case():
    names = {name for theme in THEMES for name in own_names(theme)}
    assert names & set(dir(unittest.TestCase)) == set()


def test_every_rule_says_where_it_is_written():
    rules = [name for name in dir(WorkQueueConformance) if name.startswith("test_")]
    assert len(rules) > 200
    for name in rules:
        assert getattr(WorkQueueConformance, name).__doc__, name


def test_a_subclass_can_not_replace_a_rule():
    for replaced in (None, lambda self: None):
        with pytest.raises(TypeError, match="replaces test_a_completed_item_never_comes_back"):
            type(
                "Lenient",
                (WorkQueueConformance,),
                {"test_a_completed_item_never_comes_back": replaced},
            )


def test_a_mixin_can_not_replace_a_rule():
    class Lenient:
        def test_a_completed_item_never_comes_back(self):
            pass

    with pytest.raises(TypeError, match="Queue replaces test_a_completed_item_never_comes_back"):
        type("Queue", (Lenient, WorkQueueConformance), {})


def test_the_suite_runs_without_pytest_and_finds_a_broken_rule():
    class Forgetful(MemoryWorkQueue):
        """Looks at the worker's name, not at the fence."""

        def _require_claim(self, row, worker, fence, now):
            super()._require_claim(row, worker, None, now)

    class TestForgetful(WorkQueueConformance, unittest.TestCase):
        def make_queue(self, policy):
            return Forgetful(policy)

        def advance(self, queue, seconds):
            raise AssertionError("not needed here")

    found = unittest.TestResult()
    for name in (
        "test_an_older_claim_of_the_same_worker_is_taken",
        "test_an_enqueued_item_is_queued_and_not_held",
    ):
        TestForgetful(name).run(found)
    assert (found.testsRun, len(found.failures), found.errors) == (2, 1, [])
    [(failed, text)] = found.failures
    assert failed.id().endswith("test_an_older_claim_of_the_same_worker_is_taken")
    assert "LeaseLostError was not raised" in text
