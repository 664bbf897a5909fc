"""
Hostile data at every door: nothing that anybody writes, by a verb or by SQL behind the queue's
back, stops the work beside it. What can't be run ends as one failure, and can be seen and mended.
"""

import contextlib
import json
import re
from collections import Counter as Tally
from collections import defaultdict
from io import StringIO

import pytest
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.db import Error, connections, transaction
from django.test import Client
from django.urls import reverse
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from django_workqueue import (
    InvalidFieldError,
    PayloadError,
    QueuePolicy,
    WorkItem,
    WorkState,
)
from django_workqueue.doctor import examine
from django_workqueue.exceptions import WorkItemNotFoundError, WorkQueueError
from django_workqueue.failures import storable
from django_workqueue.items import encode_payload
from django_workqueue.models import (
    AuditEntry,
    DeadLetter,
    Failure,
    Finished,
    Lease,
    QueueItem,
    Ready,
)
from django_workqueue.reading import decode_json, decode_payload
from django_workqueue.testing import DatabaseTestQueue, make_queue

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

#: Stands in payloads, and must not stand where only failures are told.
SECRET = "geheim"

#: JSON that the columns take and that no item may have; and what its failure says.
UNREADABLE = {
    "a list": ('["geheim"]', "not a JSON object"),
    "a text": ('"geheim"', "not a JSON object"),
    "null": ("null", "not a JSON object"),
    "5,000 digits": ('{"geheim": ' + "9" * 5000 + "}", "beyond 64 bits"),
    "4,000 digits": ('{"geheim": -' + "9" * 4000 + "}", "beyond 64 bits"),
    "65 bits": ('{"geheim": 9223372036854775808}', "beyond 64 bits"),
    "a number beyond floats": ('{"geheim": [1e999]}', "beyond all floats"),
    "1,500 lists": ('{"geheim": ' + "[" * 1500 + "]" * 1500 + "}", "recursion|deeper"),
    "101 objects": ('{"geheim":' * 101 + "1" + "}" * 101, "nested deeper than 100"),
    "a lone surrogate": (r'{"geheim": "geheim\ud800"}', "lone surrogate"),
    "a surrogate in a key": (r'{"geheim\uDFFF": [{"a": 1}]}', "lone surrogate"),
    "surrogates the wrong way round": (r'{"geheim": "\udc00\ud800"}', "lone surrogate"),
    "NUL": (r'{"geheim": ["geheim\u0000"]}', "NUL"),
    "NUL in a key": (r'{"\u0000geheim": 1}', "NUL"),
    "NUL behind a backslash": (r'{"geheim": "\\\u0000"}', "NUL"),
}
#: What only SQLite keeps, as bytes.
ONLY_ON_SQLITE = {
    "no UTF-8": (b'{"geheim": "\xff\xfe"}', "no text"),
    "a surrogate in UTF-8": (b'{"geheim": "\xed\xa0\x80"}', "no text"),
    "NUL and more": (b'{"geheim": 1}\x00{', "Extra data"),
}
#: Odd, and yet an item's good right.
READABLE = {
    "a key twice": ('{"a": 1, "a": 2}', {"a": 2}),
    "what only looks like NUL": (r'{"a": "\\u0000 \\\\ud800"}', {"a": r"\u0000 \\ud800"}),
    "a pair of surrogates": (r'{"\ud83d\ude00": "\uD83D\uDE00"}', {"😀": "😀"}),
    "63 bits": ('{"a": [9223372036854775807, -9223372036854775808]}', {"a": [2**63 - 1, -(2**63)]}),
    "large and small": ('{"a": [1e308, 1e-999, -0.0, 1E5]}', {"a": [1e308, 0.0, -0.0, 1e5]}),
    "white space": (' \n{"a"\t:\r1 } ', {"a": 1}),
    "5 MB": (json.dumps({"a": "x" * 5_000_000}), {"a": "x" * 5_000_000}),
    "100 objects": ('{"a":' * 99 + "{}" + "}" * 99, None),
}
#: No JSON, which no column takes.
NO_JSON = (
    "",
    " ",
    "{",
    "{} x",
    "{a: 1}",
    '{"a": NaN}',
    '{"a": -Infinity}',
    '{"a": "\x01"}',
    "\ufeff{}",
)

NAMES = (
    *('it\'s "so"', "%", "%s", "%(x)s", "100%%", "_", "*", "\\", "a\\'b", "$$ {}", "NULL"),
    *("'; drop table django_workqueue_queueitem; --", "<script>alert('x')</script>", "&amp;"),
    *("\u202eevil", "\u200fright", "e\u0301", "\x01\x1b[31m", "a\nb", "\t", "😀"),
)


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk():
    with connections["postgresql"].cursor() as cursor:
        cursor.execute("set synchronous_commit = off")
    with connections["default"].cursor() as cursor:
        cursor.execute("pragma synchronous = off")
    yield
    for alias in ("default", "postgresql"):
        connections[alias].close()


@pytest.fixture(params=["sqlite", "postgresql"])
def queue(request: pytest.FixtureRequest) -> DatabaseTestQueue:
    return make_queue(request.param)


def unreadable(queue):
    """All that the database of *queue* keeps and nobody can read, by name."""
    only = ONLY_ON_SQLITE if connections[queue.using].vendor == "sqlite" else {}
    return UNREADABLE | only


def few(queue):
    """Some that are unreadable in different ways."""
    names = ("a list", "5,000 digits", "NUL", "no UTF-8")
    return {name: kind for name, kind in unreadable(queue).items() if name in names}


