"""`manage.py workqueue`: what its verbs print, what they refuse, and how they exit."""

import argparse
import getpass
import json
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from django.core.management import BaseCommand, call_command, load_command_class
from django.core.management.base import CommandError
from django.db import connections
from django.test.utils import CaptureQueriesContext

from django_workqueue import QueuePolicy, WorkItem, WorkState
from django_workqueue.management.commands.workqueue import VERBS
from django_workqueue.management.console import overview
from django_workqueue.management.console.text import duration, moment, printable
from django_workqueue.management.console.text import table as as_table
from django_workqueue.models import AuditEntry, QueueItem, WorkerProcess
from django_workqueue.moves import Release
from django_workqueue.queues import get_queue
from django_workqueue.testing import make_queue
from django_workqueue.worker.upkeep import PRESENCE_LAPSE

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

ROOT = Path(__file__).parent.parent
#: A name that would break a line, and one that would turn the rest of it around.
HOSTILE = "a\n\x1b[31mb\u202ec"


@pytest.fixture(params=["sqlite", "postgresql"])
def queue(request):
    return make_queue(request.param, QueuePolicy(max_attempts=2, backoff_seconds=0))


@pytest.fixture
def run(queue, capsys):
    """Runs a verb on the queue's database, and returns what it printed."""

    def run(*arguments):
        call_command("workqueue", *arguments, "--database", queue.using)
        return capsys.readouterr().out

    return run


@pytest.fixture
def fails(queue, capsys):
    """Runs a verb that fails with a code, and returns what it printed, and the error."""

    def fails(code, *arguments):
        with pytest.raises(CommandError) as failed:
            call_command("workqueue", *arguments, "--database", queue.using)
        assert failed.value.returncode == code, failed.value
        return capsys.readouterr().out, str(failed.value)

    return fails


def bury(queue, *names, tenant="acme", **item):
    for name in names:
        queue.enqueue(WorkItem(tenant=tenant, id=name, **item))
        claim = queue.claim(worker="w", queue=item.get("queue", "default"))
        queue.fail(claim.id, tenant=tenant, worker="w", error=f"{name} is broken", retryable=False)


def all_of(queue, model):
    return model._base_manager.using(queue.using)


def present(queue, name="w1", queues=("default",), seen=0.0, **fields):
    now = queue.moves.now()
    return all_of(queue, WorkerProcess).create(
        boot=f"boot of {name}",
        name=name,
        host="box",
        pid=12,
        queues=[*queues],
        started_at=now - timedelta(hours=1),
        seen_at=now - timedelta(seconds=seen),
        **fields,
    )


