"""One run of the demo: what it enqueued, and what the database says became of that."""

import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Any

from django.db.models import Q, QuerySet

from django_workqueue import WorkItem, WorkState, get_queue
from django_workqueue.failures import FailureKind
from django_workqueue.models import DeadLetter, Failure, Finished, Lease, QueueItem
from library.handlers import report
from library.models import Report
from library.source import Module


class Run:
    """
    The items of one run, and its figures.

    Everything is counted from the database, and of this run only: other runs, and the items
    of others, may lie in the same tables.
    """

    def __init__(self, modules: Sequence[Module]) -> None:
        self.name = secrets.token_hex(3)
        items = get_queue().enqueue_many(self._work(modules))
        self._first = min(item.job_id for item in items)

    def _work(self, modules: Sequence[Module]) -> list[WorkItem]:
        """Return one item per module: the larger its file among all, the higher its priority."""
        by_size = sorted(modules, key=lambda module: module.size)
        steps = max(len(modules) - 1, 1)
        return [
            report.item(
                {"run": self.name, "path": str(module.path), "module": module.name},
                tenant=module.package,
                id=f"{self.name}/{module.name}",
                priority=round(200 * place / steps) - 100,
            )
            for place, module in enumerate(by_size)
        ]

    def _rows(self, model: Any, item: str = "item") -> QuerySet[Any]:
        # From the run's first job id on, because an item id without its tenant has no index.
        prefix = f"{item}__" if item else ""
        return model.objects.filter(
            **{f"{prefix}pk__gte": self._first, f"{prefix}item_id__startswith": f"{self.name}/"}
        )

    @property
    def items(self) -> QuerySet[QueueItem]:
        """All items of the run."""
        return self._rows(QueueItem, "")

    @property
    def completed(self) -> QuerySet[Finished]:
        """Those that succeeded."""
        return self._rows(Finished).filter(state=WorkState.COMPLETED)

    @property
    def dead_letters(self) -> QuerySet[DeadLetter]:
        """Those that were given up, in the order of their burial."""
        return self._rows(DeadLetter).select_related("item").order_by("dead_at")

    @property
    def leases(self) -> QuerySet[Lease]:
        """Those that a worker process holds."""
        return self._rows(Lease)

    @property
    def reports(self) -> QuerySet[Report]:
        """What the handler stored."""
        return Report.objects.filter(run=self.name)

    def errors(self, job_id: int) -> list[str]:
        """Return what each failed attempt at an item reported, oldest first."""
        failures = Failure.objects.filter(item=job_id).order_by("number")
        return list(failures.values_list("message", flat=True))

    def redelivered(self) -> list[int]:
        """
        Return the job ids of the items that were given to a worker again after one had died.

        Each claim ends with a result or with an error that the handler raised, unless the
        worker that held it was gone. So it is the items with more claims than such ends.
        """
        completed = dict(self.completed.values_list("item", "fence"))
        claims = completed | dict(self.dead_letters.values_list("item", "fence"))
        errors = self._rows(Failure).filter(kind=FailureKind.ERROR)
        ends = Counter(completed.keys()) + Counter(errors.values_list("item", flat=True))
        return sorted(job_id for job_id, number in claims.items() if number > ends[job_id])

    def lost(self) -> QuerySet[QueueItem]:
        """Return the items that left neither a report nor a dead letter."""
        return self.items.filter(dead_letter__isnull=True).exclude(
            pk__in=self.reports.values("job")
        )

    def doubtful_reports(self) -> QuerySet[Report]:
        """Return the reports that were written more than once, or of items that failed."""
        return self.reports.filter(
            Q(times_written__gt=1) | Q(job__in=self.dead_letters.values("item"))
        )

    def figures(self) -> dict[str, int]:
        """Return the figures of the last line."""
        return {
            "enqueued": self.items.count(),
            "completed": self.completed.count(),
            "dead_lettered": self.dead_letters.count(),
            "redelivered": len(self.redelivered()),
            "lost": self.lost().count(),
        }