def spoil(queue, item, text, column="payload", table="queueitem"):
    """Write *text* over a JSON column of *item*, behind the queue's back."""
    value = "cast(%s as text)" if isinstance(text, bytes) else "%s"
    key = "id" if table == "queueitem" else "item"
    run(
        queue,
        f"update django_workqueue_{table} set {column} = {value} where {key} = %s",
        text,
        item.job_id,
    )


def run(queue, statement, *parameters):
    with connections[queue.using].cursor() as cursor:
        cursor.execute(statement, parameters)


def fill(queue, **fields):
    """Enqueue an unreadable item of every kind before good ones of two tenants; the good ids."""
    kinds, items = unreadable(queue), []
    for number, name in enumerate(kinds):
        for tenant in ("acme", "other"):
            items.append(WorkItem(tenant=tenant, id=name, priority=number % 3, **fields))
            items.append(WorkItem(tenant=tenant, id=f"good {number}", **fields))
    stored = queue.enqueue_many(items)
    for bad in stored[::2]:
        spoil(queue, bad, kinds[bad.id][0])
    return [item.id for item in stored[1::2]]


def bury(queue, name="bad", text=UNREADABLE["NUL"][0], **fields):
    """Return an item that was buried because it can't be read."""
    bad = queue.enqueue(WorkItem(tenant="acme", id=name, **fields))
    spoil(queue, bad, text)
    assert queue.claim(worker="w") is None
    return queue.get(name, tenant="acme")


def of(model, queue):
    return model._base_manager.using(queue.using)


def check_burials(queue, attempts=1):
    """Each unreadable item has ended as exactly one failure that says what is wrong with it."""
    kinds = unreadable(queue)
    recorded = defaultdict(list)
    for failure in of(Failure, queue).order_by("item_id", "number"):
        recorded[failure.item_id].append(failure)
    for tenant in ("acme", "other"):
        letters = queue.dead_letters(tenant=tenant, limit=1000)
        reasons = of(DeadLetter, queue).filter(tenant=tenant).values_list("reason", flat=True)
        assert {*reasons} == {"rejected"}
        assert Tally(letter.id for letter in letters) == Tally([*kinds])
        for letter in letters:
            assert (letter.state, letter.attempts) == (WorkState.DEAD_LETTERED, attempts)
            assert (letter.payload, letter.result, letter.worker) == ({}, None, None)
            assert len(letter.failures) == attempts
            assert re.search(kinds[letter.id][1], letter.failures[0])
            failures = recorded[letter.job_id]
            told = [(each.kind, each.number, each.outcome) for each in failures]
            wanted = [("undecodable", n + 1, "dead_lettered") for n in range(attempts)]
            assert told == wanted
            for failure in failures:
                assert SECRET not in failure.message + failure.traceback + failure.error_class
    assert examine(queue.using) == []


