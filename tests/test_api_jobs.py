"""Jobs over HTTP: found, read and moved, whoever else moves them and whatever is in them."""

import json
from contextlib import contextmanager
from datetime import timedelta, timezone
from functools import partial
from urllib.parse import urlencode
from uuid import UUID

import pytest
from django.db import connections
from rest_framework.test import APIClient

from django_workqueue import QueuePolicy, WorkItem, WorkState, jobs
from django_workqueue.api import parameters
from django_workqueue.api.words import STATUSES, status_of
from django_workqueue.doctor import examine
from django_workqueue.models import (
    AuditEntry,
    DeadLetter,
    Failure,
    Finished,
    Lease,
    QueueItem,
    Ready,
)
from django_workqueue.testing import make_queue
from tests.api import check_problem, operator, post, strict, user, with_session
from tests.elsewhere import Elsewhere
from tests.test_hostile import NAMES, SECRET, run, spoil, unreadable

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

LIST = "/queue/jobs"
BULK = "/queue/jobs/requeue"
MOVES = ("requeue", "resume", "cancel", "discard")


@pytest.fixture(params=["sqlite", "postgresql"])
def queue(request, settings):
    return opened(request.param, settings)


@pytest.fixture
def postgres_queue(settings):
    queue = opened("postgresql", settings)
    yield queue
    assert examine(queue.using) == []


def opened(backend, settings):
    queue = make_queue(backend, QueuePolicy(max_attempts=1))
    settings.WORKQUEUE = {"DATABASE": queue.using}
    return queue


@pytest.fixture
def client(db):
    return operator()


def put(queue, id, state="queued", /, *, error="no", **fields):
    """Enqueue an item and bring it into that state; return its job id."""
    item = queue.enqueue(WorkItem(id=id, **({"tenant": "acme"} | fields)))
    if state == "cancelled":
        queue.cancel(id, tenant=item.tenant, job_id=item.job_id)
    elif state != "queued":
        pin = item.deployment_id
        held = queue.claim(worker="w", queue=item.queue, deployment_id=pin)
        assert held.job_id == item.job_id
        own = {"tenant": item.tenant, "worker": "w", "fence": held.fence}
        if state == "paused":
            queue.pause(id, **own)
        elif state == "completed":
            queue.complete(id, result={"done": 1}, **own)
        elif state == "failed":
            queue.fail(id, error=error, **own)
    return item.job_id


def at(job_id, verb=""):
    return f"{LIST}/{job_id}/{verb}" if verb else f"{LIST}/{job_id}"


def audit(queue):
    return list(AuditEntry.objects.using(queue.using).order_by("pk"))


def state(queue, job_id):
    row = QueueItem.objects.using(queue.using).with_state().get(pk=job_id)
    return status_of(row.state)


def names(answer):
    assert answer.status_code == 200, answer.content[:500]
    return " ".join(job["item_id"] for job in strict(answer)["data"])


