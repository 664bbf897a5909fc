"""
The OpenAPI document of `/queue`.

drf-spectacular builds it from what each action says of itself with `operation`. It needs nothing
of the project, and nothing that the project sets for its own document changes ours.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import getdoc
from threading import Lock
from typing import Any, Final, TypeVar

from django.conf import settings
from drf_spectacular.generators import SchemaGenerator
from drf_spectacular.openapi import AutoSchema
from drf_spectacular.plumbing import ResolvedComponent
from drf_spectacular.settings import SPECTACULAR_DEFAULTS, patched_settings
from drf_spectacular.utils import OpenApiParameter, OpenApiResponse
from rest_framework import serializers

from django_workqueue.api.parameters import ORDERS, SORTABLE, Parameters
from django_workqueue.api.problems import MEDIA_TYPE, PROBLEMS
from django_workqueue.api.shapes import WORKER_STATES
from django_workqueue.api.words import STATUSES

#: Of the surface, not of the package.
VERSION: Final = "1"

DESCRIPTION: Final = """\
Look after the jobs of a work queue: figures, jobs, dead letters, workers, tenants and holds.

Answers are JSON, whatever `Accept` asks for, and so are bodies. Errors have one shape, that of
RFC 9457; act by their `code`, which never changes its meaning. A parameter that isn't known is
refused. A method that an address doesn't have is answered 405, with the code `method_not_allowed`.

A token needs the admin scope; the user of a session needs the permission for what is asked, and
sends a CSRF token with all that changes something.
"""

SECURITY: Final[list[dict[str, Any]]] = [{"token": []}, {"session": []}]

#: Enumerations that have a name of their own, which stays.
ENUMERATIONS: Final = {
    tuple(STATUSES): "JobStatus",
    tuple(WORKER_STATES): "WorkerState",
    tuple(PROBLEMS): "ProblemCode",
    tuple(SORTABLE): "JobTime",
    ORDERS: "SortOrder",
}

#: What every operation may answer, and one that takes a body.
ALWAYS: Final = (
    "invalid_parameter",
    "not_authenticated",
    "authentication_failed",
    "permission_denied",
    "throttled",
    "unavailable",
    "switched_off",
)
WITH_BODY: Final = ("malformed", "too_large", "unsupported_media_type")

_Action = TypeVar("_Action", bound=Callable[..., Any])


class ProblemSerializer(serializers.Serializer[Any]):
    """Why a request was refused, as RFC 9457 has it."""

    type = serializers.CharField()
    title = serializers.CharField(help_text="For people; may change.")
    status = serializers.IntegerField()
    detail = serializers.CharField(allow_blank=True, help_text="For people; may change.")
    code = serializers.ChoiceField(choices=[*PROBLEMS], help_text="For programs; stays.")
    errors: Any = serializers.DictField(
        child=serializers.ListField(child=serializers.CharField()),
        required=False,
        help_text="With `invalid_parameter`: what is wrong, by the name of the parameter.",
    )
    twin = serializers.CharField(
        required=False, allow_null=True, help_text="With `live_twin`: the id of that job."
    )
    found = serializers.IntegerField(
        required=False, help_text="With `wrong_count`: how many jobs the filter found."
    )


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What an action says of itself."""

    id: str
    #: What 200 has: a serializer, or a schema as it stands.
    answer: Any
    asks: type[Parameters]
    codes: Sequence[str]


def operation(
    name: str, answer: Any, *codes: str, asks: type[Parameters] = Parameters
) -> Callable[[_Action], _Action]:
    """
    Say of an action what it is called, what it answers, with which codes it may refuse beside
    those that all have, and which parameters it takes: in the address, of a POST in its body.
    """

    def mark(action: _Action) -> _Action:
        unknown = {*codes} - {*PROBLEMS}
        assert not unknown, unknown
        # Beside the function: as an attribute, `@action` would take it for its own.
        action.operation = Operation(  # type: ignore[attr-defined]
            id=name, answer=answer, asks=asks, codes=codes
        )
        return action

    return mark


