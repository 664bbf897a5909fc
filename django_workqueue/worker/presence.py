"""What a worker leaves in the database for others to see, and how they judge by it."""

from __future__ import annotations

import os
import socket
from dataclasses import asdict
from datetime import datetime, timedelta
from typing import Any, Final

from django_workqueue.conf import get_settings
from django_workqueue.models import WorkerProcess
from django_workqueue.worker.options import WorkerOptions

#: Seconds between two signs of presence; without one for how long a worker counts as dead;
#: and after how long its row goes.
PRESENCE_PERIOD: Final = 5.0
PRESENCE_LAPSE: Final = 15.0
PRESENCE_KEPT: Final = 3600.0


def lives(row: WorkerProcess, now: datetime) -> bool:
    """True if a worker was seen lately and, where that can be told, its process runs."""
    if row.seen_at <= now - timedelta(seconds=PRESENCE_LAPSE):
        return False
    if row.host != socket.gethostname():
        return True
    if row.pid == os.getpid():  # an older start had the number that is now ours
        return False
    try:
        os.kill(row.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def namesake(options: WorkerOptions, now: datetime) -> WorkerProcess | None:
    """
    Return a living worker of the same name that serves none of the same queues, if there is one.

    It is no earlier start of this one but another service, started by a copied line: the two
    would end each other in turn, for ever.
    """
    rows = WorkerProcess._base_manager.using(options.alias).filter(name=options.name)
    others = rows.exclude(boot=options.boot).exclude(state="draining")
    strangers = (row for row in others if not {*row.queues} & {*options.queues})
    return next((row for row in strangers if lives(row, now)), None)


def shown_settings(options: WorkerOptions) -> dict[str, Any]:
    """Return what others are to know of a worker's settings: its size, and its queues' policies."""
    settings = get_settings()
    policies = {queue: asdict(settings.policy_for(queue)) for queue in options.queues}
    return {
        "processes": options.processes,
        "concurrency": options.concurrency,
        "policies": policies,
    }


def differing_queues(options: WorkerOptions, others: dict[str, Any]) -> list[str]:
    """
    Return the queues of which a worker that has shown the settings *others* has another policy.

    Items keep the policy they were enqueued under, so such a fleet works; but what the two
    enqueue, and how they hear of time limits, differs.
    """
    mine, theirs = shown_settings(options)["policies"], others.get("policies", {})
    return sorted(queue for queue in mine.keys() & theirs.keys() if mine[queue] != theirs[queue])