class TestListing:
    @pytest.fixture
    def scene(self, queue):
        put(queue, "done", "completed", handler="h")
        put(queue, "dead", "failed", error="timeout")
        put(queue, "gone", "cancelled")
        put(queue, "aside", "paused")
        put(queue, "held", "running")
        other = {"tenant": "beta", "queue": "mail"}
        put(queue, "lost", "failed", error=KeyError("x"), **other)
        put(queue, "sent", dedupe_key="k", deployment_id="blue", **other)
        put(queue, "next")
        return queue

    FILTERS = {
        "": "next sent lost held aside gone dead done",
        "status=queued": "next sent",
        "status=running": "held",
        "status=paused": "aside",
        "status=completed": "done",
        "status=failed": "lost dead",
        "status=cancelled": "gone",
        "status=failed&status=paused": "lost aside dead",
        "status=failed&status=failed": "lost dead",
        "status=" + "&status=".join(STATUSES): "next sent lost held aside gone dead done",
        "queue=mail": "sent lost",
        "tenant=acme": "next held aside gone dead done",
        "item_id=dead": "dead",
        "item_id=DEAD": "",
        "item_id=dea": "",
        "handler=h": "done",
        "handler=": "next sent lost held aside gone dead",
        "deployment_id=blue": "sent",
        "deployment_id=": "next lost held aside gone dead done",
        "worker=w": "held",
        "worker=v": "",
        "dedupe_key=k": "sent",
        "tenant=acme&status=failed": "dead",
        "queue=mail&status=failed&tenant=acme": "",
        "tenant=%25": "",
        "tenant=acme'%20or%20'1'='1": "",
        "queue=%FF%ED%A0%80": "",
        "sort_order=asc": "done dead gone aside held lost sent next",
        "sort_by=updated_at&status=failed": "lost dead",
        "sort_by=completed_at&status=failed&sort_order=asc": "dead lost",
        "sort_by=completed_at&status=completed": "done",
        "sort_by=completed_at&status=cancelled": "gone",
        "sort_by=updated_at&status=running": "held",
        "sort_by=updated_at&status=paused": "aside",
        "limit=1": "next",
        "limit=1&page=2": "sent",
        "limit=3&page=4": "",
        "limit=1000&page=10": "",
    }

    def test_each_filter_finds_what_it_names(self, scene, client):
        for asked, found in self.FILTERS.items():
            assert names(client.get(f"{LIST}?{asked}")) == found, asked

    def test_a_fingerprint_finds_the_jobs_that_failed_for_it(self, scene, client):
        for letter in DeadLetter.objects.using(scene.using).all():
            [name] = QueueItem.objects.using(scene.using).filter(pk=letter.item_id)
            found = client.get(LIST, {"fingerprint": letter.fingerprint})
            assert names(found) == name.item_id
            found = client.get(LIST, {"fingerprint": letter.fingerprint, "status": "failed"})
            assert names(found) == name.item_id
        assert names(client.get(LIST, {"fingerprint": "0" * 16})) == ""

    def test_times_of_creation_are_from_the_first_to_before_the_second(self, scene, client):
        rows = QueueItem.objects.using(scene.using).order_by("pk")
        created = {row.item_id: row.created_at.isoformat() for row in rows}
        asked = {"created_after": created["gone"], "created_before": created["lost"]}
        assert names(client.get(LIST, asked)) == "held aside gone"
        del asked["created_before"]
        assert names(client.get(LIST, asked)) == "next sent lost held aside gone"
        # The same time, as another zone has it.
        local = rows.get(item_id="next").created_at.astimezone(timezone(timedelta(hours=-9.5)))
        assert names(client.get(LIST, {"created_after": local.isoformat()})) == "next"

    def test_the_meta_tells_the_pages(self, scene, client):
        meta = strict(client.get(LIST, {"limit": 3, "page": 2}))["meta"]
        assert meta.pop("next_cursor")
        told = {"page": 2, "limit": 3, "total_pages": 3, "total_count": 8}
        assert meta == told | {"total_is_capped": False}
        meta = strict(client.get(LIST, {"limit": 3, "page": 3}))["meta"]
        assert meta["next_cursor"] is None
        meta = strict(client.get(LIST, {"tenant": "nobody"}))["meta"]
        assert (meta["total_count"], meta["total_pages"], meta["limit"]) == (0, 0, 20)

    def test_cursors_lead_through_all_and_tell_no_total(self, scene, client):
        for order in ("asc", "desc"):
            asked, found = {"limit": 3, "sort_order": order}, []
            while True:
                page = strict(client.get(LIST, asked))
                found += [job["item_id"] for job in page["data"]]
                asked["cursor"] = page["meta"]["next_cursor"]
                if asked["cursor"] is None:
                    break
            assert " ".join(found) == self.FILTERS["" if order == "desc" else "sort_order=asc"]
            meta = page["meta"]
            assert {meta["page"], meta["total_count"], meta["total_pages"]} == {None}

    def test_a_total_is_capped_and_says_so(self, scene, client, monkeypatch):
        monkeypatch.setattr(jobs, "COUNTED", 3)
        meta = strict(client.get(LIST, {"tenant": "acme", "limit": 2}))["meta"]
        assert (meta["total_count"], meta["total_is_capped"]) == (3, True)

    def test_a_cursor_of_another_order_is_refused(self, scene, client):
        cursor = strict(client.get(LIST, {"limit": 1}))["meta"]["next_cursor"]
        asked = {"status": "failed", "sort_by": "updated_at", "limit": 1}
        timed = strict(client.get(LIST, asked))["meta"]["next_cursor"]
        for wrong in (
            {"cursor": cursor, "page": 1},
            {"cursor": cursor, "sort_order": "asc"},
            {"cursor": timed},
            asked | {"cursor": cursor},
            {"cursor": cursor[:-1]},
            {"cursor": "WyJjcmVhdGVkX2F0Iix0cnVlLC0xXQ=="},
            {"cursor": "bnVsbA=="},
            {"cursor": "é"},
            {"cursor": "x" * 1001},
        ):
            check_problem(client.get(LIST, wrong), 400, "invalid_parameter", "cursor")

    REFUSED = {
        "status=claimed": "status",
        "status=dead_lettered": "status",
        "status=Failed": "status",
        "status=failed,paused": "status",
        "status=failed&status=x": "status",
        "status=": "status",
        "colour=red": "colour",
        "payload__a=1": "payload__a",
        "tenant__in=a": "tenant__in",
        "queue=a&queue=b": "queue",
        "limit=1&limit=1": "limit",
        "queue=%00": "queue",
        "tenant=a%00b": "tenant",
        "queue=" + "x" * 101: "queue",
        "tenant=" + "é" * 201: "tenant",
        "fingerprint=" + "x" * 17: "fingerprint",
        "limit=0": "limit",
        "limit=-1": "limit",
        "limit=1001": "limit",
        "limit=1e2": "limit",
        "limit=" + "9" * 5000: "limit",
        f"limit={2**53 + 1}": "limit",
        f"limit={2**63}": "limit",
        "page=0": "page",
        "page=-1": "page",
        "page=x": "page",
        "page=10001&limit=1": "page",
        "page=11&limit=1000": "page",
        "page=501": "page",
        f"page={2**63}": "page",
        "page=1&cursor=x": "cursor",
        "sort_by=priority": "sort_by",
        "sort_by=payload": "sort_by",
        "sort_by=-created_at": "sort_by",
        "sort_by=created_at;drop": "sort_by",
        "sort_by=updated_at": "sort_by",
        "sort_by=updated_at&status=queued": "sort_by",
        "sort_by=updated_at&status=failed&status=paused": "sort_by",
        "sort_by=completed_at&status=running": "sort_by",
        "sort_order=up": "sort_order",
        "created_after=yesterday": "created_after",
        "created_after=2026-02-30T00:00:00Z": "created_after",
        "created_after=0001-01-01T00:00:00%2B14:00": "created_after",
        "created_after=2026-12-01T00:00:00": "created_after",
        "created_before=9999-12-31T23:59:59-14:00": "created_before",
        "created_before=1e999": "created_before",
    }

    def test_what_can_not_be_meant_is_refused_by_name(self, queue, client):
        for asked, name in self.REFUSED.items():
            assert client.get(f"{LIST}?{asked}").status_code == 400, asked[:60]
            check_problem(client.get(f"{LIST}?{asked}"), 400, "invalid_parameter", name)

    def test_a_blank_value_is_refused_and_widens_no_search(self, queue, client):
        put(queue, "one")
        known = parameters.Listing().fields.keys() - {"deployment_id", "handler"}
        for name in sorted(known):
            check_problem(client.get(f"{LIST}?{name}="), 400, "invalid_parameter", name)

    def test_a_refusal_of_an_order_names_states_as_they_are_shown(self, queue, client):
        answer = client.get(f"{LIST}?sort_by=updated_at")
        told = check_problem(answer, 400, "invalid_parameter", "sort_by")
        for word in ("claimed", "dead_lettered"):
            assert word not in told["detail"]
        for word in ("running", "failed"):
            assert word in told["detail"]

    def test_more_parameters_than_django_reads_are_refused_as_all_others(self, client, queue):
        asked = "&".join(["status=failed"] * 1001)
        answer = client.get(f"{LIST}?{asked}")
        check_problem(answer, 400, "malformed")


