"""How things are written for an operator: names that can't forge a line, times, tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

from django.utils import timezone

_UNITS: Final = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"))


def printable(text: str) -> str:
    """Return *text* on one line: control characters, and marks that turn the direction, as
    escapes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def first_line(text: str, length: int) -> str:
    """Return the first line of *text* that says something, cut to *length* characters."""
    line = text.lstrip().partition("\n")[0].rstrip()
    return line if len(line) <= length else f"{line[:length]}…"


def moment(at: datetime) -> str:
    """Return a time in the project's zone, with its distance from UTC."""
    return timezone.localtime(at).isoformat(sep=" ", timespec="seconds")


def iso(at: datetime | None) -> str | None:
    """Return a time for a machine: ISO 8601 in UTC."""
    return None if at is None else at.astimezone(UTC).isoformat()


def duration(seconds: float) -> str:
    """Return a span in its two largest units, rounded down: ``2 h 5 min``."""
    rest = int(seconds)
    parts: list[str] = []
    for size, unit in _UNITS:
        number, rest = divmod(rest, size)
        if number or parts:
            parts.append(f"{number} {unit}")
    return " ".join(part for part in parts[:2] if not part.startswith("0 ")) or "0 s"


def number_of(number: int, noun: str) -> str:
    """Return ``1 item`` or ``2 items``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def table(headings: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return lines with aligned columns; numbers stand on the right."""
    cells = [[*headings], *([_cell(value) for value in row] for row in rows)]
    right = [all(isinstance(value, int) for value in column) for column in zip(*rows, strict=True)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = (
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, right, strict=True)
        )
        for line in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def _cell(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else printable(str(value))


def as_json(value: Any) -> str:
    """Return *value* as JSON of plain ASCII, which no terminal misunderstands."""
    return json.dumps(value, indent=2)
