"""Figures, workers, tenants, dead letters and holds over HTTP: what was done is what is told."""

import os
import socket
from datetime import datetime, timedelta
from functools import partial

import pytest

from django_workqueue import QueuePolicy, WorkItem, overview
from django_workqueue.api import parameters
from django_workqueue.models import (
    AuditEntry,
    DeadLetter,
    Hold,
    Lease,
    QueueItem,
    Ready,
    WorkerProcess,
)
from django_workqueue.moves import ClaimRequest, Release
from django_workqueue.testing import make_queue
from tests.api import check_problem, operator, post, strict
from tests.elsewhere import Elsewhere
from tests.test_api_jobs import put
from tests.test_hostile import NAMES

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


@pytest.fixture(params=["sqlite", "postgresql"])
def queue(request, settings):
    return opened(request.param, settings)


def opened(backend, settings):
    queue = make_queue(backend, QueuePolicy(max_attempts=1))
    settings.WORKQUEUE = {"DATABASE": queue.using}
    return queue


@pytest.fixture
def client(db):
    return operator()


def told(client, path, **asked):
    answer = client.get(f"/queue/{path}", asked)
    assert answer.status_code == 200, answer.content[:500]
    assert answer["Content-Type"] == "application/json"
    assert answer["Cache-Control"] == "no-store"
    return strict(answer)


def worker(queue, name="w", *, ago=0.0, **fields):
    """Leave the presence of a worker on another machine; its boot."""
    now = queue.moves.now()
    row = {
        "boot": f"boot of {name}",
        "name": name,
        "host": "elsewhere",
        "pid": 7,
        "queues": ["default"],
        "started_at": now,
        "seen_at": now - timedelta(seconds=ago),
    }
    return WorkerProcess._base_manager.using(queue.using).create(**row | fields).boot