class TestWords:
    WORDS = {
        "queued": WorkState.QUEUED,
        "running": WorkState.CLAIMED,
        "paused": WorkState.PAUSED,
        "completed": WorkState.COMPLETED,
        "failed": WorkState.DEAD_LETTERED,
        "cancelled": WorkState.CANCELLED,
    }

    def test_each_state_has_one_word_both_ways(self, queue, client):
        assert STATUSES == self.WORDS
        assert {*self.WORDS.values()} == {*WorkState}
        for word in sorted(self.WORDS, key=lambda each: each == "queued"):
            job = put(queue, word, word)
            [listed] = strict(client.get(LIST, {"status": word}))["data"]
            assert (listed["status"], listed["item_id"]) == (word, word)
            assert strict(client.get(at(job)))["status"] == word
            row = QueueItem.objects.using(queue.using).with_state().get(pk=job)
            assert row.state == self.WORDS[word].value


class TestDetail:
    FIELDS = (
        *("id", "item_id", "tenant", "queue", "handler", "status", "priority", "attempt"),
        *("attempts", "max_attempts", "fence", "dedupe_key", "deployment_id", "worker"),
        *("cancel_requested", "lease_expires_at", "available_at", "created_at", "updated_at"),
        *("completed_at", "error"),
    )

    def test_it_has_every_failure_and_all_fields(self, queue, client):
        job = put(queue, "one", "failed", error="first", handler="h", priority=7, dedupe_key="k")
        queue.requeue("one", tenant="acme", by="ann")
        queue.claim(worker="v")
        queue.fail("one", tenant="acme", worker="v", error=ValueError("second"))
        told = strict(client.get(at(job)))
        assert [*told] == [*self.FIELDS, "failures"]
        [listed] = strict(client.get(LIST))["data"]
        assert [*listed] == [*self.FIELDS]
        assert listed == {name: told[name] for name in self.FIELDS}
        values = {
            "id": str(job),
            "item_id": "one",
            "tenant": "acme",
            "queue": "default",
            "handler": "h",
            "status": "failed",
            "priority": 7,
            "attempt": 2,
            "attempts": 2,
            "max_attempts": 2,
            "fence": 2,
            "dedupe_key": "k",
            "deployment_id": None,
            "worker": None,
            "lease_expires_at": None,
            "error": "ValueError: second",
        }
        assert {name: told[name] for name in values} == values
        assert told["updated_at"] == told["completed_at"] == told["failures"][1]["failed_at"]
        tellings = [
            (each["number"], each["kind"], each["error"], each["error_class"], each["worker"])
            for each in told["failures"]
        ]
        assert tellings == [
            (1, "error", "first", "", "w"),
            (2, "error", "ValueError: second", "builtins.ValueError", "v"),
        ]

    def test_a_running_job_tells_who_has_it_and_until_when(self, queue, client):
        told = strict(client.get(at(put(queue, "one", "running"))))
        assert (told["worker"], told["attempt"], told["attempts"]) == ("w", 1, 0)
        assert told["cancel_requested"] is False
        told = strict(post(client, at(int(told["id"]), "cancel")))
        assert (told["status"], told["cancel_requested"]) == ("running", True)
        assert told["lease_expires_at"] > told["updated_at"]
        assert told["completed_at"] is None

    @pytest.fixture
    def failed(self, queue):
        try:
            raise ValueError("no")
        except ValueError as error:
            return put(queue, "one", "failed", error=error, payload={"a": SECRET})

    def test_payload_result_and_traceback_need_the_right_and_are_never_listed(self, queue, failed):
        done = put(queue, "done", "completed", payload={"a": SECRET})
        entitled = [
            operator("view_payload"),
            with_session(user("view_queueitem", "view_payload")),
            with_session(user(is_superuser=True)),
        ]
        others = [
            operator("edit_payload", "requeue"),
            with_session(user("view_queueitem", "edit_payload")),
        ]
        for client in entitled:
            told = strict(client.get(at(failed)))
            assert told["payload"] == {"a": SECRET}
            assert told["result"] is None
            assert "raise ValueError" in told["failures"][0]["traceback"]
            assert strict(client.get(at(done)))["result"] == {"done": 1}
        for client in others:
            for job in (failed, done):
                answer = client.get(at(job))
                told = strict(answer)
                assert not {"payload", "result"} & told.keys()
                assert all("traceback" not in each for each in told["failures"])
                assert SECRET not in answer.content.decode()
        for client in (*entitled, *others):
            for path in (LIST, f"{LIST}?status=failed", "/queue/dead-letters"):
                text = client.get(path).content.decode()
                assert SECRET not in text
                assert "traceback" not in text
                assert "raise ValueError" not in text

    def test_an_open_api_shows_no_payload(self, queue, failed, settings):
        settings.WORKQUEUE |= {"API": {"open": True}}
        told = strict(APIClient().get(at(failed)))
        assert told["item_id"] == "one"
        assert "payload" not in told
        answer = post(APIClient(), at(failed, "requeue"), {"payload": {"a": 1}})
        check_problem(answer, 403, "permission_denied")
        answer = post(APIClient(), at(failed, "requeue"))
        assert strict(answer)["status"] == "queued"
        assert "payload" not in strict(answer)
        assert audit(queue)[-1].actor == "anonymous"

    def test_a_move_answers_with_a_payload_only_who_may_see_it(self, queue, failed):
        told = strict(post(operator(), at(failed, "requeue")))
        assert "payload" not in told
        told = strict(post(operator("view_payload"), at(failed, "cancel")))
        assert told["payload"] == {"a": SECRET}

    def test_what_is_no_job_id_is_not_found(self, queue, client):
        job = put(queue, "one")
        odd = (
            "-1",
            "+1",
            "1.0",
            "1e3",
            "0x1",
            "one",
            "²",
            "\u0661",
            "1 ",
            "%00",
            "%ff",
            "%ed%a0%80",
        )
        numbers = (0, job + 1, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**39, 10**40, 10**5000)
        huge = ["1" + "0" * 5000 if number == 10**5000 else str(number) for number in numbers]
        for name in (*odd, *huge):
            check_problem(client.get(at(name)), 404, "not_found")
            for verb in MOVES:
                body = {"reason": "x"}
                check_problem(post(client, at(name, verb), body), 404, "not_found")
        assert audit(queue) == []


