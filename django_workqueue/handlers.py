"""
Handlers: the functions that do the work, how items find them, and what they are told.

A handler takes ``(payload, context)``, sync or async, and returns a JSON result or None.
It may run more than once for one item, so it must be idempotent; `Context` gives it a key
that stays and a fence that grows.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import autodiscover_modules

from django_workqueue.exceptions import ClaimLostError, InvalidFieldError, UnknownHandlerError
from django_workqueue.items import (
    DEFAULT_QUEUE,
    MAX_HANDLER_LENGTH,
    MAX_QUEUE_LENGTH,
    WorkItem,
    WorkPriority,
    new_item_id,
    require_boolean,
    require_seconds,
    require_text,
)

HandlerFunction = Callable[[Any, "Context"], Any]


class Reject(Exception):
    """Raise it in a handler: repeating can't help. The item goes to the dead letter."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Retry(Exception):
    """Raise it in a handler: counted as a failure, due again after *delay_seconds*."""

    def __init__(self, delay_seconds: float, reason: str = "asked to be retried") -> None:
        super().__init__(reason)
        self.delay_seconds = require_seconds("delay_seconds", delay_seconds)
        self.reason = reason


class Pause(Exception):
    """
    Raise it in a handler: a person is needed. The item is put aside, nothing is counted, and
    `resume` queues it again; the handler then starts afresh, so it keeps its own progress.
    The *reason* goes to the log.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Context:
    """
    What a handler is told of the item that it works on.

    `item` is the item as claimed. Long work calls `check()` now and then, which raises
    once the claim is lost, capped or cancelled: the result would not count any more.
    """

    def __init__(self, item: WorkItem) -> None:
        self.item = item
        self._stopped = threading.Event()
        self._reason = ""

    @property
    def tenant(self) -> str:
        """The item's tenant."""
        return self.item.tenant

    @property
    def attempt(self) -> int:
        """Number of this execution, from 1."""
        return self.item.attempt

    @property
    def fence(self) -> int:
        """
        Number of this claim. Greater than that of every earlier claim of the item: a
        system that remembers the greatest one it has seen can refuse a late worker.
        """
        return self.item.fence or 0

    @property
    def idempotency_key(self) -> str:
        """Text that is the same in every attempt at this item, and no other item's."""
        return f"{self.item.tenant}/{self.item.id}/{self.item.job_id}"

    @property
    def cancelled(self) -> bool:
        """True once the handler should stop."""
        return self._stopped.is_set()

    def check(self) -> None:
        """Raise `ClaimLostError` if the handler should stop."""
        if self._stopped.is_set():
            raise ClaimLostError(reason=self._reason)

    def stop(self, reason: str) -> None:
        """Tell the handler to stop; for the runtime. The first reason stays."""
        if not self._stopped.is_set():
            self._reason = reason
            self._stopped.set()


_current: Final[ContextVar[Context | None]] = ContextVar("django_workqueue_context", default=None)


def current_context() -> Context | None:
    """
    Return the context of the handler that this code runs in; None outside of handlers.

    It goes where Python's context variables go: into tasks, `asyncio.to_thread`,
    `sync_to_async` and `async_to_sync`, but not into a thread that a handler starts itself.
    """
    return _current.get()


