"""The columns that Django has no field for."""

from __future__ import annotations

from typing import Any, Final

from django.db import models
from django.db.backends.base.base import BaseDatabaseWrapper
from psycopg.types.json import Json, Jsonb

_COLLATIONS: Final = {"postgresql": "C", "sqlite": "BINARY"}


class KeyField(models.CharField):  # type: ignore[type-arg]
    """Text that is compared code point by code point, whatever the database's language."""

    def db_parameters(self, connection: BaseDatabaseWrapper) -> Any:
        """Add the collation that orders by code point."""
        parameters = super().db_parameters(connection)
        return {**parameters, "collation": _COLLATIONS.get(connection.vendor)}


class ExactJSONField(models.JSONField):
    """
    JSON that is kept as it was written.

    On PostgreSQL of type ``json``: ``jsonb`` would make 1e16 an integer and lose -0.0.
    """

    def db_type(self, connection: BaseDatabaseWrapper) -> str | None:
        """Return the column's type."""
        return "json" if connection.vendor == "postgresql" else super().db_type(connection)

    def from_db_value(self, value: Any, expression: Any, connection: BaseDatabaseWrapper) -> Any:
        """Read it; as text, what Python can't decode."""
        try:
            return super().from_db_value(value, expression, connection)
        except (ValueError, RecursionError):
            return value

    def get_db_prep_value(
        self, value: Any, connection: BaseDatabaseWrapper, prepared: bool = False
    ) -> Any:
        """Write it as text too."""
        adapted = super().get_db_prep_value(value, connection, prepared)
        # Sent as `jsonb` it would be normalised before it is stored as `json`.
        return Json(adapted.obj, adapted.dumps) if isinstance(adapted, Jsonb) else adapted

    def select_format(self, compiler: Any, sql: str, params: Any) -> Any:
        """Read it as text, so that decoding is ours on every database."""
        if compiler.connection.vendor == "postgresql":
            sql = f"{sql}::text"
        return sql, params
