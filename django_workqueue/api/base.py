"""What all endpoints have in common: access, errors, and what is told of a request."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, ClassVar, Final

from django.db import connections, transaction
from rest_framework.renderers import JSONRenderer
from rest_framework.request import Request
from rest_framework.viewsets import ViewSet

from django_workqueue.api import access, problems
from django_workqueue.api.parameters import BodyParser, JsonAlways, Parameters
from django_workqueue.api.schema import OperationSchema
from django_workqueue.conf import get_settings
from django_workqueue.queues import DatabaseWorkQueue, get_queue

MAX_REQUEST_ID: Final = 200


class OperatorViewSet(ViewSet):
    """Endpoints for operators. A class of them says what its actions need."""

    authentication_classes = access.AUTHENTICATION
    permission_classes = [access.OperatorPermission]
    throttle_classes = [access.Throttle]
    # No page to browse: it would run what users have put into their payloads.
    renderer_classes = [JSONRenderer]
    parser_classes = [BodyParser]
    content_negotiation_class = JsonAlways
    schema = OperationSchema()
    http_method_names = ["get", "head", "post", "delete"]
    #: The permission that an action needs, if it isn't that to look.
    permissions: ClassVar[Mapping[str, str]] = {}
    #: Actions on many jobs at once.
    bulk: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def as_view(cls, actions: Any = None, **initkwargs: Any) -> Any:
        """Return the view. No transaction is begun around it: with a dead database that fails."""
        view = super().as_view(actions, **initkwargs)
        for alias in connections:
            view = transaction.non_atomic_requests(using=alias)(view)
        return view

    @property
    def permission(self) -> str:
        """The permission that the present action needs."""
        return self.permissions.get(self.action or "", access.VIEW)

    @property
    def throttle_scope(self) -> str:
        """What the present action is counted as."""
        if self.action in self.bulk:
            return "workqueue-bulk"
        reads = self.request.method in ("GET", "HEAD", "OPTIONS")
        return "workqueue-read" if reads else "workqueue-write"

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Say who may go on; and nobody, while the queue is switched off."""
        super().initial(request, *args, **kwargs)
        if not get_settings().enabled:
            raise problems.SwitchedOffError

    def get_exception_handler(self) -> Any:
        """All errors have one shape, whatever handler the project has for its own views."""
        return problems.answer

    def initialize_request(self, request: Any, *args: Any, **kwargs: Any) -> Request:
        """Give the request an id, which the audit keeps."""
        self.request_id = _request_id(request)
        return super().initialize_request(request, *args, **kwargs)

    def finalize_response(self, request: Request, response: Any, *args: Any, **kwargs: Any) -> Any:
        """Nothing of this is to be kept by whoever passes it on."""
        response = super().finalize_response(request, response, *args, **kwargs)
        response["Cache-Control"] = "no-store"
        response["X-Request-ID"] = self.request_id
        return response

    @property
    def queue(self) -> DatabaseWorkQueue:
        """The queue of the settings."""
        return get_queue()

    def asked(self, kind: type[Parameters]) -> dict[str, Any]:
        """Return the parameters of the address. Raise `ValidationError`."""
        return _valid(kind, self.request.query_params)

    def told(self, kind: type[Parameters]) -> dict[str, Any]:
        """Return the members of the body; the address has none. Raise `ValidationError`."""
        self.asked(Parameters)
        return _valid(kind, self.request.data)


def _valid(kind: type[Parameters], data: Any) -> dict[str, Any]:
    serializer = kind(data=data)
    serializer.is_valid(raise_exception=True)
    values: dict[str, Any] = serializer.validated_data
    return values


def _request_id(request: Any) -> str:
    given: str = request.headers.get("X-Request-ID", "")
    if 0 < len(given) <= MAX_REQUEST_ID and given.isprintable() and given.isascii():
        return given
    return str(uuid.uuid4())
