"""How the attempts of a process ended, until the database has it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.db import Error

from django_workqueue.failures import FailureKind, describe
from django_workqueue.items import WorkState
from django_workqueue.models import Failure, Finished
from django_workqueue.moves import BATCH, Completion, EndedAttempt, Release
from django_workqueue.queues import DatabaseWorkQueue
from django_workqueue.worker.attempts import Held, Settlement, log_lost, log_success
from django_workqueue.worker.trouble import Remedy, remedy_for

logger: Final = logging.getLogger("django_workqueue")

#: Seconds until a settlement is tried again whose lease somebody else has locked.
LOCKED_DELAY: Final = 1.0


@dataclass(eq=False, slots=True)
class Ending:
    """A settlement to be stored. `held` is None for an item that no handler was found for."""

    settlement: Settlement
    held: Held | None
    #: It was sent once, and the answer has not come.
    unanswered: bool = False
    not_before: float = 0.0
    #: The last try met a lock, and was no answer.
    postponed: bool = False

    @property
    def job_id(self) -> int:
        """The item's job id."""
        return self.settlement.item

    @property
    def claim(self) -> tuple[int, int]:
        """The item's job id, and the fence."""
        return self.settlement.item, self.settlement.fence


class Settling:
    """
    The settlements that are to be stored, in batches.

    Repeating one is safe: it is known by its fence. One that is refused is logged and
    dropped, as is one whose lease has surely run out meanwhile.
    """

    def __init__(self, queue: DatabaseWorkQueue, worker: str) -> None:
        self._queue = queue
        self._worker = worker
        self._endings: dict[tuple[int, int], Ending] = {}

    def __bool__(self) -> bool:
        return bool(self._endings)

    def __contains__(self, claim: tuple[int, int]) -> bool:
        return claim in self._endings

    def add(self, settlement: Settlement, held: Held | None = None) -> None:
        """Take in how a claim ended; the first word on it counts."""
        ending = Ending(settlement, held)
        self._endings.setdefault(ending.claim, ending)

    def next_at(self) -> float | None:
        """When there is something to store, by the monotonic clock; None: nothing."""
        return min((ending.not_before for ending in self._endings.values()), default=None)

    def due(self) -> list[Ending]:
        """Return a batch of what is to be stored now."""
        now = time.monotonic()
        batch = [each for each in self._endings.values() if each.not_before <= now][:BATCH]
        for each in batch:
            each.postponed = False
        return batch

    def drop_lapsed(self) -> list[Held]:
        """Give up what can't be stored any more, and return it."""
        now = time.monotonic()
        tried = [each.held for each in self._endings.values() if each.unanswered]
        lapsed = [held for held in tried if held is not None and held.lapsed(now)]
        for held in lapsed:
            log_lost(held, "expired before its end could be stored")
            del self._endings[held.job_id, held.fence]
        return lapsed

    def store(self, batch: Sequence[Ending]) -> dict[int, WorkState]:
        """Store a batch in as few statements as there are kinds; return the new states."""
        told = [each.settlement for each in batch]
        moves = self._queue.moves
        return (
            moves.complete(self._worker, _of(Completion, told))
            | moves.fail(self._worker, _of(EndedAttempt, told))
            | moves.release(self._worker, _of(Release, told))
        )

    def store_singly(self, batch: Sequence[Ending]) -> dict[int, WorkState]:
        """Store a batch of which one is bad, or locked by somebody: the rest gets through."""
        states: dict[int, WorkState] = {}
        for each in batch:
            try:
                states |= self.store([each])
            except Error as error:
                remedy = remedy_for(error)
                if Remedy.ROW not in remedy:
                    raise
                if Remedy.REPEAT in remedy:
                    each.postponed = True
                    each.not_before = time.monotonic() + LOCKED_DELAY
                else:
                    each.settlement = _refused(each.settlement, error)
                    states |= self.store([each])
        return states

    def done(
        self, batch: Sequence[Ending], states: Mapping[int, WorkState]
    ) -> list[tuple[int, int]]:
        """Forget what was answered; return the claims. Postponed ones stay."""
        answered = [each for each in batch if not each.postponed]
        for each in answered:
            state = states.get(each.job_id)
            del self._endings[each.claim]
            if each.held is not None:
                with contextlib.suppress(Error):  # what is told asks the database
                    self._log(each, each.held, state)
        return [each.claim for each in answered]

    def _log(self, ending: Ending, held: Held, state: WorkState | None) -> None:
        settlement = ending.settlement
        if state is None:
            if not self._stands(ending):
                log_lost(held, held.stopped or "expired or taken")
        elif isinstance(settlement, Completion):
            log_success(held)
        elif isinstance(settlement, EndedAttempt):
            logger.log(
                logging.WARNING if state is WorkState.DEAD_LETTERED else logging.INFO,
                "attempt failed: queue=%s tenant=%s item=%s attempt=%s kind=%s now=%s error=%s",
                held.item.queue,
                held.item.tenant,
                held.item.id,
                held.item.attempt,
                settlement.kind,
                state,
                settlement.text.message.partition("\n")[0][:200],
            )

    def _stands(self, ending: Ending) -> bool:
        """True if an earlier try of this, or an atomic handler's commit, was stored after all."""
        settlement = ending.settlement
        claim = {"item_id": settlement.item, "fence": settlement.fence}
        finished = Finished.objects.using(self._queue.using).filter(**claim)
        if finished.filter(state=WorkState.COMPLETED).exists():
            return True
        if isinstance(settlement, EndedAttempt):
            failures = Failure.objects.using(self._queue.using).filter(**claim)
            return failures.filter(kind=settlement.kind).exists()
        return ending.unanswered and isinstance(settlement, Release)


def _of(kind: type[Any], settlements: Sequence[Settlement]) -> list[Any]:
    return [each for each in settlements if isinstance(each, kind)]


def _refused(settlement: Settlement, error: Error) -> EndedAttempt:
    return EndedAttempt(
        item=settlement.item,
        fence=settlement.fence,
        kind=FailureKind.ERROR,
        text=describe(f"the end of the attempt could not be stored: {error}"),
    )
