"""What can be wrong with the tables, in words that an operator understands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final


class Kind(StrEnum):
    """The ways in which the tables can disagree, in the order in which they are repaired."""

    NO_BODY = "no_body"
    UNLIKE_BODY = "unlike_body"
    SEVERAL_PLACES = "several_places"
    NO_PLACE = "no_place"
    NAMES_FREED = "names_freed"
    ID_UNHELD = "id_unheld"
    ATTEMPTS = "attempts"
    FENCE = "fence"
    COUNTER = "counter"


#: What each means for the work, and what a repair does about it.
EXPLAINED: Final[Mapping[Kind, tuple[str, str]]] = {
    Kind.NO_BODY: (
        "Somebody deleted the item itself. Nothing can be done for it: its payload is gone.",
        "Deletes the row that is left.",
    ),
    Kind.UNLIKE_BODY: (
        "Claims, lists and figures see the item elsewhere than it says of itself.",
        "Writes the row again as the item says.",
    ),
    Kind.SEVERAL_PLACES: (
        "The item could run although it has ended, or twice at a time.",
        "Keeps the most careful place (completed, else dead letter, cancelled, lease, waiting, "
        "ready) and deletes the others.",
    ),
    Kind.NO_PLACE: (
        "No worker will ever find the item, and nothing tells how it ended, if it did. Nobody can "
        "enqueue its id or its dedupe key meanwhile.",
        "Counts an attempt as lost and queues the item again; puts it into the dead letter if "
        "that was its last attempt, or if it may have ended already.",
    ),
    Kind.NAMES_FREED: (
        "The same id or dedupe key can be accepted a second time while the item lives.",
        "Takes id and key back from items that have ended; a second live item you must cancel.",
    ),
    Kind.ID_UNHELD: (
        "Nobody finds the item by its id. The next one of that id starts with fence 0 again, so "
        "that a late worker of this one could be taken for its holder.",
        "Gives the id to the newest item of it, and the highest fence with it, as retention does.",
    ),
    Kind.ATTEMPTS: (
        "The number of attempts and the failures that tell of them disagree.",
        "Counts the greater of the two, and writes a placeholder for each missing failure.",
    ),
    Kind.FENCE: (
        "A worker whose claim is long over could be taken for the present holder.",
        "Raises the fence, unless a worker holds the item: then repair once its claim has ended.",
    ),
    Kind.COUNTER: (
        "`workqueue status`, the figures and max_depth go by a wrong number.",
        "Corrects the counter.",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong. `problem` says what; empty fields don't apply to it."""

    kind: Kind
    problem: str
    queue: str = ""
    tenant: str = ""
    item_id: str = ""
    job_id: int | None = None
    #: For repairs. Where the search for more of the kind goes on; the model and the primary
    #: key of the row; name and error of a figure.
    cursor: Any = None
    place: Any = None
    figure: str = ""
    error: int = 0

    def __str__(self) -> str:
        return f"{self.subject} {self.problem}"

    @property
    def subject(self) -> str:
        """What the finding is about."""
        if self.job_id is None:
            return f"queue {self.queue!r}"
        named = f" ({self.item_id!r} of tenant {self.tenant!r})" if self.item_id else ""
        return f"item {self.job_id}{named}"

    @property
    def meaning(self) -> str:
        """What it means for the work."""
        return EXPLAINED[self.kind][0]

    @property
    def remedy(self) -> str:
        """What a repair does about it."""
        return EXPLAINED[self.kind][1]
