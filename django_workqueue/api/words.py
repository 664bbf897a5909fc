"""
The names of states that `/queue` prints and accepts.

Two of them are other words than Python and the database have: what is claimed is running to
whoever looks on, and a dead letter is what failed.
"""

from __future__ import annotations

from typing import Final

from django_workqueue.items import WorkState

_SHOWN: Final = {WorkState.CLAIMED: "running", WorkState.DEAD_LETTERED: "failed"}

STATUSES: Final = {_SHOWN.get(state, state.value): state for state in WorkState}
_NAMES: Final = {state: name for name, state in STATUSES.items()}


def status_of(state: WorkState | str) -> str:
    """Return the name under which *state* is shown."""
    return _NAMES[WorkState(state)]