class TestStats:
    EMPTY = {
        "counts": {},
        "oldest_queued_age_seconds": None,
        "due": 0,
        "reaped": 0,
        "duplicates_suppressed": 0,
        "workers": 0,
        "workers_gone": 0,
        "unserved_queues": [],
        "unknown_handlers": [],
    }

    def test_an_empty_queue_has_no_counts_and_no_age(self, queue, client):
        stats = told(client, "stats")
        as_of = datetime.fromisoformat(stats.pop("as_of"))
        assert abs(as_of - queue.moves.now()) < timedelta(seconds=60)
        assert stats == self.EMPTY

    def test_only_states_that_occur_are_counted(self, queue, client):
        counts = {}
        for word in ("completed", "failed", "cancelled", "paused", "running", "queued"):
            put(queue, word, word)
            counts[word] = 1
            assert told(client, "stats")["counts"] == counts
        assert told(client, "stats", queue="default")["counts"] == counts
        queue.complete("running", tenant="acme", worker="w")
        assert told(client, "stats")["counts"] == {
            "completed": 2,
            **dict.fromkeys(("failed", "cancelled", "paused", "queued"), 1),
        }

    def test_figures_are_sums_over_queues_and_one_queue_alone(self, queue, client):
        later = queue.moves.now() + timedelta(days=1)
        put(queue, "a")
        put(queue, "a")
        put(queue, "b", queue="mail")
        put(queue, "b", queue="mail")
        put(queue, "c", queue="mail", available_at=later)
        put(queue, "d", "failed", queue="other")
        stats = told(client, "stats")
        assert (stats["counts"], stats["due"]) == ({"queued": 3, "failed": 1}, 2)
        assert stats["duplicates_suppressed"] == 2
        assert stats["unserved_queues"] == ["default", "mail"]
        mail = told(client, "stats", queue="mail")
        assert (mail["counts"], mail["due"]) == ({"queued": 2}, 1)
        assert mail["duplicates_suppressed"] == 1
        assert mail["unserved_queues"] == ["mail"]
        assert told(client, "stats", queue="other")["counts"] == {"failed": 1}
        assert told(client, "stats", queue="other")["oldest_queued_age_seconds"] is None

    def test_the_age_is_of_the_oldest_in_all_queues(self, queue, client):
        now = queue.moves.now()
        for name, minutes in (("default", 5), ("mail", 50), ("other", 500)):
            put(queue, name, queue=name, enqueued_at=now - timedelta(minutes=minutes))
        queue.cancel("other", tenant="acme")
        age = told(client, "stats")["oldest_queued_age_seconds"]
        assert 3_000 <= age < 3_060
        assert 300 <= told(client, "stats", queue="default")["oldest_queued_age_seconds"] < 360
        assert 3_000 <= told(client, "stats", tenant="acme")["oldest_queued_age_seconds"] < 3_060
        queue.hold(tenant="acme")
        assert told(client, "stats")["oldest_queued_age_seconds"] >= age

    def test_lapsed_claims_that_were_taken_back_are_counted(self, queue, client):
        put(queue, "a", "running")
        queue.advance(10_000)
        queue.reap()
        assert told(client, "stats")["reaped"] == 1

    def test_living_workers_are_counted_and_lost_ones_apart(self, queue, client):
        put(queue, "a")
        worker(queue, "one")
        worker(queue, "two", queues=["mail"])
        worker(queue, "silent", ago=60)
        stats = told(client, "stats", queue="default")
        assert (stats["workers"], stats["workers_gone"]) == (2, 1)
        assert stats["unserved_queues"] == []

    def test_handlers_that_nobody_knows_are_told_by_queue(self, queue, client, monkeypatch):
        for name in ("a", "b"):
            job = put(queue, name, "running", queue="mail", handler="news.send")
            release = Release(item=job, fence=1, delay=3_600, cause="unknown_handler")
            queue.moves.release("w", [release])
        [unknown] = told(client, "stats")["unknown_handlers"]
        assert 0 <= unknown.pop("oldest_age_seconds") < 60
        wanted = {"queue": "mail", "handler": "news.send", "count": 2, "count_is_capped": False}
        assert unknown == wanted
        assert told(client, "stats", queue="default")["unknown_handlers"] == []
        monkeypatch.setattr(overview, "MOST_UNKNOWN", 1)
        [unknown] = told(client, "stats", queue="mail")["unknown_handlers"]
        assert (unknown["count"], unknown["count_is_capped"]) == (1, True)

    def test_a_queue_that_never_was_is_refused_by_name(self, queue, client):
        put(queue, "a", queue="mail")
        for path in ("stats", "dead-letters"):
            for asked in ({"queue": "mial"}, {"queue": "mial", "tenant": "acme"}):
                answer = client.get(f"/queue/{path}", asked)
                refusal = check_problem(answer, 400, "invalid_parameter", "queue")
                assert "'mial'" in refusal["detail"]
                assert "'mail'" in refusal["detail"]

    def test_a_tenant_s_jobs_are_counted(self, queue, client):
        for word in ("completed", "failed", "cancelled", "paused", "running", "queued"):
            put(queue, word, word)
        put(queue, "x", "failed", tenant="beta", queue="mail")
        put(queue, "y", tenant="beta", queue="mail")
        stats = told(client, "stats", tenant="beta")
        assert stats.pop("as_of")
        assert 0 <= stats.pop("oldest_queued_age_seconds") < 60
        assert stats == {"counts": {"queued": 1, "failed": 1}, "counts_are_capped": []}
        words = ("queued", "running", "paused", "completed", "failed", "cancelled")
        assert told(client, "stats", tenant="acme")["counts"] == dict.fromkeys(words, 1)
        assert told(client, "stats", tenant="beta", queue="default")["counts"] == {}
        nobody = told(client, "stats", tenant="nobody")
        assert (nobody["counts"], nobody["oldest_queued_age_seconds"]) == ({}, None)

    def test_a_tenant_s_counts_are_capped_and_say_so(self, queue, client, monkeypatch):
        monkeypatch.setattr(parameters, "MAX_COUNTED", 2)
        for number in range(3):
            put(queue, f"f{number}", "failed")
        for number in range(2):
            put(queue, f"q{number}")
        stats = told(client, "stats", tenant="acme")
        assert stats["counts"] == {"failed": 2, "queued": 2}
        assert stats["counts_are_capped"] == ["failed"]

    REFUSED = {
        "queue=": "queue",
        "tenant=": "tenant",
        "tenant=%00": "tenant",
        "tenant=a&tenant=b": "tenant",
        "status=failed": "status",
        "queue=" + "x" * 101: "queue",
    }

    @pytest.mark.parametrize("path", ["stats", "dead-letters"])
    def test_what_can_not_be_meant_is_refused_by_name(self, queue, client, path):
        for asked, name in self.REFUSED.items():
            answer = client.get(f"/queue/{path}?{asked}")
            assert answer.status_code == 400, asked
            check_problem(answer, 400, "invalid_parameter", name)

    @pytest.mark.parametrize("path", ["workers", "holds"])
    def test_where_there_is_nothing_to_ask_nothing_may_be_asked(self, queue, client, path):
        check_problem(client.get(f"/queue/{path}?limit=1"), 400, "invalid_parameter", "limit")


