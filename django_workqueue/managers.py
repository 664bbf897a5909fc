"""
The managers of the models: reading an item with its place, and moving items between
places. All locks and all writes of places are made here, by fence.

A move tells what it did and never raises because an item stood elsewhere: who asks in
whose name, and what to answer, is decided in `queues`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Final, NoReturn, Protocol, TypeVar

from django.apps import apps
from django.db import connections, models
from django.db.models import Case, F, OuterRef, Q, Subquery, Value, When
from django.db.models.functions import Coalesce

from django_workqueue import sql
from django_workqueue.failures import FailureKind, FailureText, fingerprint
from django_workqueue.items import WorkState
from django_workqueue.policy import LEASE_LAPSED, WORKER_RESTARTED

#: How many due items one claim promotes at most.
PROMOTED_PER_CLAIM: Final = 1000
#: Claims per statement: matching the fences is quadratic.
BATCH: Final = 200
#: How many turns stay behind the newest one.
TURNS_KEPT: Final = 100

T = TypeVar("T")
Claim = tuple[int, int]  # (job id, fence)
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """
    An item to accept. `fence` is the latest claim number of its id; times None: now; `id`
    None: the next job id.
    """

    tenant: str
    item_id: str
    queue: str
    deployment_id: str
    handler: str
    payload: str
    priority: int
    dedupe_key: str | None
    fence: int
    max_attempts: int
    lease_seconds: float
    max_lease_seconds: float
    timeout_seconds: float | None
    backoff_seconds: float
    backoff_cap_seconds: float
    retention_seconds: float | None
    dead_letter_retention_seconds: float | None
    enqueued_at: datetime | None
    available_at: datetime | None
    id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What became of an accepted item."""

    job_id: int
    enqueued_at: datetime
    available_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRequest:
    """Who claims what. `boot` and `process` tell a worker's own processes apart."""

    queue: str
    worker: str
    limit: int
    deployment_id: str = ""
    lease_seconds: float | None = None
    boot: str = ""
    process: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """A renewed lease, and whether its work should stop."""

    expires_at: datetime
    cancel_requested: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A claim to end as completed; `result` is JSON text."""

    item: int
    fence: int
    result: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """A claim to give back unspent, due after `delay` seconds."""

    item: int
    fence: int
    delay: float = 0.0
    cause: str = "released"


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedAttempt:
    """A claim to end as a counted failure; `delay` None: the item's own backoff."""

    item: int
    fence: int
    kind: FailureKind
    text: FailureText
    retryable: bool = True
    delay: float | None = None


class Moves(Protocol):
    """
    The moves between places, each atomic, on one database.

    Settling (`complete`, `release`, `fail`) needs the very claim, the worker's name and a
    lease that stands; it returns the new state of each item that it settled, by job id.
    """

    def now(self) -> datetime:
        """Return the store's time."""

    def reserve(self, number: int) -> list[int]:
        """Return *number* job ids that no other acceptance will have, in growing order."""

    def accept(self, items: Sequence[Acceptance]) -> dict[int, Stored]:
        """Store the items whose id and key are free; by position in *items*."""

    def promote(self, queue: str, limit: int = PROMOTED_PER_CLAIM) -> int:
        """Make up to *limit* waiting items ready whose time has come; return how many."""

    def claim(self, request: ClaimRequest) -> list[Row]:
        """Lease the next ready items in order of service; fewer than asked if one runs short."""

    def renew(self, worker: str, claims: Sequence[Claim], *, wait: bool) -> dict[int, Renewal]:
        """Renew leases that stand, by job id; not *wait*: pass over those locked by others."""

    def complete(self, worker: str, settlements: Sequence[Completion]) -> dict[int, WorkState]:
        """End claims as completed."""

    def release(self, worker: str, settlements: Sequence[Release]) -> dict[int, WorkState]:
        """Give claims back unspent."""

    def fail(self, worker: str, settlements: Sequence[EndedAttempt]) -> dict[int, WorkState]:
        """End claims as counted failures."""

    def reap(self, limit: int) -> dict[int, WorkState]:
        """End up to *limit* lapsed claims, the longest lapsed first."""

    def adopt(self, worker: str, spare: Sequence[str] = ()) -> dict[int, WorkState]:
        """End all claims of *worker* except those of the boots to *spare*."""

    def count_suppressed(self, queue: str, number: int) -> None:
        """Count suppressed duplicates."""

    def fold_counters(self) -> None:
        """Sum the appended deltas of each queue into one row."""

    def trim_turns(self, queue: str, deployment_id: str, newest: int) -> None:
        """Delete turns far behind the *newest* one."""