class OperationSchema(AutoSchema):
    """Describes an action by its `operation` and its docstring."""

    @property
    def operation(self) -> Operation:
        """What the action says of itself."""
        told: Operation = self._action.operation
        return told

    @property
    def _action(self) -> Any:
        view: Any = self.view
        return getattr(view, view.action)

    @property
    def _has_body(self) -> bool:
        return self.method == "POST"

    def get_operation_id(self) -> str:
        """A name that stays, whatever the address and the Python of it become."""
        return self.operation.id

    def get_tags(self) -> list[str]:
        """One for all: a project has operations of its own beside ours."""
        return ["queue"]

    def get_summary(self) -> str:
        """The first paragraph of the docstring."""
        return self._paragraphs()[0].removesuffix(".")

    def get_description(self) -> str:  # type: ignore[override]
        """The other paragraphs of the docstring."""
        return "\n\n".join(self._paragraphs()[1:])

    def _paragraphs(self) -> list[str]:
        return [" ".join(each.split()) for each in (getdoc(self._action) or "").split("\n\n")]

    def get_auth(self) -> list[dict[str, Any]]:
        """A token, or a session."""
        return SECURITY

    def get_override_parameters(self) -> list[Any]:
        """The id of a job, what is asked in the address, and headers both ways."""
        found: list[Any] = [*_HEADERS]
        if "{job_id}" in self.path:
            found.append(_JOB_ID)
        if not self._has_body and self.operation.asks is not Parameters:
            found.append(self.operation.asks())
        return found

    def get_request_serializer(self) -> Any:
        """What the body has."""
        return self.operation.asks if self._has_body else None

    def _get_request_body(self, direction: Any = "request") -> Any:
        body = super()._get_request_body(direction)  # type: ignore[no-untyped-call]
        # It can't be left out where an empty object isn't enough.
        return body | {"required": True} if body and self.operation.asks.constraints else body

    def get_response_serializers(self) -> Any:
        """The answer, and a problem for each status that a refusal may have."""
        shape = self.operation.answer
        described = "The document." if isinstance(shape, dict) else getdoc(shape) or ""
        answer = OpenApiResponse(shape, description=described)
        found: dict[Any, Any] = {(200, "application/json"): answer}
        for number, codes in sorted(self._codes().items()):
            told = "\n".join(f"- `{code}`: {PROBLEMS[code][1]}" for code in codes)
            found[number, MEDIA_TYPE] = OpenApiResponse(ProblemSerializer, description=told)
        return found

    def _codes(self) -> Mapping[int, Sequence[str]]:
        by_status: dict[int, list[str]] = {}
        for code in (*ALWAYS, *(WITH_BODY if self._has_body else ()), *self.operation.codes):
            by_status.setdefault(PROBLEMS[code][0], []).append(code)
        return by_status

    def _is_list_view(self, serializer: Any = None) -> bool:
        """Also a list is within an object."""
        return False

    def _map_serializer(self, *args: Any, **kwargs: Any) -> Any:
        schema = super()._map_serializer(*args, **kwargs)  # type: ignore[no-untyped-call]
        if isinstance(args[0], Parameters):
            schema |= {"additionalProperties": False, **args[0].constraints}
        return schema

    def _map_serializer_field(self, field: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(field, serializers.MultipleChoiceField):
            least = {} if field.allow_empty else {"minItems": 1}
            return {"type": "array", "items": self._named(field), **least}
        if isinstance(field, serializers.ChoiceField):
            # What is said of the field stands beside a reference, never in it.
            named = self._named(field)
            return {"allOf": [named]} if field.help_text else named
        schema: Any = super()._map_serializer_field(field, *args, **kwargs)  # type: ignore[no-untyped-call]
        if isinstance(field, serializers.CharField) and isinstance(field.parent, Parameters):
            schema |= {} if field.allow_blank else {"minLength": 1}
            # What is trimmed must have something left.
            schema |= {"pattern": r"\S"} if field.trim_whitespace else {}
        return schema

    def _named(self, field: Any) -> Any:
        choices = [*field.choices]
        name = ENUMERATIONS[tuple(choices)]
        component = ResolvedComponent(  # type: ignore[no-untyped-call]
            name=name,
            type=ResolvedComponent.SCHEMA,
            schema={"type": "string", "enum": choices},
            object=name,
        )
        self.registry.register_on_missing(component)
        return component.ref


def _header(name: str, description: str, *statuses: int, required: bool = False) -> Any:
    return OpenApiParameter(
        name,
        location=OpenApiParameter.HEADER,
        description=description,
        required=required,
        response=list(statuses) or False,
    )


_STATUSES: Final = (200, *sorted({number for number, _ in PROBLEMS.values()}))
_JOB_ID: Final = OpenApiParameter(
    "job_id", location=OpenApiParameter.PATH, pattern="^[0-9]+$", description="The id of a job."
)
_REQUEST_ID: Final = (
    "An id of the request: printable ASCII, up to 200 characters; any other is replaced. "
    "The audit keeps it."
)
_HEADERS: Final = (
    _header("X-Request-ID", _REQUEST_ID),
    _header("X-Request-ID", "The id of the request.", *_STATUSES, required=True),
    _header("WWW-Authenticate", "How to say who asks.", 401, required=True),
    _header("Retry-After", "Seconds to wait before the next attempt.", 429, 503),
)

_OURS: Final = {
    name: value
    for name, value in SPECTACULAR_DEFAULTS.items()
    if not name.startswith("SERVE_") and name != "DEFAULT_GENERATOR_CLASS"
} | {
    "TITLE": "Work queue",
    "DESCRIPTION": DESCRIPTION,
    "VERSION": VERSION,
    "TAGS": [{"name": "queue", "description": "The operator's surface of the work queue."}],
    "POSTPROCESSING_HOOKS": [],
    "SCHEMA_PATH_PREFIX": "",
}
_lock: Final = Lock()


def document(prefix: str) -> dict[str, Any]:
    """Return the document of what is mounted at *prefix*, which has a slash at both ends."""
    with _lock:
        made = _document()
    paths = {prefix + path.removeprefix("/"): item for path, item in made["paths"].items()}
    schemes = {
        "token": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"},
        "session": {"type": "apiKey", "in": "cookie", "name": settings.SESSION_COOKIE_NAME},
    }
    components = {**made["components"], "securitySchemes": schemes}
    return {**made, "paths": paths, "components": components}


@cache
def _document() -> dict[str, Any]:
    from django_workqueue.api.urls import urlpatterns

    with patched_settings(_OURS):
        made: dict[str, Any] = SchemaGenerator(patterns=urlpatterns).get_schema(public=True)  # type: ignore[no-untyped-call]
    made["components"]["responses"] = _shared(made["paths"])
    return made


def _shared(paths: dict[str, Any]) -> dict[str, Any]:
    """Name the refusals that are the same wherever they occur, and refer to them by their name."""
    answers = [each["responses"] for item in paths.values() for each in item.values()]
    shared = {}
    for number in _STATUSES[1:]:
        having = [each for each in answers if str(number) in each]
        first = having[0][str(number)] if having else None
        if len(having) > 1 and all(each[str(number)] == first for each in having):
            name = f"Problem{number}"  # the phrases differ between versions of Python
            shared[name] = first
            for each in having:
                each[str(number)] = {"$ref": f"#/components/responses/{name}"}
    return shared
