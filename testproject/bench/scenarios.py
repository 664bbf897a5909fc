"""Every scenario that the command knows, by name."""

from typing import Final

from bench import bulk, claim, enqueue, raw
from bench.rounds import Scenario

SCENARIOS: Final[dict[str, Scenario]] = {
    "raw": raw.SCENARIO,
    "claim": claim.SCENARIO,
    "enqueue": enqueue.SCENARIO,
    "bulk": bulk.SCENARIO,
}