class ClaimManager(models.Manager[Any]):
    """Leases, and the moves in and out of them: ``Lease.claims.db_manager(alias).moves()``."""

    def moves(self, skew: timedelta = timedelta(0)) -> Moves:
        """Return the moves on this manager's database, whose clock is off by *skew* (tests)."""
        if connections[self.db].vendor == "postgresql":
            return PostgresMoves(self.db, skew)
        # Imported late: it needs the models, which need this module.
        from django_workqueue.portable import PortableMoves

        return PortableMoves(self.db, skew)


class PostgresMoves:
    """`Moves` on PostgreSQL, each of them one statement of `sql`."""

    def __init__(self, alias: str, skew: timedelta) -> None:
        self._alias = alias
        self._skew = skew

    def now(self) -> datetime:
        [row] = self._run(sql.NOW)
        moment: datetime = row["now"]
        return moment

    def reserve(self, number: int) -> list[int]:
        return [row["id"] for row in self._run(sql.RESERVE, number=number)]

    def accept(self, items: Sequence[Acceptance]) -> dict[int, Stored]:
        records = [
            asdict(item) | {"place": place, "job_id": item.id} for place, item in enumerate(items)
        ]
        return {
            row["place"]: Stored(
                job_id=row["id"], enqueued_at=row["accepted_at"], available_at=row["due_at"]
            )
            for row in self._run(sql.ACCEPT, items=_as_json(records))
        }

    def promote(self, queue: str, limit: int = PROMOTED_PER_CLAIM) -> int:
        [row] = self._run(sql.PROMOTE, queue=queue, limit=limit)
        return int(row["count"])

    def claim(self, request: ClaimRequest) -> list[Row]:
        statements = sql.CLAIM_ONE if request.limit == 1 else sql.CLAIM_MANY
        rows = self._run(statements[bool(request.deployment_id)], **asdict(request))
        if rows and rows[0]["turn"] % TURNS_KEPT == 0:
            # Also where no worker's upkeep does it.
            self.trim_turns(request.queue, request.deployment_id, rows[0]["turn"])
            self.fold_counters()
        return rows

    def renew(self, worker: str, claims: Sequence[Claim], *, wait: bool) -> dict[int, Renewal]:
        statement = sql.RENEW_ONE if wait else sql.RENEW_MANY
        renewed = {}
        for batch in _batches(sorted(claims)):
            told = _as_json([{"item": item, "fence": fence} for item, fence in batch])
            for row in self._run(statement, worker=worker, claims=told):
                renewed[row["item"]] = Renewal(
                    expires_at=row["expires_at"], cancel_requested=row["cancel_requested"]
                )
        return renewed

    def complete(self, worker: str, settlements: Sequence[Completion]) -> dict[int, WorkState]:
        return self._settle(sql.COMPLETE, worker, [asdict(each) for each in settlements])

    def release(self, worker: str, settlements: Sequence[Release]) -> dict[int, WorkState]:
        return self._settle(sql.RELEASE, worker, [asdict(each) for each in settlements])

    def fail(self, worker: str, settlements: Sequence[EndedAttempt]) -> dict[int, WorkState]:
        return self._settle(
            sql.FAIL,
            worker,
            [
                {
                    "item": each.item,
                    "fence": each.fence,
                    "kind": each.kind,
                    "retryable": each.retryable,
                    "delay": each.delay,
                    **asdict(each.text),
                }
                for each in settlements
            ],
        )

    def reap(self, limit: int) -> dict[int, WorkState]:
        return _states(
            self._run(sql.REAP, limit=limit, **_told_once(FailureKind.LAPSED, LEASE_LAPSED))
        )

    def adopt(self, worker: str, spare: Sequence[str] = ()) -> dict[int, WorkState]:
        told = _told_once(FailureKind.RESTARTED, WORKER_RESTARTED) | {"delay": 0.0}
        return _states(self._run(sql.ADOPT, worker=worker, spare=list(spare), **told))

    def count_suppressed(self, queue: str, number: int) -> None:
        self._run(sql.COUNT_SUPPRESSED, queue=queue, number=number)

    def fold_counters(self) -> None:
        self._run(sql.FOLD_COUNTERS, limit=100_000)

    def trim_turns(self, queue: str, deployment_id: str, newest: int) -> None:
        self._run(
            sql.TRIM_TURNS, queue=queue, deployment_id=deployment_id, below=newest - TURNS_KEPT
        )

    def _settle(
        self, statement: str, worker: str, settlements: list[dict[str, Any]]
    ) -> dict[int, WorkState]:
        settled = {}
        for batch in _batches(sorted(settlements, key=lambda each: each["item"])):
            rows = self._run(statement, worker=worker, settlements=_as_json(batch))
            settled.update(_states(rows))
        return settled

    def _run(self, statement: str, **parameters: Any) -> list[Row]:
        with connections[self._alias].cursor() as cursor:
            # psycopg adapts timedelta; the stubs know only what every database takes.
            given: dict[str, Any] = {"skew": self._skew, **parameters}
            cursor.execute(statement, given)
            if cursor.description is None:
                return []
            names = [column[0] for column in cursor.description]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def _told_once(kind: FailureKind, message: str) -> dict[str, Any]:
    return {
        "kind": kind.value,
        "message": message,
        "fingerprint": fingerprint("", message, ""),
        "delay": None,
    }


