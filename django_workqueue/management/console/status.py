"""The verb that tells how things are, and fails if they are worse than allowed."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from django.core.management.base import CommandError

from django_workqueue.items import QueueHold
from django_workqueue.management.console.text import (
    as_json,
    duration,
    iso,
    moment,
    number_of,
    printable,
    table,
)
from django_workqueue.management.console.verb import (
    WRONG,
    Console,
    Verb,
    add_json,
    natural,
    require_known,
    seconds,
)
from django_workqueue.models import WorkerProcess
from django_workqueue.overview import (
    Overview,
    QueueFigures,
    UnknownHandler,
    known_queues,
    look,
)

#: Holds that are named among the rest; `workqueue holds` names all.
_SHOWN_HOLDS: Final = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """A limit that a queue exceeds."""

    option: str
    queue: str
    value: float
    limit: float

    def __str__(self) -> str:
        if self.option == "--fail-if-age":
            told = f"the oldest item waits for {self.value:.0f} s"
        else:
            told = f"{number_of(int(self.value), 'dead letter')}"
        return f"queue {self.queue!r}: {told}, and {self.option} is {self.limit:g}"


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--queue", action="append", metavar="QUEUE", help="Only this queue; may be repeated."
    )
    parser.add_argument(
        "--fail-if-age",
        type=seconds,
        metavar="SECONDS",
        help="Exit with 1 if the oldest queued item of a queue was accepted longer ago.",
    )
    parser.add_argument(
        "--fail-if-dead",
        type=natural,
        metavar="NUMBER",
        help="Exit with 1 if a queue has more dead letters.",
    )
    add_json(parser)


def _run(console: Console, options: dict[str, Any]) -> None:
    known = known_queues(console.queue)
    for name in options["queue"] or ():
        require_known(name, known)
    overview = look(console.queue, options["queue"] or known)
    exceeded = [*_exceeded(overview, options["fail_if_age"], options["fail_if_dead"])]
    if options["json"]:
        console.out(as_json(_as_object(console.queue.using, overview, exceeded)))
    else:
        for part in _as_text(console, overview):
            console.out(part)
    if exceeded:
        raise CommandError("; ".join(map(str, exceeded)), returncode=WRONG)


def _exceeded(overview: Overview, age: float | None, dead: int | None) -> Iterator[Excess]:
    for queue in overview.queues:
        for option, value, limit in (
            ("--fail-if-age", queue.stats.oldest_age_seconds, age),
            ("--fail-if-dead", queue.stats.dead_lettered, dead),
        ):
            if limit is not None and value > limit:
                yield Excess(option=option, queue=queue.name, value=value, limit=limit)


# For people.

_QUEUE_HEADINGS: Final = (
    *("queue", "depth", "due", "claimed", "paused", "dead", "oldest wait", "reaped"),
    "",  # whether it is held
)
_WORKER_HEADINGS: Final = ("worker", "host", "pid", "state", "queues", "deployment", "seen")


def _as_text(console: Console, overview: Overview) -> Iterator[str]:
    style = console.style
    yield f"database {console.queue.using}, {moment(overview.as_of)}"
    if not overview.enabled:
        yield style.WARNING("WORKQUEUE['ENABLED'] is False: no worker starts")
    yield ""
    yield table(_QUEUE_HEADINGS, [_row(queue) for queue in overview.queues])
    yield ""
    workers = overview.workers
    if workers.alive:
        yield table(_WORKER_HEADINGS, [_worker_row(overview, each) for each in workers.alive])
        yield f"{number_of(len(workers.alive), 'worker')} alive{_gone(overview)}"
    else:
        yield style.ERROR(f"no worker is alive{_gone(overview)}")
    for hold in overview.holds[:_SHOWN_HOLDS]:
        yield style.WARNING(hold_line(hold))
    if (more := len(overview.holds) - _SHOWN_HOLDS) > 0:
        yield f"and {number_of(more, 'hold')} more: see workqueue holds"
    for each in overview.unknown_handlers:
        yield style.WARNING(_unknown_line(each))
    for queue in overview.queues:
        if queue.unserved:
            items = number_of(queue.live, "item")
            yield style.ERROR(f"no live worker serves queue {queue.name!r} with its {items}")


def _row(queue: QueueFigures) -> tuple[Any, ...]:
    stats = queue.stats
    return (
        queue.name,
        stats.depth,
        stats.due,
        stats.claimed,
        stats.paused,
        stats.dead_lettered,
        duration(stats.oldest_age_seconds) if stats.depth else "–",
        stats.reaped,
        "held" if queue.held else "",
    )


def _worker_row(overview: Overview, row: WorkerProcess) -> tuple[Any, ...]:
    return (
        row.name,
        row.host,
        str(row.pid),
        row.state,
        " ".join(row.queues),
        row.deployment_id or "–",
        _ago(overview, row.seen_at),
    )


def _gone(overview: Overview) -> str:
    workers = overview.workers
    if workers.last_gone_at is None:
        return ""
    seen = f"the last was seen {_ago(overview, workers.last_gone_at)}"
    return f", and {workers.gone:,} that {'has' if workers.gone == 1 else 'have'} gone ({seen})"


def _ago(overview: Overview, at: datetime) -> str:
    return f"{duration(max(0.0, (overview.as_of - at).total_seconds()))} ago"


def _unknown_line(each: UnknownHandler) -> str:
    handler = f"handler {each.handler!r}" if each.handler else "a catch-all handler"
    more = "more than " if each.is_capped else ""
    return (
        f"no worker has {handler} of queue {each.queue!r}: {more}"
        f"{number_of(each.number, 'item')}, the oldest waits for "
        f"{duration(each.oldest_age_seconds)}"
    )


def hold_line(hold: QueueHold) -> str:
    """Return a line that tells of *hold*."""
    named = [
        f"{kind} {name!r}"
        for kind, name in (("queue", hold.queue), ("tenant", hold.tenant))
        if name is not None
    ]
    by = f" by {hold.by}" if hold.by else ""
    reason = f": {hold.reason}" if hold.reason else ""
    return printable(f"{', '.join(named)} held since {moment(hold.since)}{by}{reason}")


# For machines.


def _as_object(using: str, overview: Overview, exceeded: list[Excess]) -> dict[str, Any]:
    return {
        "database": using,
        "as_of": iso(overview.as_of),
        "enabled": overview.enabled,
        "queues": [_queue_object(queue) for queue in overview.queues],
        "workers": [
            {
                "name": row.name,
                "host": row.host,
                "pid": row.pid,
                "state": row.state,
                "queues": row.queues,
                "deployment_id": row.deployment_id or None,
                "version": row.version,
                "started_at": iso(row.started_at),
                "seen_at": iso(row.seen_at),
            }
            for row in overview.workers.alive
        ],
        "workers_gone": overview.workers.gone,
        "holds": [hold_object(hold) for hold in overview.holds],
        "unknown_handlers": [
            {
                "queue": each.queue,
                "handler": each.handler,
                "number": each.number,
                "is_capped": each.is_capped,
                "oldest_age_seconds": each.oldest_age_seconds,
            }
            for each in overview.unknown_handlers
        ],
        "exceeded": [
            {
                "option": each.option,
                "queue": each.queue,
                "value": each.value,
                "limit": each.limit,
            }
            for each in exceeded
        ],
    }


def _queue_object(queue: QueueFigures) -> dict[str, Any]:
    stats = queue.stats
    return {
        "queue": queue.name,
        "depth": stats.depth,
        "due": stats.due,
        "claimed": stats.claimed,
        "paused": stats.paused,
        "dead_lettered": stats.dead_lettered,
        "completed": stats.completed,
        "cancelled": stats.cancelled,
        "oldest_age_seconds": stats.oldest_age_seconds,
        "reaped": stats.reaped,
        "duplicates_suppressed": stats.duplicates_suppressed,
        "as_of": iso(stats.as_of),
        "held": queue.held,
        "unserved": queue.unserved,
    }


def hold_object(hold: QueueHold) -> dict[str, Any]:
    """Return *hold* for a machine."""
    return {
        "queue": hold.queue,
        "tenant": hold.tenant,
        "since": iso(hold.since),
        "by": hold.by,
        "reason": hold.reason,
    }


STATUS: Final = Verb(
    help="Show queues, workers, holds and what goes unserved.",
    description=(
        "Costs the same however long the backlog is. Exit codes: 0 all is within the limits; 1 a "
        "limit is exceeded, which standard error names; 2 the command can't work: wrong usage, "
        "or a database that can't be reached or isn't migrated."
    ),
    add_arguments=_add_arguments,
    run=_run,
)
