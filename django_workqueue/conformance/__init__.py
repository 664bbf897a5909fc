"""
The contract as a suite of tests. Each test's name is a rule, its docstring says where the
rule is written (T, R and V: the checklist of the first source system; SPEC: the
specification).

To prove a queue, subclass with the two hooks and any base that runs ``test_`` methods::

    class TestMyQueue(WorkQueueConformance, unittest.TestCase):
        def make_queue(self, policy): ...
        def advance(self, queue, seconds): ...

Under pytest, name this package in `pytest.register_assert_rewrite` before it is imported:
failing asserts then show their values.
"""

from __future__ import annotations

from typing import Any

from django_workqueue.conformance.acceptances import Superseded, Twins
from django_workqueue.conformance.fairness import Fairness
from django_workqueue.conformance.figures import AsyncTwins, Figures
from django_workqueue.conformance.handing_over import DeploymentPins, DueTimes, HandingOver
from django_workqueue.conformance.holding import HeldTurns, Holding, Holds
from django_workqueue.conformance.leases import Fences, Leases
from django_workqueue.conformance.operating import Cancelling, Operating
from django_workqueue.conformance.pausing import Pausing
from django_workqueue.conformance.pruning import IdsAfterPruning, Pruning
from django_workqueue.conformance.requeueing import (
    Discarding,
    OldWorkers,
    Requeueing,
)
from django_workqueue.conformance.returning import Adopting, DeadLetters, Reaping
from django_workqueue.conformance.same_job_twice import (
    FullQueue,
    OneAfterTheOther,
    SameJobTwice,
    SeveralAtOnce,
)
from django_workqueue.conformance.settling import Repeats, Settling
from django_workqueue.conformance.values import Arguments, Fields, Payloads

__all__ = ["WorkQueueConformance"]


class WorkQueueConformance(
    HandingOver,
    DueTimes,
    DeploymentPins,
    SameJobTwice,
    SeveralAtOnce,
    OneAfterTheOther,
    FullQueue,
    Fairness,
    Leases,
    Fences,
    Settling,
    Repeats,
    Reaping,
    Adopting,
    DeadLetters,
    Operating,
    Pausing,
    Cancelling,
    Requeueing,
    OldWorkers,
    Superseded,
    Twins,
    Discarding,
    Holding,
    HeldTurns,
    Holds,
    Pruning,
    IdsAfterPruning,
    Payloads,
    Fields,
    Arguments,
    Figures,
    AsyncTwins,
):
    """
    What every `WorkQueue` must do. A subclass gives the hooks `make_queue` and `advance`.

    The queue that `make_queue` returns applies its policy to every queue name. Tests never
    wait in real time, and don't mind that a store's clock also runs by itself. A subclass
    can't replace a test: a store that can't pass one is no work queue.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in dir(WorkQueueConformance):
            own = getattr(cls, name, None)
            if name.startswith("test_") and own is not getattr(WorkQueueConformance, name):
                raise TypeError(f"{cls.__name__} replaces {name}, a rule of the contract")
