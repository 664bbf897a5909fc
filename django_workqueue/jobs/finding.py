"""
Finding jobs among millions: never slower for a longer history.

What an index leads to is read along it, as long as it is little. All else is looked for in the
order of job ids, among so many rows at most: then fewer are found than were asked for, and it
is told up to which key nothing was missed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import cached_property
from typing import Any, Final

from django.db import connections
from django.db.models import F, OuterRef, Q, QuerySet, Subquery, Sum

from django_workqueue.items import WorkState
from django_workqueue.jobs.search import Key, Search, SearchTooBroadError
from django_workqueue.models import (
    Counter,
    DeadLetter,
    Finished,
    Lease,
    QueueItem,
    Ready,
    Waiting,
)
from django_workqueue.reading import planned

#: Rows of a table that are looked at; and rows for each of which another table is looked into.
#: If several tables are looked through, each gets its share.
LOOKED_AT: Final = 100_000
PROBED: Final = 40_000
#: Entries of the index of what is ready: nothing else is read of it.
READY: Final = 500_000
#: Rows, all over the table, that are read together because an index leads to them.
GATHERED: Final = 5_000
#: Tenants that are asked one by one for an item id or a key.
TENANTS: Final = 20_000
#: Ids are given out before the times that go with them are taken: a while, on any path.
SLACK: Final = timedelta(minutes=10)

#: Where an item stands, by its state. Of those that are queued it is one of two places.
_PLACES: Final[dict[WorkState, tuple[Any, dict[str, Any]]]] = {
    WorkState.QUEUED: (Waiting, {"due_at__isnull": False}),
    WorkState.CLAIMED: (Lease, {}),
    WorkState.PAUSED: (Waiting, {"due_at__isnull": True}),
    WorkState.COMPLETED: (Finished, {"state": "completed"}),
    WorkState.DEAD_LETTERED: (DeadLetter, {}),
    WorkState.CANCELLED: (Finished, {"state": "cancelled"}),
}
#: The counters' names of what is queued; other states have their own.
_QUEUED: Final = ("ready", "waiting")
_COUNTED: Final = (*_QUEUED, *(state.value for state in WorkState if state.value != "queued"))

#: The planner must not gather and sort what a walk along an index finds in order.
A_WALK: Final = {
    "enable_seqscan": "off",
    "enable_bitmapscan": "off",
    "enable_sort": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
}
#: Where no index has the order.
_A_SORT: Final = {"enable_seqscan": "on", "enable_bitmapscan": "on", "enable_sort": "on"}

_HOP: Final = """
with recursive hop (tenant, number) as (
  select min(tenant), 1
    from django_workqueue_queueitem
   where {held}
  union all
  select (select min(tenant)
            from django_workqueue_queueitem
           where {held}
             and tenant > hop.tenant), number + 1
    from hop
   where tenant is not null
     and number <= %(tenants)s
)
select null as id   -- there are more tenants
  from hop
 where tenant is not null
   and number > %(tenants)s{found}
 limit %(most)s
"""
_FOUND: Final = """
union all
select body.id
  from hop
  join django_workqueue_queueitem body
    on body.tenant = hop.tenant
   and body.{name} = %(value)s
   and {freed}"""


def _hop(name: str, held: str, *freed: str) -> str:
    """From tenant to tenant, a step along the unique index each, and the bodies of that name."""
    found = "".join(_FOUND.format(name=name, freed=each) for each in freed)
    return _HOP.format(held=held, found=found)


_OF_ALL_TENANTS: Final = {
    "item_id": _hop("item_id", "not id_freed", "not body.id_freed", "body.id_freed"),
    "dedupe_key": _hop(
        "dedupe_key", "not key_freed and dedupe_key is not null", "not body.key_freed"
    ),
}
#: The queues and the deployments with something ready, a step along the index each.
_LANES: Final = """
with recursive queues (queue) as (
  select min(queue)
    from django_workqueue_ready
  union all
  select (select min(queue)
            from django_workqueue_ready
           where queue > queues.queue)
    from queues
   where queue is not null
), lanes (queue, deployment_id) as (
  select queue, (select min(deployment_id)
                   from django_workqueue_ready
                  where queue = queues.queue)
    from queues
   where queue is not null
  union all
  select queue, (select min(deployment_id)
                   from django_workqueue_ready
                  where queue = lanes.queue
                    and deployment_id > lanes.deployment_id)
    from lanes
   where deployment_id is not null
)
select queue, deployment_id
  from lanes
 where deployment_id is not null