def hide(told, *, kind):
    """What a project may have as its `redact`."""
    seen.append(kind)
    return json.loads(json.dumps(told, default=str).replace(SECRET, "(hidden)"))


def burst(told, *, kind):
    raise RuntimeError(f"can't hide in {told}")


seen: list[str] = []


class TestRedact:
    def test_it_is_asked_of_every_output(self, queue, settings):
        settings.WORKQUEUE |= {"API": {"redact": f"{__name__}.hide"}}
        seen.clear()
        client = operator("view_payload")
        put(queue, f"{SECRET}-1", "completed", payload={"a": SECRET}, handler=SECRET)
        queue.hold(tenant=SECRET, reason=SECRET, by=SECRET)
        more = {"tenant": SECRET, "dedupe_key": SECRET, "queue": SECRET, "deployment_id": SECRET}
        queue.unhold(tenant=SECRET)
        job = put(queue, SECRET, "failed", error=SECRET, payload={"a": SECRET}, **more)
        queue.hold(tenant=SECRET, reason=SECRET, by=SECRET)
        paths = ("stats", "jobs", "dead-letters", "workers", "tenants", "holds")
        answers = [client.get(f"/queue/{path}") for path in paths]
        answers.append(client.get(at(job)))
        for verb in ("requeue", "cancel", "requeue", "cancel"):
            answers.append(post(client, at(job, verb), {"reason": SECRET}))
        answers.append(client.delete(f"/queue/holds?tenant={SECRET}"))
        answers.append(post(client, "/queue/holds", {"queue": SECRET, "reason": SECRET}))
        for answer in answers:
            assert answer.status_code == 200, answer.content[:500]
            assert SECRET not in answer.content.decode()
        assert "(hidden)" in answers[1].content.decode()
        assert {*seen} == {"stats", "job", "error", "tenant", "hold"}

    def test_one_that_raises_shows_nothing(self, queue, settings, client):
        job = put(queue, SECRET, "failed", error=SECRET, tenant=SECRET)
        settings.WORKQUEUE |= {"API": {"redact": f"{__name__}.burst"}}
        for path in (LIST, at(job), "/queue/stats", "/queue/tenants", "/queue/dead-letters"):
            answer = client.get(path)
            assert answer.status_code == 500
            for word in (SECRET, "RuntimeError", "Traceback", "burst"):
                assert word not in answer.content.decode()


class TestHostile:
    """Whatever is in a row, what comes out is JSON, and the rows beside it come out too."""

    def test_every_name_comes_out_as_it_is(self, queue):
        client = operator("view_payload")
        expected = []
        for name in (*NAMES, "\u2028\u2029", "</script><!--", "\x7f\x80\x9f", "\ufeff\ufffe"):
            pins = {"queue": name, "handler": name, "dedupe_key": name, "payload": {name: name}}
            job = put(queue, name, tenant=name, **pins)
            held = queue.claim(worker=f"w{name}", queue=name)
            queue.fail(name, tenant=name, worker=f"w{name}", error=name, fence=held.fence)
            expected.append(name)
            told = strict(client.get(at(job)))
            texts = (told["item_id"], told["tenant"], told["queue"], told["handler"])
            assert {*texts, told["error"], told["failures"][0]["error"]} == {name}
            assert told["payload"] == {name: name}
            assert told["failures"][0]["worker"] == f"w{name}"
            assert told["dedupe_key"] == (name if name.strip() else None)
            found = strict(client.get(LIST, {"tenant": name, "queue": name}))["data"]
            assert [each["id"] for each in found] == [str(job)]
        listed = strict(client.get(LIST, {"sort_order": "asc", "limit": 1000}))["data"]
        assert [each["item_id"] for each in listed] == expected
        answer = client.get(LIST)
        assert answer["Content-Type"] == "application/json"

    def test_a_payload_that_nobody_can_read_is_null_and_hides_nothing(self, queue):
        client = operator("view_payload")
        for name, (text, why) in unreadable(queue).items():
            job = put(queue, name, payload={"a": 1})
            item = queue.get(name, tenant="acme")
            spoil(queue, item, text)
            told = strict(client.get(at(job)))
            readable = "object" in why and text != "null"
            assert told["payload"] == (json.loads(text) if readable else None)
            assert told["status"] == "queued"
        listed = strict(client.get(LIST, {"limit": 100}))["data"]
        assert [each["item_id"] for each in reversed(listed)] == [*unreadable(queue)]

    def test_a_result_that_nobody_can_read_is_null_and_hides_nothing(self, queue):
        client = operator("view_payload")
        for name, (text, why) in unreadable(queue).items():
            job = put(queue, name, "completed")
            spoil(queue, queue.get(name, tenant="acme"), text, "result", "finished")
            told = strict(client.get(at(job)))
            readable = "object" in why and text != "null"
            assert told["result"] == (json.loads(text) if readable else None)
        assert len(strict(client.get(LIST))["data"]) == min(20, len(unreadable(queue)))

    def test_a_large_payload_comes_out_whole(self, queue):
        client = operator("view_payload")
        payload = {"a": "<\u2028é\x1b" * 250_000, "b": [2**63 - 1, -0.0, 1e308]}
        job = put(queue, "one")
        spoil(queue, queue.get("one", tenant="acme"), json.dumps(payload))
        answer = client.get(at(job))
        assert strict(answer)["payload"] == payload
        assert len(client.get(LIST).content) < 2_000

    def test_an_error_is_cut_in_lists_by_characters(self, queue, client):
        job = put(queue, "one", "failed", error="x" + "é" * 3_000)
        [listed] = strict(client.get(LIST))["data"]
        assert listed["error"] == "x" + "é" * 1_999
        assert strict(client.get(at(job)))["error"] == "x" + "é" * 3_000
        [error] = strict(client.get("/queue/dead-letters"))["data"]
        assert error["error"] == listed["error"]

    def test_texts_that_are_none_hide_nothing_on_sqlite(self, settings):
        queue = opened("sqlite", settings)
        client = operator("view_payload")
        for number, name in enumerate(("message", "traceback", "error_class", "worker")):
            job = put(queue, name, "failed", tenant=f"t{number}")
            statement = f"update django_workqueue_failure set {name} = cast(%s as text)"
            run(queue, f"{statement} where item = %s", b"\xff\xed\xa0\x80\x00x", job)
            answer = client.get(at(job))
            assert answer.status_code == 200, (name, answer.content)
            [failure] = strict(answer)["failures"]
            shown = failure["error" if name == "message" else name]
            assert shown.endswith("x"), shown
        assert len(strict(client.get(LIST))["data"]) == 4


