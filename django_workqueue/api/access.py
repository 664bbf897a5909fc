"""
Who may do what.

Denied by default, and decided by what identifies the caller. A token is judged by its scopes
alone: also a superuser's must hold the admin scope. A session's user needs the permissions of
the models. Payloads are more than operators need: a token's user must have the permission, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol

from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.settings import api_settings
from rest_framework.throttling import ScopedRateThrottle
from rest_framework_simplejwt.authentication import JWTAuthentication
from rest_framework_simplejwt.tokens import Token

from django_workqueue.arguments import MAX_ACTOR_LENGTH
from django_workqueue.conf import ApiSettings, get_settings
from django_workqueue.failures import storable

#: The token comes first: so a caller without any identity is told 401, and how to get one.
AUTHENTICATION: Final[Sequence[type[BaseAuthentication]]] = (
    JWTAuthentication,
    SessionAuthentication,
)

#: The permissions of `QueueItem`, by what they allow.
VIEW: Final = "view_queueitem"
VIEW_PAYLOAD: Final = "view_payload"
EDIT_PAYLOAD: Final = "edit_payload"
REQUEUE: Final = "requeue"
CANCEL: Final = "cancel"
DISCARD: Final = "discard"
HOLD: Final = "hold"


class Guarded(Protocol):
    """A view that says which permission its present action needs."""

    @property
    def permission(self) -> str:
        """The codename of the permission."""


class OperatorPermission(BasePermission):
    """Lets in who may do what the view is asked for."""

    def has_permission(self, request: Request, view: Guarded) -> bool:  # type: ignore[override]
        """Judge by the identity that the request carries, or that it carries none."""
        api = get_settings().api
        if isinstance(request.auth, Token):
            return api.admin_scope in scopes(request.auth.payload, api)
        if _is_known(request):
            return has_permission(request, view.permission)
        return api.open


def has_permission(request: Request, codename: str) -> bool:
    """Return whether the caller's user has a permission of `QueueItem`."""
    return _is_known(request) and bool(request.user.has_perm(f"django_workqueue.{codename}"))


def _is_known(request: Request) -> bool:
    # `UNAUTHENTICATED_USER` may be None.
    return bool(request.user and request.user.is_authenticated)


def scopes(claims: Mapping[str, Any], api: ApiSettings) -> frozenset[str]:
    """
    Return the scopes that a token claims: each claim a list of texts, or one text with spaces
    between (RFC 8693, section 4.2). Whatever else it is grants nothing.
    """
    found: set[str] = set()
    for name in api.scope_claims:
        told = claims.get(name)
        parts = told.split() if isinstance(told, str) else told
        if isinstance(parts, list | tuple):
            found.update(part for part in parts if isinstance(part, str))
    return frozenset(found)


class Throttle(ScopedRateThrottle):
    """
    Limits by the scope of the view's action: ``workqueue-read``, ``workqueue-write`` and
    ``workqueue-bulk`` in ``DEFAULT_THROTTLE_RATES``. One that has no rate there has no limit.
    """

    def get_rate(self) -> str | None:
        """Return the rate of the scope, as the settings are now."""
        rates: dict[str, Any] = api_settings.DEFAULT_THROTTLE_RATES
        rate: str | None = rates.get(self.scope or "")
        return rate


def actor(request: Request) -> str:
    """Return the name that the audit keeps of the caller."""
    name = request.user.get_username() if _is_known(request) else "anonymous"
    return storable(str(name))[:MAX_ACTOR_LENGTH]
