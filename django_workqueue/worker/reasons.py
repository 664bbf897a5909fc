"""Why a handler was told to stop. It reads the reason in `ClaimLostError`."""

from __future__ import annotations

from typing import Final

TIMEOUT: Final = "timeout"
SHUTDOWN: Final = "shutdown"
#: Its process must end, because another handler in it doesn't.
RETIRED: Final = "process retired"
CANCELLED: Final = "cancelled"
#: The attempt still has an end to be stored. With every other reason the claim is lost.
SETTLING_REASONS: Final = frozenset({TIMEOUT, SHUTDOWN, RETIRED, CANCELLED})

CAPPED: Final = "capped"
EXPIRED: Final = "expired"
TAKEN: Final = "taken"
#: The supervisor has stored how the attempt ended.
OVERDUE: Final = "ended for its time limit"