class TestMoves:
    ALLOWED = {
        "requeue": {"failed": "queued", "cancelled": "queued"},
        "resume": {"paused": "queued"},
        "cancel": {"queued": "cancelled", "paused": "cancelled", "running": "running"},
        "discard": {"failed": "cancelled"},
    }

    @pytest.mark.parametrize("verb", MOVES)
    def test_it_is_possible_in_its_states_alone(self, queue, client, verb):
        for word in sorted(STATUSES, key=lambda each: each == "queued"):
            job, before = put(queue, word, word), len(audit(queue))
            answer = post(client, at(job, verb), {"reason": "why"})
            if wanted := self.ALLOWED[verb].get(word):
                told = strict(answer)
                assert (answer.status_code, told["id"]) == (200, str(job))
                assert told["status"] == state(queue, job) == wanted
                [entry] = audit(queue)[before:]
                assert (entry.verb, entry.item, entry.reason) == (verb, job, "why")
                # Out of the way of what is claimed next.
                if wanted == "queued":
                    queue.cancel(word, tenant="acme")
            else:
                told = check_problem(answer, 400, "wrong_state")
                assert told["detail"] == f"the job is {word}: {verb} is not possible"
                assert state(queue, job) == word
                assert len(audit(queue)) == before
        assert examine(queue.using) == []

    def test_a_requeue_gives_one_more_attempt(self, queue, client):
        job = put(queue, "one", "failed")
        told = strict(post(client, at(job, "requeue")))
        assert (told["attempts"], told["max_attempts"], told["status"]) == (1, 2, "queued")
        assert len(told["failures"]) == 1

    def test_a_live_twin_is_named_by_its_job_id(self, queue, client):
        old = put(queue, "one", "failed")
        twin = put(queue, "one")
        keyed = put(queue, "two", "cancelled", dedupe_key="k")
        holder = put(queue, "three", dedupe_key="k")
        for job, other in ((old, twin), (keyed, holder)):
            told = check_problem(post(client, at(job, "requeue")), 409, "live_twin")
            assert told["twin"] == str(other)
            assert state(queue, job) in ("failed", "cancelled")
        assert audit(queue) == [entry for entry in audit(queue) if entry.verb == "cancel"]
        assert examine(queue.using) == []

    def test_an_older_acceptance_is_moved_by_its_own_id(self, queue, client):
        old = put(queue, "one", "failed")
        new = put(queue, "one", "failed")
        assert strict(post(client, at(old, "discard"), {"reason": "x"}))["id"] == str(old)
        assert (state(queue, old), state(queue, new)) == ("cancelled", "failed")

    def test_discard_says_why(self, queue, client):
        job = put(queue, "one", "failed")
        for body in ({}, {"reason": ""}, {"reason": "  "}, {"reason": None}):
            answer = post(client, at(job, "discard"), body)
            check_problem(answer, 400, "invalid_parameter", "reason")
        assert state(queue, job) == "failed"
        assert audit(queue) == []

    @pytest.mark.parametrize("latest", [2**53, 2**63 - 10])
    def test_neighbours_beyond_what_floats_tell_apart_are_moved_by_their_own_id(
        self, queue, client, latest
    ):
        with ids_from(queue, latest):
            jobs = [put(queue, f"i{number}", "failed") for number in range(3)]
        assert jobs == [latest + 1, latest + 2, latest + 3]
        told = strict(post(client, at(jobs[1], "requeue")))
        assert (told["id"], told["item_id"]) == (str(jobs[1]), "i1")
        assert [state(queue, job) for job in jobs] == ["failed", "queued", "failed"]
        listed = strict(client.get(LIST))["data"]
        assert [job["id"] for job in listed] == [str(job) for job in reversed(jobs)]
        bulk = {"filter": {"item_id": "i2"}, "expected_count": 1}
        assert strict(post(client, BULK, bulk))["done"] == [str(jobs[2])]
        page = strict(client.get(LIST, {"limit": 1}))
        after = client.get(LIST, {"limit": 1, "cursor": page["meta"]["next_cursor"]})
        assert names(after) == "i1"
        # The twin, too, is told as text.
        with ids_from(queue, latest + 5):
            twin = put(queue, "i0")
        told = check_problem(post(client, at(jobs[0], "requeue")), 409, "live_twin")
        assert told["twin"] == str(twin)


@contextmanager
def ids_from(queue, latest):
    """Have the next items of a queue get the job ids behind a given one."""
    ask, tell = _LATEST[connections[queue.using].vendor]
    with connections[queue.using].cursor() as cursor:
        cursor.execute(ask)
        before = cursor.fetchone()
        cursor.execute(tell, [latest])
        yield
        cursor.execute(tell, before or [1])


_LATEST = {
    "sqlite": (
        "select seq from sqlite_sequence where name = 'django_workqueue_queueitem'",
        "insert or replace into sqlite_sequence (rowid, name, seq) select"
        " (select rowid from sqlite_sequence where name = 'django_workqueue_queueitem'),"
        " 'django_workqueue_queueitem', %s",
    ),
    "postgresql": (
        "select last_value from django_workqueue_queueitem_id_seq",
        "select setval(pg_get_serial_sequence('django_workqueue_queueitem', 'id'), %s)",
    ),
}