def _states(rows: Iterable[Row]) -> dict[int, WorkState]:
    return {row["item"]: WorkState(row["state"]) for row in rows}


def _as_json(records: Sequence[dict[str, Any]]) -> str:
    return json.dumps(records, default=datetime.isoformat)


def _batches(claims: Sequence[T]) -> Iterable[Sequence[T]]:
    for start in range(0, len(claims), BATCH):
        yield claims[start : start + BATCH]


class QueueItemQuerySet(models.QuerySet[Any]):
    """Reads items. Writing raises: only the moves between places write."""

    def with_state(self) -> QueueItemQuerySet:
        """
        Read each item with its place, in one statement, so never between two places.

        Adds `state` (a `WorkState` value; empty for an item in no place, which
        ``workqueue doctor`` reports), `fence`, `attempts` and `released_by`.
        """
        ready = apps.get_model("django_workqueue", "Ready").objects.filter(
            queue=OuterRef("queue"),
            deployment_id=OuterRef("deployment_id"),
            tenant=OuterRef("tenant"),
            rank=OuterRef("priority") * -1,
            item_id=OuterRef("pk"),
        )
        places = ("lease", "waiting", "dead_letter", "finished")
        placed: QueueItemQuerySet = (
            self.select_related(*places)
            .annotate(
                fence=Coalesce(*(f"{place}__fence" for place in places), _first(ready, "fence")),
                attempts=Coalesce(
                    *(f"{place}__attempts" for place in places), _first(ready, "attempts")
                ),
            )
            .annotate(
                state=_STATE,
                released_by=Coalesce("waiting__released_by", _first(ready, "released_by")),
            )
        )
        return placed

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise TypeError("QueueItem.objects only reads; use the verbs of a WorkQueue")

    create = bulk_create = bulk_update = get_or_create = update_or_create = _refuse
    update = delete = acreate = abulk_create = abulk_update = _refuse
    aget_or_create = aupdate_or_create = aupdate = adelete = _refuse


def _first(rows: models.QuerySet[Any], column: str) -> Subquery:
    return Subquery(rows.values(column)[:1])


_STATE: Final = Case(
    When(lease__isnull=False, then=Value(WorkState.CLAIMED.value)),
    When(finished__isnull=False, then=F("finished__state")),
    When(dead_letter__isnull=False, then=Value(WorkState.DEAD_LETTERED.value)),
    When(waiting__cause="paused", then=Value(WorkState.PAUSED.value)),
    When(Q(waiting__isnull=False) | Q(fence__isnull=False), then=Value(WorkState.QUEUED.value)),
    default=Value(""),
    output_field=models.CharField(),
)


class BodyManager(models.Manager[Any]):
    """Writes bodies. A body's row is the mutex of re-used names and of operators' moves."""

    def lock_holders(self, items: Sequence[Acceptance]) -> list[int]:
        """Lock the bodies that hold an id or a key of *items*, in one order; their job ids."""
        holders: list[int] = []
        for batch in _batches(items):
            in_the_way = Q(pk__in=[])
            for item in batch:
                in_the_way |= self._holding(item)
            holders += self.filter(in_the_way).values_list("pk", flat=True)
        locked = self.select_for_update().filter(pk__in=holders).order_by("pk")
        return list(locked.values_list("pk", flat=True))

    def free_names(self, *, ids: Sequence[int], keys: Sequence[int]) -> None:
        """Let go of the ids, and of the keys, of these locked bodies."""
        for batch in _batches(sorted(ids)):
            self.filter(pk__in=batch).update(id_freed=True)
        for batch in _batches(sorted(keys)):
            self.filter(pk__in=batch).update(key_freed=True)

    def _holding(self, item: Acceptance) -> Q:
        holding = Q(tenant=item.tenant, item_id=item.item_id, id_freed=False)
        if item.dedupe_key is not None:
            holding |= Q(tenant=item.tenant, dedupe_key=item.dedupe_key, key_freed=False)
        return holding


QueueItemManager = models.Manager.from_queryset(QueueItemQuerySet, "QueueItemManager")
