"""Handlers: how they register, how items find them, and what they are told."""

import asyncio
import subprocess
import sys

import pytest
from asgiref.sync import sync_to_async
from django.core.exceptions import ImproperlyConfigured
from django.db import connections

from django_workqueue import (
    ClaimLostError,
    Context,
    InvalidFieldError,
    Reject,
    Retry,
    UnknownHandlerError,
    WorkItem,
    WorkPriority,
    handler,
)
from django_workqueue.handlers import Registry, registry
from django_workqueue.testing import make_queue


@pytest.fixture
def own_registry(monkeypatch) -> Registry:
    """A registry of this test alone."""
    own = Registry()
    monkeypatch.setattr("django_workqueue.handlers.registry", own)
    return own


def work(payload, context):
    """Do the work."""
    return payload


async def awork(payload, context):
    return payload


class TestRegistering:
    def test_a_named_handler_is_found_by_its_name_in_any_queue(self, own_registry):
        made = handler("report", queue="reports")(work)
        assert own_registry.find("report", "reports") is made
        assert own_registry.find("report", "elsewhere") is made

    def test_a_handler_without_a_name_catches_all_nameless_items_of_its_queue(self, own_registry):
        made = handler(queue="email")(work)
        assert own_registry.find("", "email") is made
        with pytest.raises(UnknownHandlerError):
            own_registry.find("", "default")
        with pytest.raises(UnknownHandlerError) as unknown:
            own_registry.find("named", "email")
        assert (unknown.value.handler, unknown.value.queue) == ("named", "email")

    def test_two_functions_can_not_have_one_name(self, own_registry):
        handler("report")(work)
        with pytest.raises(ImproperlyConfigured, match="'report' is both"):
            handler("report")(awork)
        handler(queue="email")(work)
        with pytest.raises(ImproperlyConfigured, match="catch-all handler of queue 'email'"):
            handler(queue="email")(awork)

    def test_a_module_loaded_again_registers_the_same_function_anew(self, own_registry):
        handler("report")(work)
        again = handler("report")(work)
        assert own_registry.find("report", "default") is again

    def test_decorating_twice_registers_under_both_names(self, own_registry):
        inner = handler("one", queue="other")(work)
        outer = handler("two")(inner.function)
        assert (inner.name, outer.name, outer.queue) == ("one", "two", "default")
        wrapped = handler("three")(inner)
        assert own_registry.find("three", "default") is wrapped
        assert own_registry.find("one", "other") is inner

    def test_attributes_of_the_function_do_not_become_the_handlers(self, own_registry):
        def named(payload, context):
            return None

        named.name, named.queue = "evil", "q"
        made = handler("good")(named)
        assert (made.name, made.queue) == ("good", "default")

    def test_an_object_with_an_async_call_is_async(self, own_registry):
        class Callable:
            async def __call__(self, payload, context):
                return None

        with pytest.raises(InvalidFieldError, match="atomic"):
            handler("object", atomic=True)(Callable())

    def test_a_handler_is_still_the_function(self, own_registry):
        made = handler("report")(work)
        context = Context(WorkItem(tenant="acme"))
        assert made({"a": 1}, context) == {"a": 1}
        assert (made.__name__, made.__doc__) == ("work", "Do the work.")
        assert not made.is_async
        assert handler("async")(awork).is_async

    @pytest.mark.parametrize(
        ("options", "field"),
        [
            ({"name": "x" * 201}, "name"),
            ({"queue": ""}, "queue"),
            ({"max_attempts": 0}, "max_attempts"),
            ({"timeout_seconds": -1}, "timeout_seconds"),
            ({"priority": 101}, "priority"),
            ({"atomic": "no"}, "atomic"),
        ],
    )
    def test_options_that_no_item_may_have_are_refused_by_name(self, own_registry, options, field):
        with pytest.raises(InvalidFieldError) as refused:
            handler(**options)(work)
        assert refused.value.field == field
        assert list(own_registry) == []

    def test_an_async_handler_can_not_be_atomic(self, own_registry):
        with pytest.raises(InvalidFieldError, match="atomic"):
            handler("a", atomic=True)(awork)

    def test_forgotten_parentheses_are_told(self, own_registry):
        with pytest.raises(InvalidFieldError, match="name"):
            handler(work)

    def test_the_handlers_of_installed_apps_are_registered_when_apps_are_ready(self):
        assert registry.find("library.report", "demo").atomic

    def test_the_package_imports_before_settings_and_apps_are_there(self):
        code = (
            "import django_workqueue as w\n"
            "@w.handler('x')\n"
            "def f(payload, context): pass\n"
            "w.WorkItem(tenant='acme'); w.MemoryWorkQueue()\n"
        )
        subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env={})