class TestAtOnce:
    """Two at one job: a second connection stands in between, nothing sleeps."""

    @pytest.mark.parametrize(
        ("verb", "word", "end"),
        [
            ("requeue", "failed", "queued"),
            ("requeue", "cancelled", "queued"),
            ("resume", "paused", "queued"),
            ("discard", "failed", "cancelled"),
            ("cancel", "queued", "cancelled"),
        ],
    )
    def test_of_two_operators_one_moves_it(self, postgres_queue, verb, word, end):
        queue = postgres_queue
        job, before = put(queue, "one", word), len(audit(queue))
        ann, bob = operator(), operator()
        body = {"reason": "why"}
        with Elsewhere(queue.using) as first, Elsewhere(queue.using) as second:
            first.begin()
            done = first.call(partial(post, ann, at(job, verb), body))
            assert strict(done)["status"] == end
            waits = second.start(partial(post, bob, at(job, verb), body))
            second.wait_until_blocked(waits)
            first.commit()
            late = waits.result(20)
        told = check_problem(late, 400, "wrong_state")
        assert told["detail"].startswith(f"the job is {end}")
        assert state(queue, job) == end
        [entry] = audit(queue)[before:]
        assert (entry.verb, entry.item) == (verb, job)
        assert Ready.objects.using(queue.using).count() == (end == "queued")

    def test_one_that_was_undone_leaves_it_to_the_other(self, postgres_queue):
        queue = postgres_queue
        job = put(queue, "one", "failed")
        with Elsewhere(queue.using) as first, Elsewhere(queue.using) as second:
            first.begin()
            first.call(partial(post, operator(), at(job, "discard"), {"reason": "x"}))
            waits = second.start(partial(post, operator(), at(job, "requeue")))
            second.wait_until_blocked(waits)
            first.rollback()
            assert strict(waits.result(20))["status"] == "queued"
        assert [entry.verb for entry in audit(queue)] == ["requeue"]

    def test_a_worker_that_claims_first_is_asked_to_stop(self, postgres_queue):
        queue = postgres_queue
        job = put(queue, "one")
        with Elsewhere(queue.using) as worker, Elsewhere(queue.using) as second:
            worker.begin()
            assert worker.call(partial(queue.claim, worker="w")).job_id == job
            waits = second.start(partial(post, operator(), at(job, "cancel")))
            second.wait_until_blocked(waits)
            worker.commit()
            told = strict(waits.result(20))
        assert (told["status"], told["worker"]) == ("running", "w")
        [lease] = Lease.objects.using(queue.using).all()
        assert lease.cancel_requested
        [entry] = audit(queue)
        assert (entry.verb, entry.detail["state"]) == ("cancel", "claimed")

    def test_a_worker_that_claims_what_was_requeued_keeps_it(self, postgres_queue):
        queue = postgres_queue
        job = put(queue, "one", "failed")
        assert post(operator(), at(job, "requeue")).status_code == 200
        assert queue.claim(worker="v").job_id == job
        told = check_problem(post(operator(), at(job, "requeue")), 400, "wrong_state")
        assert told["detail"] == "the job is running: requeue is not possible"
        assert [entry.verb for entry in audit(queue)] == ["requeue"]
        assert queue.get("one", tenant="acme").worker == "v"

    def test_a_twin_that_comes_meanwhile_is_told(self, postgres_queue):
        queue = postgres_queue
        job = put(queue, "one", "failed")
        with Elsewhere(queue.using) as other, Elsewhere(queue.using) as second:
            other.begin()
            item = WorkItem(tenant="acme", id="one")
            twin = other.call(partial(queue.enqueue, item)).job_id
            waits = second.start(partial(post, operator(), at(job, "requeue")))
            second.wait_until_blocked(waits)
            other.commit()
            late = waits.result(20)
        assert check_problem(late, 409, "live_twin")["twin"] == str(twin)
        assert state(queue, job) == "failed"
        assert audit(queue) == []

    def test_of_two_bulk_requeues_each_job_is_of_one(self, postgres_queue):
        queue = postgres_queue
        jobs = [put(queue, f"i{number}", "failed") for number in range(3)]
        wish = {"filter": {"status": ["failed"]}, "expected_count": 3}
        with Elsewhere(queue.using) as first, Elsewhere(queue.using) as second:
            first.begin()
            done = strict(first.call(partial(post, operator(), BULK, wish)))["done"]
            assert done == [str(job) for job in jobs]
            waits = second.start(partial(post, operator(), BULK, wish))
            second.wait_until_blocked(waits)
            first.commit()
            late = strict(waits.result(20))
        assert (late["found"], late["done"]) == (3, [])
        assert late["skipped"] == {"wrong_state": [str(job) for job in jobs]}
        assert len(audit(queue)) == 3


class TestAudit:
    def test_each_move_leaves_who_why_and_which_request(self, queue):
        client = with_session(user("view_queueitem", "cancel", "requeue", "discard"))
        name = strict_username(client)
        job = put(queue, "one")
        for verb in ("cancel", "requeue"):
            answer = post(client, at(job, verb), {"reason": f"r {verb}"}, **{"X-Request-ID": verb})
            assert answer["X-Request-ID"] == verb
        told = [
            (entry.actor, entry.verb, entry.reason, entry.detail["request_id"], entry.tenant)
            for entry in audit(queue)
        ]
        assert told == [
            (name, "cancel", "r cancel", "cancel", "acme"),
            (name, "requeue", "r requeue", "requeue", "acme"),
        ]

    def test_a_token_s_user_is_who_did_it(self, queue):
        job, client = put(queue, "one"), operator()
        post(client, at(job, "cancel"))
        assert audit(queue)[0].actor.startswith("user-")

    def test_a_request_without_an_id_or_with_a_bad_one_gets_one(self, queue, client):
        job = put(queue, "one")
        for given in (None, "", "x" * 201, "é", "a\tb", "a\x7f", "a\x1b[31m", "\u202eevil"):
            headers = {} if given is None else {"X-Request-ID": given}
            answer = post(client, at(job, "cancel"), **headers)
            made = answer["X-Request-ID"]
            assert str(UUID(made)) == made
            assert audit(queue)[-1].detail["request_id"] == made
            post(client, at(job, "requeue"))
        answer = post(client, at(job, "cancel"), **{"X-Request-ID": "x" * 200})
        assert answer["X-Request-ID"] == "x" * 200
        assert client.get("/queue/jobs/x", headers={"X-Request-ID": "mine"})["X-Request-ID"] == (
            "mine"
        )

    def test_the_next_request_has_not_the_last_one_s_id(self, queue, client):
        job = put(queue, "one")
        post(client, at(job, "cancel"), **{"X-Request-ID": "first"})
        queue.requeue("one", tenant="acme", by="ann")
        assert "request_id" not in audit(queue)[-1].detail

    def test_a_refusal_leaves_nothing(self, queue, client):
        job = put(queue, "one")
        post(client, at(job, "discard"), {"reason": "x"})
        post(client, at(job, "cancel"), {"colour": "red"})
        post(client, at(job, "cancel"), {"reason": "x" * 2001})
        assert audit(queue) == []
        assert state(queue, job) == "queued"

    def test_a_reason_is_kept_as_it_is(self, queue, client):
        job = put(queue, "one")
        for reason in (*NAMES, "x" * 2000):
            post(client, at(job, "cancel"), {"reason": reason})
            assert audit(queue)[-1].reason == reason
            post(client, at(job, "requeue"))


