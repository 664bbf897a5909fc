"""
The managers of the models: reading an item with its place, locking bodies, and the moves of
`moves` on PostgreSQL.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any, Final, NoReturn, TypeVar

from django.apps import apps
from django.db import connections, models, transaction
from django.db.models import Case, F, OuterRef, Q, Subquery, Value, When
from django.db.models.functions import Coalesce

from django_workqueue.failures import FailureKind, fingerprint
from django_workqueue.items import WorkState
from django_workqueue.moves import (
    BATCH,
    FOLDED_EVERY,
    PROMOTED_PER_CLAIM,
    RECALL_BATCH,
    TURNS_KEPT,
    Acceptance,
    Claim,
    ClaimRequest,
    Completion,
    EndedAttempt,
    Moves,
    Promotion,
    Recall,
    Release,
    Renewal,
    Row,
    Stored,
)
from django_workqueue.policy import LEASE_LAPSED, WORKER_RESTARTED
from django_workqueue.sql import accepting, claiming, clock, ending, recalling, settling, upkeep

T = TypeVar("T")

# On SQLite a transaction locks when it first writes; this writes nothing.
SQLITE_LOCK: Final = "update django_workqueue_counter set id = id where false"


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
        [row] = self._run(clock.NOW)
        moment: datetime = row["now"]
        return moment

    def reserve(self, number: int) -> list[int]:
        return [row["id"] for row in self._run(accepting.RESERVE, number=number)]

    def accept(self, items: Sequence[Acceptance]) -> dict[int, Stored]:
        records = [
            asdict(item) | {"place": place, "job_id": item.id} for place, item in enumerate(items)
        ]
        rows = self._run(accepting.ACCEPT, items=_as_json(records))
        if any(row["id"] % FOLDED_EVERY == 0 for row in rows):
            self.fold_counters()
        return {
            row["place"]: Stored(
                job_id=row["id"], enqueued_at=row["accepted_at"], available_at=row["due_at"]
            )
            for row in rows
        }

    def promote(self, queue: str, limit: int = PROMOTED_PER_CLAIM) -> Promotion:
        [row] = self._run(claiming.PROMOTE, queue=queue, limit=limit)
        return Promotion(**row)

    def recall(
        self,
        queue: str,
        lanes: Sequence[str],
        handlers: Sequence[str],
        after: datetime | None = None,
        limit: int = RECALL_BATCH,
    ) -> Recall:
        [row] = self._run(
            recalling.RECALL,
            queue=queue,
            lanes=[*lanes],
            handlers=[*handlers],
            after=after,
            limit=limit,
        )
        return Recall(**row)

    def claim(self, request: ClaimRequest) -> list[Row]:
        pinned, holds = bool(request.deployment_id), request.has_held_tenants
        if request.limit == 1 and not holds:
            statement = claiming.CLAIM_ONE[pinned]
        else:
            statement = claiming.CLAIM_MANY[pinned, holds]
        rows = self._run(statement, **asdict(request))
        if rows and rows[0]["turn"] % TURNS_KEPT == 0:
            # Also where no worker's upkeep does it.
            self.trim_turns(request.queue, request.deployment_id, rows[0]["turn"])
            self.fold_counters()
        return rows

    def serves(self, queue: str, deployment_id: str) -> bool:
        statement = claiming.SERVES[bool(deployment_id)]
        [row] = self._run(statement, queue=queue, deployment_id=deployment_id)
        return bool(row["served"])

    def renew(self, worker: str, claims: Sequence[Claim], *, wait: bool) -> dict[int, Renewal]:
        statement = settling.RENEW_ONE if wait else settling.RENEW_MANY
        renewed = {}
        for batch in _batches(sorted(claims)):
            told = _as_json([{"item": item, "fence": fence} for item, fence in batch])
            for row in self._run(statement, worker=worker, claims=told):
                renewed[row["item"]] = Renewal(
                    expires_at=row["expires_at"],
                    cancel_requested=row["cancel_requested"],
                    renewable_for=row["renewable_for"],
                )
        return renewed

    def complete(self, worker: str, settlements: Sequence[Completion]) -> dict[int, WorkState]:
        return self._settle(settling.COMPLETE, worker, [asdict(each) for each in settlements])

    def release(self, worker: str, settlements: Sequence[Release]) -> dict[int, WorkState]:
        return self._settle(settling.RELEASE, worker, [asdict(each) for each in settlements])

    def fail(self, worker: str, settlements: Sequence[EndedAttempt]) -> dict[int, WorkState]:
        return self._settle(
            ending.FAIL,
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
            self._run(ending.REAP, limit=limit, **_told_once(FailureKind.LAPSED, LEASE_LAPSED))
        )

    def adopt(self, worker: str, spare: Sequence[str] = ()) -> dict[int, WorkState]:
        told = _told_once(FailureKind.RESTARTED, WORKER_RESTARTED) | {"delay": 0.0}
        return _states(self._run(ending.ADOPT, worker=worker, spare=list(spare), **told))

    def count_suppressed(self, queue: str, number: int) -> None:
        [row] = self._run(accepting.COUNT_SUPPRESSED, queue=queue, number=number)
        if row["id"] % FOLDED_EVERY == 0:
            self.fold_counters()

    def fold_counters(self) -> None:
        self._run(upkeep.FOLD_COUNTERS, limit=100_000)

    def prune(self, limit: int) -> int:
        [finished] = self._run(upkeep.PRUNE["finished"], limit=limit)
        gone = int(finished["count"])
        if gone < limit:
            [dead] = self._run(upkeep.PRUNE["dead"], limit=limit - gone)
            gone += int(dead["count"])
        return gone

    def trim_turns(self, queue: str, deployment_id: str, newest: int) -> None:
        self._run(
            claiming.TRIM_TURNS, queue=queue, deployment_id=deployment_id, below=newest - TURNS_KEPT
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
        ``workqueue doctor`` reports), `fence`, `attempts` and `settled_by`.
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
                settled_by=Coalesce("waiting__settled_by", _first(ready, "settled_by")),
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

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Open a transaction that looks at bodies, locks them, looks again and changes them."""
        with transaction.atomic(using=self.db):
            connection = connections[self.db]
            if connection.vendor == "sqlite":
                with connection.cursor() as cursor:
                    cursor.execute(SQLITE_LOCK)
            yield

    def lock(self, job_ids: Iterable[int]) -> list[int]:
        """Lock these bodies until the transaction ends, in one order; those that are there."""
        locked = self.select_for_update().filter(pk__in=sorted(job_ids)).order_by("pk")
        return list(locked.values_list("pk", flat=True))

    def holders(self, names: Iterable[tuple[str, str, str | None]]) -> list[int]:
        """The job ids of the bodies that hold an id or a key of (tenant, id, key)."""
        holders: list[int] = []
        for batch in _batches([*names]):
            in_the_way = Q(pk__in=[])
            for tenant, item_id, key in batch:
                in_the_way |= Q(tenant=tenant, item_id=item_id, id_freed=False)
                if key is not None:
                    in_the_way |= Q(tenant=tenant, dedupe_key=key, key_freed=False)
            holders += self.filter(in_the_way).values_list("pk", flat=True)
        return holders

    def set_freed(self, freed: bool, *, ids: Sequence[int], keys: Sequence[int]) -> None:
        """Let go of the ids and of the keys of these locked bodies, or take them back."""
        for batch in _batches(sorted(ids)):
            self.filter(pk__in=batch).update(id_freed=freed)
        for batch in _batches(sorted(keys)):
            self.filter(pk__in=batch).update(key_freed=freed)


QueueItemManager = models.Manager.from_queryset(QueueItemQuerySet, "QueueItemManager")
