"""
The dispatcher of a process: claims for free slots, settles what has ended.

It is an actor in a thread of its own, the only one of the runtime in this process that
talks to the database: everything that concerns it arrives as a call in its inbox.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final

from django.db import Error, connections, transaction

from django_workqueue.exceptions import QueueUnavailableError, UnknownHandlerError
from django_workqueue.handlers import registry
from django_workqueue.items import WorkItem, WorkState
from django_workqueue.models import Lease
from django_workqueue.moves import BATCH, ClaimRequest, Release
from django_workqueue.queues import DatabaseWorkQueue
from django_workqueue.worker.attempts import Held, Settlement, claim_of, cut
from django_workqueue.worker.channel import Channel, ChannelClosedError
from django_workqueue.worker.connection import own_connection
from django_workqueue.worker.options import WorkerOptions
from django_workqueue.worker.settling import Ending, Settling
from django_workqueue.worker.slots import Slots
from django_workqueue.worker.trouble import Backoff, back_off, from_one_row, is_hopeless
from django_workqueue.worker.unknown import UnknownHandlers

logger: Final = logging.getLogger("django_workqueue")

#: Prefetching begins where attempts are shorter than this, and holds work for this long.
SHORT_ATTEMPT: Final = 0.005
PREFETCH_SECONDS: Final = 0.02
#: Seconds after which a prefetched item is given back: attempts have become long.
PREFETCH_PATIENCE: Final = 2.0
#: Seconds until an item is tried again whose handler still runs here, by a claim that is lost.
STILL_RUNNING_DELAY: Final = 1.0
_RECOVERY_PERIOD: Final = 5.0

#: Items, and when the claim was sent, by the monotonic clock.
Claimed = tuple[Sequence[WorkItem], float]


class Dispatcher:
    """`run` in a thread; `wake`, `drain`, `abandon` from any. Done when `finished`."""

    def __init__(
        self,
        options: WorkerOptions,
        *,
        process: int,
        budget: int | None,
        channel: Channel,
        announce: Callable[[Held], None],
    ) -> None:
        self._options = options
        self._process = process
        #: How many items it may still start; None: no limit.
        self._budget = budget
        self._channel = channel
        self._queue = DatabaseWorkQueue(options.alias)
        self.slots = Slots(
            self._queue,
            options.concurrency,
            announce=announce,
            report=lambda held, settlement: self._inbox.put(partial(self._end, held, settlement)),
        )
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._held: dict[int, Held] = {}
        self._settling = Settling(self._queue, options.name)
        self._gone: list[tuple[int, int]] = []
        self._left: list[tuple[int, int]] = []
        # Queues that may have due work; the others have shown that they have none.
        self._due: set[str] = set()
        self._turn = 0
        self._hungry = False
        self._draining = False
        self._trouble = Backoff()
        # A claim was sent, and is not known to be answered.
        self._claim_sent = False
        self._recover_at: float | None = None
        self._recover_until = 0.0
        # Claims that were held to be lost: should one stand after all, it is not unspent.
        self._given_up: dict[int, int] = {}
        self._unknown = UnknownHandlers(self._queue, options)

    # From other threads.

    def wake(self, queues: Iterable[str]) -> None:
        """Look for work in *queues*."""
        self._inbox.put(partial(self._look_into, queues))

    def drain(self) -> None:
        """Claim nothing more, give back what has not started, and finish with the rest."""
        self._draining = True  # at once: a claim may be under way
        self._inbox.put(self._stop_claiming)

    def abandon(self) -> None:
        """Settle what still runs as cut short; its own end won't count."""
        self._inbox.put(self._cut_running)

    @property
    def holds(self) -> bool:
        """True while it holds something, be it only until its end is stored."""
        return bool(self._held or self._settling)

    def held(self, job_id: int, fence: int) -> Held | None:
        """Return the item as held by that very claim, if it is."""
        held = self._held.get(job_id)
        return held if held is not None and held.fence == fence else None

    def _look_into(self, queues: Iterable[str]) -> None:
        self._due.update(queues)
        self._unknown.search(queues)
        self._hungry = False

    # The loop.

    def run(self) -> None:
        """Work until drained. Any error but trouble of the database comes out."""
        own_connection(self._options.alias, f"process {self._process}")
        try:
            while not self._finished():
                self._gather()
                if not self._trouble.remaining:
                    self._work()
        finally:
            connections[self._options.alias].close()

    def _finished(self) -> bool:
        return self._draining and not self._held and not self._settling

    def _gather(self) -> None:
        """Wait for something to do, then take in all that has come."""
        try:
            self._inbox.get(timeout=self._patience())()
            while True:
                self._inbox.get_nowait()()
        except Empty:
            pass

    def _patience(self) -> float | None:
        """Seconds until it has something to do of its own accord; None: nothing is known."""
        if wait := self._trouble.remaining:
            return wait
        if self._gone or (self._room() and (self._due or self._unknown.searching)):
            return 0.0
        times = [at for at in (self._settling.next_at(), self._recover_at) if at is not None]
        now = time.monotonic()
        if self.slots.backlog:
            times.append(now + PREFETCH_PATIENCE)
        return max(0.0, min(times) - now) if times else None

    def _work(self) -> None:
        self._give_back_stale()
        for held in self._settling.drop_lapsed():
            self._give_up(held)
        try:
            self._recover()
            if self._room():
                self._due.update(self._unknown.recall())
            self._settle_and_claim()
        except (Error, QueueUnavailableError) as error:
            if is_hopeless(error):
                raise
            self._back_off(error)
        else:
            if self._trouble.over():
                logger.info("database back: process=%s", self._process)

    def _settle_and_claim(self) -> None:
        """Store what has ended and claim for the slots that this frees: one commit."""
        batch = self._settling.due()
        try:
            states, claims = self._exchange(batch)
        except (Error, QueueUnavailableError):
            for each in batch:
                each.unanswered = True
            raise
        self._claim_sent = False
        self._forget(self._settling.done(batch, states))
        for items, began in claims:
            self._take(items, began)
        if self._left:
            self._tell("left", self._left)
            self._left = []
        if self._gone:
            self._tell("gone", self._gone)
            self._gone = []
        self._tell_whether_hungry()

    def _exchange(self, batch: Sequence[Ending]) -> tuple[dict[int, WorkState], list[Claimed]]:
        try:
            with self._one_commit(batch):
                return self._settling.store(batch), self._claim(freed=len(batch))
        except (Error, QueueUnavailableError) as error:
            if not batch or not from_one_row(error):
                raise
            self._due.update(self._options.queues)  # what was claimed is undone
            return self._settling.store_singly(batch), []

    def _one_commit(self, batch: Sequence[Ending]) -> contextlib.AbstractContextManager[Any]:
        kinds = {type(each.settlement) for each in batch}
        statements = len(kinds) + bool(self._due and self._room(len(batch)))
        if statements > 1:
            return transaction.atomic(using=self._options.alias)
        return contextlib.nullcontext()

    def _back_off(self, error: Exception) -> None:
        back_off(self._trouble, self._options.alias, f"process={self._process}", error)
        self._due.update(self._options.queues)
        if self._claim_sent:
            self._expect_lost_answer()

    # What has ended.

    def _end(self, held: Held, settlement: Settlement | None) -> None:
        if self._held.get(held.job_id) is not held:
            return  # settled as cut short before
        self._due.add(held.item.queue)
        if settlement is not None:
            self._settling.add(settlement, held)
        else:
            if held.lost:
                self._give_up(held)
            else:
                self._forget([claim_of(held.item)])
        if isinstance(settlement, Release) and held.started is None and self._budget is not None:
            self._budget += 1

    def _give_up(self, held: Held) -> None:
        self._given_up[held.job_id] = held.fence
        self._left.append((held.job_id, held.fence))
        self._forget([claim_of(held.item)])

    def _forget(self, claims: Iterable[tuple[int, int]]) -> None:
        for job_id, fence in claims:
            if self.held(job_id, fence):
                del self._held[job_id]
            self._gone.append((job_id, fence))

    def _stop_claiming(self) -> None:
        for held in self.slots.withdraw():
            self._end(held, Release(item=held.job_id, fence=held.fence))

    def _give_back_stale(self) -> None:
        oldest = time.monotonic() - PREFETCH_PATIENCE
        for held in self.slots.withdraw(unless=lambda held: held.taken > oldest):
            self._end(held, Release(item=held.job_id, fence=held.fence))

    def _cut_running(self) -> None:
        for held in self.slots.running():
            name, job_id = held.handler.name, held.job_id
            logger.warning("handler did not stop: handler=%s item=%s", name, job_id)
            self._end(held, cut(held))

    # Claiming.

    def _claim(self, freed: int) -> list[Claimed]:
        """
        Claim for all free slots, of which *freed* are only being freed.

        What was passed on counts as freed too, though it had no slot: the more of it there was,
        the more is claimed, since there is likely to be more of it.
        """
        claims: list[Claimed] = []
        room = self._room(freed)
        for _ in self._options.queues:
            if not room or not (queue := self._next_queue()):
                break
            began = time.monotonic()
            self._claim_sent = True
            items, more = self._queue.claim_for(self._request(queue, room))
            if not more:
                self._due.discard(queue)
            room -= len(items)
            claims.append((items, began))
        return claims

    def _room(self, freed: int = 0) -> int:
        if self._draining:
            return 0
        room = self._options.concurrency + self._prefetch() - len(self._held) + freed
        return max(0, room if self._budget is None else min(room, self._budget))

    def _prefetch(self) -> int:
        """How many items to hold beyond the slots: what short attempts use up meanwhile."""
        took = self.slots.attempt_seconds()
        if took > SHORT_ATTEMPT:
            return 0
        slots = self._options.concurrency
        return min(8 * slots, int(slots * PREFETCH_SECONDS / max(took, 1e-6)), BATCH)

    def _tell_whether_hungry(self) -> None:
        room = self._room()
        if self._budget == 0 and not self._held:
            self._draining = True
            self._tell("leaving")
        elif self._due or self._unknown.searching or not room:
            self._hungry = False
        elif not self._hungry:
            self._hungry = True
            self._tell("hungry")

    def _request(self, queue: str, limit: int) -> ClaimRequest:
        options = self._options
        return ClaimRequest(
            queue=queue,
            worker=options.name,
            limit=limit,
            deployment_id=options.deployment_id,
            boot=options.boot,
            process=self._process,
        )

    def _next_queue(self) -> str | None:
        """The next queue in rotation that may have due work."""
        queues = self._options.queues
        for step in range(len(queues)):
            place = (self._turn + step) % len(queues)
            if queues[place] in self._due:
                self._turn = place + 1
                return queues[place]
        return None

    def _take(self, items: Sequence[WorkItem], began: float) -> None:
        if not items:
            return
        taken = []
        self._hungry = False
        for item in items:
            try:
                handler = registry.find(item.handler, item.queue)
            except UnknownHandlerError:
                self._settling.add(self._unknown.pass_on(item))
                continue
            job_id, fence = claim_of(item)
            if job_id in self._held:  # by a claim that is lost: let another process have it
                delay = STILL_RUNNING_DELAY
                self._settling.add(Release(item=job_id, fence=fence, delay=delay))
                continue
            held = Held(item, handler, lease_seconds=_lease_seconds(item), confirmed=began)
            self._held[held.job_id] = held
            taken.append(held)
        if self._budget is not None:
            self._budget -= len(taken)
        claims = [(i.job_id, i.fence, _lease_seconds(i), i.timeout_seconds) for i in items]
        self._tell("held", began, claims)
        if not self._draining:
            self.slots.offer(taken)
            return
        for held in taken:  # the answer came when nothing was to begin any more
            self._end(held, Release(item=held.job_id, fence=held.fence))

    # Claims whose answer was lost.

    def _expect_lost_answer(self) -> None:
        # The claim may be stored although its answer never came: a statement that was on
        # its way may even be carried out later.
        longest = max(self._queue.policy_for(queue).lease_seconds for queue in self._options.queues)
        self._recover_at = time.monotonic()
        self._recover_until = self._recover_at + longest

    def _recover(self) -> None:
        """Give back what this process holds in the database but never heard of."""
        now = time.monotonic()
        if self._recover_at is None or now < self._recover_at:
            return
        options = self._options
        mine = Lease.objects.using(options.alias).filter(
            worker=options.name, boot=options.boot, process=self._process
        )
        for lease in mine.only("fence"):
            claim = lease.pk, lease.fence
            known = self.held(*claim) or claim in self._settling
            if not known and self._given_up.get(lease.pk) != lease.fence:
                self._settling.add(Release(item=lease.pk, fence=lease.fence))
        self._recover_at = now + _RECOVERY_PERIOD if now < self._recover_until else None

    def _tell(self, kind: str, *parts: Any) -> None:
        with contextlib.suppress(ChannelClosedError):  # the main thread sees it, and drains
            self._channel.send(kind, *parts)


def _lease_seconds(item: WorkItem) -> float:
    if item.lease_expires_at is None or item.first_claimed_at is None:
        return 0.0
    return (item.lease_expires_at - item.first_claimed_at).total_seconds()