@dataclass(kw_only=True, eq=False)
class Handler:
    """A registered function, and how items for it are enqueued. Calling it runs the function."""

    function: HandlerFunction = field(repr=False)
    name: str
    queue: str = DEFAULT_QUEUE
    max_attempts: int | None = None
    timeout_seconds: float | None = None
    priority: int = WorkPriority.NORMAL
    atomic: bool = False

    def __post_init__(self) -> None:
        # Not the function's own attributes: they could overwrite the fields.
        functools.update_wrapper(self, self.function, updated=())

    @functools.cached_property
    def is_async(self) -> bool:
        """True if the function is a coroutine function."""
        call = getattr(self.function, "__call__", None)  # noqa: B004 - of an object, if it is one
        return inspect.iscoroutinefunction(self.function) or inspect.iscoroutinefunction(call)

    def __call__(self, payload: Any, context: Context) -> Any:
        if self.is_async:
            return self._call_async(payload, context)
        token = _current.set(context)
        try:
            return self.function(payload, context)
        finally:
            _current.reset(token)  # the thread goes on with another item

    async def _call_async(self, payload: Any, context: Context) -> Any:
        token = _current.set(context)
        try:
            return await self.function(payload, context)
        finally:
            _current.reset(token)

    def item(
        self, payload: Mapping[str, Any] | None = None, *, tenant: str, **options: Any
    ) -> WorkItem:
        """
        Return an item for this handler, to be enqueued. *options*: fields of `WorkItem`
        (id, dedupe_key, priority, available_at, max_attempts, timeout_seconds, …).
        """
        for fixed in ("handler", "payload"):
            if fixed in options:
                raise InvalidFieldError("is given by the handler itself", field=fixed)
        own: dict[str, Any] = {
            "queue": self.queue,
            "priority": self.priority,
            "max_attempts": self.max_attempts,
            "timeout_seconds": self.timeout_seconds,
        }
        return WorkItem(
            tenant=tenant,
            handler=self.name,
            payload={} if payload is None else payload,
            **(own | options),
        )

    def enqueue(
        self,
        payload: Mapping[str, Any] | None = None,
        *,
        tenant: str,
        id: str | None = None,
        dedupe_key: str | None = None,
        priority: int | None = None,
        available_at: datetime | None = None,
        deployment_id: str | None = None,
        max_attempts: int | None = None,
        timeout_seconds: float | None = None,
        using: str | None = None,
    ) -> WorkItem:
        """Enqueue an item for this handler, in the caller's transaction (`WorkQueue.enqueue`)."""
        # Imported late: handlers are registered before the models are loaded.
        from django_workqueue.queues import get_queue

        item = self.item(
            payload,
            tenant=tenant,
            id=new_item_id() if id is None else id,
            dedupe_key=dedupe_key,
            priority=self.priority if priority is None else priority,
            available_at=available_at,
            deployment_id=deployment_id,
            max_attempts=self.max_attempts if max_attempts is None else max_attempts,
            timeout_seconds=self.timeout_seconds if timeout_seconds is None else timeout_seconds,
        )
        return get_queue(using).enqueue(item)

    async def aenqueue(self, payload: Mapping[str, Any] | None = None, **options: Any) -> WorkItem:
        """Do `enqueue()` in the thread, and the transaction, of async ORM calls."""
        item: WorkItem = await sync_to_async(self.enqueue)(payload, **options)
        return item


class Registry:
    """The handlers of this process. Names are global; a queue has at most one catch-all."""

    def __init__(self) -> None:
        self._by_name: dict[str, Handler] = {}
        self._catch_alls: dict[str, Handler] = {}

    def register(self, handler: Handler) -> None:
        """Add *handler*. Raise `ImproperlyConfigured` if another function has its place."""
        place, key = (
            (self._by_name, handler.name) if handler.name else (self._catch_alls, handler.queue)
        )
        other = place.get(key)
        if other is not None and _origin(other) != _origin(handler):
            kind = "handler" if handler.name else "catch-all handler of queue"
            raise ImproperlyConfigured(
                f"{kind} {key!r} is both {_origin(other)} and {_origin(handler)}"
            )
        place[key] = handler

    def find(self, name: str, queue: str) -> Handler:
        """
        Return the handler *name*, or for an empty name the catch-all of *queue*.

        Raise `UnknownHandlerError` if this process has none.
        """
        found = self._by_name.get(name) if name else self._catch_alls.get(queue)
        if found is None:
            raise UnknownHandlerError(handler=name, queue=queue)
        return found

    def __iter__(self) -> Any:
        return iter([*self._by_name.values(), *self._catch_alls.values()])


def _origin(handler: Handler) -> str:
    # A module that is loaded again registers the same function anew.
    name = getattr(handler.function, "__qualname__", type(handler.function).__qualname__)
    return f"{handler.function.__module__}.{name}"


registry: Final = Registry()


def handler(
    name: str = "",
    *,
    queue: str = DEFAULT_QUEUE,
    max_attempts: int | None = None,
    timeout_seconds: float | None = None,
    priority: int = WorkPriority.NORMAL,
    atomic: bool = False,
) -> Callable[[HandlerFunction], Handler]:
    """
    Register the decorated function for the items with that handler *name*.

    Without a name it is the catch-all of *queue*, for items without one. The other options
    are those of the items that its ``enqueue()`` makes; None: as the queue's policy says.
    With *atomic*, the function's database work and the item's completion commit together
    or not at all: it runs in a transaction on the queue's database, so it must be sync.
    """
    require_text("name", name, MAX_HANDLER_LENGTH, empty=True)
    require_boolean("atomic", atomic)
    require_text("queue", queue, MAX_QUEUE_LENGTH)

    def register(function: HandlerFunction) -> Handler:
        if not callable(function):
            raise InvalidFieldError("@handler needs parentheses: @handler()", field="name")
        made = Handler(
            function=function,
            name=name,
            queue=queue,
            max_attempts=max_attempts,
            timeout_seconds=timeout_seconds,
            priority=priority,
            atomic=atomic,
        )
        if atomic and made.is_async:
            raise InvalidFieldError("an async handler can't be atomic", field="atomic")
        made.item({}, tenant="-")  # refuses options that no item may have
        registry.register(made)
        return made

    return register


def autodiscover() -> None:
    """Import the `handlers` module of every installed app, so that its handlers register."""
    autodiscover_modules("handlers")