def strict_username(client):
    from django.contrib.auth import get_user

    request = type("Request", (), {"session": client.session})()
    return get_user(request).get_username()


class TestPayloads:
    """A move may bring a new payload."""

    KINDS = {"requeue": "failed", "resume": "paused"}

    @pytest.mark.parametrize("verb", KINDS)
    def test_it_needs_the_right_to_edit(self, queue, verb):
        job, before = put(queue, "one", self.KINDS[verb], payload={"a": 1}), len(audit(queue))
        wish = {"payload": {"a": 2}}
        may_not = with_session(user("view_queueitem", "requeue", "view_payload"))
        for client in (operator("view_payload"), may_not):
            check_problem(post(client, at(job, verb), wish), 403, "permission_denied")
        assert state(queue, job) == self.KINDS[verb]
        assert len(audit(queue)) == before
        may = with_session(user("requeue", "edit_payload"))
        told = strict(post(may, at(job, verb), wish))
        assert told["status"] == "queued"
        # To write isn't to read.
        assert "payload" not in told
        assert queue.claim(worker="v").payload == {"a": 2}
        assert audit(queue)[-1].detail["payload"] in ('{"a": 1}', '{"a":1}')

    REFUSED = {
        "null": "payload",
        "[1]": "payload",
        '"x"': "payload",
        "7": "payload",
        '{"a": "\\u0000"}': "payload.a",
        '{"a": "\\ud800"}': "payload.a",
        '{"\\ud800": 1}': "payload",
        '{"a": 9223372036854775808}': "payload.a",
        '{"a": ' + "9" * 4000 + "}": "payload.a",
        '{"a": 1e999}': "payload",
        '{"a":' * 101 + "1" + "}" * 101: "payload",
        '{"a": "' + "x" * 262_144 + '"}': "payload",
    }

    @pytest.mark.parametrize("verb", KINDS)
    def test_one_that_can_not_be_kept_is_refused_by_name_and_changes_nothing(self, queue, verb):
        job = put(queue, "one", self.KINDS[verb], payload={"a": 1})
        client = operator("edit_payload")
        for payload, name in self.REFUSED.items():
            answer = post(client, at(job, verb), f'{{"payload": {payload}}}')
            told = strict(answer)
            assert (answer.status_code, told["code"]) == (400, "invalid_parameter"), payload[:40]
            [field] = told["errors"]
            assert field == name or field.startswith("payload"), field
        assert state(queue, job) == self.KINDS[verb]
        assert queue.get("one", tenant="acme").payload == {"a": 1}
        assert audit(queue) == []

    def test_what_is_wrong_with_a_payload_is_told_without_it(self, queue):
        job = put(queue, "one", "failed")
        wish = '{"payload": {"a": ["geheim", "geheim\\u0000"]}}'
        answer = post(operator("edit_payload"), at(job, "requeue"), wish)
        assert SECRET not in answer.content.decode()

    def test_one_that_nobody_could_read_is_mended(self, queue):
        client = operator("edit_payload", "view_payload")
        for name, (text, _) in unreadable(queue).items():
            job = put(queue, name, "failed")
            spoil(queue, queue.get(name, tenant="acme"), text)
            told = strict(post(client, at(job, "requeue"), {"payload": {"now": "good"}}))
            assert (told["status"], told["payload"]) == ("queued", {"now": "good"})
            queue.cancel(name, tenant="acme")


