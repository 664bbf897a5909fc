"""
The columns that Django has no field for, and those that refuse what the moves can't live with.

One body that a driver can't read, or with which the database can't calculate, would stop every
claim of its queue. So a body's column refuses it, whoever writes: text that is none, spans out
of range, times that no `datetime` can be. The rows of the places are copies of what was let in;
they check nothing, since they are written much more often.
"""

from __future__ import annotations

from typing import Any, Final

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg.types.json import Json, Jsonb

from django_workqueue.items import FIRST_YEAR, LAST_YEAR, MAX_SECONDS

_COLLATIONS: Final = {"postgresql": "C", "sqlite": "BINARY"}
#: A day is left at each end of what a datetime can be: every zone can then show it.
_NO_TIME_BEFORE: Final = f"{FIRST_YEAR:04}-01-01 00:00:00"
_NO_TIME_FROM: Final = f"{LAST_YEAR + 1:04}-01-01 00:00:00"


def _with_check(
    field: models.Field[Any, Any], connection: BaseDatabaseWrapper, parameters: Any, **checks: str
) -> Any:
    """Add what the column checks, by the vendor's name; in it, ``{}`` is the column."""
    check = checks.get(connection.vendor)
    if check is None:
        return parameters
    own = check.replace("{}", connection.ops.quote_name(field.column or ""))
    return {**parameters, "check": f"({own})"}


class KeyField(models.CharField):  # type: ignore[type-arg]
    """Text that is compared code point by code point, whatever the database's language."""

    def db_parameters(self, connection: BaseDatabaseWrapper) -> Any:
        """Add the collation that orders by code point; on SQLite, refuse what is no such text."""
        parameters = super().db_parameters(connection)
        parameters = {**parameters, "collation": _COLLATIONS.get(connection.vendor)}
        text = f"typeof({{}}) = 'text' and length({{}}) <= {self.max_length}"
        check = f"{{}} is null or {text} and not instr({{}}, char(0))"
        return _with_check(self, connection, parameters, sqlite=check)


class SecondsField(models.FloatField):  # type: ignore[type-arg]
    """A span that can be added to any time."""

    def db_parameters(self, connection: BaseDatabaseWrapper) -> Any:
        """Refuse what is none. NaN is greater than all on PostgreSQL, and text on SQLite."""
        check = f"{{}} >= 0 and {{}} <= {MAX_SECONDS}"
        parameters = super().db_parameters(connection)
        return _with_check(self, connection, parameters, sqlite=check, postgresql=check)


class LimitField(models.IntegerField):  # type: ignore[type-arg]
    """A number up to which is counted."""

    def db_parameters(self, connection: BaseDatabaseWrapper) -> Any:
        """Refuse what is none, such as text on SQLite."""
        check = f"{{}} >= 0 and {{}} <= {2**31 - 1}"
        parameters = super().db_parameters(connection)
        return _with_check(self, connection, parameters, sqlite=check)


class MomentField(models.DateTimeField):  # type: ignore[type-arg]
    """A time that every zone can show: no infinity, nothing before Christ."""

    def db_parameters(self, connection: BaseDatabaseWrapper) -> Any:
        """Refuse what is none."""
        return _with_check(
            self,
            connection,
            super().db_parameters(connection),
            postgresql=f"{{}} >= timestamptz '{_NO_TIME_BEFORE}+00' "
            f"and {{}} < timestamptz '{_NO_TIME_FROM}+00'",
            # By way of a number of days: February 30th has one, which is another date's.
            sqlite="{} is null or datetime(substr({}, 1, 19), '+0 days') is substr({}, 1, 19) "
            "and julianday({}) is not null and length({}) <= 32 "
            f"and {{}} >= '{_NO_TIME_BEFORE}' and {{}} < '{_NO_TIME_FROM}'",
        )


class ExactJSONField(models.JSONField):
    """
    JSON that is kept as it was written.

    On PostgreSQL of type ``json``: ``jsonb`` would make 1e16 an integer and lose -0.0.
    """

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        """Return the column's type."""
        return "json" if connection.vendor == "postgresql" else super().db_type(connection)

    def get_db_prep_value(
        self, value: Any, connection: BaseDatabaseWrapper, prepared: bool = False
    ) -> Any:
        """Write it as text too."""
        adapted = super().get_db_prep_value(value, connection, prepared)
        # Sent as `jsonb` it would be normalised before it is stored as `json`.
        return Json(adapted.obj, adapted.dumps) if isinstance(adapted, Jsonb) else adapted

    def select_format(self, compiler: Any, sql: str, params: Any) -> Any:
        """Read it as text, so that decoding is ours on every database; bytes may be none."""
        if compiler.connection.vendor == "postgresql":
            sql = f"{sql}::text"
        elif compiler.connection.vendor == "sqlite":
            sql = f"cast({sql} as blob)"
        return sql, params

    def from_db_value(self, value: Any, expression: Any, connection: BaseDatabaseWrapper) -> Any:
        """Decode it. What can't be decoded comes as text: it must not hide the rows beside it."""
        if isinstance(value, bytes):
            value = value.decode(errors="surrogateescape")
        try:
            return super().from_db_value(value, expression, connection)
        except (ValueError, RecursionError):
            return value
