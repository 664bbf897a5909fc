"""
Jobs, as an operator looks for them: among millions, a page at a time, each page bounded.

A page may hold fewer jobs than it has room for while more are to come: what isn't found among
so many rows is looked for by the next page. Who follows the cursors misses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from django.db import Error, connections

from django_workqueue.arguments import MAX_PAGE_LIMIT
from django_workqueue.exceptions import InvalidFieldError, WorkItemNotFoundError
from django_workqueue.items import require_integer
from django_workqueue.jobs.finding import A_WALK, Finder, Found
from django_workqueue.jobs.search import (
    Key,
    Search,
    SearchTooBroadError,
    cursor_of,
    key_of,
)
from django_workqueue.models import QueueItem
from django_workqueue.queues.store import Store, sqlstate
from django_workqueue.reading import planned

__all__ = ["Jobs", "Page", "Search", "SearchTooBroadError"]

#: Jobs up to which they are counted, and up to which pages have numbers.
COUNTED: Final = 10_000
#: What a statement may take, in milliseconds.
STATEMENT_TIMEOUT: Final = 2_000
_QUERY_CANCELED: Final = "57014"


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """
    Rows of items with their places, without payloads and results. `next_cursor` None: there
    are no more. `total` of the whole search, None after a cursor; `is_capped`: at least so many.
    """

    rows: Sequence[Any]
    next_cursor: str | None
    total: int | None
    is_capped: bool


class Jobs(Store):
    """Finds jobs. An item that is in no place (see workqueue doctor) is not shown."""

    def page(self, search: Search, *, limit: int, number: int = 1) -> Page:
        """
        The page of that number, of *limit* rows. Raise `InvalidFieldError` beyond 10,000 rows,
        `SearchTooBroadError` or `QueueUnavailableError`.
        """
        require_integer("limit", limit, 1, MAX_PAGE_LIMIT)
        require_integer("page", number, 1, COUNTED)
        if number * limit > COUNTED:
            raise InvalidFieldError(
                f"page times limit is more than {COUNTED}: go on with a cursor", field="page"
            )
        with self._reading():
            finder = Finder(self.using, search)
            total, is_capped = finder.total(), False
            # One more tells whether there are more.
            found = finder.find(None, (COUNTED if total is None else number * limit) + 1)
            if total is None:
                total = min(len(found.keys), COUNTED)
                is_capped = found.end is not None
            return self._page(search, found, (number - 1) * limit, limit, total, is_capped)

    def after(self, search: Search, cursor: str, *, limit: int) -> Page:
        """The page that begins where another of the same order ended; it isn't counted."""
        require_integer("limit", limit, 1, MAX_PAGE_LIMIT)
        key = key_of(search, cursor)
        with self._reading():
            found = Finder(self.using, search).find(key, limit + 1)
            return self._page(search, found, 0, limit, None, False)

    def ids(self, search: Search, *, most: int, passes: int = 1) -> tuple[list[int], bool]:
        """
        Up to *most* job ids in their order, and whether there may be more. What one look at
        so many rows doesn't find is looked for *passes* times.
        """
        ids: list[int] = []
        after: Key | None = None
        with self._reading():
            finder = Finder(self.using, search)
            for _ in range(passes):
                found = finder.find(after, most + 1 - len(ids))
                ids += [key[-1] for key in found.keys]
                after = found.end
                if after is None or len(ids) > most:
                    break
        return ids[:most], after is not None

    def one(self, job_id: int) -> Any:
        """The job's row, with payload and result as text. Raise `WorkItemNotFoundError`."""
        with self._store("jobs"):
            for row in self._reader.items().filter(pk=job_id):
                if row.state:
                    return row
        raise WorkItemNotFoundError("there is no such job")

    def _page(
        self,
        search: Search,
        found: Found,
        start: int,
        limit: int,
        total: int | None,
        is_capped: bool,
    ) -> Page:
        keys, end = found.keys[start : start + limit], found.end
        if len(found.keys) > start + limit:
            end = keys[-1]
        # Items move meanwhile, where the database doesn't hold the picture still.
        rows = [
            row
            for row in self._rows([key[-1] for key in keys])
            if row.state and (not search.states or row.state in search.states)
        ]
        cursor = None if end is None else cursor_of(search, end)
        return Page(rows=rows, next_cursor=cursor, total=total, is_capped=is_capped)

    def _rows(self, job_ids: Sequence[int]) -> list[Any]:
        # Without payloads: a page of them may be hundreds of megabytes.
        items = QueueItem.objects.using(self.using).with_state()
        items = items.defer("payload", "finished__result").filter(pk__in=job_ids)
        rows = {row.pk: row for row in items}
        return [rows[job_id] for job_id in job_ids if job_id in rows]

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """One picture of all places, and an end to a search that takes too long."""
        options = {"statement_timeout": str(STATEMENT_TIMEOUT), **A_WALK}
        with self._store("jobs"):
            connection = connections[self.using]
            if not connection.in_atomic_block and connection.get_autocommit():
                # Else the caller's transaction has its own level, and may have begun to read.
                options = {"transaction_isolation": "'repeatable read'", **options}
            try:
                with planned(self.using, **options):
                    yield
            except Error as error:
                if sqlstate(error) != _QUERY_CANCELED:
                    raise
                raise SearchTooBroadError(
                    f"the search took longer than {STATEMENT_TIMEOUT / 1000:g} seconds: narrow it"
                    " by a tenant, a queue or the time of creation, or sort by created_at"
                ) from error
