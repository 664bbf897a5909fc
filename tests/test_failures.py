"""What is kept of an error, however odd it is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from django_workqueue.failures import MAX_TEXT_BYTES, FailureText, describe, fingerprint, storable


class TextFailsError(Exception):
    def __str__(self):
        raise RuntimeError("no text")


class TextIsNoTextError(Exception):
    def __str__(self):
        return 5


class HugeReprError(Exception):
    def __init__(self):
        super().__init__("x" * 2**21)


def raised(error: BaseException) -> BaseException:
    """Return *error* with a traceback."""
    try:
        raise error
    except BaseException as caught:
        return caught


def deep_group(depth: int) -> BaseException:
    error: Exception = ValueError("deepest")
    for _ in range(depth):
        error = ExceptionGroup("group", [error])
    return error


def assert_storable(text: FailureText) -> None:
    for part in (text.message, text.error_class, text.traceback, text.fingerprint):
        assert "\x00" not in part
        assert len(part.encode()) <= MAX_TEXT_BYTES


@pytest.mark.parametrize(
    "error",
    [
        "",
        "plain",
        "\x00\ud800\udfff",
        "x" * 2**21,
        "😀" * 2**19,
        "\ud800" * 2**17,
        TextFailsError(),
        TextIsNoTextError(),
        HugeReprError(),
        ValueError("a\x00b\ud800"),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        ExceptionGroup("several", [ValueError("one"), TextFailsError()]),
        deep_group(5000),
        KeyboardInterrupt(),
        SystemExit(3),
        type("Näme", (Exception,), {"__module__": "\ud800\x00"})("odd class"),
        type("X" * 5000, (Exception,), {})("long class"),
        5,
        None,
        b"bytes\xff",
        object(),
    ],
    ids=lambda error: f"{type(error).__name__!a:.30}",
)
def test_no_error_is_refused(error):
    assert_storable(describe(error))
    if isinstance(error, BaseException):
        assert_storable(describe(raised(error)))


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters()))
def test_any_text_can_be_kept(text):
    kept = storable(text)
    assert "\x00" not in kept
    assert len(kept.encode()) <= MAX_TEXT_BYTES


def test_plain_text_is_kept_unchanged():
    assert describe("no route ✓").message == "no route ✓"
    assert storable("x" * MAX_TEXT_BYTES) == "x" * MAX_TEXT_BYTES


def test_what_can_not_be_stored_is_escaped():
    assert storable("a\x00b\ud800c") == "a\\x00b\\ud800c"


def test_a_long_text_says_that_it_was_cut():
    for text in ("x" * (MAX_TEXT_BYTES + 1), "é" * MAX_TEXT_BYTES, "x" * 2**21):
        assert storable(text).endswith("[cut]")
        assert storable(text, keep="tail").startswith(" … [cut]")


def test_a_long_traceback_keeps_its_end():
    text = storable("head" + "x" * MAX_TEXT_BYTES + "tail", keep="tail")
    assert text.endswith("tail")
    assert "head" not in text


def test_an_exception_is_described_by_class_text_and_place():
    text = describe(raised(ValueError("no such account")))
    assert text.message == "ValueError: no such account"
    assert text.error_class == "builtins.ValueError"
    assert "in raised" in text.traceback
    assert len(text.fingerprint) == 16


def test_an_exception_without_a_text_is_its_name():
    assert describe(ValueError()).message == "ValueError"


def test_an_exception_that_has_no_text_says_so():
    assert describe(TextFailsError()).message == "TextFailsError: <no text: RuntimeError>"


def test_failures_of_one_kind_share_a_fingerprint():
    texts = [f"user {n} not found at 0x{n:08x} in 'table_{n}'" for n in (1, 22, 333)]
    assert len({describe(raised(LookupError(text))).fingerprint for text in texts}) == 1
    assert len({describe(text).fingerprint for text in texts}) == 1


def test_failures_of_two_kinds_differ_in_their_fingerprint():
    kinds = {
        describe("no route").fingerprint,
        describe("no account").fingerprint,
        describe(LookupError("no route")).fingerprint,
        describe(ValueError("no route")).fingerprint,
        describe(raised(ValueError("no route"))).fingerprint,
    }
    assert len(kinds) == 5


def test_only_the_first_line_makes_the_fingerprint():
    assert fingerprint("E", "first\nsecond", "f") == fingerprint("E", "first\nother", "f")