class TestWorkers:
    def test_living_ones_are_listed_with_what_they_have(self, queue, client):
        put(queue, "a")
        put(queue, "b")
        boot = worker(queue, "one", version="0.1", settings={"processes": 1}, deployment_id="v2")
        worker(queue, "two", state="draining", queues=["default", "mail"])
        request = ClaimRequest(queue="default", worker="one", limit=2, boot=boot)
        assert len(queue.moves.claim(request)) == 2
        listed = told(client, "workers")
        one, two = listed["data"]
        assert datetime.fromisoformat(one.pop("started_at")).utcoffset() is not None
        assert datetime.fromisoformat(one.pop("seen_at")).utcoffset() is not None
        assert one == {
            "name": "one",
            "host": "elsewhere",
            "pid": 7,
            "boot": boot,
            "state": "running",
            "version": "0.1",
            "queues": ["default"],
            "deployment_id": "v2",
            "settings": {"processes": 1},
            "running": 2,
        }
        assert (two["state"], two["running"], two["deployment_id"]) == ("draining", 0, None)
        assert two["queues"] == ["default", "mail"]
        assert listed["meta"] == {"gone": 0, "last_gone_at": None}

    def test_those_that_are_gone_are_counted_and_not_listed(self, queue, client):
        worker(queue, "silent", ago=60)
        worker(queue, "silent too", ago=30)
        # Of this machine: one whose process is no more, and one whose process runs.
        here = socket.gethostname()
        worker(queue, "dead", host=here, pid=2**22 + 1)
        worker(queue, "alive", host=here, pid=os.getppid())
        listed = told(client, "workers")
        assert [each["name"] for each in listed["data"]] == ["alive"]
        assert listed["meta"]["gone"] == 3
        dead = WorkerProcess._base_manager.using(queue.using).get(name="dead")
        assert datetime.fromisoformat(listed["meta"]["last_gone_at"]) == dead.seen_at

    def test_names_of_every_kind_come_out_as_they_are(self, queue, client):
        for number, name in enumerate(NAMES):
            worker(queue, name, boot=str(number), queues=[name], settings={name: name})
        listed = told(client, "workers")["data"]
        assert {each["name"] for each in listed} == {*NAMES}
        assert all(each["settings"] == {each["name"]: each["name"]} for each in listed)


