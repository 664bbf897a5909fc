"""
Errors as answers, all in one shape: that of RFC 9457, with a `code` that stays.

A client acts by `code`; `detail` is for people. `errors` names the parameters that were refused.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from django.core.exceptions import PermissionDenied, RequestDataTooBig, SuspiciousOperation
from django.db import InterfaceError, OperationalError, ProgrammingError
from django.http import Http404
from rest_framework import exceptions, status
from rest_framework.response import Response
from rest_framework.views import set_rollback

from django_workqueue.api.words import status_of
from django_workqueue.exceptions import (
    InvalidFieldError,
    InvalidTransitionError,
    LiveTwinError,
    QueueUnavailableError,
    WorkItemNotFoundError,
)
from django_workqueue.failures import storable
from django_workqueue.items import WorkState
from django_workqueue.jobs import SearchTooBroadError
from django_workqueue.queues.store import NOT_SET_UP, sqlstate

logger: Final = logging.getLogger("django_workqueue")

MEDIA_TYPE: Final = "application/problem+json"
#: Seconds after which a client may try again what the store could not answer.
RETRY_AFTER: Final = 5

#: Each code, with its status and its title. A code is never used for anything else again.
PROBLEMS: Final = {
    "not_authenticated": (401, "Who are you?"),
    "authentication_failed": (401, "That is no valid identity"),
    "permission_denied": (403, "You may not do that"),
    "invalid_parameter": (400, "A parameter is wrong"),
    "malformed": (400, "The request can't be read"),
    "too_broad": (400, "That would take too long"),
    "wrong_state": (400, "The job is not in a state for that"),
    "wrong_count": (409, "There are not as many as expected"),
    "not_found": (404, "There is no such thing"),
    "method_not_allowed": (405, "That can't be done here"),
    "live_twin": (409, "Another live job has its id or its dedupe key"),
    "too_large": (413, "The body is too large"),
    "unsupported_media_type": (415, "Bodies are JSON"),
    "throttled": (429, "Too many requests"),
    "unavailable": (503, "The queue can't be reached"),
    "switched_off": (503, "The queue is switched off"),
}


class SwitchedOffError(Exception):
    """``WORKQUEUE["ENABLED"]`` is False."""


class WrongCountError(Exception):
    """A bulk call met other jobs than its caller had seen."""

    def __init__(self, expected: int, found: int, *, is_capped: bool) -> None:
        super().__init__(f"expected {expected} jobs, found {'more than ' * is_capped}{found}")
        self.found = found


def answer(error: Exception, context: Mapping[str, Any]) -> Response | None:
    """Return the answer to *error*; None if it is nobody's fault but ours."""
    for kinds, make in _ANSWERS:
        if isinstance(error, kinds):
            set_rollback()
            return make(error)
    return None


def problem(code: str, detail: str, **more: Any) -> Response:
    """Return an answer that says *code*; *more* are members of its own."""
    number, title = PROBLEMS[code]
    body = {"type": "about:blank", "title": title, "status": number, "detail": detail}
    return Response({**body, "code": code, **more}, number, content_type=MEDIA_TYPE)


def _of_framework(error: exceptions.APIException) -> Response:
    if isinstance(error, exceptions.ValidationError):
        return _invalid(error.get_full_details())
    code = _FRAMEWORK.get(error.status_code, "malformed")
    if isinstance(error, exceptions.NotAuthenticated):
        code = "not_authenticated"
    told = error.detail.get("detail") if isinstance(error.detail, dict) else error.detail
    response = problem(code, str(told))
    if header := getattr(error, "auth_header", None):
        response["WWW-Authenticate"] = header
    if wait := getattr(error, "wait", None):
        response["Retry-After"] = str(max(1, round(wait)))
    return response


_FRAMEWORK: Final = {
    status.HTTP_401_UNAUTHORIZED: "authentication_failed",
    status.HTTP_403_FORBIDDEN: "permission_denied",
    status.HTTP_404_NOT_FOUND: "not_found",
    status.HTTP_405_METHOD_NOT_ALLOWED: "method_not_allowed",
    status.HTTP_413_REQUEST_ENTITY_TOO_LARGE: "too_large",
    status.HTTP_415_UNSUPPORTED_MEDIA_TYPE: "unsupported_media_type",
    status.HTTP_429_TOO_MANY_REQUESTS: "throttled",
}


def _invalid(details: Any) -> Response:
    errors = _by_name(details)
    named = "; ".join(f"{name}: {told[0]}" for name, told in errors.items())
    return problem("invalid_parameter", named, errors=errors)


def _by_name(details: Mapping[str, Any], before: str = "") -> dict[str, list[str]]:
    """The messages by the names of their parameters; one within another: with a dot between."""
    found: dict[str, list[str]] = {}
    for name, told in details.items():
        path = before + storable(str(name))
        if isinstance(told, Mapping):
            found |= _by_name(told, f"{path}.")
        else:
            found[path] = [storable(str(each["message"])) for each in told]
    return found


def _of_field(error: InvalidFieldError) -> Response:
    told = str(error).removeprefix(f"{error.field}: ")
    return problem("invalid_parameter", str(error), errors={error.field: [told]})


def _of_twin(error: LiveTwinError) -> Response:
    twin = error.twin.job_id if error.twin else None
    return problem("live_twin", str(error), twin=None if twin is None else str(twin))


def _unavailable(error: Exception) -> Response:
    logger.warning("request not answered: %s", str(error).partition("\n")[0])
    response = problem("unavailable", "the store of the queue can't be reached")
    response["Retry-After"] = str(RETRY_AFTER)
    return response


def _of_state(error: InvalidTransitionError) -> Response:
    known = error.state in {*WorkState}
    shown = status_of(error.state) if known else error.state
    return problem("wrong_state", f"the job is {shown}: {error.verb} is not possible")


def _of_session(error: ProgrammingError) -> Response:
    """Of what looks for the caller's user or session: tables that nobody has made yet."""
    if sqlstate(error) not in NOT_SET_UP:
        raise error
    return _unavailable(error)


_ANSWERS: Final[list[tuple[Any, Callable[[Any], Response]]]] = [
    (exceptions.APIException, _of_framework),
    (RequestDataTooBig, lambda error: problem("too_large", "the body is too large")),
    (SuspiciousOperation, lambda error: problem("malformed", str(error))),
    (Http404, lambda error: problem("not_found", "there is nothing at this address")),
    (PermissionDenied, lambda error: problem("permission_denied", "it is not allowed")),
    (WorkItemNotFoundError, lambda error: problem("not_found", "there is no such job")),
    (InvalidFieldError, _of_field),
    (SearchTooBroadError, lambda error: problem("too_broad", str(error))),
    (LiveTwinError, _of_twin),
    (InvalidTransitionError, _of_state),
    (WrongCountError, lambda error: problem("wrong_count", str(error), found=error.found)),
    (SwitchedOffError, lambda error: problem("switched_off", "the work queue is switched off")),
    ((QueueUnavailableError, OperationalError, InterfaceError), _unavailable),
    (ProgrammingError, _of_session),
]
