"""
What must be true of any store, whatever it is told: the invariants I1 to I13, judged by what
the store shows before and after each call, and by nothing that a store says of itself.

The witness keeps its own books: what policy each acceptance was given, when it became due and
when it ended, how often it was started and what came of that, which fences were given out, and
whose turn it is.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from django_workqueue import QueuePolicy, QueueStats, WorkItem, WorkState
from django_workqueue.items import QueueHold
from django_workqueue.policy import LEASE_LAPSED, MOVES, WORKER_RESTARTED
from tests.lockstep import Outcome, Picture

SETTLING = ("complete", "fail", "release", "pause")
BY_HOLDERS = ("heartbeat", *SETTLING)
BY_OPERATORS = ("resume", "cancel", "requeue", "discard")

Name = tuple[str, str]  # tenant and id
Lane = tuple[str, str]  # queue and the worker's deployment


@dataclass(frozen=True, kw_only=True)
class Step:
    """One call, what came of it, and what could be seen before it and after."""

    verb: str
    wanted: dict[str, Any]
    outcome: Outcome
    before: Picture
    after: Picture
    now: datetime
    holds: tuple[QueueHold, ...] = ()

    @property
    def target(self) -> int | None:
        """The acceptance that a verb on one item means; None if there is none."""
        name, job = (self.wanted["tenant"], self.wanted["item_id"]), self.wanted.get("job")
        known = self.before.holders if job is None else {job} & self.before.items.keys()
        return next((n for n in known if name_of(self.before.items[n]) == name), None)


@dataclass
class Record:
    """What the witness knows of an acceptance."""

    policy: QueuePolicy
    due_at: datetime
    ended_at: datetime | None = None
    buried_at: datetime | None = None
    starts: int = 0
    unspent: int = 0
    successes: int = 0
    #: Verb, worker and fence of the settlement after which nothing has happened.
    settled: tuple[str, str, int] | None = None

    def keep_until(self, item: WorkItem) -> datetime | None:
        """When its retention is over; None: never."""
        if self.ended_at is None:
            return None
        dead = item.state is WorkState.DEAD_LETTERED
        kept = self.policy.dead_letter_retention_seconds if dead else self.policy.retention_seconds
        return None if kept is None else self.ended_at + timedelta(seconds=kept)


@dataclass
class Witness:
    """Judges steps, one after the other."""

    policy: QueuePolicy
    records: dict[int, Record] = field(default_factory=dict)
    #: The latest claim of every id of which something is stored.
    fences: dict[Name, int] = field(default_factory=dict)
    #: By lane: who has waited since that tenant was served.
    owed: dict[Lane, dict[str, set[str]]] = field(default_factory=dict)
    reaped: Counter[str] = field(default_factory=Counter)
    suppressed: Counter[str] = field(default_factory=Counter)
    #: Accepted moves of operators.
    audited: int = 0

    def see(self, step: Step) -> None:
        """Judge a step. Raise `AssertionError`, which names the invariant."""
        before, after = step.before.items, step.after.items
        new = sorted(after.keys() - before.keys())
        gone = sorted(before.keys() - after.keys())
        changed = [n for n in before if n in after and _differs(before[n], after[n])]
        if step.outcome.error:
            assert before == after, "a refused call changed something"
            assert step.before.holders == step.after.holders, "a refused call moved an id"
            assert not (step.verb in SETTLING and self._repeats(step)), "a repeat was refused"
        assert not new or step.verb in ("enqueue", "enqueue_many"), "I2: an item from nowhere"
        assert not gone or step.verb == "prune", f"I1: {gone} lost by {step.verb}"
        for item in step.outcome.items():
            shown = after.get(_number(item))
            assert item == shown, f"the answer is not how it stands: {item} / {shown}"
        judge = getattr(self, f"_{step.verb}", None)
        if judge is None:
            assert not changed, f"{step.verb} changed {changed}"
        elif not step.outcome.error:
            judge(step, changed, new or gone)
        for n in changed:
            self._follow(step, n)
        self._look(step)

    # What each verb may do.

    def _enqueue(self, step: Step, changed: list[int], new: list[int]) -> None:
        assert not changed, "accepting changed an older item"
        before, fresh = step.before.items, iter(new)
        accepted: list[int] = []
        for wanted, item in zip(step.wanted["items"], step.outcome.items(), strict=True):
            n = _number(item)
            if n in before or n in accepted:
                assert item.live, "I1: an item was answered with one that has ended"
                same_key = wanted.dedupe_key is not None and wanted.dedupe_key == item.dedupe_key
                assert wanted.tenant == item.tenant
                assert same_key or wanted.id == item.id, "answered with a stranger"
                self.suppressed[wanted.queue] += 1
                continue
            assert n == next(fresh)
            accepted.append(n)
            policy = self.policy.for_item(wanted)
            due_at = wanted.available_at or step.now
            self.records[n] = Record(policy=policy, due_at=due_at)
            assert item.state is WorkState.QUEUED
            assert (item.max_attempts, item.attempts) == (policy.max_attempts, 0)
            stored = [each for each in step.before.items.values() if name_of(each) == name_of(item)]
            latest = max((each.fence or 0 for each in stored), default=0)
            assert (item.fence or 0) == latest, f"I4: {item.fence} goes on from {latest}"
        assert next(fresh, None) is None

    _enqueue_many = _enqueue

    def _claim(self, step: Step, changed: list[int], _: list[int]) -> None:
        claims = step.outcome.items()
        assert sorted(changed) == sorted(_number(item) for item in claims)
        lane = step.wanted["queue"], step.wanted["deployment_id"] or ""
        due = self._servable(step, step.before, lane)
        owed = self.owed.setdefault(lane, {})
        for item in claims:
            own = due.get(item.tenant, [])
            assert own[:1] == [item.job_id], f"I3, I11: {item} is not its tenant's next"
            own.pop(0)
            waiting = {tenant for tenant, rest in due.items() if rest}
            starved = owed.get(item.tenant, set()) & waiting
            assert not starved, f"I11: {item.tenant} is served before {starved}"
            for others in owed.values():
                others.discard(item.tenant)
            owed[item.tenant] = waiting - {item.tenant}
            self._started(step, item)
        if len(claims) < step.wanted["limit"]:
            assert not any(due.values()), f"due, and not served: {due}"

    _claim_many = _claim

    def _started(self, step: Step, item: WorkItem) -> None:
        record = self.records[_number(item)]
        record.starts += 1
        assert item.fence is not None
        latest = self.fences.get(name_of(item), 0)
        assert item.fence > latest, f"I4: fence {item.fence} after {latest}"
        self.fences[name_of(item)] = item.fence
        length = record.policy.lease_for(step.wanted["lease_seconds"])
        assert item.worker == step.wanted["worker"]
        assert item.first_claimed_at == step.now
        assert item.lease_expires_at == step.now + timedelta(seconds=length)

    def _held(self, step: Step, changed: list[int], _: list[int]) -> None:
        target = step.target
        assert target is not None, "I15: an item that isn't there was answered"
        if not changed and self._repeats(step):
            return
        if not changed:
            assert step.verb == "heartbeat", f"I5: {step.verb} of what was settled otherwise"
            assert self._holds(step, step.before.items[target]), "I5: renewed for nobody"
            return
        assert changed == [target], f"{step.verb} of {target} changed {changed}"
        old = step.before.items[target]
        assert self._holds(step, old), f"I5: {step.verb} by one who doesn't hold {old}"
        record, new = self.records[target], step.after.items[target]
        if step.verb == "heartbeat":
            return
        assert new.fence is not None
        record.settled = (_way(step.verb, new), step.wanted["worker"], new.fence)
        record.successes += step.verb == "complete"
        record.unspent += step.verb in ("release", "pause")
        if step.verb == "release":
            record.due_at = step.now + timedelta(seconds=step.wanted["delay_seconds"])
        if step.verb == "fail":
            self._counted(step, old, new, step.wanted["error"], step.wanted["delay_seconds"])

    _heartbeat = _complete = _fail = _release = _pause = _held

    def _holds(self, step: Step, item: WorkItem) -> bool:
        worker, fence = step.wanted["worker"], step.wanted["fence"]
        named = item.held and item.worker == worker and fence in (None, item.fence)
        return named and not item.lapsed_at(step.now)

    def _repeats(self, step: Step) -> bool:
        """True if it says again what put the item where it stands."""
        if step.target is None or step.wanted["fence"] is None:
            return False
        item, record = step.before.items[step.target], self.records[step.target]
        told = (_way(step.verb, item), step.wanted["worker"], step.wanted["fence"])
        return record.settled == told and item.fence == step.wanted["fence"]

    def _counted(
        self, step: Step, old: WorkItem, new: WorkItem, text: str, delay: float | None
    ) -> None:
        assert new.failures == (*old.failures, text), "I6: the failure isn't on record"
        record = self.records[_number(new)]
        wait = record.policy.backoff(new.attempts) if delay is None else delay
        record.due_at = step.now + timedelta(seconds=wait)
        if old.cancel_requested:
            assert new.state is WorkState.CANCELLED
        elif step.wanted.get("retryable", True) and new.attempts < (old.max_attempts or 0):
            assert new.state is WorkState.QUEUED
        else:
            assert new.state is WorkState.DEAD_LETTERED

    def _reap(self, step: Step, changed: list[int], _: list[int]) -> None:
        lapsed = _by_expiry(item for item in step.before.items.values() if item.lapsed_at(step.now))
        self._ended(step, changed, lapsed[: step.wanted["limit"]], LEASE_LAPSED, None)
        self.reaped.update(step.before.items[n].queue for n in changed)

    def _adopt(self, step: Step, changed: list[int], _: list[int]) -> None:
        worker = step.wanted["worker"]
        held = _by_expiry(item for item in step.before.items.values() if item.worker == worker)
        self._ended(step, changed, held, WORKER_RESTARTED, 0)

    def _ended(
        self, step: Step, changed: list[int], due: list[int], text: str, delay: float | None
    ) -> None:
        assert [_number(item) for item in step.outcome.items()] == due
        assert sorted(changed) == sorted(due)
        for n in due:
            self._counted(step, step.before.items[n], step.after.items[n], text, delay)

    def _operate(self, step: Step, changed: list[int], _: list[int]) -> None:
        target = step.target
        assert target is not None, "I15: an item that isn't there was answered"
        assert set(changed) <= {target}, f"{step.verb} of {target} changed {changed}"
        self.audited += 1
        old, new = step.before.items[target], step.after.items[target]
        if step.verb in ("resume", "requeue"):
            self.records[target].due_at = step.now
        if step.verb == "resume":
            assert new.max_attempts == max(old.max_attempts or 0, old.attempts + 1)
        if step.verb == "requeue":
            assert new.max_attempts == old.attempts + 1
            assert target in step.after.holders, "a requeued item holds its id"

    _resume = _cancel = _requeue = _discard = _operate

    def _prune(self, step: Step, changed: list[int], gone: list[int]) -> None:
        assert step.outcome.answer == len(gone)
        ends = {n: self.records[n].keep_until(item) for n, item in step.before.items.items()}
        over = sorted(
            (step.before.items[n].state is WorkState.DEAD_LETTERED, end, n)
            for n, end in ends.items()
            if end and end <= step.now
        )
        wanted = sorted(n for *_, n in over[: step.wanted["limit"]])
        assert gone == wanted, f"I13: {gone} pruned, not {wanted}"
        for n in changed:  # an heir
            old, new = step.before.items[n], step.after.items[n]
            assert old.terminal
            assert replace(new, fence=old.fence) == old, f"pruning changed {new}"
        for n in gone:
            del self.records[n]

    # What holds after every step.

    def _follow(self, step: Step, n: int) -> None:
        """Judge a move of acceptance *n*, and keep the books."""
        old, new, record = step.before.items[n], step.after.items[n], self.records[n]
        assert (new.fence or 0) >= (old.fence or 0), f"I4: the fence of {old} fell"
        if step.verb == "prune":
            return
        if step.verb not in SETTLING:
            record.settled = None
        verb = "claim" if step.verb == "claim_many" else step.verb
        assert new.state in MOVES[old.state].get(verb, ()), f"{verb}: {old.state} to {new.state}"
        if step.verb not in ("claim", "claim_many", "requeue"):
            assert new.fence == old.fence, "I4: a fence without a claim"
        if step.verb not in ("requeue", "resume"):
            assert new.max_attempts == old.max_attempts
        kept = ("tenant", "id", "queue", "handler", "priority", "dedupe_key", "deployment_id")
        for name in (*kept, "enqueued_at", "timeout_seconds"):
            assert getattr(new, name) == getattr(old, name), f"{verb} changed {name}"
        if new.terminal and new.state is not old.state:
            record.ended_at = step.now
        if new.state is WorkState.DEAD_LETTERED:
            record.buried_at = step.now
        if new.live:
            record.ended_at = None

    def _look(self, step: Step) -> None:
        items = step.after.items
        assert items.keys() == self.records.keys(), "I1"
        live = [item for item in items.values() if item.live]
        for names in ([name_of(i) for i in live], [(i.tenant, i.dedupe_key) for i in live]):
            twice = [n for n, number in Counter(names).items() if number > 1 and n[1] is not None]
            assert not twice, f"I10: {twice} are live twice"
        for n, item in items.items():
            self._look_at(step.now, n, item)
            assert not item.live or n in step.after.holders, "a live item doesn't hold its id"
        holders = Counter(name_of(items[n]) for n in step.after.holders)
        assert holders == Counter({name_of(item) for item in items.values()}), "holders of ids"
        stored = {name_of(item) for item in items.values()}
        self.fences = {name: fence for name, fence in self.fences.items() if name in stored}
        for n in step.after.holders:
            latest = self.fences.get(name_of(items[n]), 0)
            assert (items[n].fence or 0) == latest, f"I4: {items[n]} forgot fence {latest}"
        for lane, owed in self.owed.items():
            servable = self._servable(step, step.after, lane).keys()
            for others in owed.values():
                others.intersection_update(servable)

    def _look_at(self, now: datetime, n: int, item: WorkItem) -> None:
        record = self.records[n]
        running = int(item.held)
        assert len(item.failures) == item.attempts, "I6: attempts and failures"
        ends = record.unspent + item.attempts + record.successes + running
        assert record.starts == ends, f"I6: {record.starts} starts, {ends} outcomes of {item}"
        used = item.attempts + record.successes + running
        assert used <= (item.max_attempts or 0), f"I6: {used} of {item.max_attempts} attempts"
        assert not item.live or item.attempts < (item.max_attempts or 0), (
            "live, and no attempt left"
        )
        assert record.successes == (item.state is WorkState.COMPLETED), "I7"
        if item.held:
            assert item.first_claimed_at is not None
            assert item.lease_expires_at is not None
            cap = item.first_claimed_at + timedelta(seconds=record.policy.max_lease_seconds)
            assert item.lease_expires_at <= cap, "I8"
        else:
            assert item.worker is item.lease_expires_at is item.first_claimed_at is None
            assert not item.cancel_requested
        if item.state is WorkState.QUEUED and record.due_at > now:
            assert item.available_at == record.due_at, f"due at {record.due_at}: {item}"

    def _servable(self, step: Step, picture: Picture, lane: Lane) -> dict[str, list[int]]:
        """The due work of each tenant that a worker would be served, best first."""
        held = {(hold.queue, hold.tenant) for hold in step.holds}
        due: dict[str, list[int]] = {}
        for n, item in picture.items.items():
            scopes = {(item.queue, None), (None, item.tenant), (item.queue, item.tenant)}
            if (
                item.queue == lane[0]
                and item.deployment_id in (None, lane[1])
                and item.state is WorkState.QUEUED
                and self.records[n].due_at <= step.now
                and not scopes & held
            ):
                due.setdefault(item.tenant, []).append(n)
        for own in due.values():
            own.sort(key=lambda n: (-picture.items[n].priority, n))
        return due

    # Figures.

    def figures(self, picture: Picture, queue: str, now: datetime) -> QueueStats:
        """What `stats` must tell."""
        own = {n: item for n, item in picture.items.items() if item.queue == queue}
        states = Counter(item.state for item in own.values())
        queued = {n: item for n, item in own.items() if item.state is WorkState.QUEUED}
        ages = [(now - (item.enqueued_at or now)).total_seconds() for item in queued.values()]
        return QueueStats(
            depth=len(queued),
            due=sum(self.records[n].due_at <= now for n in queued),
            claimed=states[WorkState.CLAIMED],
            paused=states[WorkState.PAUSED],
            dead_lettered=states[WorkState.DEAD_LETTERED],
            completed=states[WorkState.COMPLETED],
            cancelled=states[WorkState.CANCELLED],
            oldest_age_seconds=max([0.0, *ages]),
            reaped=self.reaped[queue],
            duplicates_suppressed=self.suppressed[queue],
            as_of=now,
        )

    def dead_letters(self, picture: Picture, tenant: str) -> list[int]:
        """The dead letters of a tenant, oldest burial first."""
        dead = [
            (self.records[n].buried_at, n)
            for n, item in picture.items.items()
            if item.tenant == tenant and item.state is WorkState.DEAD_LETTERED
        ]
        return [n for _, n in sorted(dead)]

    def deadlines(self, picture: Picture) -> Iterator[datetime]:
        """The moments at which something is decided otherwise than before."""
        for n, item in picture.items.items():
            record = self.records[n]
            if item.state is WorkState.QUEUED:
                yield record.due_at
            if item.held and item.first_claimed_at and item.lease_expires_at:
                yield item.lease_expires_at
                yield item.first_claimed_at + timedelta(seconds=record.policy.max_lease_seconds)
            if until := record.keep_until(item):
                yield until


def name_of(item: WorkItem) -> Name:
    """The tenant and the id."""
    return item.tenant, item.id


def _way(verb: str, item: WorkItem) -> str:
    """The verb that a repeat must have: cancelled instead, a pause and a release are the same."""
    return "release" if verb == "pause" and item.state is WorkState.CANCELLED else verb


def _by_expiry(items: Iterable[WorkItem]) -> list[int]:
    return [n for _, n in sorted((item.lease_expires_at, _number(item)) for item in items)]


def _number(item: WorkItem) -> int:
    assert item.job_id is not None
    return item.job_id


def _differs(old: WorkItem, new: WorkItem) -> bool:
    """True if the acceptance was changed; when a waiting item shows what is the clock's doing."""
    return replace(old, available_at=new.available_at) != new