class TestTenants:
    def test_each_with_work_is_listed_by_name_page_by_page(self, queue, client):
        put(queue, "a", "failed", tenant="dead")
        put(queue, "b", "running", tenant="busy")
        put(queue, "c", tenant="waits")
        put(queue, "d", tenant="waits", queue="mail")
        put(queue, "e", "completed", tenant="done", queue="x")
        whole = [
            {"tenant": "busy", "ready": 0, "running": 1, "failed": 0, "is_capped": False},
            {"tenant": "dead", "ready": 0, "running": 0, "failed": 1, "is_capped": False},
            {"tenant": "waits", "ready": 2, "running": 0, "failed": 0, "is_capped": False},
        ]
        first = told(client, "tenants")
        assert first == {"data": whole, "meta": {"limit": 100, "next_after": None}}
        for limit in (1, 2, 3):
            found, asked = [], {"limit": limit}
            while True:
                page = told(client, "tenants", **asked)
                assert len(page["data"]) <= limit
                assert page["meta"]["limit"] == limit
                found += page["data"]
                if (after := page["meta"]["next_after"]) is None:
                    break
                asked["after"] = after
            assert found == whole

    def test_a_page_goes_on_behind_any_name(self, queue, client):
        for number, name in enumerate(NAMES):
            put(queue, str(number), tenant=name)
        found, after = [], ""
        while after is not None:
            page = told(client, "tenants", limit=3, after=after)
            found += [each["tenant"] for each in page["data"]]
            after = page["meta"]["next_after"]
        assert found == sorted(NAMES)

    REFUSED = {
        "limit=0": "limit",
        "limit=-1": "limit",
        "limit=501": "limit",
        "limit=": "limit",
        "limit=x": "limit",
        "limit=" + "9" * 5000: "limit",
        "after=" + "x" * 201: "after",
        "after=%00": "after",
        "page=1": "page",
        "after=a&after=b": "after",
    }

    def test_what_can_not_be_meant_is_refused_by_name(self, queue, client):
        for asked, name in self.REFUSED.items():
            answer = client.get(f"/queue/tenants?{asked}")
            assert answer.status_code == 400, asked
            check_problem(answer, 400, "invalid_parameter", name)


class TestDeadLetters:
    def test_what_failed_for_one_reason_is_one_entry(self, queue, client):
        put(queue, "a", "failed", error=ValueError("order 1"))
        put(queue, "b", "failed", error=ValueError("order 2"), queue="mail", tenant="beta")
        put(queue, "c", "failed", error="timeout")
        last = put(queue, "d", "failed", error=ValueError("order 3"))
        rows = {row.item_id: row for row in DeadLetter.objects.using(queue.using).all()}
        listed = told(client, "dead-letters")
        assert listed["meta"] == {"is_capped": False}
        values, timeout = listed["data"]
        dead = sorted(rows[job].dead_at for job in rows if rows[job].error_class)
        assert datetime.fromisoformat(values.pop("first_failed_at")) == dead[0]
        assert datetime.fromisoformat(values.pop("last_failed_at")) == dead[-1]
        assert values == {
            "fingerprint": rows[last].fingerprint,
            "error_class": "builtins.ValueError",
            "error": "ValueError: order 3",
            "count": 3,
            "queues": ["default", "mail"],
            "example": str(last),
        }
        assert (timeout["error"], timeout["count"], timeout["error_class"]) == ("timeout", 1, "")

    def test_a_queue_or_a_tenant_narrows_it(self, queue, client):
        put(queue, "a", "failed", error="x")
        put(queue, "b", "failed", error="x", tenant="beta")
        put(queue, "c", "failed", error="x", tenant="beta", queue="mail")
        for asked, count in (
            ({}, 3),
            ({"tenant": "acme"}, 1),
            ({"tenant": "beta"}, 2),
            ({"queue": "default"}, 2),
            ({"queue": "mail", "tenant": "beta"}, 1),
        ):
            [error] = told(client, "dead-letters", **asked)["data"]
            assert error["count"] == count
        assert told(client, "dead-letters", tenant="nobody")["data"] == []
        assert told(client, "dead-letters", queue="mail", tenant="acme")["data"] == []

    def test_what_is_moved_away_is_no_longer_there(self, queue, client):
        job = put(queue, "a", "failed")
        assert len(told(client, "dead-letters")["data"]) == 1
        post(client, f"/queue/jobs/{job}/requeue")
        assert told(client, "dead-letters")["data"] == []

    def test_only_so_many_are_looked_at_and_that_is_said(self, queue, client, monkeypatch):
        monkeypatch.setattr(overview, "MOST_DEAD", 2)
        for name in ("a", "b", "c"):
            put(queue, name, "failed", error=name)
        listed = told(client, "dead-letters")
        assert [each["error"] for each in listed["data"]] == ["c", "b"]
        assert listed["meta"] == {"is_capped": True}

    def test_errors_of_every_kind_come_out_as_they_are(self, queue, client):
        for number, name in enumerate(NAMES):
            put(queue, str(number), "failed", error=f"{number} {name}", queue=name)
        told_of = {
            error["error"] for error in told(client, "dead-letters")["data"] if error["count"] == 1
        }
        assert told_of <= {f"{number} {name}" for number, name in enumerate(NAMES)}
        assert len(told_of) > 10