class TestUnreadablePayloads:
    def test_a_batch_gets_all_good_items_and_buries_each_unreadable_one(self, queue):
        good = fill(queue)
        claimed = queue.claim_many(worker="w", limit=1000)
        assert Tally(item.id for item in claimed) == Tally(good)
        stats = queue.stats()
        assert (stats.claimed, stats.depth, stats.due) == (len(good), 0, 0)
        assert stats.dead_lettered == 2 * len(unreadable(queue))
        check_burials(queue)

    def test_a_batch_is_full_though_unreadable_items_come_first(self, queue):
        fill(queue)
        for _ in range(4):
            assert len(queue.claim_many(worker="w", limit=5)) == 5
        assert examine(queue.using) == []

    def test_claims_of_one_get_the_good_items_of_both_tenants_in_turns(self, queue):
        good = fill(queue)
        claimed = [item for _ in good if (item := queue.claim(worker="w"))]
        assert [item.tenant for item in claimed] == ["acme", "other"] * (len(good) // 2)
        assert queue.claim(worker="w") is None
        check_burials(queue)

    def test_one_requeued_as_it_is_is_buried_again_and_counted_again(self, queue):
        fill(queue)
        queue.claim_many(worker="w", limit=1000)
        for tenant in ("acme", "other"):
            for letter in queue.dead_letters(tenant=tenant, limit=1000):
                again = queue.requeue(letter.id, tenant=tenant, by="ann", reason="in hope")
                assert (again.state, again.max_attempts) == (WorkState.QUEUED, 2)
        assert queue.claim(worker="w") is None
        check_burials(queue, attempts=2)

    def test_one_requeued_with_a_new_payload_runs_and_the_audit_keeps_the_old_one(self, queue):
        kinds = unreadable(queue)
        for name, (text, _) in kinds.items():
            bad = bury(queue, name, text)
            queue.requeue(name, tenant="acme", payload={"now": "good"}, by="ann", reason="mended")
            mended = queue.claim(worker="w")
            assert (mended.id, mended.payload, mended.attempts) == (name, {"now": "good"}, 1)
            done = queue.complete(name, tenant="acme", worker="w", fence=mended.fence, result=[1])
            assert (done.state, done.result) == (WorkState.COMPLETED, [1])
            [entry] = of(AuditEntry, queue).filter(item=bad.job_id)
            kept = text.decode(errors="surrogateescape") if isinstance(text, bytes) else text
            assert entry.detail["payload"] == storable(kept)
        assert queue.stats().completed == len(kinds)
        assert examine(queue.using) == []

    def test_one_can_be_discarded_cancelled_paused_resumed_and_pruned(self):
        for backend in ("sqlite", "postgresql"):
            queue = make_queue(backend, QueuePolicy(retention_seconds=60))
            for name, (text, _) in few(queue).items():
                bury(queue, name, text)
                who = {"tenant": "acme", "by": "ann", "reason": "no use"}
                assert queue.discard(name, **who).state is WorkState.CANCELLED
                queued = queue.enqueue(WorkItem(tenant="acme", id=f"{name}, queued"))
                spoil(queue, queued, text)
                assert queue.cancel(queued.id, **who).state is WorkState.CANCELLED
                paused = queue.enqueue(WorkItem(tenant="acme", id=f"{name}, paused"))
                queue.claim(worker="w")
                queue.pause(paused.id, tenant="acme", worker="w")
                spoil(queue, paused, text)
                assert queue.resume(paused.id, tenant="acme").state is WorkState.QUEUED
                assert queue.claim(worker="w") is None
                assert queue.discard(paused.id, **who).state is WorkState.CANCELLED
            assert queue.prune() == 0
            queue.advance(61)
            assert queue.prune() == 3 * len(few(queue))
            assert not of(QueueItem, queue).exists()
            assert not of(Failure, queue).exists()
            assert examine(queue.using) == []

    def test_the_dead_letter_of_one_is_pruned_if_its_policy_says_so(self):
        for backend in ("sqlite", "postgresql"):
            queue = make_queue(backend, QueuePolicy(dead_letter_retention_seconds=60))
            fill(queue)
            good = len(queue.claim_many(worker="w", limit=1000))
            queue.advance(61)
            assert queue.prune() == 2 * len(unreadable(queue))
            assert of(QueueItem, queue).count() == good
            assert examine(queue.using) == []

    def test_one_that_was_spoilt_while_it_was_claimed_is_settled_as_any_other(self, queue):
        ends = {
            "heartbeat": WorkState.CLAIMED,
            "complete": WorkState.COMPLETED,
            "fail": WorkState.QUEUED,
            "pause": WorkState.PAUSED,
            "release": WorkState.QUEUED,
        }
        for name, (text, _) in few(queue).items():
            for verb, state in ends.items():
                item = queue.enqueue(WorkItem(tenant=verb, id=name, queue=name))
                queue.claim(worker="w", queue=name)
                spoil(queue, item, text)
                more = {"error": "x", "delay_seconds": 60} if verb == "fail" else {}
                more |= {"delay_seconds": 60} if verb == "release" else {}
                settled = getattr(queue, verb)(name, tenant=verb, worker="w", fence=1, **more)
                assert (settled.state, settled.payload) == (state, {})
        queue.advance(3601)
        assert {item.tenant for item in queue.reap()} == {"heartbeat"}
        assert examine(queue.using) == []

    def test_a_twin_of_one_is_answered_with_it(self, queue):
        for name, (text, _) in few(queue).items():
            first = queue.enqueue(WorkItem(tenant="acme", id=name, dedupe_key=name))
            spoil(queue, first, text)
            twin = queue.enqueue(WorkItem(tenant="acme", dedupe_key=name, payload={"a": 1}))
            assert (twin.job_id, twin.payload) == (first.job_id, {})
        assert queue.stats().duplicates_suppressed == len(few(queue))

    def test_what_is_odd_but_allowed_is_served_as_it_is(self, queue):
        for name, (text, payload) in READABLE.items():
            item = queue.enqueue(WorkItem(tenant="acme", id=name))
            spoil(queue, item, text)
            claimed = queue.claim(worker="w")
            wanted = json.loads(text) if payload is None else payload
            assert claimed.payload == wanted
            assert queue.get(name, tenant="acme").payload == wanted
            queue.complete(name, tenant="acme", worker="w")
        assert queue.stats().dead_lettered == 0

    def test_what_is_no_json_is_refused_by_the_column(self, queue):
        item = queue.enqueue(WorkItem(tenant="acme", payload={"a": 1}))
        for text in NO_JSON:
            with pytest.raises(Error), transaction.atomic(using=queue.using):
                spoil(queue, item, text)
        assert queue.claim(worker="w").payload == {"a": 1}

    def test_a_result_that_cannot_be_read_does_not_hide_its_item(self, queue):
        for name, (text, reason) in unreadable(queue).items():
            item = queue.enqueue(WorkItem(tenant="acme", id=name))
            queue.claim(worker="w")
            queue.complete(name, tenant="acme", worker="w", result=1)
            spoil(queue, item, text, "result", "finished")
            shown = queue.get(name, tenant="acme")
            assert shown.state is WorkState.COMPLETED
            # A result may be any value.
            assert (shown.result is None) == ("object" not in reason or text == "null")
            assert QueueItem.objects.using(queue.using).with_state().get(pk=item.job_id).finished


class TestReaders:
    """Every reader shows what can't be read, and what stands beside it."""

    def test_pages_of_dead_letters_go_on_behind_it(self, queue):
        fill(queue)
        queue.claim_many(worker="w", limit=1000)
        seen, after = [], None
        while page := queue.dead_letters(tenant="acme", limit=2, after=after):
            seen += [letter.id for letter in page]
            after = page[-1].job_id
        assert Tally(seen) == Tally([*unreadable(queue)])

    def test_the_models_show_it(self, queue):
        good = fill(queue)
        items = QueueItem.objects.using(queue.using)
        assert {item.state for item in items.with_state()} == {"queued"}
        assert len(items.with_state()) == 2 * len(good)
        queue.claim_many(worker="w", limit=1000)
        assert Tally(item.state for item in items.with_state()) == Tally(
            claimed=len(good), dead_lettered=2 * len(unreadable(queue))
        )
        assert len(list(items.values_list("payload", flat=True))) == 2 * len(good)

    def test_the_console_shows_it_and_none_of_its_payload(self, queue):
        for name, (text, _) in few(queue).items():
            bury(queue, name, text)
        console = {"database": queue.using, "skip_checks": True}
        for name in few(queue):
            for options in ([], ["--json"], ["--payload"], ["--payload", "--json"]):
                out = StringIO()
                arguments = ["show", name, "--tenant", "acme", *options]
                call_command("workqueue", *arguments, stdout=out, **console)
                shown = out.getvalue()
                assert "dead_lettered" in shown
                assert "undecodable" in shown
                assert SECRET not in shown
        for arguments in (["doctor"], ["status"], ["holds"]):
            out = StringIO()
            call_command("workqueue", *arguments, stdout=out, **console)
            assert SECRET not in out.getvalue()
        requeued = StringIO()
        arguments = ["requeue", *few(queue), "--tenant", "acme", "--by", "ann"]
        call_command("workqueue", *arguments, "--reason", "again", stdout=requeued, **console)
        assert requeued.getvalue().count("now queued") == len(few(queue))

    def test_the_admin_shows_it_and_its_payload_as_text(self, queue, settings):
        settings.WORKQUEUE = {"DATABASE": queue.using}
        client = superuser()
        for name, (text, _) in few(queue).items():
            bad = bury(queue, name, text)
            page = read(client, QueueItem, bad.job_id)
            assert SECRET in page
            assert "undecodable" not in page
            done = queue.enqueue(WorkItem(tenant="acme", id=f"{name}, done"))
            queue.claim(worker="w")
            queue.complete(done.id, tenant="acme", worker="w", result=1)
            spoil(queue, done, text, "result", "finished")
            assert SECRET in read(client, Finished, done.job_id)
            assert SECRET not in read(client, DeadLetter, bad.job_id)
            [failure] = of(Failure, queue).filter(item_id=bad.job_id)
            assert SECRET not in read(client, Failure, failure.pk)
        for name in unreadable(queue).keys() - few(queue).keys():
            text, _ = unreadable(queue)[name]
            read(client, QueueItem, bury(queue, name, text).job_id)
        for model in (QueueItem, DeadLetter, Finished, Failure, Lease):
            assert SECRET not in read(client, model)
        assert read(client, QueueItem).count("dead_lettered") >= len(few(queue))

    def test_the_admin_cuts_a_huge_payload(self, queue, settings):
        settings.WORKQUEUE = {"DATABASE": queue.using}
        item = queue.enqueue(WorkItem(tenant="acme"))
        spoil(queue, item, READABLE["5 MB"][0])
        page = read(superuser(), QueueItem, item.job_id)
        assert "[cut]" in page
        assert len(page) < 1_200_000


def superuser():
    client = Client()
    user = get_user_model().objects.create_superuser("root", "root@example.com", "root")
    client.force_login(user)
    return client


def read(client, model, key=None, **query):
    """Return the admin's page of a row, or its list."""
    page, args = ("changelist", ()) if key is None else ("change", (key,))
    address = reverse(f"admin:django_workqueue_{model._meta.model_name}_{page}", args=args)
    answer = client.get(address, query)
    assert answer.status_code == 200
    return answer.content.decode()


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(min_value=-(2**66), max_value=2**66)
    | st.floats()
    | st.text(
        alphabet=st.characters(codec=None) | st.sampled_from('\x00\\u0d8\ud800\udc00"'), max_size=8
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=8,
)


class TestWhatCanBeRead:
    @given(json_values, st.booleans())
    @settings(max_examples=400, deadline=None)
    def test_it_is_what_may_be_enqueued_and_comes_back_the_same(self, value, ascii):
        payload = {"a": value}
        stored = json.dumps(payload, ensure_ascii=ascii)
        try:
            text = encode_payload(payload, 10**6)
        except PayloadError:
            with pytest.raises(PayloadError):
                decode_payload(stored)
        else:
            assert written(decode_payload(text)) == written(decode_payload(stored))
            assert written(decode_payload(stored.encode())) == written(payload)

    @given(st.text(alphabet='{}[]",:0123456789eE.-+\\u0d8fa nulltrefsNIy\x00\ud800', max_size=30))
    @settings(max_examples=400, deadline=None)
    def test_no_text_leads_to_any_error_but_the_named_one(self, text):
        try:
            payload = decode_payload(text)
        except PayloadError:
            return
        else:
            assert json.loads(encode_payload(payload, 10**6)) == payload

    @given(st.binary(max_size=12), st.sampled_from(["payload", "result"]))
    @settings(max_examples=200, deadline=None)
    def test_no_bytes_either(self, data, name):
        fields = set()
        for stored in (data, b'{"a":"' + data + b'"}'):
            try:
                decode_json(name, stored)
            except PayloadError as error:
                fields.add(error.field)
        assert fields <= {name}

    def test_the_error_says_nothing_of_the_payload(self):
        for text, reason in (UNREADABLE | ONLY_ON_SQLITE).values():
            with pytest.raises(PayloadError, match=reason) as refused:
                decode_payload(text)
            assert SECRET not in str(refused.value)
            assert refused.value.__suppress_context__ or refused.value.__context__ is None
            assert "999" not in str(refused.value)


def written(value):
    return json.dumps(value, sort_keys=True)


class TestDoors:
    """What a verb is given is refused by name, with nothing stored, whatever it is."""

    HUGE = 10**5000  # which Python doesn't print

    def test_odd_values_of_an_item_are_refused_by_the_fields_name(self):
        odd = (
            self.HUGE,
            -self.HUGE,
            float("nan"),
            b"\xff",
            object(),
            [],
            {"a": 1},
            "\ud800",
            "\x00",
        )
        names = ("tenant", "id", "queue", "handler", "dedupe_key", "deployment_id", "priority")
        names += ("max_attempts", "timeout_seconds", "enqueued_at", "available_at", "state")
        for name in names:
            for value in odd:
                with pytest.raises(InvalidFieldError) as refused:
                    WorkItem(**{"tenant": "acme", name: value})
                assert refused.value.field == name
                str(refused.value).encode()

    @pytest.mark.parametrize("backend", ["memory", "sqlite", "postgresql"])
    def test_odd_payloads_and_results_are_refused_and_their_errors_can_be_told(self, backend):
        queue = make_queue(backend)
        odd = [
            {self.HUGE: 1},
            {b"\xff": 1},
            {"a": self.HUGE},
            {"a": {("geheim",): 1}},
            {"\ud800": 1},
        ]
        for payload in odd:
            with pytest.raises(PayloadError) as refused:
                queue.enqueue_many(
                    [WorkItem(tenant="acme"), WorkItem(tenant="acme", payload=payload)]
                )
            assert SECRET not in str(refused.value)
            str(refused.value).encode()
        assert queue.stats().depth == 0
        queue.enqueue(WorkItem(tenant="acme", id="one"))
        queue.claim(worker="w")
        for result in (*odd, self.HUGE, "\ud800", float("inf"), object()):
            with pytest.raises(PayloadError, match=r"^result"):
                queue.complete("one", tenant="acme", worker="w", result=result)
        assert queue.get("one", tenant="acme").state is WorkState.CLAIMED

    def test_job_ids_and_cursors_up_to_63_bits_find_nothing_and_break_nothing(self, queue):
        queue.enqueue(WorkItem(tenant="acme", id="one"))
        for number in (0, 2**31, 2**53, 2**53 + 1, 2**63 - 1):
            for verb in ("get", "cancel", "requeue", "resume"):
                with pytest.raises(WorkItemNotFoundError):
                    getattr(queue, verb)("one", tenant="acme", job_id=number)
            with pytest.raises(InvalidFieldError, match="after"):
                queue.dead_letters(tenant="acme", after=number)
        for number in (2**63, self.HUGE, -1):
            with pytest.raises(InvalidFieldError, match="job_id"):
                queue.get("one", tenant="acme", job_id=number)
            with pytest.raises(InvalidFieldError, match="after"):
                queue.dead_letters(tenant="acme", after=number)

    def test_the_admin_looks_for_any_term_and_address(self, queue, settings):
        settings.WORKQUEUE = {"DATABASE": queue.using}
        client = superuser()
        queue.enqueue(WorkItem(tenant="acme"))
        for term in ("9" * 5000, "9" * 19, str(2**63 - 1), "٣" * 5000, *NAMES):
            for model in (QueueItem, DeadLetter) if term in NAMES[:2] else (QueueItem,):
                assert ("acme" in read(client, model, q=term)) == (
                    term == "\t" and model is QueueItem
                )
        for key in ("9" * 5000, "9" * 19, "-1"):
            page = reverse("admin:django_workqueue_queueitem_change", args=[key])
            assert client.get(page).status_code == 302


@pytest.fixture
def after_job_id():
    """Has the next item of a queue get the job id behind a given one, until the test ends."""
    before = {}

    def go(queue, latest):
        run(queue, _LATEST_ID[connections[queue.using].vendor], latest)

    def move(queue, latest):
        before[queue] = queue.enqueue(WorkItem(tenant="-")).job_id
        queue.cancel(queue.claim(worker="-").id, tenant="-")
        queue.adopt(worker="-")
        go(queue, latest)

    yield move
    for queue, latest in before.items():
        go(queue, latest)


_LATEST_ID = {
    "sqlite": "update sqlite_sequence set seq = %s where name = 'django_workqueue_queueitem'",
    "postgresql": "select setval(pg_get_serial_sequence('django_workqueue_queueitem', 'id'), %s)",
}


class TestLargeJobIds:
    """JSON readers and floats take neighbours beyond 2^53 for one."""

    @pytest.mark.parametrize("latest", [2**53 - 2, 2**63 - 10])
    def test_neighbours_are_told_apart_by_every_verb(self, queue, latest, after_job_id):
        after_job_id(queue, latest)
        names = [f"i{number}" for number in range(5)]
        items = queue.enqueue_many(WorkItem(tenant="acme", id=name) for name in names)
        items += (queue.enqueue(WorkItem(tenant="acme", id="i5")),)
        assert [item.job_id for item in items] == [*range(latest + 1, latest + 7)]
        held = queue.claim_many(worker="w", limit=6)
        assert [item.job_id for item in held] == [item.job_id for item in items]
        for item in held[:4]:
            claim = {"tenant": "acme", "worker": "w", "fence": item.fence}
            assert queue.heartbeat(item.id, **claim).job_id == item.job_id
            queue.fail(item.id, error=item.id, retryable=False, **claim)
        assert queue.complete("i4", tenant="acme", worker="w").job_id == items[4].job_id
        assert queue.pause("i5", tenant="acme", worker="w").job_id == items[5].job_id
        letters, after = [], None
        while page := queue.dead_letters(tenant="acme", limit=1, after=after):
            letters += page
            after = page[-1].job_id
        assert [letter.job_id for letter in letters] == [item.job_id for item in items[:4]]
        for item in items:
            shown = queue.get(item.id, tenant="acme", job_id=item.job_id)
            assert (shown.id, shown.job_id) == (item.id, item.job_id)
            with pytest.raises(WorkItemNotFoundError):
                queue.get(item.id, tenant="acme", job_id=item.job_id + 1)
        assert queue.requeue("i0", tenant="acme", job_id=items[0].job_id).state == "queued"
        assert queue.claim(worker="w").job_id == items[0].job_id
        entry = of(AuditEntry, queue).get(verb="requeue")
        assert (entry.item, entry.detail["job_id"]) == (items[0].job_id, items[0].job_id)
        assert examine(queue.using) == []

    def test_the_admin_finds_each(self, queue, settings, after_job_id):
        settings.WORKQUEUE = {"DATABASE": queue.using}
        after_job_id(queue, 2**53)
        items = queue.enqueue_many(WorkItem(tenant="acme", id=f"i-{n}") for n in range(3))
        client = superuser()
        for item in items:
            page = read(client, QueueItem, q=str(item.job_id))
            assert re.findall(r"i-\d", page) == [item.id]
            assert item.id in read(client, QueueItem, item.job_id)


class TestNames:
    """Quotes, percent signs, wildcards and marks that turn the direction are only characters."""

    def test_every_name_is_served_held_shown_and_settled_as_itself(self, queue):
        plain = queue.enqueue(WorkItem(tenant="plain", queue="plain"))
        for number, name in enumerate(NAMES):
            key = name if name.strip() else None
            worker = name if name.strip() else "w"
            item = queue.enqueue(
                WorkItem(
                    tenant=name,
                    id=name,
                    queue=name,
                    handler=name,
                    dedupe_key=name,
                    deployment_id=name,
                    payload={name: name},
                )
            )
            assert queue.enqueue(WorkItem(tenant=name, id=name)).job_id == item.job_id
            scopes = ({"queue": name}, {"tenant": name}, {"queue": name, "tenant": name})
            scope = scopes[number % 3]
            hold = queue.hold(by=name, reason=name, **scope)
            assert (hold.by, hold.reason) == (name, name)
            assert queue.holds() == (hold,)
            assert queue.claim(worker=worker, queue=name, deployment_id=name) is None
            assert queue.unhold(**scope) == hold
            claim = queue.claim(worker=worker, queue=name, deployment_id=name)
            texts = (claim.tenant, claim.id, claim.queue, claim.handler, claim.deployment_id)
            assert {*texts} == {name}
            assert (claim.dedupe_key, claim.worker, claim.payload) == (key, worker, {name: name})
            held = {"tenant": name, "worker": worker, "fence": claim.fence}
            queue.fail(name, error=name, retryable=False, **held)
            [letter] = queue.dead_letters(tenant=name)
            assert letter.failures == (name,)
            queue.requeue(name, tenant=name, by=name, reason=name)
            queue.claim(worker=worker, queue=name, deployment_id=name)
            queue.complete(name, tenant=name, worker=worker, result=name)
            assert queue.get(name, tenant=name).result == name
            entry = of(AuditEntry, queue).get(verb="requeue", tenant=name)
            assert (entry.actor, entry.reason, entry.item_id, entry.queue) == (name,) * 4
            assert queue.stats(queue=name).completed == 1
        assert queue.get(plain.id, tenant="plain").state is WorkState.QUEUED
        assert queue.claim(worker="w", queue="plain").id == plain.id
        assert examine(queue.using) == []

    def test_a_hold_holds_nothing_that_it_would_match_as_a_pattern(self, queue):
        for pattern in ("%", "_", "*", "?", ".*", "a%", "a_", "A", "[a-z]"):
            queue.hold(tenant=pattern)
            queue.hold(queue=pattern)
        for tenant in ("ab", "a", "\\"):
            queue.enqueue(WorkItem(tenant=tenant, queue="ab"))
        assert len(queue.claim_many(worker="w", limit=5, queue="ab")) == 3

    def test_a_worker_of_one_name_adopts_nothing_of_another(self, queue):
        queue.enqueue_many(WorkItem(tenant="acme", id=name) for name in NAMES)
        workers = [name for name in NAMES if name.strip()]
        for name in workers:
            queue.claim(worker=name)
        for name in workers:
            [adopted] = queue.adopt(worker=name)
            assert adopted.failures == ("worker restarted",)
            queue.claim(worker="elsewhere")

    def test_the_admin_shows_each_escaped(self, queue, settings):
        settings.WORKQUEUE = {"DATABASE": queue.using}
        for name in NAMES:
            queue.enqueue(WorkItem(tenant=name, id=name, handler=name))
            worker = name if name.strip() else "w"
            queue.claim(worker=worker)
            queue.fail(name, tenant=name, worker=worker, error=name, retryable=False)
        client = superuser()
        for model in (QueueItem, DeadLetter, Failure):
            page = read(client, model)
            assert "<script>alert" not in page
            assert "&lt;script&gt;alert" in page
        for name in NAMES:
            found = read(client, QueueItem, q=f"{name} {name}")
            assert found.count("field-item_id") == (1 if name == name.strip() else len(NAMES))


#: An argument of a verb, and the longest text that it takes.
ARGUMENTS = {
    "tenant": 200,
    "id": 200,
    "queue": 100,
    "handler": 200,
    "key": 200,
    "worker": 200,
    "by": 200,
    "reason": 2000,
}
MAY_BE_EMPTY = ("handler", "key", "by", "reason")
good_texts = st.text(
    alphabet=st.characters(codec="utf-8", exclude_characters="\x00"), min_size=1, max_size=20
)
any_texts = st.one_of(
    st.text(max_size=20),
    st.text(alphabet=st.characters(codec=None, categories=["Cs", "Cc", "Cf", "Zs"]), max_size=5),
    st.sampled_from(["", " ", "\x00", "\ud800", *NAMES]),
    st.integers(98, 2002).map("é".__mul__),
)


def may_be(argument, text):
    """Whether the contract takes *text* as *argument*; written down here once more."""
    if "\x00" in text or any("\ud800" <= character <= "\udfff" for character in text):
        return argument == "key" and not text.strip()
    if argument == "key" and not text.strip():
        return True
    if argument == "worker" and not text.strip():
        return False
    return len(text) <= ARGUMENTS[argument] and (bool(text) or argument in MAY_BE_EMPTY)


class Life:
    """An item's life by verbs that are told the same texts; what each answered, comparable."""

    def __init__(self, queue, texts):
        self.queue = queue
        self.texts = texts
        self.answers = []

    def say(self, verb, *args, **kwargs):
        """Call *verb*, and note what it takes of the texts and what became of it."""
        try:
            answer = getattr(self.queue, verb)(*args, **kwargs)
        except InvalidFieldError as error:
            self.answers.append((verb, "refused", error.field))
        except WorkQueueError as error:
            self.answers.append((verb, type(error).__name__))
        else:
            self.answers.append((verb, shown(answer)))

    def live(self):
        it = self.texts
        named = {"tenant": it["tenant"]}
        held = named | {"worker": it["worker"]}
        who = {"by": it["by"], "reason": it["reason"]}
        try:
            item = WorkItem(
                id=it["id"],
                queue=it["queue"],
                handler=it["handler"],
                dedupe_key=it["key"],
                payload={"a": 1},
                **named,
            )
        except InvalidFieldError as error:
            self.answers.append(("item", "refused", error.field))
        else:
            self.say("enqueue", item)
            self.say("enqueue_many", [item, item])
        self.say("hold", queue=it["queue"], tenant=it["tenant"], **who)
        self.say("holds")
        self.say("claim", worker=it["worker"], queue=it["queue"])
        self.say("unhold", queue=it["queue"], tenant=it["tenant"], **who)
        self.say("claim", worker=it["worker"], queue=it["queue"])
        self.say("heartbeat", it["id"], **held)
        self.say("pause", it["id"], **held)
        self.say("resume", it["id"], **named, **who)
        self.say("claim_many", worker=it["worker"], queue=it["queue"], limit=3)
        self.say("release", it["id"], **held)
        self.say("claim", worker=it["worker"], queue=it["queue"])
        self.say("adopt", worker=it["worker"])
        self.say("claim", worker=it["worker"], queue=it["queue"])
        self.say("fail", it["id"], error=it["error"], retryable=False, **held)
        self.say("dead_letters", **named)
        self.say("requeue", it["id"], **named, **who)
        self.say("cancel", it["id"], **named, **who)
        self.say("requeue", it["id"], **named, **who)
        self.say("claim", worker=it["worker"], queue=it["queue"])
        self.say("complete", it["id"], result=[1], **held)
        self.say("discard", it["id"], **named, **who)
        self.say("get", it["id"], **named)
        self.say("stats", queue=it["queue"])
        # Nothing is left for the next life.
        for name in ("id", "tenant"):
            if not may_be(name, it[name]):
                return self.answers
        self.queue.adopt(worker="w")
        with contextlib.suppress(WorkQueueError):
            self.queue.cancel(it["id"], tenant=it["tenant"])
        return self.answers


def shown(answer):
    """What can be compared between stores: no times, no job ids."""
    if isinstance(answer, tuple):
        return tuple(map(shown, answer))
    names = ("id", "tenant", "queue", "handler", "dedupe_key", "payload", "state", "attempts")
    names += ("failures", "worker", "fence", "result", "by", "reason", "depth", "completed")
    return {name: getattr(answer, name) for name in names if hasattr(answer, name)}


@pytest.fixture
def three():
    return [make_queue(backend) for backend in ("memory", "sqlite", "postgresql")]


@given(
    texts=st.fixed_dictionaries(dict.fromkeys(ARGUMENTS, good_texts)),
    odd=st.sampled_from([*ARGUMENTS]),
    text=any_texts,
    error=any_texts,
)
@settings(
    max_examples=15,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # shrinking it would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_any_text_is_refused_by_name_or_comes_back_as_it_is_on_all_three_stores(
    three, texts, odd, text, error
):
    # The worker's name is no blank one, or no claim would be.
    texts = {name: value if value.strip() else "x" for name, value in texts.items()}
    texts |= {odd: text, "error": error}
    memory, sqlite, postgresql = (Life(queue, texts).live() for queue in three)
    assert memory == sqlite == postgresql
    refused = {answer[2] for answer in memory if answer[1] == "refused"}
    if not may_be(odd, text):
        names = {"id": {"id", "item_id"}, "key": {"dedupe_key"}}
        assert refused
        assert refused <= names.get(odd, {odd})
        return
    # But for a discard, which needs both and comes too late.
    assert refused <= {"by", "reason"}
    assert all(answer[0] == "discard" for answer in memory if answer[1] == "refused")
    gone = next(answer for verb, *answer in memory if verb == "get")[0]
    key = texts["key"] if texts["key"].strip() else None
    for name, value in (("tenant", texts["tenant"]), ("id", texts["id"]), ("dedupe_key", key)):
        assert gone[name] == value
    assert (gone["queue"], gone["handler"]) == (texts["queue"], texts["handler"])
    assert (gone["state"], gone["result"]) == (WorkState.COMPLETED, [1])
    assert gone["failures"] == ("worker restarted", storable(error))
    [hold] = next(answer for verb, *answer in memory if verb == "holds")[0]
    assert (hold["by"], hold["reason"]) == (texts["by"], texts["reason"])


class TestColumns:
    """What the moves could not live with, the columns refuse."""

    SECONDS = ("lease", "max_lease", "timeout", "backoff", "backoff_cap", "retention")
    TIMES = ("enqueued_at", "available_at", "created_at")
    NO_TIMES = {
        "postgresql": ("infinity", "-infinity", "0044-03-15 BC", "20000-01-01", "9999-12-31"),
        "sqlite": (
            "rubbish",
            "",
            "5",
            "2030-02-30 00:00:00",
            "2030-01-01 00:00:00 x",
            "9999-12-31",
        ),
    }
    NO_SECONDS = {
        "postgresql": ("1e300", "'NaN'", "'Infinity'", "-1"),
        "sqlite": ("1e300", "9e999", "'abc'", "-1"),
    }

    def refused(self, queue, column, value):
        with pytest.raises(Error, match=column), transaction.atomic(using=queue.using):
            run(queue, f"update django_workqueue_queueitem set {column} = {value}")

    def test_times_spans_and_numbers_with_which_nothing_can_be_done(self, queue):
        queue.enqueue_many(WorkItem(tenant="acme") for _ in range(2))
        queue.claim(worker="w")
        vendor = connections[queue.using].vendor
        for column in self.TIMES:
            for value in self.NO_TIMES[vendor]:
                self.refused(queue, column, f"'{value}'")
        for name in (*self.SECONDS, "dead_letter_retention"):
            for value in self.NO_SECONDS[vendor]:
                self.refused(queue, f"{name}_seconds", value)
        for value in ("'abc'", "2147483648") if vendor == "sqlite" else ():
            self.refused(queue, "max_attempts", value)
        assert queue.claim(worker="w") is not None
        queue.advance(61)
        assert len(queue.reap()) == 2

    def test_names_that_are_no_text_or_too_long(self):
        queue = make_queue("sqlite")
        queue.enqueue(WorkItem(tenant="acme"))
        for column in ("tenant", "item_id", "queue", "handler", "deployment_id", "dedupe_key"):
            for value in ("x'6162'", f"'{'x' * 201}'", "'a' || char(0) || 'b'"):
                self.refused(queue, column, value)
        assert queue.claim(worker="w") is not None


class TestRowsWithoutABody:
    """Somebody deleted items by SQL: what is left of them stops nothing."""

    def scene(self, queue):
        names = ("ready", "leased", "finished", "good", "better")
        queue.enqueue_many(WorkItem(tenant="acme", id=name) for name in names[1:4])
        queue.claim_many(worker="w", limit=3)
        queue.complete("finished", tenant="acme", worker="w")
        queue.enqueue_many(WorkItem(tenant="acme", id=name) for name in ("ready", "better"))
        gone = ["ready", "leased", "finished"]
        bodies = of(QueueItem, queue).filter(item_id__in=gone)
        bodies._raw_delete(queue.using)

    def test_claims_go_on(self, queue):
        self.scene(queue)
        claimed = [item.id for _ in range(3) if (item := queue.claim(worker="w"))]
        assert claimed == ["better"]
        assert not of(Ready, queue).exists()

    def test_reaping_and_pruning_go_on(self, queue):
        self.scene(queue)
        queue.complete("good", tenant="acme", worker="w")
        queue.claim_many(worker="w", limit=5)
        queue.advance(86_400 + 1)
        assert [item.id for item in queue.reap()] == ["better"]
        assert queue.prune() >= 1
        assert not of(Lease, queue).exists()

    def test_figures_stay_right(self, queue):
        self.scene(queue)
        queue.claim_many(worker="w", limit=5)
        queue.advance(61)
        assert len(queue.reap()) == 2
        assert not [each for each in examine(queue.using) if "counts" in each]


class TestLeases:
    def test_nonsense_in_leases_does_not_keep_others_from_being_renewed_or_reaped(self, queue):
        queue.enqueue_many(WorkItem(tenant="acme", id=f"i{n}") for n in range(6))
        queue.claim_many(worker="w", limit=6)
        for number, change in enumerate(
            (
                "worker = '%%s'' \"\\', boot = '%%', process = -2147483648",
                "fence = 0, attempts = 2000000000",
                "rank = -32768, queue = 'elsewhere', tenant = '%%'",
                "claimed_at = '9000-01-01 00:00:00', enqueued_at = '1900-01-01 00:00:00'",
                "lease_seconds = 0, max_attempts = -1",
            )
        ):
            run(
                queue,
                f"update django_workqueue_lease set {change} where item = "
                "(select id from django_workqueue_queueitem where item_id = %s)",
                f"i{number}",
            )
        assert queue.heartbeat("i5", tenant="acme", worker="w").held
        for number in range(6):
            assert queue.get(f"i{number}", tenant="acme").state is WorkState.CLAIMED
        queue.advance(61)
        assert {item.id for item in queue.reap()} == {f"i{number}" for number in range(6)}
        assert not of(Lease, queue).exists()


@pytest.mark.parametrize("backend", ["sqlite", "postgresql"])
def test_a_worker_works_off_the_good_items_among_all_of_this(backend, scene, after_job_id):
    it = scene(backend, QueuePolicy(backoff_seconds=0))
    queue = it.queue
    after_job_id(queue, 2**53)
    good = fill(queue, handler="return_one")
    for number, name in enumerate(NAMES):
        queue.enqueue(WorkItem(tenant=name, id=name, handler="return_one", payload={name: number}))
        queue.enqueue(WorkItem(tenant=name, id=f"{name} by nobody", handler=name))
    failing = queue.enqueue(WorkItem(tenant="t", handler="return_rubbish", max_attempts=1))
    worker = it.start("--until-empty", "--name", "%s' \"")
    assert worker.wait() == 0
    assert queue.stats().completed == len(good) + len(NAMES)
    bad = 2 * len(unreadable(queue))
    assert queue.stats().dead_lettered == bad + 1
    assert of(Failure, queue).filter(kind="undecodable").count() == bad
    assert queue.get(failing.id, tenant="t").state is WorkState.DEAD_LETTERED
    assert queue.stats().depth == len(NAMES)  # what no worker had a handler for
    assert SECRET not in worker.log
    assert "\u202e" not in worker.log
    check_burials(queue)
    # Mended, they run.
    for name in few(queue):
        queue.requeue(name, tenant="acme", payload={"mended": True}, by="ann")
    assert it.drain() == 0
    for name in few(queue):
        assert queue.get(name, tenant="acme").result == 1