"""


@dataclass(frozen=True, slots=True)
class Found:
    """Keys in their order. Up to `end` nothing is missed; None: nothing at all."""

    keys: Sequence[Key]
    end: Key | None


@dataclass(frozen=True, slots=True)
class _Source:
    """
    Rows that are *wanted*, of a table whose job ids are *key*. *limits*: in the order of ids, up
    to so many of those rows; none: an index leads to what is wanted.
    """

    wanted: QuerySet[Any]
    key: str
    limits: Sequence[tuple[QuerySet[Any], int]] = ()


class Finder:
    """Finds what *search* looks for in the database *using*."""

    def __init__(self, using: str, search: Search) -> None:
        self._using = using
        self._search = search
        self._sign = "-" if search.descending else ""
        self._states = search.states if search.states != {*WorkState} else frozenset()
        # A lease alone has a worker, a dead letter alone the fingerprint of its error.
        only = {WorkState.CLAIMED: search.worker, WorkState.DEAD_LETTERED: search.fingerprint}
        implied = [state for state, value in only.items() if value is not None]
        if implied:
            self._states = frozenset(implied)
        #: No row can be both.
        self._is_vain = len(implied) > 1 or bool(search.states and self._states - search.states)

    def find(self, after: Key | None, most: int) -> Found:
        """Find up to *most*, beyond the key *after*."""
        search = self._search
        span = None if self._is_vain else self._span()
        if span is None:
            return Found([], None)
        known = self._known()
        if search.time is not None:
            return self._by_time(search.time, span, known, after, most)
        if after is not None:
            span["lt" if search.descending else "gt"] = after[-1]
        sources = [*self._sources(known)]
        sharers = sum(bool(source.limits) for source in sources)
        walks = [self._walk(source, span, sharers, most) for source in sources]
        ends = [end for _, end in walks if end is not None]
        nearest = max if search.descending else min
        end = nearest(ends, default=None)
        # Beyond the nearest end another place may have what was not found.
        seen = {pk for ids, _ in walks for pk in ids if end is None or nearest(pk, end) == pk}
        keys: list[Key] = [(pk,) for pk in sorted(seen, reverse=search.descending)]
        if len(keys) > most:
            return Found(keys[:most], keys[most - 1])
        return Found(keys, None if end is None else (end,))

    def total(self) -> int | None:
        """How many there are, as far as the counters of queues tell; None: they don't."""
        if not self._search.is_counted:
            return None
        names = [
            name
            for state in self._search.states or WorkState
            for name in (_QUEUED if state is WorkState.QUEUED else (state.value,))
        ]
        return sum(self._count(name) for name in names)

    def _by_time(
        self,
        time: str,
        span: dict[str, Any],
        known: Sequence[int] | None,
        after: Key | None,
        most: int,
    ) -> Found:
        """What is in one place, sorted by a time of that place."""
        [state] = self._states
        source = self._source(*_PLACES[state], known)
        rows = self._within(span, source.wanted, source.key)
        if after is not None:
            beyond = "lt" if self._search.descending else "gt"
            # The first alone bounds an index.
            rows = rows.filter(**{f"{time}__{beyond}e": after[0]}).filter(
                Q(**{f"{time}__{beyond}": after[0]}) | Q(**{f"item_id__{beyond}": after[-1]})
            )
        rows = rows.order_by(self._sign + time, f"{self._sign}item_id")
        has_index = state is WorkState.DEAD_LETTERED
        with planned(self._using, **(A_WALK if has_index else _A_SORT)):
            keys = list(rows.values_list(time, "item_id")[:most])
        return Found(keys, keys[-1] if len(keys) == most else None)

    def _walk(
        self, source: _Source, span: dict[str, Any], sharers: int, most: int
    ) -> tuple[list[int], int | None]:
        """The ids in order, and up to which nothing is missed; None: nothing at all."""
        key, order, span, end = source.key, self._sign + source.key, dict(span), None
        for rows, number in source.limits:
            share = max(1, number // sharers)
            ids = self._within(span, rows, key).order_by(order).values_list(key, flat=True)
            if len(edge := list(ids[share - 1 : share + 1])) == 2:
                end = edge[0]
                span["gte" if self._sign else "lte"] = end
        wanted = self._within(span, source.wanted, key)
        if source.limits:
            wanted = wanted.order_by(order)
        else:
            # No index may offer to give the order, by a walk through all there is.
            no_key = F(key) + 0
            wanted = wanted.order_by(no_key.desc() if self._sign else no_key)
        found = list(wanted.values_list(key, flat=True)[:most])
        return found, found[-1] if len(found) == most else end

    def _within(self, span: dict[str, Any], rows: Any, key: str) -> Any:
        return rows.filter(**{f"{key}__{each}": value for each, value in span.items()})

    def _sources(self, known: Sequence[int] | None) -> Iterator[_Source]:
        if not self._states:
            yield self._source(QueueItem, {}, known)
        for state in self._states:
            if state is WorkState.QUEUED:
                yield self._ready(known)
            place, own = _PLACES[state]
            gathered = None if known is not None else self._gathered(state)
            yield self._source(place, own, known, gathered)

    def _source(
        self,
        model: Any,
        own: dict[str, Any],
        known: Sequence[int] | None,
        gathered: dict[str, Any] | None = None,
    ) -> _Source:
        """
        The rows with *own* values, of the *known* ids if these are all there are; else, if it
        is not None, those that *gathered* finds by an index; else in the order of ids.
        """
        key = "pk" if model is QueueItem else "item_id"
        own_rows, wanted = self._wanted(model, own)
        if known is not None:
            return _Source(wanted.filter(**{f"{key}__in": known}), key)
        if gathered is not None:
            return _Source(wanted.filter(**gathered), key)
        limits = [(self._all(model), LOOKED_AT)]
        if own_rows is not wanted:
            limits.append((own_rows, PROBED))
        return _Source(wanted, key, limits)

    def _wanted(self, model: Any, own: dict[str, Any]) -> tuple[QuerySet[Any], QuerySet[Any]]:
        """
        The rows of *model* that may be looked for, by their own columns; and those that are,
        by their bodies too. The same object twice: that takes no body.
        """
        names = {field.name for field in model._meta.concrete_fields}
        here, elsewhere = dict(own), dict[str, Any]()
        for name, value in self._search.of_bodies.items():
            (here if name.partition("__")[0] in names else elsewhere)[name] = value
        if model is Lease and self._search.worker is not None:
            here["worker"] = self._search.worker
        if model is DeadLetter and self._search.fingerprint is not None:
            here["fingerprint"] = self._search.fingerprint
        rows = self._all(model).filter(**here)
        if not elsewhere:
            return rows, rows
        body = self._all(QueueItem).filter(pk=OuterRef("item_id"), **elsewhere)
        return rows, _having(rows, body)

    def _ready(self, known: Sequence[int] | None) -> _Source:
        """Ready rows are in the order of service: all of a range, or for each body in turn."""
        if known is None:
            ready, wanted = self._wanted(Ready, {})
            most = READY if ready is wanted else PROBED
            if self._search.tenant is None:
                number = self._count("ready")
            else:
                lanes = self._lanes()
                range_ = {
                    "queue__in": {queue for queue, _ in lanes},
                    "deployment_id__in": {deployment_id for _, deployment_id in lanes},
                }
                wanted = wanted.filter(**range_)
                number = ready.filter(**range_).order_by().values("rank")[: most + 1].count()
            if number <= most:
                return _Source(wanted, "item_id")
        bodies = self._source(QueueItem, {}, known)
        row = self._all(Ready).filter(
            queue=OuterRef("queue"),
            deployment_id=OuterRef("deployment_id"),
            tenant=OuterRef("tenant"),
            rank=OuterRef("priority") * -1,
            item_id=OuterRef("pk"),
        )
        limits = [*bodies.limits, (bodies.wanted, PROBED)] if bodies.limits else []
        return _Source(_having(bodies.wanted, row), "pk", limits)

    def _lanes(self) -> list[tuple[str, str]]:
        search = self._search
        return [
            (queue, deployment_id)
            for queue, deployment_id in self._run(_LANES)
            if search.queue in (None, queue) and search.deployment_id in (None, deployment_id)
        ]

    def _gathered(self, state: WorkState) -> dict[str, Any] | None:
        """What leads along an index to the few in *state*; None: they are many, or nothing does."""
        tenant = self._search.tenant
        if state is WorkState.PAUSED and self._count("paused") <= GATHERED:
            return {"queue__in": [*self._counts]}
        if state is WorkState.DEAD_LETTERED:
            names = {"tenant": tenant, "fingerprint": self._search.fingerprint}
            for name, value in names.items():
                if value is None:
                    continue
                # In the order of the index, so that no other is walked for them.
                letters = self._all(DeadLetter).filter(**{name: value}).order_by(name, "dead_at")
                if letters.values("dead_at")[: GATHERED + 1].count() <= GATHERED:
                    return {}
        return None

    def _known(self) -> list[int] | None:
        """The job ids that can be found at all, by an index of names; None: too many, or none."""
        search = self._search
        named = {
            name: value
            for name in ("item_id", "dedupe_key")
            if (value := getattr(search, name)) is not None
        }
        if search.tenant is None:
            for name, value in named.items():
                return self._of_all_tenants(name, value)
            return None
        if search.dedupe_key is not None:
            bodies = self._all(QueueItem).filter(
                tenant=search.tenant, dedupe_key=search.dedupe_key, key_freed=False
            )
            return list(bodies.order_by().values_list("pk", flat=True))
        found: list[int] = []
        for freed in (False, True):
            bodies = self._all(QueueItem).filter(tenant=search.tenant, id_freed=freed, **named)
            in_order = bodies.order_by("tenant", "item_id").values_list("pk", flat=True)
            found += in_order[: GATHERED + 1 - len(found)]
            if len(found) > GATHERED:
                return None
        return found

    def _of_all_tenants(self, name: str, value: str) -> list[int] | None:
        given = {"value": value, "tenants": TENANTS, "most": GATHERED + 1}
        found = [pk for [pk] in self._run(_OF_ALL_TENANTS[name], given)]
        if None in found:
            raise SearchTooBroadError(
                f"there are more than {TENANTS} tenants that may have this {name}: name the tenant"
            )
        return found if len(found) <= GATHERED else None

    def _span(self) -> dict[str, Any] | None:
        """Between which ids the bodies were created, with some slack; None: there are none."""
        search, span = self._search, {}
        if search.created_after is not None:
            span["gte"] = self._first_created(search.created_after - SLACK)
            if span["gte"] is None:
                return None
        if search.created_before is not None:
            end = self._first_created(search.created_before + SLACK)
            if end is not None:
                span["lte"] = end - 1
        return span

    def _first_created(self, moment: datetime) -> int | None:
        """The id from which on bodies were created at *moment* or later; None: none was."""
        bodies = self._all(QueueItem).order_by("pk").values_list("pk", "created_at")
        first, last = bodies.first(), bodies.last()
        if first is None or last is None or last[1] < moment:
            return None
        low, high = first[0], last[0]
        while low < high:
            middle = (low + high) // 2
            body = bodies.filter(pk__gte=middle).first()
            if body is not None and body[1] < moment:
                low = body[0] + 1
            else:
                high = middle
        return int(low)

    def _count(self, name: str) -> int:
        return sum(max(0, counts[name]) for counts in self._counts.values())

    @cached_property
    def _counts(self) -> dict[str, dict[str, int]]:
        """The counters by queue, of the one that is looked in or of all."""
        rows = self._all(Counter).order_by().values("queue")
        if self._search.queue is not None:
            rows = rows.filter(queue=self._search.queue)
        sums = rows.annotate(**{f"{name}_sum": Sum(name) for name in _COUNTED})
        return {
            row["queue"]: {name: int(row[f"{name}_sum"] or 0) for name in _COUNTED} for row in sums
        }

    def _run(
        self, statement: str, parameters: dict[str, Any] | None = None
    ) -> list[tuple[Any, ...]]:
        with connections[self._using].cursor() as cursor:
            cursor.execute(statement, parameters)
            return list(cursor.fetchall())

    def _all(self, model: Any) -> Any:
        return model._base_manager.using(self._using)


def _having(rows: Any, one: Any) -> Any:
    """
    Those of *rows* for each of which there is *one* of another table. Neither a join nor EXISTS,
    which the planner would turn round: it would begin with the other table.
    """
    found = Subquery(one.values("pk" if one.model is QueueItem else "item_id")[:1])
    return rows.alias(one=found).filter(one__isnull=False)
