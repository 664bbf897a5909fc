"""
The WORKQUEUE setting as one frozen dataclass, read when it is used.

A wrong setting raises `ImproperlyConfigured`, which names the key; the system check
`django_workqueue.E001` shows the same message before anything runs.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from django.conf import settings as django_settings
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed

from django_workqueue.exceptions import InvalidFieldError
from django_workqueue.items import (
    DEFAULT_QUEUE,
    MAX_DEPLOYMENT_LENGTH,
    MAX_QUEUE_LENGTH,
    require_boolean,
    require_integer,
    require_seconds,
    require_text,
)
from django_workqueue.policy import QueuePolicy

SETTING = "WORKQUEUE"
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How `manage.py runworkers` runs, where its options don't say otherwise."""

    processes: int = 1
    concurrency: int = 8
    #: Seconds between two looks for due work while idle.
    poll_seconds: float = 1.0
    #: Seconds that running handlers get to finish in a drain.
    stop_timeout_seconds: float = 30.0
    #: Seconds between two passes of the reaper.
    reap_seconds: float = 5.0
    retention_sweep_seconds: float = 3600.0

    def __post_init__(self) -> None:
        require_integer("processes", self.processes, 1, 1000)
        require_integer("concurrency", self.concurrency, 1, 10_000)
        for spec in fields(self):
            if spec.name.endswith("_seconds"):
                require_seconds(spec.name, getattr(self, spec.name), positive=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Who may use `/queue`, and what it hides."""

    #: Let in whoever carries no identity at all. Not to payloads.
    open: bool = False
    #: What a token must claim, exactly so, in one of `scope_claims`.
    admin_scope: str = "workqueue:admin"
    scope_claims: tuple[str, ...] = ("scope", "scopes", "permissions")
    #: Dotted path of a function that is given each object before it is shown, and returns it.
    redact: str | None = None

    def __post_init__(self) -> None:
        require_boolean("open", self.open)
        if not require_text("admin_scope", self.admin_scope, 200).strip():
            raise InvalidFieldError("must not be blank", field="admin_scope")
        if not isinstance(self.scope_claims, list | tuple) or not self.scope_claims:
            raise InvalidFieldError("must be a list of names", field="scope_claims")
        for name in self.scope_claims:
            require_text("scope_claims", name, 200)
        object.__setattr__(self, "scope_claims", tuple(self.scope_claims))
        if self.redact is not None:
            require_text("redact", self.redact, 500)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkQueueSettings:
    """What ``settings.WORKQUEUE`` says, defaults filled in."""

    enabled: bool = True
    database: str | None = None
    deployment_id: str | None = None
    pooler: bool = False
    policy: QueuePolicy = field(default_factory=QueuePolicy)
    queues: Mapping[str, QueuePolicy] = field(
        default_factory=lambda: {DEFAULT_QUEUE: QueuePolicy()}
    )
    worker: WorkerSettings = field(default_factory=WorkerSettings)
    api: ApiSettings = field(default_factory=ApiSettings)

    def policy_for(self, queue: str) -> QueuePolicy:
        """Return the policy of *queue*; one that isn't in QUEUES has the policy of all."""
        return self.queues.get(queue, self.policy)


def get_settings() -> WorkQueueSettings:
    """Return the settings in force. Raise `ImproperlyConfigured` if they are wrong."""
    return _parsed()


@functools.cache
def _parsed() -> WorkQueueSettings:
    return parse(getattr(django_settings, SETTING, {}))


def _forget(*, setting: str, **kwargs: Any) -> None:
    if setting == SETTING:
        _parsed.cache_clear()


setting_changed.connect(_forget, dispatch_uid="django_workqueue.conf")


def parse(raw: Any) -> WorkQueueSettings:
    """Return *raw*, a dictionary as documented in the settings reference, as settings."""
    known: dict[str, Any] = {
        "ENABLED": True,
        "DATABASE": None,
        "DEPLOYMENT_ID": None,
        "POOLER": False,
        "POLICY": {},
        "QUEUES": {DEFAULT_QUEUE: {}},
        "WORKER": {},
        "API": {},
    }
    given = known | _dictionary(SETTING, raw, known)
    policy = _policy("POLICY", given["POLICY"], {})
    queues = _dictionary("QUEUES", given["QUEUES"], None)
    if not queues:
        raise ImproperlyConfigured(f"{SETTING}: QUEUES must name at least one queue")
    deployment_id = None if given["DEPLOYMENT_ID"] == "" else given["DEPLOYMENT_ID"]
    try:
        for name in queues:
            require_text("QUEUES", name, MAX_QUEUE_LENGTH)
        if deployment_id is not None:
            require_text("DEPLOYMENT_ID", deployment_id, MAX_DEPLOYMENT_LENGTH)
    except InvalidFieldError as error:
        raise ImproperlyConfigured(f"{SETTING}: {error}") from None
    return WorkQueueSettings(
        enabled=_boolean("ENABLED", given["ENABLED"]),
        database=given["DATABASE"],
        deployment_id=deployment_id,
        pooler=_boolean("POOLER", given["POOLER"]),
        policy=policy,
        queues={
            name: _policy(f"QUEUES[{name!r}]", own, given["POLICY"]) for name, own in queues.items()
        },
        worker=_build(WorkerSettings, "WORKER", given["WORKER"]),
        api=_build(ApiSettings, "API", given["API"]),
    )


def _policy(key: str, own: Any, common: Mapping[str, Any]) -> QueuePolicy:
    known = [spec.name for spec in fields(QueuePolicy)]
    return _build(QueuePolicy, key, {**common, **_dictionary(key, own, known)})


def _build(kind: type[T], key: str, raw: Any) -> T:
    known = [spec.name for spec in fields(kind)]  # type: ignore[arg-type]
    try:
        return kind(**_dictionary(key, raw, known))
    except InvalidFieldError as error:
        raise ImproperlyConfigured(f"{SETTING}: {key}: {error}") from None


def _dictionary(key: str, raw: Any, known: Iterable[str] | None) -> dict[str, Any]:
    if not isinstance(raw, Mapping):
        raise ImproperlyConfigured(f"{SETTING}: {key} must be a dictionary, not {raw!r}")
    for name in raw:
        if known is not None and name not in known:
            close = difflib.get_close_matches(str(name), [*known], n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise ImproperlyConfigured(f"{SETTING}: {key} has no key {name!r}.{hint}")
    return dict(raw)


def _boolean(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ImproperlyConfigured(f"{SETTING}: {key} must be True or False, not {value!r}")
    return value
