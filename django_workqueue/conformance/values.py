"""Which values are taken, and that they come back unchanged; which are refused, by name."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any, cast

from django_workqueue.conformance._bench import (
    HOLDER_VERBS,
    OPERATOR_VERBS,
    Bench,
    new_item,
    refused,
)
from django_workqueue.exceptions import InvalidFieldError, PayloadError, WorkItemNotFoundError
from django_workqueue.items import WorkItem, WorkState


def nested(depth: int) -> dict[str, Any]:
    """Return a payload of so many objects, one in the other."""
    payload: dict[str, Any] = {}
    for _ in range(depth - 1):
        payload = {"in": payload}
    return payload


class Payloads(Bench):
    def refuse_payload(self, payload: Any, field: str) -> None:
        with refused(PayloadError, field=field):
            self.put(payload=payload)

    def test_a_payload_is_an_object(self) -> None:
        """SPEC 3."""
        self.start()
        for payload in (None, [], ["a"], "text", 5, b"bytes", object()):
            self.refuse_payload(payload, "payload")
        assert self.figures().depth == 0

    def test_a_value_that_json_does_not_have_is_refused(self) -> None:
        """SPEC 3."""
        self.start()
        cyclic: list[Any] = []
        cyclic.append(cyclic)
        for value in (
            *(float("nan"), float("inf"), float("-inf")),
            *(2**63, -(2**63) - 1, 10**5000),
            *("\x00", "a\x00b", "\ud800", "\udfff tail"),
            *(b"bytes", {1}, object(), Decimal(1), datetime(2020, 1, 1, tzinfo=UTC), 1j, range(2)),
        ):
            self.refuse_payload({"bad": value}, "payload.bad")
            self.refuse_payload({"a": {"bad": [1, value]}}, "payload.a.bad")
        self.refuse_payload({"cyclic": cyclic}, "payload")
        assert self.figures().depth == 0

    def test_a_key_that_is_no_plain_text_is_refused(self) -> None:
        """SPEC 3."""
        self.start()
        for key in (1, None, True, 1.5, b"k", ("a",), "\x00", "a\ud800"):
            self.refuse_payload({key: 1}, "payload")
            self.refuse_payload({"a": {key: 1}}, "payload.a")
        assert self.figures().depth == 0

    def test_nesting_has_a_limit(self) -> None:
        """SPEC 3."""
        self.start()
        assert self.put(payload=nested(100)).payload == nested(100)
        self.refuse_payload(nested(101), "payload")
        self.refuse_payload(nested(50_000), "payload")
        assert self.figures().depth == 1

    def test_the_size_limit_counts_bytes_of_json(self) -> None:
        """SPEC 3."""
        self.start(max_payload_bytes=100)
        for fits in ("x" * 92, "é" * 46, "😀" * 23):
            assert self.put(payload={"k": fits}).payload == {"k": fits}
            self.refuse_payload({"k": fits + "x"}, "payload")
        assert self.figures().depth == 3

    def test_the_largest_payload_comes_back(self) -> None:
        """SPEC 3: 256 KiB."""
        self.start()
        payload = {"k": "é" * (131_072 - 4)}
        assert self.put(payload=payload).payload == payload
        self.refuse_payload({"k": "é" * (131_072 - 3)}, "payload")

    def test_payloads_come_back_unchanged(self) -> None:
        """SPEC 3: value by value, type by type."""
        self.start()
        payload = {
            "": "the empty key",
            "integers": [0, -1, 2**53 + 1, 2**63 - 1, -(2**63)],
            "floats": [0.1, 1.0, -0.0, 1e16, 1e308, 5e-324, -123456.789e-7],
            "words": [True, False, None],
            "texts": ["", " ", "\n\t\r\x01\x7f", "é", "e\u0301", "中", "😀", "\u2028", "\\u0000"],
            "empty": [{}, [], [[]], {"": {}}],
            'quote " and \\': "</script>",
            "😀": "a key",
            "zz": 1,
            "a": 2,
        }
        stored = self.put(payload=payload)
        for item in (stored, self.take(), self.look(stored)):
            assert item.payload == payload
            assert written(item.payload) == written(payload)

    def test_tuples_and_subclasses_come_back_as_plain_json(self) -> None:
        """SPEC 3."""
        self.start()
        item = self.put(payload={"tuple": (1, 2), "int": _Number(3), "text": _Text("t")})
        assert item.payload == {"tuple": [1, 2], "int": 3, "text": "t"}

    def test_a_payload_is_not_shared_with_the_caller(self) -> None:
        """SPEC 3."""
        self.start()
        payload = {"list": [1]}
        stored = self.put(payload=payload)
        payload["list"].append(2)
        taken = self.take()
        taken.payload["list"].append(3)
        assert self.look(stored).payload == {"list": [1]}


class _Number(int):
    pass


class _Text(str):
    __slots__ = ()


def written(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


#: The text fields of an item: the longest value, and whether it may be empty.
TEXT_FIELDS = {
    "id": (200, False),
    "tenant": (200, False),
    "queue": (100, False),
    "handler": (200, True),
    "dedupe_key": (200, True),
    "deployment_id": (100, True),
}


class Fields(Bench):
    def refuse_field(self, name: str, value: Any) -> None:
        fields: dict[str, Any] = {"tenant": "acme", name: value}
        with refused(InvalidFieldError, field=name):
            self.queue.enqueue(WorkItem(**fields))

    def test_texts_that_no_store_can_keep_are_refused(self) -> None:
        """SPEC 3."""
        self.start()
        for field, (limit, may_be_empty) in TEXT_FIELDS.items():
            for value in ("a\x00", "\ud800", "x" * (limit + 1), "😀" * (limit + 1), 5, b"b", ["a"]):
                self.refuse_field(field, value)
            if not may_be_empty:
                self.refuse_field(field, "")
                self.refuse_field(field, None)
        assert self.figures().depth == 0

    def test_the_longest_texts_come_back(self) -> None:
        """SPEC 3: characters are counted, not bytes."""
        self.start()
        for character in ("x", "😀"):
            lengths = {field: limit for field, (limit, _) in TEXT_FIELDS.items()}
            texts: dict[str, Any] = {field: character * n for field, n in lengths.items()}
            self.queue.enqueue(WorkItem(**texts))
            item = self.take(
                character * 200, queue=texts["queue"], deployment_id=texts["deployment_id"]
            )
            assert {field: getattr(item, field) for field in texts} == texts
            done = self.say("complete", item)
            assert self.queue.get(texts["id"], tenant=texts["tenant"]) == done

    def test_odd_texts_come_back(self) -> None:
        """SPEC 3."""
        self.start()
        for text in (" ", "a/b?c=d&e#f", "%s %(x)s {0}", "'; --", "\n", "ﬁ\u200b", "..", "-1", "0"):
            item = self.put(text, text, queue=text, handler=text)
            assert (item.id, item.tenant, item.queue, item.handler) == (text,) * 4
            assert self.take(queue=text).id == text
            assert self.look(item).worker == "w1"

    def test_priorities_have_a_scale(self) -> None:
        """SPEC 3."""
        self.start()
        for priority in (-101, 101, 10**5000, 1.0, True, "5", None):
            self.refuse_field("priority", priority)
        assert [self.put(priority=edge).priority for edge in (-100, 100)] == [-100, 100]

    def test_numbers_that_make_no_sense_are_refused(self) -> None:
        """SPEC 3."""
        self.start()
        for attempts in (0, -1, 2**31, 1.5, True, "3"):
            self.refuse_field("max_attempts", attempts)
        for seconds in (0, -1, float("nan"), float("inf"), 10**5000, True, "3"):
            self.refuse_field("timeout_seconds", seconds)
        assert self.figures().depth == 0

    def test_times_that_no_zone_could_show_are_refused(self) -> None:
        """SPEC 3: nothing is stored."""
        self.start()
        west, east = timezone(timedelta(hours=-12)), timezone(timedelta(hours=14))
        odd = (datetime.max.replace(tzinfo=west), datetime.min.replace(tzinfo=east))
        for name in ("enqueued_at", "available_at"):
            for value in odd:
                with refused(InvalidFieldError, field=name):
                    self.put(None, **cast(dict[str, Any], {name: value}))
        assert self.figures().depth == 0

    def test_far_times_and_odd_zones_are_kept(self) -> None:
        """SPEC 3."""
        self.start()
        zone = timezone(timedelta(hours=5, minutes=45, seconds=7))
        for number, year in enumerate((3, 1900, 9997)):
            moment = datetime(year, 7, 1, 12, 30, 15, 123_456, tzinfo=zone)
            item = self.put(f"i-{number}", enqueued_at=moment, available_at=moment)
            assert item.enqueued_at == item.available_at == moment
            assert self.look(item).enqueued_at == moment

    def test_only_items_can_be_enqueued(self) -> None:
        """SPEC 3."""
        self.start()
        for offered in ({"tenant": "acme"}, None, "acme"):
            with refused(InvalidFieldError, field="item"):
                self.queue.enqueue(cast(Any, offered))
        with refused(InvalidFieldError, field="items"):
            self.queue.enqueue_many(cast(Any, None))
        assert self.figures().depth == 0

    def test_whether_to_retry_is_yes_or_no(self) -> None:
        """SPEC 4."""
        self.start()
        item = self.take_new("i-1")
        values: list[Any] = ["no", "", None, 2, []]
        for value in values:
            with refused(InvalidFieldError, field="retryable"):
                self.say("fail", item, retryable=value)
        assert self.look(item) == item

    def test_naive_times_are_refused(self) -> None:
        """SPEC 3."""
        self.start()
        naive = datetime(2030, 1, 1)  # noqa: DTZ001
        for field in ("enqueued_at", "available_at"):
            for value in (naive, naive.date(), 5, "2030-01-01T00:00:00Z"):
                self.refuse_field(field, value)
        assert self.figures().depth == 0

    def test_far_and_fine_times_are_kept(self) -> None:
        """SPEC 3: to the microsecond."""
        self.start()
        for time in (
            datetime(1900, 1, 1, tzinfo=UTC),
            datetime(2001, 2, 3, 4, 5, 6, 7, tzinfo=UTC),
            datetime(2101, 2, 3, 4, 5, 6, 123456, tzinfo=UTC),
            datetime(9000, 12, 31, 23, 59, 59, 999999, tzinfo=UTC),
        ):
            item = self.look(self.put(enqueued_at=time, available_at=time))
            assert (item.enqueued_at, item.available_at) == (time, time)
        assert self.figures().due == 2


BAD_TEXTS = ("", "a\x00", "\ud800", "x" * 201, 5, None, b"b")
BAD_FENCES = (-1, 2**63, 1.0, True, "1")
BAD_SECONDS = (-1, float("nan"), float("inf"), 10**5000, True, "5")
BAD_JOB_IDS = (-1, 2**63, 1.0, True, "1")
BAD_LIMITS = (0, -1, 1.0, True, "5")
#: Of who acts, and why; of a verb that needs both, also what says nothing.
BAD_ACTORS: dict[str, tuple[Any, ...]] = {
    "by": ("a\x00", "\ud800", "x" * 201, "😀" * 201, 5, b"b", ["a"]),
    "reason": ("a\x00", "\ud800", "x" * 2001, "😀" * 2001, 5, b"b", ["a"], None),
}
BLANK = ("", " ", "\t\n", None)
#: Values that can't be right, by verb and argument.
BAD_ARGUMENTS: dict[str, dict[str, tuple[Any, ...]]] = {
    "claim": {
        "worker": (*BAD_TEXTS, " "),
        "queue": (*BAD_TEXTS, "x" * 101),
        "lease_seconds": (*BAD_SECONDS, 0),
        "deployment_id": ("a\x00", "\ud800", "x" * 101, 5),
    },
    "claim_many": {
        "worker": (*BAD_TEXTS, " "),
        "queue": BAD_TEXTS,
        "lease_seconds": (*BAD_SECONDS, 0),
        "deployment_id": ("a\x00", "\ud800", "x" * 101, 5),
        "limit": (0, -1, 10_001, 10**5000, 1.0, True, "5", None),
    },
    **{
        verb: {
            "item_id": BAD_TEXTS,
            "tenant": BAD_TEXTS,
            "worker": (*BAD_TEXTS, " "),
            "fence": BAD_FENCES,
        }
        for verb in HOLDER_VERBS
    },
    **{
        verb: {"item_id": BAD_TEXTS, "tenant": BAD_TEXTS, "job_id": BAD_JOB_IDS, **BAD_ACTORS}
        for verb in OPERATOR_VERBS
    },
    **{
        verb: {
            "queue": ("", "a\x00", "\ud800", "x" * 101, 5, b"b"),
            "tenant": ("", "a\x00", "\ud800", "x" * 201, 5, b"b"),
            **BAD_ACTORS,
        }
        for verb in ("hold", "unhold")
    },
    "reap": {"limit": BAD_LIMITS},
    "prune": {"limit": BAD_LIMITS},
    "adopt": {"worker": (*BAD_TEXTS, " ")},
    "get": {"item_id": BAD_TEXTS, "tenant": BAD_TEXTS, "job_id": BAD_JOB_IDS},
    "dead_letters": {
        "tenant": BAD_TEXTS,
        "limit": (0, -1, 1001, 1.0, True, "5", None),
        "after": (-1, 2**63, 1.0, True, "1"),
    },
    "stats": {"queue": (*BAD_TEXTS, "x" * 101)},
}


class Arguments(Bench):
    def call(self, verb: str, **changes: Any) -> None:
        """Call *verb* as the claim "i-1" could, with *changes* to that."""
        known = {"item_id": "i-1", "tenant": "acme", "worker": "w1", "fence": 1, "limit": 5}
        known |= {"by": "ann", "reason": "because"}
        names = [name for name in known if name in BAD_ARGUMENTS.get(verb, {})]
        arguments = {name: known[name] for name in names} | changes
        if verb == "fail":
            arguments.setdefault("error", "boom")
        positional = [arguments.pop("item_id")] if "item_id" in arguments else []
        getattr(self.queue, verb)(*positional, **arguments)

    def test_arguments_that_can_not_be_right_are_refused_by_name(self) -> None:
        """SPEC 3, 4."""
        self.start()
        item = self.take_new("i-1")
        for verb, arguments in BAD_ARGUMENTS.items():
            for name, values in arguments.items():
                for value in values:
                    with refused(InvalidFieldError, field=name):
                        self.call(verb, **{name: value})
        assert self.look(item) == item
        assert self.queue.holds() == ()

    def test_who_discards_says_so_and_why(self) -> None:
        """SPEC 4."""
        self.start()
        dead = self.bury()
        for name in ("by", "reason"):
            for value in BLANK:
                with refused(InvalidFieldError, field=name):
                    self.operate("discard", dead, **{name: value})
        assert self.queue.dead_letters(tenant="acme") == (dead,)

    def test_who_does_anything_else_need_not_say_so(self) -> None:
        """SPEC 4: nobody, or an empty name; without a reason."""
        self.start()
        queue = self.queue
        for by in (None, "", " "):
            item = self.in_state(WorkState.PAUSED)
            for verb in ("resume", "cancel", "requeue", "cancel"):
                self.operate(verb, item, by=by, reason="")
            assert queue.hold(queue="mail", by=by) == queue.unhold(queue="mail", by=by)

    def test_a_hold_of_nothing_is_refused(self) -> None:
        """SPEC 4."""
        self.start()
        self.put()
        for verb in ("hold", "unhold"):
            with refused(InvalidFieldError, field="queue"):
                getattr(self.queue, verb)()
        assert self.queue.holds() == ()
        self.take()

    def test_a_payload_given_later_has_the_rules_of_the_first(self) -> None:
        """SPEC 3: through requeue and resume."""
        self.start()
        states = {"requeue": WorkState.DEAD_LETTERED, "resume": WorkState.PAUSED}
        items = {verb: self.in_state(state) for verb, state in states.items()}
        bad: dict[str, tuple[Any, ...]] = {
            "payload": ([], "text", 5, b"b", {1: 1}, {"\x00": 1}, nested(101))
        }
        bad["payload.a"] = ({"a": float("nan")}, {"a": 2**63}, {"a": "\ud800"}, {"a": object()})
        for verb, item in items.items():
            for field, payloads in bad.items():
                for payload in payloads:
                    with refused(PayloadError, field=field):
                        self.operate(verb, item, payload=payload)
            assert self.look(item) == item
            kept = self.operate(verb, item, payload={"tuple": (1, 2.0, 1e16), "": "é😀"}).payload
            assert written(kept) == written({"tuple": [1, 2.0, 1e16], "": "é😀"})
            assert written(self.look(item).payload) == written(kept)

    def test_delays_that_can_not_be_right_are_refused(self) -> None:
        """SPEC 4."""
        self.start()
        item = self.take_new("i-1")
        for verb in ("fail", "release"):
            for seconds in BAD_SECONDS:
                with refused(InvalidFieldError, field="delay_seconds"):
                    self.call(verb, delay_seconds=seconds)
        assert self.look(item) == item

    def test_the_largest_arguments_are_taken(self) -> None:
        """SPEC 4."""
        self.start()
        item = self.take_new()
        self.say("release", item, delay_seconds=86_400 * 365)
        assert self.take_many(10_000) == ()
        assert self.queue.dead_letters(tenant="acme", limit=1000) == ()
        assert self.queue.reap(limit=2**31 - 1) == ()
        assert self.queue.prune(limit=2**63 - 1) == 0
        for verb in (*OPERATOR_VERBS, "get"):
            with refused(WorkItemNotFoundError):
                self.operate(verb, item, job_id=2**63 - 1)

    def test_the_longest_names_and_reasons_are_taken(self) -> None:
        """SPEC 4: characters are counted, not bytes."""
        self.start()
        for character in ("x", "😀"):
            who: dict[str, Any] = {"by": character * 200, "reason": character * 2000}
            item = self.in_state(WorkState.PAUSED)
            for verb in ("resume", "cancel", "requeue"):
                self.operate(verb, item, **who)
            self.say("fail", self.take())
            assert self.operate("discard", item, **who).state is WorkState.CANCELLED
            hold = self.queue.hold(queue=character * 100, tenant=character * 200, **who)
            assert (hold.queue, hold.tenant) == (character * 100, character * 200)
            assert (hold.by, hold.reason) == (who["by"], who["reason"])
            assert self.queue.holds() == (hold,)
            assert self.queue.unhold(queue=hold.queue, tenant=hold.tenant, **who) == hold

    def test_several_items_must_be_items(self) -> None:
        """SPEC 4: and one that can't be made is never offered."""
        self.start()
        with refused(InvalidFieldError, field="tenant"):
            self.queue.enqueue_many([new_item("a"), new_item("b", "")])
        assert self.figures().depth == 0
