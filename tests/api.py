"""Calling `/queue` in tests: every endpoint, and identities of every kind."""

import json
from dataclasses import dataclass
from typing import Any

from django.contrib.auth.models import Permission, User
from rest_framework.test import APIClient
from rest_framework_simplejwt.tokens import AccessToken

SCOPE = "workqueue:admin"
ALL = ("view_queueitem", "view_payload", "requeue", "edit_payload", "cancel", "discard", "hold")


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """What can be called, with what does nothing; and the permission that it needs."""

    method: str
    path: str
    body: Any = None
    permission: str = "view_queueitem"
    #: What is answered to whoever may call it.
    status: int = 200

    @property
    def name(self) -> str:
        return f"{self.method} {self.path}"

    def call(self, client: APIClient, **headers: str) -> Any:
        return client.generic(
            self.method,
            self.path,
            "" if self.body is None else json.dumps(self.body),
            content_type="application/json",
            headers=headers,
        )


NOBODY = "/queue/jobs/999999999999"
ENDPOINTS = [
    *(
        Endpoint(method="GET", path=f"/queue/{name}")
        for name in ("stats", "jobs", "dead-letters", "workers", "tenants", "holds", "schema")
    ),
    Endpoint(method="GET", path=NOBODY, status=404),
    Endpoint(method="POST", path=f"{NOBODY}/requeue", body={}, permission="requeue", status=404),
    Endpoint(method="POST", path=f"{NOBODY}/resume", body={}, permission="requeue", status=404),
    Endpoint(method="POST", path=f"{NOBODY}/cancel", body={}, permission="cancel", status=404),
    Endpoint(
        method="POST",
        path=f"{NOBODY}/discard",
        body={"reason": "old"},
        permission="discard",
        status=404,
    ),
    Endpoint(
        method="POST",
        path="/queue/jobs/requeue",
        body={"filter": {"tenant": "nobody"}, "expected_count": 0},
        permission="requeue",
    ),
    Endpoint(method="POST", path="/queue/holds", body={"tenant": "nobody"}, permission="hold"),
    Endpoint(
        method="DELETE", path="/queue/holds?tenant=nobody-else", permission="hold", status=404
    ),
]


def user(*permissions: str, **fields: Any) -> User:
    """A user of the tests with these permissions of items."""
    named = User.objects.create_user(f"user-{User.objects.count()}", **fields)
    rows = Permission.objects.filter(
        codename__in=permissions, content_type__app_label="django_workqueue"
    )
    named.user_permissions.set(rows)
    return named


def token(owner: User, **claims: Any) -> AccessToken:
    """An access token of a user."""
    made = AccessToken.for_user(owner)
    for name, value in claims.items():
        made[name] = value
    return made


def bearing(made: Any) -> APIClient:
    """A client that carries a token."""
    client = APIClient()
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {made}")
    return client


def with_session(owner: User, **options: Any) -> APIClient:
    """A client that has logged in."""
    client = APIClient(**options)
    client.force_login(owner)
    return client


def operator(*permissions: str) -> APIClient:
    """A client with the scope, of a user with these permissions; what we do wrong is a 500."""
    client = bearing(token(user(*permissions), scope=SCOPE))
    client.raise_request_exception = False
    return client


def post(client: APIClient, path: str, body: Any = None, **headers: str) -> Any:
    """Post *body*: text or bytes as they are, all else as JSON."""
    text = body if isinstance(body, str | bytes) else json.dumps(body or {})
    return client.generic("POST", path, text, content_type="application/json", headers=headers)


def check_problem(answer: Any, status: int, code: str, *fields: str) -> dict[str, Any]:
    """Check that it is a refusal of that kind, which names these parameters; return it."""
    assert answer.status_code == status, answer.content[:500]
    assert answer["Content-Type"] == "application/problem+json"
    assert answer["Cache-Control"] == "no-store"
    told: dict[str, Any] = strict(answer)
    assert (told["status"], told["code"], told["type"]) == (status, code, "about:blank")
    assert told["title"]
    assert told["detail"]
    assert [*told.get("errors", {})] == [*fields], told
    return told


def strict(answer: Any) -> Any:
    """The body of *answer*, which must be JSON to everybody and not to Python alone."""

    def refused(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(answer.content.decode("utf-8"), parse_constant=refused)
