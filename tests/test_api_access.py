"""Who may do what in `/queue`: every endpoint, by every kind of identity."""

import re
from datetime import timedelta

import jwt
import pytest
from django.conf import settings as django_settings
from django.contrib.auth.models import User
from django.urls import get_resolver
from rest_framework.test import APIClient
from rest_framework_simplejwt.tokens import AccessToken, RefreshToken

from django_workqueue.models import AuditEntry, Hold
from django_workqueue.testing import make_queue
from tests.api import ALL, ENDPOINTS, SCOPE, bearing, token, user, with_session

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")
every_endpoint = pytest.mark.parametrize("endpoint", ENDPOINTS, ids=lambda each: each.name)


@pytest.fixture(autouse=True)
def queue():
    return make_queue("sqlite")


def test_the_table_has_every_endpoint_there_is():
    from django_workqueue.api.urls import urlpatterns

    there = set()
    for pattern in urlpatterns:
        actions = getattr(pattern.callback, "actions", {})
        path = re.sub(r"\(\?P<\w+>[^)]*\)", "999999999999", str(pattern.pattern))
        path = "/queue/" + re.sub(r"[\^$]|\\Z", "", path)
        there |= {(method.upper(), path) for method in actions if method != "head"}
    assert {(each.method, each.path.partition("?")[0]) for each in ENDPOINTS} == there


@every_endpoint
def test_nobody_is_told_who_to_be(endpoint):
    answer = endpoint.call(APIClient())
    assert (answer.status_code, answer.json()["code"]) == (401, "not_authenticated")
    assert answer["WWW-Authenticate"].startswith("Bearer")
    assert answer["Content-Type"] == "application/problem+json"


@every_endpoint
def test_an_open_api_lets_in_whoever_has_no_identity(endpoint, settings):
    settings.WORKQUEUE = {"API": {"open": True}}
    assert endpoint.call(APIClient()).status_code == endpoint.status
    # But not who has one that isn't enough.
    assert endpoint.call(bearing(token(user()))).status_code == 403
    assert endpoint.call(bearing("nonsense")).status_code == 401
    assert endpoint.call(with_session(user())).status_code == 403


@every_endpoint
def test_a_token_with_the_scope_is_let_in(endpoint):
    assert endpoint.call(bearing(token(user(), scope=SCOPE))).status_code == endpoint.status


@every_endpoint
def test_a_token_without_the_scope_is_refused_also_that_of_a_superuser(endpoint):
    for owner in (user(*ALL), user(is_superuser=True, is_staff=True)):
        answer = endpoint.call(bearing(token(owner, scope="other")))
        assert (answer.status_code, answer.json()["code"]) == (403, "permission_denied")


@every_endpoint
def test_a_session_needs_the_permission_of_the_endpoint_and_no_other(endpoint):
    others = [name for name in ALL if name != endpoint.permission]
    assert endpoint.call(with_session(user(*others))).status_code == 403
    assert endpoint.call(with_session(user(endpoint.permission))).status_code == endpoint.status
    assert endpoint.call(with_session(user(is_staff=True))).status_code == 403
    assert endpoint.call(with_session(user(is_superuser=True))).status_code == endpoint.status


ENOUGH = [
    {"scope": SCOPE},
    {"scope": f"openid {SCOPE}  email"},
    {"scope": [SCOPE]},
    {"scopes": ["openid", SCOPE]},
    {"permissions": [SCOPE]},
    {"scope": "openid", "permissions": SCOPE},
]
NOT_ENOUGH = [
    {},
    {"scope": ""},
    {"scope": SCOPE.upper()},
    {"scope": f"{SCOPE}istrator"},
    {"scope": "workqueue"},
    {"scope": f"x{SCOPE}"},
    {"scope": f"{SCOPE},openid"},
    {"scope": [f"{SCOPE} openid"]},
    {"scope": [[SCOPE]]},
    {"scope": {SCOPE: True}},
    {"scope": True},
    {"scope": None},
    {"scope": 7},
    {"roles": [SCOPE]},
]


@pytest.mark.parametrize("claims", ENOUGH, ids=str)
def test_the_scope_may_be_one_of_several_in_text_or_a_list(claims):
    assert bearing(token(user(), **claims)).get("/queue/stats").status_code == 200


@pytest.mark.parametrize("claims", NOT_ENOUGH, ids=str)
def test_what_is_not_exactly_the_scope_is_none(claims):
    assert bearing(token(user(), **claims)).get("/queue/stats").status_code == 403


