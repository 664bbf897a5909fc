"""
Items whose handler this process doesn't have: passed on to others, who may have newer code,
and fetched back once a process has it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from django.db import Error

from django_workqueue.handlers import registry
from django_workqueue.items import WorkItem
from django_workqueue.moves import Recall, Release
from django_workqueue.queues import DatabaseWorkQueue
from django_workqueue.worker.attempts import claim_of
from django_workqueue.worker.options import WorkerOptions
from django_workqueue.worker.trouble import from_one_row

logger: Final = logging.getLogger("django_workqueue")

#: Seconds until an item comes back at the earliest: others can take it, and it can't sit at
#: the head of its tenant's work.
DELAY: Final = 5.0
#: Of what a worker has passed on, so much comes back in a second, however much there is. To
#: look at an item in vain is a claim and a release. If all were due again after `DELAY`, more
#: than are passed on in that time would keep what is behind them waiting for ever.
RATE: Final = 100
#: Seconds until a process looks again whether it has a handler that is waited for, once it
#: has looked in vain.
RECALL_PERIOD: Final = 5.0


@dataclass(eq=False, slots=True)
class _Search:
    """A walk through what waits in a queue for a handler, round and round."""

    #: Where it goes on; None: at the oldest.
    after: datetime | None = None
    #: The process is new, and may know more than others: on to the end, in one go.
    first: bool = True
    wanted: bool = True
    not_before: float = 0.0


class UnknownHandlers:
    """What a process does about them. For the dispatcher's thread."""

    def __init__(self, queue: DatabaseWorkQueue, options: WorkerOptions) -> None:
        self._moves = queue.moves
        self._lanes = ["", options.deployment_id]
        self._searches = {name: _Search() for name in options.queues}
        self._told: set[str] = set()
        # Seconds between two of its own: each process has its part of the rate.
        self._distance = options.processes / RATE
        # When what was passed on last comes back, by the monotonic clock.
        self._last_due = 0.0

    def pass_on(self, item: WorkItem) -> Release:
        """Give back an item: it comes back at the end of the line of all of them."""
        if item.handler not in self._told:
            self._told.add(item.handler)
            logger.warning("unknown handler: queue=%s handler=%s", item.queue, item.handler)
        now = time.monotonic()
        self._last_due = max(now + DELAY, self._last_due + self._distance)
        job_id, fence = claim_of(item)
        delay = self._last_due - now
        return Release(item=job_id, fence=fence, delay=delay, cause="unknown_handler")

    @property
    def searching(self) -> bool:
        """True while it is to be looked for what can be recalled."""
        return any(search.wanted for search in self._searches.values())

    def search(self, queues: Iterable[str]) -> None:
        """Look a step further for what can be recalled, where that wasn't in vain lately."""
        now = time.monotonic()
        for queue in queues:
            self._searches[queue].wanted |= self._searches[queue].not_before <= now

    def recall(self) -> list[str]:
        """
        Make due what waits for a handler that is here, a batch of each queue that is searched;
        return the queues in which there was some.

        Not all at once, but of a new process: while others pass it on again, it would keep what
        is behind it waiting.
        """
        found = []
        for queue, search in self._searches.items():
            if not search.wanted:
                continue
            recall = self._recall(queue, search.after)
            search.after = recall.seen
            if recall.recalled:
                logger.info("recalled: queue=%s items=%d", queue, recall.recalled)
                found.append(queue)
            else:
                search.not_before = time.monotonic() + RECALL_PERIOD
            search.wanted = search.first = search.first and recall.seen is not None
        return found

    def _recall(self, queue: str, after: datetime | None) -> Recall:
        try:
            return self._moves.recall(queue, self._lanes, _known(queue), after)
        except Error as error:
            if not from_one_row(error):
                raise
            # It must not keep the process from its work.
            logger.warning("a row stands in the way: %s", str(error).partition("\n")[0])
            return Recall(recalled=0, seen=None)


def _known(queue: str) -> list[str]:
    """The names of this process's handlers of items in *queue*; empty: its catch-all's."""
    return [each.name for each in registry if each.name or each.queue == queue]
