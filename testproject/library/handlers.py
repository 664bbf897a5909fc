"""The demo's work: one item per module, each of which leaves a report."""

import warnings
from pathlib import Path

from django.db.models import F

from django_workqueue import Context, Reject, handler
from library.models import Report
from library.source import figures

# Old escapes in old modules are no news here. For the whole process, since handlers run in
# threads, which share the filters: one set for a while in one would be lost in another.
warnings.filterwarnings("ignore", category=SyntaxWarning)


@handler("library.report", queue="demo", atomic=True)
def report(payload: dict[str, str], context: Context) -> None:
    """
    Store the figures of the module at ``payload["path"]``.

    Atomic: the report and the completion of the item commit together, so an item that is
    delivered again after its worker died finds no half of an earlier try.
    """
    try:
        found = figures(Path(payload["path"]))
    except (SyntaxError, ValueError) as error:
        # It won't become Python by trying again. What else can go wrong may pass (a file on a
        # disk that is away, memory that is short): it is left to the queue's retries.
        raise Reject(f"not Python: {error}") from error
    Report.objects.update_or_create(
        run=payload["run"],
        path=payload["path"],
        defaults={**found, "job": context.item.job_id, "times_written": F("times_written") + 1},
        create_defaults={
            **found,
            "job": context.item.job_id,
            "module": payload["module"],
            "package": context.tenant,
        },
    )