def test_the_scope_and_its_claims_are_what_the_settings_say(settings):
    settings.WORKQUEUE = {"API": {"admin_scope": "ops", "scope_claims": ["roles"]}}
    assert bearing(token(user(), roles=["ops"])).get("/queue/stats").status_code == 200
    assert bearing(token(user(), scope="ops")).get("/queue/stats").status_code == 403
    assert bearing(token(user(), roles=[SCOPE])).get("/queue/stats").status_code == 403


def forged(**changes):
    """A token like a good one, but for one thing."""
    good = token(user(), scope=SCOPE)
    key = changes.pop("key", django_settings.SECRET_KEY)
    algorithm = changes.pop("algorithm", "HS256")
    return jwt.encode({**good.payload, **changes}, key, algorithm=algorithm)


def expired():
    made = token(user(), scope=SCOPE)
    made.set_exp(lifetime=-timedelta(seconds=1))
    return made


def refresh():
    made = RefreshToken.for_user(user())
    made["scope"] = SCOPE
    return made


def of_a_user(change):
    owner = user()
    made = token(owner, scope=SCOPE)
    change(owner)
    return made


WRONG = {
    "expired": expired,
    "unsigned": lambda: forged(key=None, algorithm="none"),
    "another key": lambda: forged(key="another key, and long enough for this algorithm too"),
    "another algorithm": lambda: forged(algorithm="HS512"),
    "a refresh token": refresh,
    "no type": lambda: forged(token_type=None),
    "of nobody": lambda: forged(user_id=10**9),
    "of no user": lambda: forged(user_id=None),
    "of a deleted user": lambda: of_a_user(lambda owner: owner.delete()),
    "of an inactive user": lambda: of_a_user(
        lambda owner: User.objects.filter(pk=owner.pk).update(is_active=False)
    ),
    "cut": lambda: str(token(user(), scope=SCOPE))[:-4],
    "nonsense": lambda: "nonsense",
    "two words": lambda: f"{token(user(), scope=SCOPE)} more",
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_token_that_is_not_right_is_no_identity(kind):
    answer = bearing(WRONG[kind]()).get("/queue/stats")
    assert (answer.status_code, answer.json()["code"]) == (401, "authentication_failed")
    assert str(AccessToken) not in answer.content.decode()


def test_a_token_goes_before_a_session():
    client = with_session(user(is_superuser=True))
    assert client.get("/queue/stats").status_code == 200
    client.credentials(HTTP_AUTHORIZATION=f"Bearer {token(user(is_superuser=True))}")
    assert client.get("/queue/stats").status_code == 403


def test_a_session_can_not_be_used_by_another_site():
    client = with_session(user(*ALL), enforce_csrf_checks=True)
    assert client.get("/queue/holds").status_code == 200
    answer = client.post("/queue/holds", {"tenant": "t"}, format="json")
    assert (answer.status_code, answer.json()["code"]) == (403, "permission_denied")
    assert not Hold.objects.exists()
    # A token isn't sent by a browser of its own accord, so it needs no more.
    answer = bearing(token(user(), scope=SCOPE)).post(
        "/queue/holds", {"tenant": "t"}, format="json"
    )
    assert answer.status_code == 200
    assert Hold.objects.count() == 1


@every_endpoint
def test_nothing_is_changed_by_a_look(endpoint):
    client = bearing(token(user(is_superuser=True), scope=SCOPE))
    for method in ("GET", "HEAD", "OPTIONS", "PUT", "PATCH"):
        if method == endpoint.method or (method == "HEAD" and endpoint.method == "GET"):
            continue
        override = {"X-HTTP-Method-Override": endpoint.method}
        client.generic(method, endpoint.path, "{}", "application/json", headers=override)
    assert not AuditEntry.objects.exists()


@every_endpoint
def test_what_an_endpoint_can_not_do_it_says_once_it_knows_who_asks(endpoint):
    assert endpoint.call(APIClient()).status_code == 401
    client = bearing(token(user(), scope=SCOPE))
    answer = client.patch(endpoint.path, {}, format="json")
    assert (answer.status_code, answer.json()["code"]) == (405, "method_not_allowed")


def test_the_answers_come_in_their_order(settings):
    """401, 403, switched off, parameters, not found."""
    path = "/queue/jobs/999999999999/discard"
    settings.WORKQUEUE = {"ENABLED": False}
    admin = bearing(token(user(), scope=SCOPE))

    def code(client):
        return client.post(path, {"reason": 7, "x": 1}, format="json").json()["code"]

    assert code(APIClient()) == "not_authenticated"
    assert code(bearing(token(user()))) == "permission_denied"
    assert code(admin) == "switched_off"
    settings.WORKQUEUE = {}
    assert code(admin) == "invalid_parameter"
    assert admin.post(path, {"reason": "x"}, format="json").json()["code"] == "not_found"
    assert get_resolver().resolve(path)
