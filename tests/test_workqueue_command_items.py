"""`workqueue show`, and the verbs that move single items."""

import getpass
import json
import re

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.db import connections

from django_workqueue import QueuePolicy, WorkItem, WorkState
from django_workqueue.management.console import showing
from django_workqueue.models import AuditEntry
from django_workqueue.testing import make_queue
from tests.console import HOSTILE, Shell, all_of, bury, put_aside, spoil

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


@pytest.fixture(params=["sqlite", "postgresql"])
def queue(request):
    return make_queue(request.param, QueuePolicy(max_attempts=2, backoff_seconds=0))


@pytest.fixture
def shell(queue, capsys):
    return Shell(queue, capsys)


class TestShow:
    def test_it_shows_the_item_with_every_failure(self, queue, shell):
        queue.enqueue(WorkItem(tenant="acme", id="one", handler="sms", payload={"secret": 1}))
        for error in ("first", "second"):
            queue.claim(worker="w")
            queue.fail("one", tenant="acme", worker="w", error=error)
        lines = shell.run("show", "one", "--tenant", "acme").splitlines()
        told = {line[:17].strip(): line[18:] for line in lines if not line.startswith(" ")}
        assert (told["id"], told["state"], told["handler"]) == ("one", "dead_lettered", "sms")
        assert (told["attempts"], told["max attempts"]) == ("2", "2")
        assert "secret" not in "".join(lines)
        assert re.fullmatch(r"  1\. .*\+05:45, error, worker w", lines[-4])
        assert [line.strip() for line in lines[-3::2]] == ["first", "second"]

    def test_the_payload_is_shown_on_request_only(self, queue, shell):
        queue.enqueue(WorkItem(tenant="acme", id="one", payload={"secret": "\x1b"}))
        named = ("show", "one", "--tenant", "acme")
        assert "payload" not in json.loads(shell.run(*named, "--json"))
        assert json.loads(shell.run(*named, "--json", "--payload"))["payload"] == {"secret": "\x1b"}
        assert 'payload           {"secret": "\\u001b"}' in shell.run(*named, "--payload")

    def test_the_json_has_times_in_utc_and_failures_as_objects(self, queue, shell):
        bury(queue, "one")
        told = json.loads(shell.run("show", "one", "--tenant", "acme", "--json"))
        assert told["enqueued_at"].endswith("+00:00")
        [failure] = told["failures"]
        assert failure["message"] == "one is broken"
        assert (failure["number"], failure["kind"], failure["worker"]) == (1, "error", "w")

    def test_another_acceptance_is_named_by_its_job_id(self, queue, shell):
        bury(queue, "one")
        old = queue.get("one", tenant="acme").job_id
        queue.enqueue(WorkItem(tenant="acme", id="one"))
        named = ("show", "one", "--tenant", "acme", "--json")
        assert json.loads(shell.run(*named))["state"] == "queued"
        assert json.loads(shell.run(*named, "--job-id", str(old)))["state"] == "dead_lettered"

    def test_control_characters_of_an_error_are_escaped_and_a_long_one_cut(self, queue, shell):
        queue.enqueue(WorkItem(tenant="acme", id="one"))
        queue.claim(worker="w")
        error = f"line\n{HOSTILE}\r\n" + "x" * 5000
        queue.fail("one", tenant="acme", worker="w", error=error)
        shown = shell.run("show", "one", "--tenant", "acme")
        assert "     line\n     a\n     \\x1b[31mb\\u202ec\\r\n     xxx" in shown
        assert "[cut]" in shown
        assert len(shown) < 3_500

    def test_it_says_since_when_by_whom_and_why_the_item_stands_there(self, queue, shell):
        put_aside(queue, "paused")
        bury(queue, "dead", "dropped")
        queue.discard("dropped", tenant="acme", by="ann", reason="paid")
        queue.enqueue(WorkItem(tenant="acme", id="failed"))
        queue.claim(worker="w")
        queue.fail("failed", tenant="acme", worker="w", error="no", delay_seconds=9)
        queue.enqueue(WorkItem(tenant="acme", id="done"))
        queue.claim(worker="w")
        queue.complete("done", tenant="acme", worker="w", result=0)
        queue.enqueue(WorkItem(tenant="acme", id="queued"))
        told = {}
        for name in ("paused", "dead", "dropped", "failed", "done", "queued"):
            told[name] = json.loads(shell.run("show", name, "--tenant", "acme", "--json"))
        assert {name: (each["by"], each["reason"]) for name, each in told.items()} == {
            "paused": ("w", None),
            "dead": ("w", "can't succeed by repeating"),
            "dropped": ("ann", "paid"),
            "failed": ("w", "backing off"),
            "done": ("w", None),
            "queued": (None, None),
        }
        since = {name: each["since"] is not None for name, each in told.items()}
        assert since == {name: name != "queued" for name in told}
        lines = shell.run("show", "done", "--tenant", "acme").splitlines()
        assert [line for line in lines if line.startswith(("by ", "result "))] == [
            *(f"{'by':<17} w", f"{'result':<17} 0")
        ]

    def test_it_shows_the_latest_entries_of_the_audit(self, queue, shell, monkeypatch):
        monkeypatch.setattr(showing, "SHOWN_ENTRIES", 2)
        bury(queue, "one", "another")
        queue.requeue("one", tenant="acme", by="ann", reason="first", payload={"secret": 1})
        queue.cancel("one", tenant="acme", by="ben\n", reason=HOSTILE)
        queue.requeue("one", tenant="acme")
        queue.requeue("another", tenant="acme", by="eve")
        audit = json.loads(shell.run("show", "one", "--tenant", "acme", "--json"))["audit"]
        assert [(each["verb"], each["by"], each["reason"]) for each in audit] == [
            ("cancel", "ben\n", HOSTILE),
            ("requeue", "", ""),
        ]
        lines = shell.run("show", "one", "--tenant", "acme").splitlines()
        assert lines[-3].startswith("audit ")
        assert lines[-2].endswith("+05:45, cancel by ben\\n: a\\n\\x1b[31mb\\u202ec")
        assert lines[-1].endswith("+05:45, requeue")

    def test_tracebacks_are_shown_on_request_and_cut_at_their_head(self, queue, shell):
        queue.enqueue(WorkItem(tenant="acme", id="one"))
        queue.claim(worker="w")
        error = ValueError("broken\x1b " + "x" * 3000)
        queue.fail("one", tenant="acme", worker="w", error=error)
        named = ("show", "one", "--tenant", "acme")
        assert "x" * 1000 in shell.run(*named)
        assert "x" * 2000 not in shell.run(*named)
        assert "traceback" not in json.loads(shell.run(*named, "--json"))["failures"][0]
        shown = shell.run(*named, "--traceback")
        assert "     [cut] … " + "x" * 100 in shown
        assert "\x1b" not in shown
        [failure] = json.loads(shell.run(*named, "--traceback", "--json"))["failures"]
        assert failure["traceback"] == f"ValueError: {error}\n"

    def test_another_tenants_item_is_not_found(self, queue, shell):
        queue.enqueue(WorkItem(tenant="acme", id="one"))
        _, told = shell.fails(1, "show", "one", "--tenant", "other")
        assert told == "tenant 'other' has no item 'one'"

    def test_an_item_in_no_place_is_the_doctors(self, queue, shell):
        queue.enqueue(WorkItem(tenant="acme", id="one"))
        with connections[queue.using].cursor() as cursor:
            cursor.execute("delete from django_workqueue_ready")
        _, told = shell.fails(1, "show", "one", "--tenant", "acme")
        assert told == "item 'one' is in no place (see workqueue doctor)"
        shown, _ = shell.fails(1, "cancel", "one", "--tenant", "acme")
        assert shown.startswith("one: skipped: item 'one' is in no place (see workqueue doctor)")


