"""`workqueue status`: what it shows, what it costs, and when it fails."""

import json
import os
import re
import socket
import subprocess
import sys
from datetime import timedelta

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from django_workqueue import QueuePolicy, WorkItem, overview
from django_workqueue.models import QueueItem
from django_workqueue.moves import Release
from django_workqueue.testing import make_queue
from django_workqueue.worker.presence import PRESENCE_LAPSE
from tests.console import HOSTILE, Shell, all_of, bury, present

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


@pytest.fixture(params=["sqlite", "postgresql"])
def queue(request):
    return make_queue(request.param, QueuePolicy(max_attempts=2, backoff_seconds=0))


@pytest.fixture
def shell(queue, capsys):
    return Shell(queue, capsys)


def gone(alive, number):
    return rf"^{alive}, and {number} gone \(the last was seen 1 min 1\d s ago\)$"


class TestStatus:
    def test_it_shows_a_line_per_queue_with_its_figures(self, queue, shell):
        queue.enqueue(WorkItem(tenant="acme", queue="mail"))
        bury(queue, "dead")
        queue.enqueue(WorkItem(tenant="acme"))
        queue.claim(worker="w")
        lines = shell.run("status").splitlines()
        assert lines[0].startswith(f"database {queue.using}, ")
        assert lines[2].split()[:6] == ["queue", "depth", "due", "claimed", "paused", "dead"]
        assert lines[3].split() == ["default", "0", "0", "1", "0", "1", "–", "0"]
        assert lines[4].split() == ["mail", "1", "1", "0", "0", "0", "0", "s", "0"]

    def test_only_the_queues_that_are_named_are_shown(self, queue, shell):
        for name in ("mail", "video"):
            queue.enqueue(WorkItem(tenant="acme", queue=name))
        told = json.loads(shell.run("status", "--json", "--queue", "mail", "--queue", "default"))
        assert [each["queue"] for each in told["queues"]] == ["mail", "default"]

    def test_a_queue_that_does_not_exist_is_not_taken_for_a_healthy_one(self, shell):
        _, told = shell.fails(2, "status", "--queue", "mial", "--fail-if-age", "60")
        assert told == "--queue: there is no queue 'mial'; there are 'default'"

    def test_workers_are_alive_as_long_as_they_showed_themselves_lately(self, queue, shell):
        present(queue, "w1", state="draining")
        present(queue, "w2", seen=PRESENCE_LAPSE + 60)
        text = shell.run("status")
        assert re.search(r"^w1 +box +12 +draining +default +– +\d s ago$", text, re.M)
        assert "w2" not in text
        told = json.loads(shell.run("status", "--json"))
        assert [each["name"] for each in told["workers"]] == ["w1"]

    def test_those_that_have_gone_are_counted_and_the_last_is_dated(self, queue, shell):
        for number in range(1, 4):
            present(queue, f"w{number}", seen=PRESENCE_LAPSE + 60 * number)
            told = f"{number} that {'has' if number == 1 else 'have'}"
            assert re.search(gone("no worker is alive", told), shell.run("status"), re.M)
        present(queue, "w4")
        assert re.search(gone("1 worker alive", "3 that have"), shell.run("status"), re.M)
        assert json.loads(shell.run("status", "--json"))["workers_gone"] == 3

    def test_a_worker_whose_process_has_ended_on_this_host_has_gone(self, queue, shell):
        with subprocess.Popen([sys.executable, "-c", ""]) as ended:
            ended.wait()
        present(queue, "w1", host=socket.gethostname(), pid=ended.pid)
        present(queue, "w2", host=socket.gethostname(), pid=os.getppid())
        told = json.loads(shell.run("status", "--json"))
        assert [each["name"] for each in told["workers"]] == ["w2"]
        assert told["workers_gone"] == 1

    def test_queues_with_work_that_no_live_worker_serves_are_named(self, queue, shell):
        present(queue, "w1", queues=["default"])
        present(queue, "w2", queues=["mail"], seen=PRESENCE_LAPSE + 1)
        for name in ("default", "mail"):
            queue.enqueue(WorkItem(tenant="acme", queue=name))
        queue.enqueue(WorkItem(tenant="acme", queue="old"))
        queue.cancel(all_of(queue, QueueItem).get(queue="old").item_id, tenant="acme")
        text = shell.run("status")
        assert "no live worker serves queue 'mail' with its 1 item" in text
        assert text.count("no live worker serves") == 1
        told = json.loads(shell.run("status", "--json"))["queues"]
        assert [each["queue"] for each in told if each["unserved"]] == ["mail"]

    def test_holds_are_shown(self, queue, shell):
        queue.enqueue(WorkItem(tenant="acme"))
        queue.hold(queue="default", by="ann", reason="provider down")
        queue.hold(tenant="acme")
        text = shell.run("status")
        assert re.search(r"^default .* held$", text, re.M)
        assert re.search(r"^queue 'default' held since .* by ann: provider down$", text, re.M)
        assert "tenant 'acme' held since" in text
        told = json.loads(shell.run("status", "--json"))
        assert told["queues"][0]["held"] is True
        assert [hold["tenant"] for hold in told["holds"]] == ["acme", None]

    def test_items_whose_handler_no_worker_knew_are_counted_to_a_bound(
        self, queue, shell, monkeypatch
    ):
        monkeypatch.setattr(overview, "MOST_UNKNOWN", 2)
        for number in range(3):
            then = queue.moves.now() - timedelta(seconds=90 + number)
            queue.enqueue(WorkItem(tenant="acme", id=str(number), handler="sms", enqueued_at=then))
        claims = queue.claim_many(worker="w", limit=3)

        def give_back(item):
            release = Release(item=item.job_id, fence=1, delay=60, cause="unknown_handler")
            queue.moves.release("w", [release])

        for item in claims[:2]:
            give_back(item)
        [told] = json.loads(shell.run("status", "--json"))["unknown_handlers"]
        assert (told["handler"], told["number"], told["is_capped"]) == ("sms", 2, False)
        assert 90 < told["oldest_age_seconds"] < 150
        line = "no worker has handler 'sms' of queue 'default': {}2 items, the oldest waits for "
        assert line.format("") in shell.run("status")
        give_back(claims[2])
        [told] = json.loads(shell.run("status", "--json"))["unknown_handlers"]
        assert (told["number"], told["is_capped"]) == (2, True)
        assert line.format("more than ") in shell.run("status")

    def test_an_age_beyond_the_limit_fails_and_says_which_queue(self, queue, shell):
        then = queue.moves.now() - timedelta(seconds=700)
        queue.enqueue(WorkItem(tenant="acme", queue="mail", enqueued_at=then))
        shell.run("status", "--fail-if-age", "800")
        shell.run("status", "--fail-if-age", "600", "--queue", "default")
        shown, told = shell.fails(1, "status", "--fail-if-age", "600", "--json")
        assert re.fullmatch(
            r"queue 'mail': the oldest item waits for 70\d s, and --fail-if-age is 600", told
        )
        [exceeded] = json.loads(shown)["exceeded"]
        assert (exceeded["queue"], exceeded["limit"]) == ("mail", 600)

    def test_dead_letters_beyond_the_limit_fail(self, queue, shell):
        bury(queue, "one", "two")
        shell.run("status", "--fail-if-dead", "2")
        shown, told = shell.fails(1, "status", "--fail-if-dead", "1")
        assert told == "queue 'default': 2 dead letters, and --fail-if-dead is 1"
        assert shown.startswith("database ")

    def test_the_json_has_these_keys_and_base_units(self, queue, shell):
        queue.enqueue(WorkItem(tenant="acme"))
        present(queue)
        told = json.loads(shell.run("status", "--json"))
        assert [*told] == [
            *("database", "as_of", "enabled", "queues", "workers", "workers_gone", "holds"),
            *("unknown_handlers", "exceeded"),
        ]
        [figures] = told["queues"]
        assert [*figures] == [
            *("queue", "depth", "due", "claimed", "paused", "dead_lettered", "completed"),
            *("cancelled", "oldest_age_seconds", "reaped", "duplicates_suppressed", "as_of"),
            *("held", "unserved"),
        ]
        assert isinstance(figures["oldest_age_seconds"], float)
        assert re.fullmatch(r"[\d-]{10}T[\d:.]+\+00:00", told["as_of"])

    def test_its_statements_are_as_many_for_a_long_backlog(self, queue, shell):
        queue.enqueue(WorkItem(tenant="acme"))
        shell.run("status")
        numbers = []
        for _ in range(2):
            with CaptureQueriesContext(connections[queue.using]) as statements:
                shell.run("status")
            numbers.append(len(statements))
            queue.enqueue_many(WorkItem(tenant=f"t{n % 50}") for n in range(500))
        assert numbers[0] == numbers[1]

    def test_a_switched_off_queue_is_told_of(self, queue, shell, settings):
        settings.WORKQUEUE = {"ENABLED": False}
        assert "WORKQUEUE['ENABLED'] is False" in shell.run("status")
        assert json.loads(shell.run("status", "--json"))["enabled"] is False

    def test_names_cannot_forge_lines(self, queue, shell):
        queue.enqueue(WorkItem(tenant=HOSTILE, queue=HOSTILE, id=HOSTILE))
        present(queue, HOSTILE, queues=[HOSTILE])
        queue.hold(tenant=HOSTILE, by=HOSTILE, reason=HOSTILE)
        for output in (shell.run("status"), shell.run("status", "--json"), shell.run("holds")):
            assert "\x1b" not in output
            assert "\u202e" not in output
            assert "[31mb" in output
