"""What the tests of `manage.py workqueue` share: running its verbs, and scenes to look at."""

import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connections

from django_workqueue import WorkItem
from django_workqueue.models import WorkerProcess

MANAGE = Path(__file__).parent.parent / "testproject" / "manage.py"
#: A name that would break a line, and one that would turn the rest of it around.
HOSTILE = "a\n\x1b[31mb\u202ec"


class Shell:
    """Runs verbs on the database of *queue*. `warned`: what the last one wrote to stderr."""

    def __init__(self, queue, capsys):
        self._queue = queue
        self._capsys = capsys
        self.warned = ""

    def run(self, *arguments):
        """Run a verb, and return what it printed."""
        call_command("workqueue", *arguments, "--database", self._queue.using)
        out, self.warned = self._capsys.readouterr()
        return out

    def fails(self, code, *arguments):
        """Run a verb that fails with *code*; return what it printed, and the error."""
        with pytest.raises(CommandError) as failed:
            call_command("workqueue", *arguments, "--database", self._queue.using)
        assert failed.value.returncode == code, failed.value
        return self._capsys.readouterr().out, str(failed.value)


def manage(environment, *arguments):
    """Run a verb as a process, and return that; no traceback was printed."""
    done = subprocess.run(
        [sys.executable, MANAGE, "workqueue", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in done.stderr
    return done


def bury(queue, /, *names, tenant="acme", **item):
    """Leave dead letters."""
    for name in names:
        queue.enqueue(WorkItem(tenant=tenant, id=name, **item))
        claim = queue.claim(worker="w", queue=item.get("queue", "default"))
        queue.fail(claim.id, tenant=tenant, worker="w", error=f"{name} is broken", retryable=False)


def put_aside(queue, /, *names, tenant="acme", **item):
    """Leave paused items."""
    for name in names:
        queue.enqueue(WorkItem(tenant=tenant, id=name, **item))
        queue.claim(worker="w", queue=item.get("queue", "default"))
        queue.pause(name, tenant=tenant, worker="w")


def spoil(queue, *, payload, failure):
    """Write bytes over all payloads and failures, which SQLite lets anybody do."""
    with connections[queue.using].cursor() as cursor:
        for table, column, value in (
            ("queueitem", "payload", payload),
            ("failure", "message", failure),
            ("failure", "traceback", failure),
        ):
            cursor.execute(
                f"update django_workqueue_{table} set {column} = cast(%s as text)", [value]
            )


def all_of(queue, model):
    return model._base_manager.using(queue.using)


def present(queue, name="w1", queues=("default",), seen=0.0, host="box", pid=12, **fields):
    """Leave a worker that was seen so many seconds ago."""
    now = queue.moves.now()
    return all_of(queue, WorkerProcess).create(
        boot=f"boot of {name}",
        name=name,
        host=host,
        pid=pid,
        queues=[*queues],
        started_at=now - timedelta(hours=1),
        seen_at=now - timedelta(seconds=seen),
        **fields,
    )