class TestBulk:
    @pytest.fixture
    def dead(self, queue):
        return [put(queue, f"i{number}", "failed") for number in range(3)]

    def test_what_the_filter_finds_is_requeued_if_it_is_what_was_expected(
        self, queue, client, dead
    ):
        put(queue, "other", "failed", tenant="beta")
        wish = {
            "filter": {"status": ["failed"], "tenant": "acme"},
            "expected_count": 3,
            "reason": "mended",
        }
        answer = post(client, BULK, wish, **{"X-Request-ID": "r-1"})
        assert strict(answer) == {
            "dry_run": False,
            "found": 3,
            "done": [str(job) for job in dead],
            "skipped": {},
        }
        assert [state(queue, job) for job in dead] == ["queued"] * 3
        assert queue.stats().dead_lettered == 1
        told = {(each.actor[:5], each.verb, each.reason) for each in audit(queue)}
        assert told == {("user-", "requeue", "mended")}
        assert [each.item for each in audit(queue)] == dead
        assert {each.detail["request_id"] for each in audit(queue)} == {"r-1"}
        assert examine(queue.using) == []

    def test_another_number_than_expected_changes_nothing(self, queue, client, dead):
        for expected in (0, 2, 4, 1000):
            for dry_run in (True, False):
                wish = {"filter": {"tenant": "acme"}, "expected_count": expected}
                answer = post(client, BULK, wish | {"dry_run": dry_run})
                told = check_problem(answer, 409, "wrong_count")
                assert (told["found"], told["detail"]) == (3, f"expected {expected} jobs, found 3")
        assert {state(queue, job) for job in dead} == {"failed"}
        assert audit(queue) == []

    def test_a_dry_run_changes_nothing(self, queue, client, dead):
        wish = {"filter": {"status": ["failed"]}, "expected_count": 3, "dry_run": True}
        told = strict(post(client, BULK, wish))
        assert told == {"dry_run": True, "found": 3, "done": [], "skipped": {}}
        assert {state(queue, job) for job in dead} == {"failed"}
        assert audit(queue) == []

    def test_no_more_than_the_cap_are_requeued_and_that_is_said(
        self, queue, client, dead, monkeypatch
    ):
        wish = {"filter": {"status": ["failed"]}, "expected_count": 1001}
        check_problem(post(client, BULK, wish), 400, "invalid_parameter", "expected_count")
        monkeypatch.setattr(parameters, "MAX_BULK", 2)
        told = check_problem(post(client, BULK, wish | {"expected_count": 2}), 409, "wrong_count")
        assert told["detail"] == "expected 2 jobs, found more than 2"
        assert {state(queue, job) for job in dead} == {"failed"}

    def test_what_can_not_be_requeued_is_skipped_by_why(self, queue, client, dead):
        done = put(queue, "i9", "completed")
        twin = put(queue, "i0")
        wish = {"filter": {"tenant": "acme"}, "expected_count": 5}
        told = strict(post(client, BULK, wish))
        assert told["done"] == [str(job) for job in dead[1:]]
        assert told["skipped"]["live_twin"] == [str(dead[0])]
        assert {*told["skipped"]["wrong_state"]} == {str(twin), str(done)}
        assert len(audit(queue)) == 2
        assert examine(queue.using) == []

    def test_each_filter_of_a_listing_is_one_here(self, queue, client):
        put(queue, "a", "failed", handler="h", queue="mail", dedupe_key="k", deployment_id="blue")
        put(queue, "b", "failed", tenant="beta", error=KeyError("x"))
        [a, b] = QueueItem.objects.using(queue.using).order_by("pk")
        letter = DeadLetter.objects.using(queue.using).get(item_id=a.pk)
        filters = (
            {"fingerprint": letter.fingerprint},
            {"handler": "h"},
            {"queue": "mail"},
            {"dedupe_key": "k"},
            {"deployment_id": "blue"},
            {"item_id": "a"},
            {"tenant": "acme"},
            {"created_before": b.created_at.isoformat()},
        )
        for each in filters:
            wish = {"filter": each, "expected_count": 1}
            told = strict(post(client, BULK, wish))
            assert told.get("done") == [str(a.pk)], (each, told)
            queue.cancel("a", tenant="acme")
        assert state(queue, b.pk) == "failed"

    REFUSED = {
        '{"expected_count": 3}': "filter",
        '{"filter": {}, "expected_count": 3}': "filter",
        '{"filter": null, "expected_count": 3}': "filter",
        '{"filter": [], "expected_count": 3}': "filter",
        '{"filter": "all", "expected_count": 3}': "filter",
        '{"filter": {"status": []}, "expected_count": 3}': "filter",
        '{"filter": {"status": "failed"}, "expected_count": 3}': "filter",
        '{"filter": {"status": ["dead_lettered"]}, "expected_count": 3}': "filter",
        '{"filter": {"status": [["failed"]]}, "expected_count": 3}': "filter",
        '{"filter": {"status": ["\\ud800"]}, "expected_count": 3}': "filter",
        '{"filter": {"status": [%s]}, "expected_count": 3}' % ("[" * 912 + "]" * 912): "filter",
        '{"filter": {"limit": 3}, "expected_count": 3}': "filter",
        '{"filter": {"message": 3}, "expected_count": 3}': "filter",
        '{"filter": {"\\ud800": 3}, "expected_count": 3}': "filter",
        '{"filter": {"tenant": null}, "expected_count": 3}': "filter",
        '{"filter": {"tenant": ""}, "expected_count": 3}': "filter",
        '{"filter": {"tenant": "a\\u0000"}, "expected_count": 3}': "filter",
        '{"filter": {"tenant": "\\udfff"}, "expected_count": 3}': "filter",
        '{"filter": {"tenant": ["acme"]}, "expected_count": 3}': "filter",
        '{"filter": {"tenant": "acme"}}': "expected_count",
        '{"filter": {"tenant": "acme"}, "expected_count": null}': "expected_count",
        '{"filter": {"tenant": "acme"}, "expected_count": -1}': "expected_count",
        '{"filter": {"tenant": "acme"}, "expected_count": "all"}': "expected_count",
        '{"filter": {"tenant": "acme"}, "expected_count": 3.5}': "expected_count",
        '{"filter": {"tenant": "acme"}, "expected_count": 9223372036854775808}': "expected_count",
        '{"filter": {"tenant": "acme"}, "expected_count": 3, "dry_run": "maybe"}': "dry_run",
        '{"filter": {"tenant": "acme"}, "expected_count": 3, "dry_run": null}': "dry_run",
        '{"filter": {"tenant": "acme"}, "expected_count": 3, "payload": {}}': "payload",
        '{"filter": {"tenant": "acme"}, "expected_count": 3, "\\ud800": 1}': "\\ud800",
        "[]": "body",
    }

    def test_what_can_not_be_meant_is_refused_and_changes_nothing(self, queue, client, dead):
        wrong = []
        for wish, name in self.REFUSED.items():
            answer = post(client, BULK, wish)
            if answer.status_code != 400 or answer["Content-Type"] != "application/problem+json":
                wrong.append((wish[:70], answer.status_code))
                continue
            told = strict(answer)
            assert told["code"] in ("invalid_parameter", "malformed"), wish
            assert "ErrorDetail" not in told["detail"], wish
            if told["code"] == "invalid_parameter":
                assert all(each.partition(".")[0] == name for each in told["errors"]), wish
        assert wrong == []
        assert {state(queue, job) for job in dead} == {"failed"}
        assert audit(queue) == []

    def test_a_refused_filter_names_what_of_it(self, queue, client):
        wish = {"filter": {"tenant": "", "colour": "red"}, "expected_count": 0}
        answer = post(client, BULK, wish)
        check_problem(answer, 400, "invalid_parameter", "filter.colour")
        wish = {"filter": {"tenant": ""}, "expected_count": 0}
        check_problem(post(client, BULK, wish), 400, "invalid_parameter", "filter.tenant")


def test_the_body_of_a_move_is_its_only_source(queue, client):
    job = put(queue, "one", "failed")
    answer = post(client, at(job, "discard") + "?" + urlencode({"reason": "x"}))
    check_problem(answer, 400, "invalid_parameter", "reason")
    assert not Finished.objects.using(queue.using).exists()
    assert Failure.objects.using(queue.using).count() == 1
