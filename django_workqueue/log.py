"""What the records of a project's log tell of the item that is worked on."""

from __future__ import annotations

import logging
from typing import Any, Final

from django_workqueue.handlers import current_context

#: The attributes that `ContextFilter` gives to a record.
FIELDS: Final = ("queue", "tenant", "item", "job_id", "attempt", "worker")


class ContextFilter(logging.Filter):
    """
    Puts the item whose handler is logging on every record, as the attributes of `FIELDS`.

    Outside of handlers they are empty strings. What a record has of its own (by `extra`)
    stays. It belongs to the handlers of LOGGING: a logger's filter misses what comes from
    the loggers below it.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Let every record pass."""
        own: dict[str, Any] = dict.fromkeys(FIELDS, "")
        if (context := current_context()) is not None:
            item = context.item
            own |= {field: getattr(item, field) for field in FIELDS if field != "item"}
            own["item"] = item.id
        vars(record).update(own | vars(record))
        return True
