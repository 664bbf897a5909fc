"""
What is kept of an error: text that any store takes, however odd the error was.

Recording a failure must never fail itself, or the item would be stuck: nothing here
raises. The fingerprint lets an operator see a thousand failures as one.
"""

from __future__ import annotations

import hashlib
import re
import traceback as tracebacks
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

MAX_TEXT_BYTES = 65_536
_CUT = " … [cut]"
# What differs between two failures of one kind: numbers, hex ids, quoted values.
_VARIABLE = re.compile(r"0x[0-9a-fA-F]+|[0-9a-fA-F]{8,}|\d+|'[^']*'|\"[^\"]*\"")


class FailureKind(StrEnum):
    """How an attempt ended without success."""

    ERROR = "error"  # its worker reported a failure
    LAPSED = "lapsed"  # the lease ran out
    DIED = "died"  # the process that ran it died
    RESTARTED = "restarted"  # its worker came back under the same name
    SHUTDOWN = "shutdown"  # it was cut by a drain
    TIMEOUT = "timeout"  # it exceeded its time limit
    UNDECODABLE = "undecodable"  # its payload could not be read


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureText:
    """The storable form of an error: no NUL, no lone surrogate, at most 64 KiB a text."""

    message: str
    error_class: str = ""
    traceback: str = ""
    fingerprint: str = ""


def describe(error: str | BaseException) -> FailureText:
    """Return what to store of *error*, a text or an exception. Never raises."""
    if isinstance(error, BaseException):
        return _describe_exception(error)
    message = storable(_safely(lambda: error))
    return FailureText(message=message, fingerprint=fingerprint("", message, ""))


def _describe_exception(error: BaseException) -> FailureText:
    kind = type(error)
    name = _safely(lambda: kind.__qualname__)
    error_class = storable(f"{_safely(lambda: kind.__module__)}.{name}")[:200]
    text = _safely(lambda: error)
    message = storable(f"{name}: {text}" if text else name)
    trace = storable(_safely(lambda: "".join(tracebacks.format_exception(error))), keep="tail")
    frame = _safely(lambda: _deepest_frame(error))
    return FailureText(
        message=message,
        error_class=error_class,
        traceback=trace,
        fingerprint=fingerprint(error_class, message, frame),
    )


def _safely(produce: Callable[[], object]) -> str:
    try:
        # A plain text, not an object of a subclass with ways of its own.
        return str.__str__(str(produce()))
    except BaseException as problem:  # a handler's own code runs here, whatever it raises
        return f"<no text: {type(problem).__name__}>"


def _deepest_frame(error: BaseException) -> str:
    frames = tracebacks.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].name}" if frames else ""


def storable(text: str, *, keep: str = "head", limit: int = MAX_TEXT_BYTES) -> str:
    """
    Return *text* with NUL and lone surrogates escaped, cut to *limit* bytes of UTF-8.

    *keep* says which end survives a cut: "head", or "tail" for tracebacks.
    """
    if len(text) > limit:  # a huge text must not be encoded whole
        text = text[:limit] + _CUT if keep == "head" else _CUT + text[-limit:]
    data = text.replace("\x00", "\\x00").encode(errors="backslashreplace")
    if len(data) <= limit:
        return data.decode()
    room = limit - len(_CUT.encode())
    if keep == "head":
        return data[:room].decode(errors="ignore") + _CUT
    return _CUT + data[-room:].decode(errors="ignore")


def fingerprint(error_class: str, message: str, frame: str) -> str:
    """Return 16 hex digits that failures of one kind share, whatever numbers they name."""
    first_line = message.partition("\n")[0][:500]
    kind = "\x1f".join((error_class, _VARIABLE.sub("#", first_line), frame))
    return hashlib.sha256(kind.encode(errors="replace")).hexdigest()[:16]