def test_bytes_that_are_no_text_hide_nothing_of_an_item(capsys):
    queue = make_queue("sqlite")  # PostgreSQL doesn't take them
    bury(queue, "one")
    spoil(queue, payload=b'{"a": "\xff"}', failure=b"no \xff text")
    named, shell = ("show", "one", "--tenant", "acme", "--traceback"), Shell(queue, capsys)
    assert shell.run(*named).count("no \\udcff text") == 2
    [failure] = json.loads(shell.run(*named, "--json"))["failures"]
    assert (failure["message"], failure["traceback"]) == ("no \udcff text",) * 2


class TestMoves:
    def test_each_item_is_requeued_or_skipped_for_itself(self, queue, shell):
        bury(queue, "dead")
        queue.enqueue(WorkItem(tenant="acme", id="queued"))
        shown, told = shell.fails(
            1, "requeue", "dead", "queued", "nobody", "dead", "--tenant", "acme"
        )
        job = queue.get("dead", tenant="acme").job_id
        assert shown.splitlines() == [
            f"dead: now queued, attempts 1/2, job id {job}",
            "queued: skipped: item 'queued' is queued: requeue is not possible",
            "nobody: skipped: tenant 'acme' has no item 'nobody'",
        ]
        assert told == "requeue: 2 of 3 items skipped"

    def test_what_it_did_is_told_to_machines_too(self, queue, shell):
        bury(queue, "dead")
        [told] = json.loads(shell.run("requeue", "dead", "--tenant", "acme", "--json"))["items"]
        assert (told["id"], told["done"], told["skipped"]) == ("dead", True, "")
        assert (told["after"]["state"], told["after"]["max_attempts"]) == ("queued", 2)
        shown, _ = shell.fails(1, "requeue", "dead", "--tenant", "acme", "--json")
        [told] = json.loads(shown)["items"]
        assert (told["done"], told["after"]) == (False, None)
        assert "is queued" in told["skipped"]

    def test_a_live_twin_is_a_reason_to_skip(self, queue, shell):
        bury(queue, "dead", dedupe_key="k")
        queue.enqueue(WorkItem(tenant="acme", id="new", dedupe_key="k"))
        shown, _ = shell.fails(1, "requeue", "dead", "--tenant", "acme")
        assert "live item 'new' has its id or key" in shown

    def test_a_payload_is_replaced_by_text_or_by_a_file(self, queue, shell, tmp_path):
        bury(queue, "one", "two", payload={"n": 0})
        shell.run("requeue", "one", "--tenant", "acme", "--payload", '{"n": 1}')
        file = tmp_path / "payload.json"
        file.write_text('{"n": "zwölf"}', encoding="utf-8")
        shell.run("requeue", "two", "--tenant", "acme", "--payload", f"@{file}")
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
            ('{"a": [{"b\\u001b": 1, "b\\u001b": 1}]}', r"--payload: has the key 'b\x1b' twice"),
        ],
    )
    def test_what_is_no_payload_is_refused_and_nothing_moves(self, queue, shell, text, why):
        bury(queue, "dead")
        _, told = shell.fails(2, "requeue", "dead", "--tenant", "acme", "--payload", text)
        assert told.startswith(why)
        assert queue.get("dead", tenant="acme").state is WorkState.DEAD_LETTERED

    @pytest.mark.parametrize("option", [("--payload", "{}"), ("--job-id", "1")])
    def test_what_belongs_to_one_item_does_not_go_with_two(self, shell, option):
        _, told = shell.fails(2, "requeue", "one", "two", "--tenant", "acme", *option)
        assert told == f"{option[0]} goes with one ITEM_ID only"

    def test_queued_items_are_cancelled_and_claimed_ones_asked(self, queue, shell):
        for name in ("claimed", "queued"):
            queue.enqueue(WorkItem(tenant="acme", id=name))
        queue.claim(worker="w")
        lines = shell.run("cancel", "claimed", "queued", "--tenant", "acme").splitlines()
        assert lines[0].startswith("claimed: now claimed (asked to cancel), attempts 0/2, job id")
        assert lines[1].startswith("queued: now cancelled, attempts 0/2, job id")

    def test_a_paused_item_is_resumed(self, queue, shell):
        put_aside(queue, "one")
        told = shell.run("resume", "one", "--tenant", "acme", "--payload", '{"answer": 42}')
        assert told.startswith("one: now queued, attempts 0/2")
        assert queue.claim(worker="w").payload == {"answer": 42}

    def test_a_dead_letter_is_given_up_with_a_reason(self, queue, shell):
        bury(queue, "one")
        for reason in ([], ["--reason", " "]):
            code = 2 if reason else 1  # from a command line argparse exits with 2 itself
            _, told = shell.fails(code, "discard", "one", "--tenant", "acme", *reason)
            assert "--reason" in told
        assert "one: now cancelled" in shell.run(
            "discard", "one", "--tenant", "acme", "--reason", "old"
        )
        entry = all_of(queue, AuditEntry).get()
        assert (entry.verb, entry.reason) == ("discard", "old")

    @pytest.mark.parametrize("by", [[], ["--by", "ann"]])
    def test_the_audit_keeps_who_by_default_the_systems_user(self, queue, shell, by):
        bury(queue, "one")
        shell.run("requeue", "one", "--tenant", "acme", "--reason", "mended", *by)
        entry = all_of(queue, AuditEntry).get()
        assert entry.actor == ("ann" if by else getpass.getuser())
        assert (entry.verb, entry.reason) == ("requeue", "mended")

    def test_a_user_without_a_name_is_kept_by_the_number(self, queue, shell, monkeypatch):
        monkeypatch.setattr(getpass, "getuser", lambda: {}["no such user"])
        shell.run("hold", "--queue", "default", "--reason", "x")
        assert re.fullmatch(r"uid \d+", all_of(queue, AuditEntry).get().actor)

    def test_names_are_one_line_each(self, queue, shell):
        bury(queue, HOSTILE)
        shown = shell.run("requeue", HOSTILE, "--tenant", "acme")
        assert shown.startswith("a\\n\\x1b[31mb\\u202ec: now queued")
        assert shown.count("\n") == 1


def test_an_id_that_none_can_have_is_refused_before_any_item_is_moved():
    queue = make_queue("sqlite")
    queue.enqueue(WorkItem(tenant="acme", id="good"))
    for options in ((), ("--json",)):
        with pytest.raises(CommandError, match="ITEM_ID: contains a lone surrogate") as error:
            call_command("workqueue", "cancel", "good", "\udcff", "--tenant", "acme", *options)
        assert error.value.returncode == 2
    assert queue.get("good", tenant="acme").state is WorkState.QUEUED
