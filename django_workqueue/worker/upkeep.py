"""
The supervisor's upkeep: presence, adoption, the claims of dead processes, the reaper,
promotion, counters, and whether there is work for idle processes.

It never touches a process: what it finds out is posted to the supervisor's main thread.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property, partial
from typing import Any, Final

from django.db import Error, connections
from django.db.models import Exists, Max, Min, OuterRef, Q, Sum
from django.db.models.expressions import RawSQL
from django.db.models.functions import Now

import django_workqueue
from django_workqueue.failures import FailureKind, describe
from django_workqueue.figures import Figures
from django_workqueue.models import Counter, Hold, Lease, Ready, Turn, Waiting, WorkerProcess
from django_workqueue.moves import (
    BATCH,
    PROMOTED_PER_CLAIM,
    PRUNE_BATCH,
    TURNS_KEPT,
    EndedAttempt,
    Release,
)
from django_workqueue.policy import WORKER_DIED, WORKER_SHUTDOWN
from django_workqueue.queues import DatabaseWorkQueue
from django_workqueue.worker.children import Crew, HeldLease
from django_workqueue.worker.duty import DutyThread
from django_workqueue.worker.options import WorkerOptions, exceeded
from django_workqueue.worker.presence import (
    PRESENCE_KEPT,
    PRESENCE_PERIOD,
    differing_queues,
    lives,
    shown_settings,
)
from django_workqueue.worker.settling import LOCKED_DELAY
from django_workqueue.worker.trouble import from_one_row

logger: Final = logging.getLogger("django_workqueue")

#: Seconds between two looks whether the minute's sample was taken.
SAMPLE_PERIOD: Final = 15.0
#: Counter rows beyond which they are folded, and batches that the reaper takes in a pass.
_COUNTERS_LEFT: Final = 100
_REAPED_IN_A_PASS: Final = 25
_PRUNED_IN_A_PASS: Final = 10

_TEXTS: Final = {FailureKind.DIED: WORKER_DIED, FailureKind.SHUTDOWN: WORKER_SHUTDOWN}


@dataclass(eq=False, kw_only=True)
class Death:
    """A process that has ended, with the claims (fence by item) that it had begun."""

    process: int
    begun: dict[int, int]
    kind: FailureKind
    #: Until then a claim that it had sent may still be carried out by the server.
    watched_until: float


class _Duty:
    """Something to do every so many seconds."""

    def __init__(self, every: float, run: Callable[[], None]) -> None:
        self.every = every
        self.run = run
        self.at = 0.0
        #: Set by the run if there is more to do, after the other duties' turn.
        self.unfinished = False


class Upkeep(DutyThread):
    """Does the duties of one worker, each in its period. Everything else is in its turn."""

    def __init__(self, options: WorkerOptions, crew: Crew) -> None:
        super().__init__("upkeep", options.alias, crew)
        self._options = options
        self._queue = DatabaseWorkQueue(options.alias)
        self._moves = self._queue.moves
        self._figures = Figures(options.alias, self._moves)
        self._lanes = {"", options.deployment_id}
        self._deaths: list[Death] = []
        self._overdue: list[HeldLease] = []
        self._booted = False
        self._started_at: datetime | None = None
        # Whether an older start of this name was alive when it was last looked for.
        self._has_twin = True
        self.draining = False
        self._polling = _Duty(options.poll_seconds, self._poll)
        self._pruning = _Duty(options.retention_sweep_seconds, self._prune)
        self._duties = [
            _Duty(PRESENCE_PERIOD, self._show_presence),
            _Duty(options.reap_seconds, self._reap),
            _Duty(options.reap_seconds, self._tidy),
            self._polling,
            self._pruning,
            _Duty(SAMPLE_PERIOD, self._figures.take_samples),
        ]

    def bury(self, death: Death) -> None:
        """Settle the claims of a process that has ended. From the main thread."""
        self._deaths.append(death)
        self.nudge()

    def time_out(self, lease: HeldLease) -> None:
        """Fail an attempt whose handler doesn't stop. From the main thread."""
        self._overdue.append(lease)
        self.nudge()

    def look(self) -> None:
        """Ask at once whether something is due, or anything left. From the main thread."""
        self._polling.at = 0.0
        self.nudge()

    def turn(self) -> float | None:
        now = time.monotonic()
        # The overdue first: they had begun, whatever their process did then.
        quiet = [self._passes(self._settle_overdue), self._passes(self._settle_deaths)]
        for duty in self._duties:
            if duty.at <= now:
                duty.unfinished = False
                quiet.append(self._passes(duty.run))
                duty.at = now if duty.unfinished else now + duty.every
        if not self._booted:  # present, and what older starts left is adopted
            self._booted = True
            self._look_around()
            self._post(self._crew.booted)
        wait = max(0.0, min(duty.at for duty in self._duties) - time.monotonic())
        return wait if all(quiet) else min(wait, LOCKED_DELAY)

    def _passes(self, duty: Callable[[], None]) -> bool:
        """Do a duty; False if one bad or locked row stopped it, which must not stop the rest."""
        try:
            duty()
        except Error as error:
            if not from_one_row(error):
                raise
            logger.warning("a row stands in the way: %s", str(error).partition("\n")[0])
            return False
        return True

    def finish(self) -> None:
        self._settle_overdue()
        self._settle_deaths()
        self._all(WorkerProcess).filter(boot=self._options.boot).delete()

    def _all(self, model: Any) -> Any:
        return model._base_manager.using(self._alias)

    # Presence.

    def _show_presence(self) -> None:
        """Tell that this worker lives, take over from older starts that don't, and drain
        if there is a newer one."""
        options, now = self._options, self._moves.now()
        state = "draining" if self.draining else "running"
        own = self._all(WorkerProcess).filter(boot=options.boot)
        if not own.update(seen_at=now, state=state):
            self._appear(state, now)
        self._all(WorkerProcess).filter(seen_at__lt=now - timedelta(seconds=PRESENCE_KEPT)).delete()
        others = self._all(WorkerProcess).filter(name=options.name).exclude(boot=options.boot)
        living = [row for row in others if lives(row, now)]
        if self._has_twin:
            self._adopt([row.boot for row in living])
        if any(row.started_at > self._started_at for row in living):
            self._post(partial(self._crew.drain, "a newer start has the same name"))

    def _appear(self, state: str, now: datetime) -> None:
        options = self._options
        self._started_at = self._started_at or now
        self._all(WorkerProcess).create(
            boot=options.boot,
            name=options.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            state=state,
            version=django_workqueue.__version__,
            queues=list(options.queues),
            deployment_id=options.deployment_id,
            settings=shown_settings(options),
            started_at=self._started_at,
            seen_at=now,
        )

    def _adopt(self, living: list[str]) -> None:
        adopted = self._moves.adopt(self._options.name, [self._options.boot, *living])
        if adopted:
            logger.warning("adopted: worker=%s items=%d", self._options.name, len(adopted))
        self._has_twin = bool(living)

    def _look_around(self) -> None:
        """Warn of queues that nobody serves, and of workers that go by other settings."""
        live = Sum("ready") + Sum("waiting") + Sum("claimed")
        queues = self._all(Counter).order_by().values("queue").annotate(live=live)
        now = self._moves.now()
        rows = self._all(WorkerProcess).exclude(boot=self._options.boot)
        others = [row for row in rows if lives(row, now)]
        served = {queue for row in others for queue in row.queues} | {*self._options.queues}
        unserved = sorted({row["queue"] for row in queues if row["live"]} - served)
        if unserved:
            logger.warning("queues with work that nobody serves: %s", ", ".join(unserved))
        for row in others:
            if differing := differing_queues(self._options, row.settings):
                told = ", ".join(differing)
                logger.warning("worker with other settings: name=%s queues=%s", row.name, told)

    # The dead.

    def _settle_deaths(self) -> None:
        now = time.monotonic()
        for death in [*self._deaths]:
            self._settle_death(death)
            if death.watched_until <= now:
                self._deaths.remove(death)

    def _settle_death(self, death: Death) -> None:
        """End what it had begun, and give back what it only held."""
        worker, text = self._options.name, describe(_TEXTS[death.kind])
        leases = self._all(Lease).filter(
            worker=worker, boot=self._options.boot, process=death.process
        )
        begun, unspent = [], []
        for item, fence in leases.values_list("item_id", "fence"):
            if death.begun.get(item) == fence:
                begun.append(
                    EndedAttempt(item=item, fence=fence, kind=death.kind, text=text, delay=0.0)
                )
            else:
                unspent.append(Release(item=item, fence=fence))
        ended = self._moves.fail(worker, begun)
        released = self._moves.release(worker, unspent)
        if ended or released:
            logger.warning(
                "took over from process: process=%d kind=%s begun=%d unspent=%d",
                death.process,
                death.kind,
                len(ended),
                len(released),
            )
            self._polling.at = 0.0

    def _settle_overdue(self) -> None:
        for lease in [*self._overdue]:
            text = describe(exceeded(lease.timeout))
            attempt = EndedAttempt(
                item=lease.item, fence=lease.fence, kind=FailureKind.TIMEOUT, text=text
            )
            if self._moves.fail(self._options.name, [attempt]):
                logger.warning("handler overdue: item=%d fence=%d", lease.item, lease.fence)
            self._overdue.remove(lease)

    # The queues.

    def _reap(self) -> None:
        for _ in range(_REAPED_IN_A_PASS):
            reaped = self._moves.reap(BATCH)
            if reaped:
                logger.warning("reaped lapsed claims: items=%d", len(reaped))
            if len(reaped) < BATCH:
                break

    def _tidy(self) -> None:
        """Promote what is due beyond what claims do, fold counters, drop old turns."""
        late = self._all(Waiting).filter(queue__in=self._options.queues, due_at__lte=Now())
        for queue in late.order_by().values_list("queue", flat=True).distinct():
            while self._moves.promote(queue).promoted == PROMOTED_PER_CLAIM:
                pass
        if self._all(Counter)[_COUNTERS_LEFT : _COUNTERS_LEFT + 1].exists():
            self._moves.fold_counters()
        turns = self._all(Turn).filter(queue__in=self._options.queues).order_by()
        lanes = turns.values("queue", "deployment_id").annotate(newest=Max("number"))
        for row in lanes.filter(newest__gt=Min("number") + TURNS_KEPT):
            self._moves.trim_turns(**row)

    def _prune(self) -> None:
        """Delete what was kept long enough, a few batches at a time."""
        pruned = 0
        for _ in range(_PRUNED_IN_A_PASS):
            batch = self._moves.prune(PRUNE_BATCH)
            pruned += batch
            if not batch:
                break
        else:
            self._pruning.unfinished = True
        if pruned:
            logger.info("pruned: items=%d", pruned)

    def _poll(self) -> None:
        """Wake idle processes if something is due; end if nothing is left to wait for."""
        children = [*self._crew.children()]
        if self.draining or not any(child.hungry for child in children):
            return
        if due := self._due():
            self._post(partial(self._crew.wake, due))
        elif (
            self._options.until_empty
            and all(child.idle for child in children)
            and not self._unfinished()
        ):
            self._post(partial(self._crew.drain, "nothing is left"))

    def _due(self) -> list[str]:
        """The served queues in which an idle process may find something, in one statement."""
        with connections[self._alias].cursor() as cursor:
            cursor.execute(*self._question)
            row = cursor.fetchone()
        if row is None:  # our presence was deleted as that of the dead
            return []
        answers = iter(row)
        by_queue = zip(self._options.queues, answers, answers, answers, answers, strict=True)
        return [
            queue
            for queue, ready, late, unknown, holds in by_queue
            if ready or late or unknown
            if not holds or self._serves(queue)
        ]

    @cached_property
    def _question(self) -> tuple[str, Any]:
        """
        Whether in each served queue something is ready, or due; waits for a handler; and there
        are holds that bear on it.

        Made once: to build it for every poll would be most of what an idle worker costs.
        """
        lanes = {"deployment_id__in": self._lanes}
        # A literal: of a parameter, a plan that is kept can't know that the index is of these.
        unknown = Q(cause=RawSQL(f"'{Waiting.Cause.UNKNOWN_HANDLER.value}'", ()))
        # What nobody can run must not keep a worker from ending.
        counts = ~unknown if self._options.until_empty else Q()
        questions: dict[str, Exists] = {}
        for place, queue in enumerate(self._options.queues):
            waiting = self._all(Waiting).filter(queue=queue)
            asked = (
                self._all(Ready).filter(queue=queue, **lanes),
                waiting.filter(counts, due_at__lte=Now(), **lanes),
                waiting.filter(unknown & counts),
                self._all(Hold).filter(queue__in=["", queue]),
            )
            questions |= {f"q{place}_{n}": Exists(rows) for n, rows in enumerate(asked)}
        # Of the row that is surely there and only one: our own.
        own = self._all(WorkerProcess).filter(boot=self._options.boot)
        compiled: tuple[str, Any] = own.values(**questions).query.get_compiler(self._alias).as_sql()
        return compiled

    def _serves(self, queue: str) -> bool:
        """True if something of a queue with holds could be claimed; what is late comes first."""
        self._moves.promote(queue)
        return self._moves.serves(queue, self._options.deployment_id)

    def _unfinished(self) -> bool:
        """True while the served queues hold something claimed, or backing off and not held."""
        own = {"queue__in": self._options.queues, "deployment_id__in": self._lanes}
        back = self._all(Waiting).filter(
            cause__in=[Waiting.Cause.BACKOFF, Waiting.Cause.RELEASED], **own
        )
        held = self._all(Hold).filter(
            Q(queue=OuterRef("queue")) | Q(queue=""), Q(tenant=OuterRef("tenant")) | Q(tenant="")
        )
        return bool(
            self._all(Lease).filter(**own).exists()
            or back.filter(~Exists(held)).exists()
            or any(
                self._moves.serves(queue, self._options.deployment_id)
                for queue in self._options.queues
            )
        )
