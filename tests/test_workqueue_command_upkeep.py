"""`workqueue hold`, `unhold`, `holds` and `prune`."""

import json
import re

import pytest
from django.db import connections

from django_workqueue import QueuePolicy, WorkItem
from django_workqueue.models import AuditEntry, Hold
from django_workqueue.queues import DatabaseWorkQueue
from django_workqueue.testing import make_queue
from tests.console import Shell, all_of

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


@pytest.fixture(params=["sqlite", "postgresql"])
def queue(request):
    return make_queue(request.param, QueuePolicy(max_attempts=2, backoff_seconds=0))


@pytest.fixture
def shell(queue, capsys):
    return Shell(queue, capsys)


class TestHolds:
    def test_what_is_held_is_told_kept_and_lifted(self, queue, shell):
        named = ("--queue", "mail", "--tenant", "acme")
        told = shell.run("hold", *named, "--reason", "flood", "--by", "a")
        assert re.fullmatch(r"queue 'mail', tenant 'acme' held since .* by a: flood\n", told)
        again = shell.run("hold", *named, "--reason", "more")
        assert again.startswith("already: queue 'mail', tenant 'acme'")
        assert shell.run("holds") == told
        [hold] = json.loads(shell.run("holds", "--json"))["holds"]
        assert (hold["queue"], hold["tenant"], hold["reason"]) == ("mail", "acme", "flood")
        assert shell.run("unhold", *named) == f"lifted: {told}"
        assert shell.run("holds") == "nothing is held\n"

    def test_a_hold_that_is_not_there_cannot_be_lifted(self, queue, shell):
        shell.run("hold", "--queue", "mail", "--tenant", "acme", "--reason", "flood")
        _, told = shell.fails(1, "unhold", "--queue", "mail")
        assert "there is no hold of just that" in told

    def test_what_they_did_is_told_to_machines_too(self, shell):
        hold = ("hold", "--tenant", "acme", "--reason", "flood", "--by", "ann", "--json")
        first, again = (json.loads(shell.run(*hold)) for _ in range(2))
        assert first == {"hold": again["hold"], "already": False}
        assert again["already"] is True
        told = {name: first["hold"][name] for name in ("queue", "tenant", "by", "reason")}
        assert told == {"queue": None, "tenant": "acme", "by": "ann", "reason": "flood"}
        unhold = ("unhold", "--tenant", "acme", "--json")
        assert json.loads(shell.run(*unhold)) == {"lifted": first["hold"]}
        shown, _ = shell.fails(1, *unhold)
        assert json.loads(shown) == {"lifted": None}

    def test_a_hold_that_somebody_makes_at_the_same_moment_is_known_for_theirs(
        self, queue, shell, monkeypatch
    ):
        queue.hold(queue="default", by="bob", reason="faster")
        monkeypatch.setattr(DatabaseWorkQueue, "holds", lambda self: ())
        told = shell.run("hold", "--queue", "default", "--reason", "flood", "--by", "ann")
        assert re.fullmatch(r"already: queue 'default' held .* by bob: faster\n", told)

    def test_a_queue_that_was_never_used_is_held_with_a_warning(self, queue, shell):
        queue.enqueue(WorkItem(tenant="acme", queue="mail"))
        for known in (["--queue", "default"], ["--queue", "mail"], ["--tenant", "acme"]):
            shell.run("hold", *known, "--reason", "flood")
            assert shell.warned == ""
        told = shell.run("hold", "--queue", "mial", "--tenant", "acme", "--reason", "flood")
        assert told.startswith("queue 'mial', tenant 'acme' held since")
        assert shell.warned == (
            "it is held, but there is no queue 'mial'; there are 'default', 'mail'\n"
        )
        assert all_of(queue, Hold).filter(queue="mial").exists()

    def test_a_blank_reason_is_none(self, queue, shell):
        _, told = shell.fails(2, "hold", "--queue", "default", "--reason", " \t")
        assert told == "--reason: must not be blank"
        assert queue.holds() == ()
        queue.hold(queue="default", reason="flood")
        shell.run("unhold", "--queue", "default", "--reason", " ")
        assert all_of(queue, AuditEntry).get(verb="unhold").reason == ""

    @pytest.mark.parametrize("verb", [("hold", "--reason", "x"), ("unhold",)])
    def test_a_queue_or_a_tenant_must_be_named(self, shell, verb):
        assert shell.fails(2, *verb)[1] == "name a --queue, a --tenant or both"

    def test_a_refused_name_is_told_by_its_option(self, shell):
        _, told = shell.fails(2, "hold", "--tenant", "x" * 201, "--reason", "x")
        assert told == "--tenant: 201 characters are more than 200"


def test_prune_deletes_what_is_past_its_retention_and_prints_the_number(queue, shell):
    short = make_queue(connections[queue.using].vendor, QueuePolicy(retention_seconds=0))
    for number in range(3):
        short.enqueue(WorkItem(tenant="acme", id=str(number)))
        short.claim(worker="w")
        short.complete(str(number), tenant="acme", worker="w")
    assert shell.run("prune", "--limit", "2") == "deleted 2 items\n"
    assert json.loads(shell.run("prune", "--json")) == {"deleted": 1}
    assert shell.run("prune") == "deleted 0 items\n"
    assert shell.fails(2, "prune", "--limit", "0")[1].startswith("--limit: ")