class TestContext:
    def context(self, **fields) -> Context:
        claimed = {"tenant": "acme", "state": "claimed", "worker": "w", "job_id": 7, "fence": 3}
        return Context(WorkItem(id="one", attempts=2, **claimed | fields))

    def test_it_tells_tenant_attempt_and_fence(self):
        context = self.context()
        assert (context.tenant, context.attempt, context.fence) == ("acme", 3, 3)

    def test_the_key_stays_over_attempts_and_differs_between_acceptances(self):
        first = self.context()
        again = self.context(fence=4)
        anew = self.context(job_id=8)
        assert first.idempotency_key == again.idempotency_key
        assert first.idempotency_key != anew.idempotency_key

    def test_check_raises_once_the_handler_should_stop(self):
        context = self.context()
        context.check()
        assert not context.cancelled
        context.stop("the lease was lost")
        context.stop("something later")
        assert context.cancelled
        with pytest.raises(ClaimLostError, match="the lease was lost"):
            context.check()

    def test_reject_and_retry_carry_what_was_said(self):
        assert Reject("no such page").reason == "no such page"
        assert Retry(30, "busy").delay_seconds == 30
        for delay in (-1, float("nan"), "soon"):
            with pytest.raises(InvalidFieldError, match="delay_seconds"):
                Retry(delay)


@pytest.mark.django_db(transaction=True, databases="__all__")
class TestEnqueueing:
    def test_an_item_has_the_options_of_its_handler(self, own_registry):
        made = handler(
            "report", queue="reports", max_attempts=2, timeout_seconds=9, priority=WorkPriority.HIGH
        )(work)
        queue = make_queue("sqlite")
        item = made.enqueue({"id": 1}, tenant="acme", dedupe_key="k", using=queue.using)
        assert (item.handler, item.queue, item.payload) == ("report", "reports", {"id": 1})
        assert (item.max_attempts, item.timeout_seconds, item.priority) == (2, 9, 50)
        again = made.enqueue({"id": 2}, tenant="acme", dedupe_key="k", using=queue.using)
        assert again.job_id == item.job_id

    def test_options_of_the_call_win(self, own_registry):
        made = handler("report", priority=10)(work)
        make_queue("sqlite")
        item = made.enqueue(
            tenant="acme", id="mine", priority=0, max_attempts=2, timeout_seconds=9, using="default"
        )
        assert (item.id, item.priority, item.payload) == ("mine", 0, {})
        assert (item.max_attempts, item.timeout_seconds) == (2, 9)
        for payload in ([], "", 0, False):
            with pytest.raises(InvalidFieldError, match="payload"):
                made.enqueue(payload, tenant="acme", using="default")

    def test_it_has_an_async_twin(self, own_registry):
        made = handler("report")(awork)
        queue = make_queue("sqlite")

        async def enqueue() -> WorkItem:
            item = await made.aenqueue({"n": 1}, tenant="acme", using=queue.using)
            await sync_to_async(connections.close_all)()
            return item

        assert queue.get(asyncio.run(enqueue()).id, tenant="acme").payload == {"n": 1}

    def test_what_the_handler_itself_decides_can_not_be_given(self, own_registry):
        made = handler("report")(work)
        with pytest.raises(InvalidFieldError, match="handler"):
            made.item({}, tenant="acme", handler="other")
