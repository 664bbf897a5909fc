"""What the demo says at its end, as lines of text."""

import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence

from django_workqueue.failures import FailureKind
from django_workqueue.models import Failure, QueueItem
from library.run import Run
from library.workers import Kill

# For an output that has no width of its own.
WIDTH = 140
LARGEST = 5
NAMED = 10


def largest_modules(run: Run) -> Iterator[str]:
    """Yield the largest modules as a table."""
    yield "The largest modules"
    rows = [("lines", "classes", "functions", "longest", "module", "longest function")]
    for each in run.reports.order_by("-lines", "module")[:LARGEST]:
        numbers = (each.lines, each.classes, each.functions, each.longest_function_lines)
        names = (each.module, each.longest_function)
        rows.append((*(f"{number:,}" for number in numbers), *names))
    yield from _table(rows, numbers=4)


def dead_letters(run: Run) -> Iterator[str]:
    """Yield every dead letter with its attempts, and what each of them reported."""
    letters = list(run.dead_letters)
    yield f"Dead letters: {len(letters)}"
    rows = []
    for letter in letters:
        errors = run.errors(letter.pk)
        attempts = f"{letter.attempts} attempt{'' if letter.attempts == 1 else 's'}"
        rows.append((_module(letter.item), attempts, errors[0]))
        if len(set(errors)) > 1:
            rows += [("", "", error) for error in errors[1:]]
    yield from _table(rows)
    listing = [sys.executable, sys.argv[0], "workqueue", "list", "dead_lettered"]
    yield f"  They wait for an operator; their ids: {shlex.join(listing)}"


def redelivered(run: Run, kill: Kill | None) -> Iterator[str]:
    """Yield which items the killed process had held, and how they were taken from it."""
    if kill is None:
        yield "No worker process was killed: none held an item of this run when it was looked for."
        return
    again = run.redelivered()
    died = Failure.objects.filter(item__in=again).exclude(kind=FailureKind.ERROR)
    started = set(died.values_list("item", flat=True))
    yield f"Redelivered: {len(again)}"
    yield f"  Worker process {kill.pid} held {kill.load} when it was killed."
    names = {item.pk: _module(item) for item in QueueItem.objects.filter(pk__in=again)}
    rows = [
        (
            names[job],
            "had been started, which counts as an attempt"
            if job in started
            else "had only been reserved",
        )
        for job in again
    ]
    yield from _table(rows[:NAMED])
    if len(rows) > NAMED:
        yield f"  and {len(rows) - NAMED} more"


def problems(run: Run, figures: dict[str, int], kill: Kill | None) -> Iterator[str]:
    """Yield what speaks against the promise, a sentence each; nothing if all is well."""
    ended = figures["completed"] + figures["dead_lettered"]
    if figures["enqueued"] != ended:
        yield f"{figures['enqueued']} items were enqueued, and {ended} ended"
    if figures["lost"]:
        names = ", ".join(_module(item) for item in run.lost()[:NAMED])
        yield f"{figures['lost']} items have no report and no dead letter: {names}"
    for doubtful in run.doubtful_reports()[:NAMED]:
        yield (
            f"the report of {doubtful.module} was written {doubtful.times_written} times, "
            "or though its item failed"
        )
    # Without a kill nothing is proven, but nothing is wrong either: the table says so.
    if kill is not None and not figures["redelivered"]:
        yield "a worker process was killed, and nothing was redelivered"


def _module(item: QueueItem) -> str:
    return item.item_id.partition("/")[2]


def _table(rows: Sequence[tuple[str, ...]], numbers: int = 0) -> Iterator[str]:
    """Yield *rows* with aligned columns; the first *numbers* of them to the right."""
    room = shutil.get_terminal_size((WIDTH, 0)).columns
    widths = [max(len(text) for text in column) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            text.rjust(width) if place < numbers else text.ljust(width)
            for place, (text, width) in enumerate(zip(row[:-1], widths, strict=False))
        ]
        start = "  " + "  ".join(cells) + "  "
        yield (start + _shortened(row[-1], max(room - len(start), 20))).rstrip()


def _shortened(text: str, length: int) -> str:
    line = " ".join(text.split())
    return line if len(line) <= length else f"{line[: length - 1]}…"
