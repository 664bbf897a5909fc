"""
The tenants that have work: a page of them by name, and how much each has.

It costs a step along an index per tenant, however many items it has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.db import connections
from django.db.models import Count

from django_workqueue.models import DeadLetter, Lease, Ready
from django_workqueue.queues.store import Store
from django_workqueue.reading import planned

#: Items of a tenant, in a lane or among the dead letters, up to which they are counted.
COUNTED_UP_TO: Final = 1_000
_A_WALK: Final = {"enable_seqscan": "off", "enable_bitmapscan": "off"}

# The next greater name in each step: an index scan from there that stops at its first row.
_HOP: Final = """
with recursive hop (tenant, number) as (
  select (select min(tenant) from {table} where {lane} tenant > %s), 1
  union all
  select (select min(tenant) from {table} where {lane} tenant > hop.tenant), number + 1
    from hop
   where hop.tenant is not null
     and number < %s
)
select tenant,
       (select count(*)
          from (select 1 from {table} where {lane} tenant = hop.tenant limit %s) counted)
  from hop
 where tenant is not null
"""


@dataclass(slots=True, kw_only=True)
class TenantFigures:
    """
    How many items a tenant has that can be claimed, are claimed, and failed.

    `is_capped`: of some there may be more, since no more were counted.
    """

    name: str
    ready: int = 0
    running: int = 0
    failed: int = 0
    is_capped: bool = False

    def add(self, figure: str, number: int) -> None:
        """Count some more."""
        setattr(self, figure, getattr(self, figure) + number)
        self.is_capped |= figure != "running" and number >= COUNTED_UP_TO


class Tenants(Store):
    """Reads them from the database of a queue."""

    def page(self, *, after: str = "", limit: int = 100) -> tuple[Sequence[TenantFigures], bool]:
        """
        Return the *limit* tenants that come next by name, and whether there are more.

        They are those with an item that can be claimed, is claimed or failed. One that only waits
        for its time, or was paused, isn't found: no index has it by tenant.
        """
        found: dict[str, TenantFigures] = {}
        with self._store("tenants"), planned(self.using, **_A_WALK):
            for figure, name, number in self._figures(after, limit + 1):
                found.setdefault(name, TenantFigures(name=name)).add(figure, number)
        names = sorted(found)
        return [found[name] for name in names[:limit]], len(names) > limit

    def _figures(self, after: str, limit: int) -> Iterator[tuple[str, str, int]]:
        for lane in self._lanes():
            for name, number in self._hop(Ready, lane, after, limit):
                yield "ready", name, number
        for name, number in self._hop(DeadLetter, (), after, limit):
            yield "failed", name, number
        # As large as what is in flight.
        leases = Lease._base_manager.using(self.using).filter(tenant__gt=after).order_by()
        for name, number in leases.values_list("tenant").annotate(number=Count("pk")):
            yield "running", name, number

    def _lanes(self) -> Iterator[tuple[str, str]]:
        """Each queue and deployment with something ready: a step along the index each."""
        rows = Ready._base_manager.using(self.using).order_by("queue", "deployment_id")
        names = rows.values_list("queue", "deployment_id")
        lane = names.first()
        while lane is not None:
            yield lane
            same = names.filter(queue=lane[0], deployment_id__gt=lane[1]).first()
            lane = same or names.filter(queue__gt=lane[0]).first()

    def _hop(
        self, model: Any, lane: tuple[str, ...], after: str, limit: int
    ) -> list[tuple[str, int]]:
        bound = "queue = %s and deployment_id = %s and" if lane else ""
        statement = _HOP.format(table=model._meta.db_table, lane=bound)
        with connections[self.using].cursor() as cursor:
            given: list[str | int] = [*lane, after, *lane, limit, *lane, COUNTED_UP_TO]
            cursor.execute(statement, given)
            rows: list[tuple[str, int]] = cursor.fetchall()
        return rows
