"""The database's time in the statements, from one place."""

from __future__ import annotations

from typing import Final

_CLOCK: Final = {
    "{now}": "(statement_timestamp() + %(skew)s::interval)",
    "{clock}": "(clock_timestamp() + %(skew)s::interval)",
}


def timed(text: str) -> str:
    for name, fragment in _CLOCK.items():
        text = text.replace(name, fragment)
    return text


NOW: Final = timed("select {clock} as now")