class TestStatus:
    def test_it_shows_a_line_per_queue_with_its_figures(self, queue, run):
        queue.enqueue(WorkItem(tenant="acme", queue="mail"))
        bury(queue, "dead")
        queue.enqueue(WorkItem(tenant="acme"))
        queue.claim(worker="w")
        lines = run("status").splitlines()
        assert lines[0].startswith(f"database {queue.using}, ")
        assert lines[2].split()[:6] == ["queue", "depth", "due", "claimed", "paused", "dead"]
        assert lines[3].split() == ["default", "0", "0", "1", "0", "1", "–", "0"]
        assert lines[4].split() == ["mail", "1", "1", "0", "0", "0", "0", "s", "0"]

    def test_only_the_queues_that_are_named_are_shown(self, queue, run):
        for name in ("mail", "video"):
            queue.enqueue(WorkItem(tenant="acme", queue=name))
        told = json.loads(run("status", "--json", "--queue", "mail", "--queue", "default"))
        assert [each["queue"] for each in told["queues"]] == ["mail", "default"]

    def test_a_queue_that_does_not_exist_is_not_taken_for_a_healthy_one(self, fails):
        _, told = fails(2, "status", "--queue", "mial", "--fail-if-age", "60")
        assert told == "--queue: there is no queue 'mial'; there are 'default'"

    def test_workers_are_alive_as_long_as_they_showed_themselves_lately(self, queue, run):
        present(queue, "w1", state="draining")
        present(queue, "w2", seen=PRESENCE_LAPSE + 60)
        text = run("status")
        assert re.search(r"^w1 +box +12 +draining +default +– +\d s ago$", text, re.M)
        assert re.search(r"^w2 +box +12 +gone +default +– +1 min 1\d s ago$", text, re.M)
        assert "\n1 worker alive" in text
        workers = json.loads(run("status", "--json"))["workers"]
        assert [(each["name"], each["alive"]) for each in workers] == [("w1", True), ("w2", False)]

    def test_queues_with_work_that_no_live_worker_serves_are_named(self, queue, run):
        present(queue, "w1", queues=["default"])
        present(queue, "w2", queues=["mail"], seen=PRESENCE_LAPSE + 1)
        for name in ("default", "mail"):
            queue.enqueue(WorkItem(tenant="acme", queue=name))
        queue.enqueue(WorkItem(tenant="acme", queue="old"))
        queue.cancel(all_of(queue, QueueItem).get(queue="old").item_id, tenant="acme")
        text = run("status")
        assert "no live worker serves queue 'mail' with its 1 item" in text
        assert text.count("no live worker serves") == 1
        told = json.loads(run("status", "--json"))["queues"]
        assert [each["queue"] for each in told if each["unserved"]] == ["mail"]

    def test_holds_are_shown(self, queue, run):
        queue.enqueue(WorkItem(tenant="acme"))
        queue.hold(queue="default", by="ann", reason="provider down")
        queue.hold(tenant="acme")
        text = run("status")
        assert re.search(r"^default .* held$", text, re.M)
        assert re.search(r"^queue 'default' held since .* by ann: provider down$", text, re.M)
        assert "tenant 'acme' held since" in text
        told = json.loads(run("status", "--json"))
        assert told["queues"][0]["held"] is True
        assert [hold["tenant"] for hold in told["holds"]] == ["acme", None]

    def test_items_whose_handler_no_worker_knew_are_counted_to_a_bound(
        self, queue, run, monkeypatch
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
        [told] = json.loads(run("status", "--json"))["unknown_handlers"]
        assert (told["handler"], told["number"], told["is_capped"]) == ("sms", 2, False)
        assert 90 < told["oldest_age_seconds"] < 150
        line = "no worker has handler 'sms' of queue 'default': {}2 items, the oldest waits for "
        assert line.format("") in run("status")
        give_back(claims[2])
        [told] = json.loads(run("status", "--json"))["unknown_handlers"]
        assert (told["number"], told["is_capped"]) == (2, True)
        assert line.format("more than ") in run("status")

    def test_an_age_beyond_the_limit_fails_and_says_which_queue(self, queue, run, fails):
        then = queue.moves.now() - timedelta(seconds=700)
        queue.enqueue(WorkItem(tenant="acme", queue="mail", enqueued_at=then))
        run("status", "--fail-if-age", "800")
        run("status", "--fail-if-age", "600", "--queue", "default")
        shown, told = fails(1, "status", "--fail-if-age", "600", "--json")
        assert re.fullmatch(
            r"queue 'mail': the oldest item waits for 70\d s, and --fail-if-age is 600", told
        )
        [exceeded] = json.loads(shown)["exceeded"]
        assert (exceeded["queue"], exceeded["limit"]) == ("mail", 600)

    def test_dead_letters_beyond_the_limit_fail(self, queue, run, fails):
        bury(queue, "one", "two")
        run("status", "--fail-if-dead", "2")
        shown, told = fails(1, "status", "--fail-if-dead", "1")
        assert told == "queue 'default': 2 dead letters, and --fail-if-dead is 1"
        assert shown.startswith("database ")

    def test_the_json_has_these_keys_and_base_units(self, queue, run):
        queue.enqueue(WorkItem(tenant="acme"))
        present(queue)
        told = json.loads(run("status", "--json"))
        assert [*told] == [
            *("database", "as_of", "enabled", "queues", "workers", "holds"),
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

    def test_its_statements_are_as_many_for_a_long_backlog(self, queue, run):
        queue.enqueue(WorkItem(tenant="acme"))
        run("status")
        numbers = []
        for _ in range(2):
            with CaptureQueriesContext(connections[queue.using]) as statements:
                run("status")
            numbers.append(len(statements))
            queue.enqueue_many(WorkItem(tenant=f"t{n % 50}") for n in range(500))
        assert numbers[0] == numbers[1]

    def test_a_switched_off_queue_is_told_of(self, queue, run, settings):
        settings.WORKQUEUE = {"ENABLED": False}
        assert "WORKQUEUE['ENABLED'] is False" in run("status")
        assert json.loads(run("status", "--json"))["enabled"] is False

    def test_names_cannot_forge_lines(self, queue, run):
        queue.enqueue(WorkItem(tenant=HOSTILE, queue=HOSTILE, id=HOSTILE))
        present(queue, HOSTILE, queues=[HOSTILE], seen=60)
        queue.hold(tenant=HOSTILE, by=HOSTILE, reason=HOSTILE)
        for output in (run("status"), run("status", "--json"), run("holds")):
            assert "\x1b" not in output
            assert "\u202e" not in output
            assert "[31mb" in output


class TestShow:
    def test_it_shows_the_item_with_every_failure(self, queue, run):
        queue.enqueue(WorkItem(tenant="acme", id="one", handler="sms", payload={"secret": 1}))
        for error in ("first", "second"):
            queue.claim(worker="w")
            queue.fail("one", tenant="acme", worker="w", error=error)
        lines = run("show", "one", "--tenant", "acme").splitlines()
        told = {line[:17].strip(): line[18:] for line in lines if not line.startswith(" ")}
        assert (told["id"], told["state"], told["handler"]) == ("one", "dead_lettered", "sms")
        assert (told["attempts"], told["max attempts"]) == ("2", "2")
        assert "secret" not in "".join(lines)
        assert re.fullmatch(r"  1\. .*\+05:45, error, worker w", lines[-4])
        assert [line.strip() for line in lines[-3::2]] == ["first", "second"]

    def test_the_payload_is_shown_on_request_only(self, queue, run):
        queue.enqueue(WorkItem(tenant="acme", id="one", payload={"secret": "\x1b"}))
        named = ("show", "one", "--tenant", "acme")
        assert "payload" not in json.loads(run(*named, "--json"))
        assert json.loads(run(*named, "--json", "--payload"))["payload"] == {"secret": "\x1b"}
        assert 'payload           {"secret": "\\u001b"}' in run(*named, "--payload")

    def test_the_json_has_times_in_utc_and_failures_as_objects(self, queue, run):
        bury(queue, "one")
        told = json.loads(run("show", "one", "--tenant", "acme", "--json"))
        assert told["enqueued_at"].endswith("+00:00")
        [failure] = told["failures"]
        assert failure["message"] == "one is broken"
        assert (failure["number"], failure["kind"], failure["worker"]) == (1, "error", "w")

    def test_another_acceptance_is_named_by_its_job_id(self, queue, run):
        bury(queue, "one")
        old = queue.get("one", tenant="acme").job_id
        queue.enqueue(WorkItem(tenant="acme", id="one"))
        named = ("show", "one", "--tenant", "acme", "--json")
        assert json.loads(run(*named))["state"] == "queued"
        assert json.loads(run(*named, "--job-id", str(old)))["state"] == "dead_lettered"

    def test_control_characters_of_an_error_are_escaped_and_a_long_one_cut(self, queue, run):
        queue.enqueue(WorkItem(tenant="acme", id="one"))
        queue.claim(worker="w")
        error = f"line\n{HOSTILE}\r\n" + "x" * 5000
        queue.fail("one", tenant="acme", worker="w", error=error)
        shown = run("show", "one", "--tenant", "acme")
        assert "     line\n     a\n     \\x1b[31mb\\u202ec\\r\n     xxx" in shown
        assert "[cut]" in shown
        assert len(shown) < 3_500

    def test_another_tenants_item_is_not_found(self, queue, fails):
        queue.enqueue(WorkItem(tenant="acme", id="one"))
        _, told = fails(1, "show", "one", "--tenant", "other")
        assert told == "tenant 'other' has no item 'one'"

    def test_an_item_in_no_place_is_the_doctors(self, queue, fails):
        queue.enqueue(WorkItem(tenant="acme", id="one"))
        with connections[queue.using].cursor() as cursor:
            cursor.execute("delete from django_workqueue_ready")
        _, told = fails(1, "show", "one", "--tenant", "acme")
        assert told == "item 'one' is in no place: see workqueue doctor"
        shown, _ = fails(1, "cancel", "one", "--tenant", "acme")
        assert shown == "one: skipped: item 'one' is in no place: see workqueue doctor\n"


class TestMoves:
    def test_each_item_is_requeued_or_skipped_for_itself(self, queue, fails):
        bury(queue, "dead")
        queue.enqueue(WorkItem(tenant="acme", id="queued"))
        shown, told = fails(1, "requeue", "dead", "queued", "nobody", "dead", "--tenant", "acme")
        job = queue.get("dead", tenant="acme").job_id
        assert shown.splitlines() == [
            f"dead: dead_lettered, attempts 1/2 -> queued, attempts 1/2, job id {job}",
            "queued: skipped: item 'queued' is queued: requeue is not possible",
            "nobody: skipped: tenant 'acme' has no item 'nobody'",
        ]
        assert told == "requeue: 2 of 3 items skipped"

    def test_what_it_did_is_told_to_machines_too(self, queue, run, fails):
        bury(queue, "dead")
        [told] = json.loads(run("requeue", "dead", "--tenant", "acme", "--json"))["items"]
        assert (told["id"], told["done"], told["skipped"]) == ("dead", True, "")
        assert (told["before"]["state"], told["after"]["state"]) == ("dead_lettered", "queued")
        shown, _ = fails(1, "requeue", "dead", "--tenant", "acme", "--json")
        [told] = json.loads(shown)["items"]
        assert (told["done"], told["before"], told["after"]) == (False, None, None)
        assert "is queued" in told["skipped"]

    def test_a_live_twin_is_a_reason_to_skip(self, queue, fails):
        bury(queue, "dead", dedupe_key="k")
        queue.enqueue(WorkItem(tenant="acme", id="new", dedupe_key="k"))
        shown, _ = fails(1, "requeue", "dead", "--tenant", "acme")
        assert "live item 'new' has its id or key" in shown

    def test_a_payload_is_replaced_by_text_or_by_a_file(self, queue, run, tmp_path):
        bury(queue, "one", "two", payload={"n": 0})
        run("requeue", "one", "--tenant", "acme", "--payload", '{"n": 1}')
        file = tmp_path / "payload.json"
        file.write_text('{"n": "zwölf"}', encoding="utf-8")
        run("requeue", "two", "--tenant", "acme", "--payload", f"@{file}")
        payloads = [queue.get(name, tenant="acme").payload for name in ("one", "two")]
        assert payloads == [{"n": 1}, {"n": "zwölf"}]

    @pytest.mark.parametrize(
        ("text", "why"),
        [
            ("{", "--payload: is not JSON"),
            ("[1]", "--payload: must be a mapping"),
            ('{"a": {"b": NaN}}', "--payload.a.b: NaN and infinity are not JSON"),
            ("9" * 5000, "--payload: is not JSON"),
            ("[" * 100_000, "--payload: is not JSON"),
            ("@/nonexistent", "--payload: [Errno 2]"),
        ],
    )
    def test_what_is_no_payload_is_refused_and_nothing_moves(self, queue, fails, text, why):
        bury(queue, "dead")
        _, told = fails(2, "requeue", "dead", "--tenant", "acme", "--payload", text)
        assert told.startswith(why)
        assert queue.get("dead", tenant="acme").state is WorkState.DEAD_LETTERED

    @pytest.mark.parametrize("option", [("--payload", "{}"), ("--job-id", "1")])
    def test_what_belongs_to_one_item_does_not_go_with_two(self, fails, option):
        _, told = fails(2, "requeue", "one", "two", "--tenant", "acme", *option)
        assert told == f"{option[0]} goes with one ITEM_ID only"

    def test_queued_items_are_cancelled_and_claimed_ones_asked(self, queue, run):
        for name in ("claimed", "queued"):
            queue.enqueue(WorkItem(tenant="acme", id=name))
        queue.claim(worker="w")
        lines = run("cancel", "claimed", "queued", "--tenant", "acme").splitlines()
        assert "claimed, attempts 0/2 -> claimed (asked to cancel), attempts 0/2" in lines[0]
        assert "queued, attempts 0/2 -> cancelled, attempts 0/2" in lines[1]

    def test_a_paused_item_is_resumed(self, queue, run):
        queue.enqueue(WorkItem(tenant="acme", id="one"))
        queue.claim(worker="w")
        queue.pause("one", tenant="acme", worker="w")
        told = run("resume", "one", "--tenant", "acme", "--payload", '{"answer": 42}')
        assert told.startswith("one: paused, attempts 0/2 -> queued, attempts 0/2")
        assert queue.claim(worker="w").payload == {"answer": 42}

    def test_a_dead_letter_is_given_up_with_a_reason(self, queue, run, fails):
        bury(queue, "one")
        for reason in ([], ["--reason", " "]):
            code = 2 if reason else 1  # from a command line argparse exits with 2 itself
            _, told = fails(code, "discard", "one", "--tenant", "acme", *reason)
            assert "--reason" in told
        assert "-> cancelled" in run("discard", "one", "--tenant", "acme", "--reason", "old")
        entry = all_of(queue, AuditEntry).get()
        assert (entry.verb, entry.reason) == ("discard", "old")

    @pytest.mark.parametrize("by", [[], ["--by", "ann"]])
    def test_the_audit_keeps_who_by_default_the_systems_user(self, queue, run, by):
        bury(queue, "one")
        run("requeue", "one", "--tenant", "acme", "--reason", "mended", *by)
        entry = all_of(queue, AuditEntry).get()
        assert entry.actor == ("ann" if by else getpass.getuser())
        assert (entry.verb, entry.reason) == ("requeue", "mended")

    def test_a_user_without_a_name_is_kept_by_the_number(self, queue, run, monkeypatch):
        monkeypatch.setattr(getpass, "getuser", lambda: {}["no such user"])
        run("hold", "--queue", "default", "--reason", "x")
        assert re.fullmatch(r"uid \d+", all_of(queue, AuditEntry).get().actor)

    def test_names_are_one_line_each(self, queue, run):
        bury(queue, HOSTILE)
        shown = run("requeue", HOSTILE, "--tenant", "acme")
        assert shown.startswith("a\\n\\x1b[31mb\\u202ec: dead_lettered")
        assert shown.count("\n") == 1


class TestHolds:
    def test_what_is_held_is_told_kept_and_lifted(self, queue, run):
        told = run("hold", "--queue", "mail", "--tenant", "acme", "--reason", "flood", "--by", "a")
        assert re.fullmatch(r"queue 'mail', tenant 'acme' held since .* by a: flood\n", told)
        again = run("hold", "--queue", "mail", "--tenant", "acme", "--reason", "more")
        assert again.startswith("already: queue 'mail', tenant 'acme'")
        assert run("holds") == told
        [hold] = json.loads(run("holds", "--json"))["holds"]
        assert (hold["queue"], hold["tenant"], hold["reason"]) == ("mail", "acme", "flood")
        assert run("unhold", "--queue", "mail", "--tenant", "acme") == f"lifted: {told}"
        assert run("holds") == "nothing is held\n"

    def test_a_hold_that_is_not_there_cannot_be_lifted(self, queue, run, fails):
        run("hold", "--queue", "mail", "--tenant", "acme", "--reason", "flood")
        _, told = fails(1, "unhold", "--queue", "mail")
        assert "there is no hold of just that" in told

    @pytest.mark.parametrize("verb", [("hold", "--reason", "x"), ("unhold",)])
    def test_a_queue_or_a_tenant_must_be_named(self, fails, verb):
        assert fails(2, *verb)[1] == "name a --queue, a --tenant or both"

    def test_a_refused_name_is_told_by_its_option(self, fails):
        _, told = fails(2, "hold", "--tenant", "x" * 201, "--reason", "x")
        assert told == "--tenant: 201 characters are more than 200"


def test_prune_deletes_what_is_past_its_retention_and_prints_the_number(queue, run, fails):
    short = make_queue(connections[queue.using].vendor, QueuePolicy(retention_seconds=0))
    for number in range(3):
        short.enqueue(WorkItem(tenant="acme", id=str(number)))
        short.claim(worker="w")
        short.complete(str(number), tenant="acme", worker="w")
    assert run("prune", "--limit", "2") == "deleted 2 items\n"
    assert run("prune") == "deleted 1 item\n"
    assert fails(2, "prune", "--limit", "0")[1].startswith("--limit: ")


class TestUnusable:
    def test_an_unknown_database_is_told_by_its_option(self):
        for verb in ("status", "doctor", "holds", "prune"):
            with pytest.raises(CommandError, match="--database: there is no database 'x'") as error:
                call_command("workqueue", verb, "--database", "x")
            assert error.value.returncode == 2

    def test_a_wrong_setting_is_a_line(self, settings):
        for wrong, told in (
            ({"DATABASE": "x"}, r"WORKQUEUE\['DATABASE'\]: there is no database 'x'"),
            ({"QUEUE": {}}, "no key 'QUEUE'"),
        ):
            settings.WORKQUEUE = wrong
            with pytest.raises(CommandError, match=told) as error:
                call_command("workqueue", "status")
            assert error.value.returncode == 2

    def test_options_of_django_may_stand_behind_the_verb_and_before_it(self):
        parser = load_command_class("django_workqueue", "workqueue").create_parser("", "workqueue")
        common = ["--no-color", "--verbosity", "0", "--settings", "elsewhere"]
        for arguments in (["status", *common], [*common, "status"]):
            options = parser.parse_args(arguments)
            given = (options.no_color, options.verbosity, options.settings)
            assert given == (True, 0, "elsewhere")
        assert parser.parse_args(["status"]).verbosity == 1


def manage(environment, *arguments):
    done = subprocess.run(
        [sys.executable, ROOT / "testproject" / "manage.py", "workqueue", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "Traceback" not in done.stderr
    return done


def test_a_process_exits_with_the_documented_codes(process_environment):
    queue = make_queue("sqlite")
    then = queue.moves.now() - timedelta(seconds=100)
    queue.enqueue(WorkItem(tenant="acme", enqueued_at=then))
    fine = manage(process_environment, "status", "--fail-if-age", "1000")
    assert (fine.returncode, fine.stderr) == (0, "")
    late = manage(process_environment, "status", "--json", "--fail-if-age", "50")
    assert late.returncode == 1
    assert json.loads(late.stdout)["exceeded"]
    assert re.fullmatch(r"CommandError: queue 'default': the oldest item .*\n", late.stderr)
    for wrong in (["status", "--fail-if-age", "soon"], ["discard", "x", "--tenant", "t"], []):
        assert manage(process_environment, *wrong).returncode == 2


def test_a_database_that_cannot_be_reached_or_is_not_migrated_is_a_line_and_2(
    process_environment, tmp_path
):
    databases = json.loads(process_environment["WORKQUEUE_TEST_DATABASES"])
    databases["default"]["NAME"] = str(tmp_path / "empty.sqlite3")
    databases["postgresql"] |= {"HOST": "127.0.0.1", "PORT": "1"}
    environment = process_environment | {"WORKQUEUE_TEST_DATABASES": json.dumps(databases)}
    empty = manage(environment, "status")
    assert empty.returncode == 2
    assert empty.stderr == (
        "CommandError: Tables are missing in 'default': run manage.py migrate.\n"
    )
    gone = manage(environment, "status", "--json", "--database", "postgresql")
    assert (gone.returncode, gone.stdout) == (2, "")
    assert re.fullmatch(r"CommandError: the database of the queue can't be used: .*\n", gone.stderr)


# The parts.


def test_spans_are_told_in_their_two_largest_units():
    spans = {0: "0 s", 59.9: "59 s", 60: "1 min", 3_725: "1 h 2 min", 86_405: "1 d"}
    assert {seconds: duration(seconds) for seconds in spans} == spans


def test_times_are_told_in_the_projects_zone_with_its_distance():
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+05:45", moment(get_queue("default").moves.now())
    )


def test_text_that_turns_or_breaks_a_line_is_escaped_and_other_text_is_not():
    assert printable("zwölf 十二 א") == "zwölf 十二 א"
    assert printable("\x9b\u2028\u200f\ud800") == "\\x9b\\u2028\\u200f\\ud800"


def test_columns_are_aligned_and_numbers_stand_on_the_right():
    text = as_table(("name", "number"), [("a", 1), ("long name", 12_000)])
    assert text == "name       number\na               1\nlong name  12,000"


# The page.


def own_options(verb):
    parser = load_command_class("django_workqueue", "workqueue").create_parser("", "")
    [verbs] = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    common = BaseCommand().create_parser("", "")
    known = {option for action in common._actions for option in action.option_strings}
    actions = verbs.choices[verb]._actions
    own = [action for action in actions if not known.intersection(action.option_strings)]
    assert all(action.help for action in own)
    return {(action.option_strings or [action.metavar])[0] for action in own}


@pytest.mark.parametrize("verb", VERBS)
def test_the_page_has_every_option_of_each_verb(verb):
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    heading = f"## workqueue {verb}\n"
    assert heading in page
    section = page.partition(heading)[2].partition("\n## ")[0]
    [table, *_] = re.findall(r"(?:^\|.*\n)+", section, re.M)
    told = re.findall(r"^\| `([^` ]+)", table, re.M)
    assert sorted(told) == sorted(own_options(verb) - {"--database"})


def test_an_id_that_none_can_have_is_refused_before_any_item_is_moved():
    queue = make_queue("sqlite")
    queue.enqueue(WorkItem(tenant="acme", id="good"))
    for options in ((), ("--json",)):
        with pytest.raises(CommandError, match="ITEM_ID: contains a lone surrogate") as error:
            call_command("workqueue", "cancel", "good", "\udcff", "--tenant", "acme", *options)
        assert error.value.returncode == 2
    assert queue.get("good", tenant="acme").state is WorkState.QUEUED