KINDS = ({"queue": "mail"}, {"tenant": "acme"}, {"queue": "mail", "tenant": "acme"})


class TestHolds:
    @pytest.mark.parametrize("kind", KINDS, ids=str)
    def test_what_is_held_stays_so_and_is_audited_once(self, queue, client, kind):
        answer = post(client, "/queue/holds", kind | {"reason": "why"}, **{"X-Request-ID": "r-1"})
        made = strict(answer)
        since = datetime.fromisoformat(made["since"])
        assert abs(since - queue.moves.now()) < timedelta(seconds=60)
        wanted = {"queue": None, "tenant": None} | kind | {"reason": "why"}
        assert {name: made[name] for name in wanted} == wanted
        assert made["by"].startswith("user-")
        again = post(operator(), "/queue/holds", kind | {"reason": "another"})
        assert (again.status_code, strict(again)) == (200, made)
        assert told(client, "holds")["data"] == [made]
        [entry] = AuditEntry.objects.using(queue.using).all()
        seen = (entry.verb, entry.actor, entry.reason, entry.queue, entry.tenant)
        assert seen == ("hold", made["by"], "why", kind.get("queue", ""), kind.get("tenant", ""))
        assert entry.detail == {"request_id": "r-1"}

    @pytest.mark.parametrize("kind", KINDS, ids=str)
    def test_exactly_what_is_named_is_served_again_and_once(self, queue, client, kind):
        for each in KINDS:
            post(client, "/queue/holds", each)
        asked = "&".join(f"{name}={value}" for name, value in kind.items())
        path = f"/queue/holds?{asked}&reason=over"
        answer = client.delete(path, headers={"X-Request-ID": "r-2"})
        lifted = strict(answer)
        assert {name: lifted[name] for name in kind} == kind
        left = [
            {name: hold[name] for name in ("queue", "tenant") if hold[name]}
            for hold in told(client, "holds")["data"]
        ]
        assert {str(each) for each in left} == {str(each) for each in KINDS if each != kind}
        refusal = check_problem(client.delete(path), 404, "not_found")
        assert refusal["detail"] == "nothing of that name is held"
        entries = AuditEntry.objects.using(queue.using).filter(verb="unhold")
        [entry] = entries
        assert (entry.reason, entry.detail) == ("over", {"request_id": "r-2"})

    def test_work_is_held_and_served_again(self, queue, client):
        put(queue, "a")
        post(client, "/queue/holds", {"tenant": "acme"})
        assert queue.claim(worker="w") is None
        client.delete("/queue/holds?tenant=acme")
        assert queue.claim(worker="w").id == "a"

    def test_all_are_listed_in_order(self, queue, client):
        for kind in ({"tenant": "b"}, {"queue": "z"}, {"queue": "a", "tenant": "c"}):
            post(client, "/queue/holds", kind)
        listed = [(each["queue"], each["tenant"]) for each in told(client, "holds")["data"]]
        assert listed == [(None, "b"), ("a", "c"), ("z", None)]

    def test_every_name_is_held_as_it_is(self, queue, client):
        for name in NAMES:
            made = strict(post(client, "/queue/holds", {"tenant": name, "reason": name}))
            assert (made["tenant"], made["reason"]) == (name, name)
        assert [each["tenant"] for each in told(client, "holds")["data"]] == sorted(NAMES)

    REFUSED = {
        "{}": "queue",
        "[]": "body",
        '{"reason": "x"}': "queue",
        '{"queue": ""}': "queue",
        '{"tenant": ""}': "tenant",
        '{"queue": null, "tenant": "a"}': "queue",
        '{"queue": ["a"]}': "queue",
        '{"queue": "a\\u0000"}': "queue",
        '{"tenant": "\\ud800"}': "tenant",
        '{"tenant": "a", "until": 1}': "until",
        '{"tenant": "%s"}' % ("x" * 201): "tenant",
        '{"queue": "%s"}' % ("x" * 101): "queue",
        '{"tenant": "a", "reason": "%s"}' % ("x" * 2001): "reason",
    }

    def test_what_can_not_be_held_is_refused_by_name(self, queue, client):
        for wish, name in self.REFUSED.items():
            answer = post(client, "/queue/holds", wish)
            assert answer.status_code == 400, wish
            check_problem(answer, 400, "invalid_parameter", name)
        assert not Hold.objects.using(queue.using).exists()
        assert not AuditEntry.objects.using(queue.using).exists()

    def test_a_blank_name_lifts_no_other_hold(self, queue, client):
        post(client, "/queue/holds", {"tenant": "acme"})
        post(client, "/queue/holds", {"queue": "mail"})
        for asked, name in (("queue=&tenant=acme", "queue"), ("queue=mail&tenant=", "tenant")):
            answer = client.delete(f"/queue/holds?{asked}")
            assert answer.status_code == 400, asked
            check_problem(answer, 400, "invalid_parameter", name)
        check_problem(client.delete("/queue/holds"), 400, "invalid_parameter", "queue")
        assert Hold.objects.using(queue.using).count() == 2

    def test_of_two_who_hold_at_once_one_does(self, settings):
        queue = opened("postgresql", settings)
        wish = {"tenant": "acme"}
        with Elsewhere(queue.using) as first, Elsewhere(queue.using) as second:
            first.begin()
            made = first.call(partial(post, operator(), "/queue/holds", wish | {"reason": "a"}))
            waits = second.start(partial(post, operator(), "/queue/holds", wish | {"reason": "b"}))
            second.wait_until_blocked(waits)
            first.commit()
            late = waits.result(20)
        assert strict(late) == strict(made)
        [entry] = AuditEntry.objects.using(queue.using).all()
        assert entry.reason == "a"

    def test_of_two_who_lift_at_once_one_does(self, settings):
        queue = opened("postgresql", settings)
        queue.hold(tenant="acme")
        path = "/queue/holds?tenant=acme"
        with Elsewhere(queue.using) as first, Elsewhere(queue.using) as second:
            first.begin()
            assert first.call(partial(operator().delete, path)).status_code == 200
            waits = second.start(partial(operator().delete, path))
            second.wait_until_blocked(waits)
            first.commit()
            late = waits.result(20)
        check_problem(late, 404, "not_found")
        assert AuditEntry.objects.using(queue.using).filter(verb="unhold").count() == 1


def test_figures_agree_with_the_tables_after_moves_over_http(queue, client):
    jobs = [put(queue, f"i{number}", "failed") for number in range(4)]
    post(client, f"/queue/jobs/{jobs[0]}/requeue")
    post(client, f"/queue/jobs/{jobs[1]}/discard", {"reason": "x"})
    post(client, f"/queue/jobs/{jobs[0]}/cancel")
    wish = {"filter": {"status": ["cancelled"]}, "expected_count": 2}
    post(client, "/queue/jobs/requeue", wish)
    assert told(client, "stats")["counts"] == {"queued": 2, "failed": 2}
    assert Ready.objects.using(queue.using).count() == 2
    assert DeadLetter.objects.using(queue.using).count() == 2
    assert not Lease.objects.using(queue.using).exists()
    assert QueueItem.objects.using(queue.using).count() == 4
    queue.enqueue(WorkItem(tenant="acme"))
    assert told(client, "stats")["counts"] == {"queued": 3, "failed": 2}
