"""The OpenAPI document of `/queue`: it is whole and as committed, and the API does what it says."""

import re
from pathlib import Path

import pytest
import schemathesis
import yaml
from django.core.handlers.wsgi import WSGIHandler
from django.urls import include
from django.urls import path as mounted
from drf_spectacular.drainage import GENERATOR_STATS
from drf_spectacular.renderers import OpenApiYamlRenderer
from drf_spectacular.settings import spectacular_settings
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as examples
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from django_workqueue import QueuePolicy
from django_workqueue.api import schema
from django_workqueue.api.problems import PROBLEMS
from django_workqueue.api.schema import document
from django_workqueue.api.words import STATUSES
from django_workqueue.models import QueueItem
from django_workqueue.testing import make_queue
from tests.api import ENDPOINTS, SCOPE, operator, token, user
from tests.test_api_jobs import put

COMMITTED = Path(__file__).parent.parent / "docs" / "reference" / "openapi.yaml"
REGENERATE = """\
docs/reference/openapi.yaml is not what the code says. Write it anew, and look at the difference:

python testproject/manage.py shell -c 'from tests.test_api_schema import write; write()'
"""
EXAMPLES = 12

OPERATIONS = [
    (method, path, operation["operationId"])
    for path, item in document("/queue/")["paths"].items()
    for method, operation in item.items()
]
every_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda each: each[2])
load_all_checks()
with_database = pytest.mark.django_db(transaction=True, databases="__all__")


def written():
    """The document as it is committed."""
    return OpenApiYamlRenderer().render(document("/queue/")).decode()


def write():
    COMMITTED.write_text(written(), encoding="utf-8")


def test_the_committed_document_is_what_the_code_says():
    there = COMMITTED.read_text(encoding="utf-8") if COMMITTED.exists() else ""
    assert there == written(), REGENERATE


def test_it_is_built_without_a_warning():
    schema._document.cache_clear()
    document("/queue/")
    assert not GENERATOR_STATS, (GENERATOR_STATS._warn_cache, GENERATOR_STATS._error_cache)


def test_what_the_project_sets_for_its_own_document_does_not_change_ours(settings, monkeypatch):
    before = written()
    schema._document.cache_clear()
    monkeypatch.setattr(spectacular_settings, "TITLE", "Theirs")
    monkeypatch.setattr(spectacular_settings, "CAMELIZE_NAMES", True)
    settings.REST_FRAMEWORK = {"DEFAULT_SCHEMA_CLASS": "rest_framework.schemas.openapi.AutoSchema"}
    assert written() == before
    # And theirs is as it was.
    assert spectacular_settings.TITLE == "Theirs"
    assert "drf_spectacular" not in settings.INSTALLED_APPS


def test_it_has_every_endpoint_and_nothing_of_the_project():
    there = {(method.upper(), path) for method, path, _ in OPERATIONS}
    named = {
        (each.method, each.path.partition("?")[0].replace("999999999999", "{job_id}"))
        for each in ENDPOINTS
    }
    assert there == named


def test_every_operation_is_told_whole():
    assert len({name for _, _, name in OPERATIONS}) == len(OPERATIONS) == len(ENDPOINTS)
    for method, path, _ in OPERATIONS:
        operation = document("/queue/")["paths"][path][method]
        assert operation["tags"] == ["queue"]
        assert operation["summary"][0].isupper()
        assert operation["security"] == [{"token": []}, {"session": []}]
        has_body = {"413", "415"} if method == "post" else set()
        found = {"404"} if "{job_id}" in path or method == "delete" else set()
        always = {"200", "400", "401", "403", "429", "503"}
        assert {*operation["responses"]} - {"409"} == always | has_body | found, path
        assert ("requestBody" in operation) == (method == "post")
    components = document("/queue/")["components"]
    assert components["schemas"]["JobStatus"]["enum"] == [*STATUSES]
    assert components["schemas"]["ProblemCode"]["enum"] == [*PROBLEMS]
    assert components["securitySchemes"]["token"]["scheme"] == "bearer"
    assert components["securitySchemes"]["session"]["name"] == "sessionid"


def test_every_code_is_told_somewhere():
    told = {*re.findall(r"`(\w+)`", written())}
    assert {*PROBLEMS} <= told


urlpatterns = [mounted("ops/work/", include("django_workqueue.api.urls"))]


@with_database
def test_it_is_served_with_the_addresses_where_it_is_mounted(settings):
    answer = operator().get("/queue/schema")
    assert answer["Content-Type"] == "application/json"
    assert answer.json() == yaml.safe_load(COMMITTED.read_text(encoding="utf-8"))
    settings.ROOT_URLCONF = __name__
    elsewhere = operator().get("/ops/work/schema").json()
    assert {*elsewhere["paths"]} == {
        path.replace("/queue/", "/ops/work/") for path in answer.json()["paths"]
    }


# What the document says, tried out.


CHECKED = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
    "positive_data_acceptance",
]
#: What more than the document can say decides whether they refuse: parameters that go only with
#: others, names that must be known, and the state of a job.
#: Their right answers may be 400.
DECIDED_BY_MORE = {
    "queue_jobs_list",
    "queue_stats",
    "queue_dead_letters_list",
    "queue_holds_lift",
    "queue_jobs_requeue",
    "queue_jobs_resume",
    "queue_jobs_cancel",
    "queue_jobs_discard",
    "queue_jobs_requeue_many",
}


#: The state from which a move can be made.
CAN = {
    "queue_jobs_requeue": "failed",
    "queue_jobs_resume": "paused",
    "queue_jobs_cancel": "queued",
    "queue_jobs_discard": "failed",
}


@pytest.fixture
def queue(request, settings):
    """A queue with three jobs in every state, each state in a queue of its own."""
    queue = make_queue(getattr(request, "param", "sqlite"), QueuePolicy(max_attempts=1))
    settings.WORKQUEUE = {"DATABASE": queue.using}
    settings.ALLOWED_HOSTS = ["*"]
    for state in STATUSES:
        for number in range(3):
            put(queue, f"{state} {number}", state, queue=state)
    return queue


def admin():
    return {"Authorization": f"Bearer {token(user(is_superuser=True), scope=SCOPE)}"}


def within_reach(case, queue, name, data, *, surely):
    """Change an example so that it can succeed: nothing of what there is, is found by chance."""
    if "job_id" in case.path_parameters:
        can = CAN.get(name, "completed")
        states = [can] if surely else [can, *STATUSES]
        jobs = QueueItem.objects.using(queue.using).filter(queue=data.draw(st.sampled_from(states)))
        ids = [str(pk) for pk in jobs.order_by("pk").values_list("pk", flat=True)]
        case.path_parameters["job_id"] = data.draw(st.sampled_from(ids))
    elif name == "queue_holds_lift":
        queue.hold(queue="failed", by="", reason="")
        case.query = {"queue": "failed"}
    elif name == "queue_jobs_requeue_many":
        case.body |= {"filter": {"queue": "failed"}, "expected_count": 3}


def run(method, path, headers, *, mode=GenerationMode.POSITIVE, number, without=(), change=None):
    """Call an operation with examples, and check the answers; the statuses that came."""
    described = schemathesis.openapi.from_dict(document("/queue/"))
    described.app = WSGIHandler()
    operation = described[path][method]
    checks = [CHECKS.get_one(name) for name in CHECKED if name not in without]
    came = []

    @examples(
        max_examples=number,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=[*HealthCheck],
    )
    @given(case=operation.as_strategy(generation_mode=mode), data=st.data())
    def call(case, data):
        if change:
            change(case, data)
        came.append(case.call_and_validate(headers=headers, checks=checks).status_code)

    call()
    print(method, path, mode, sorted(came))
    return came


@with_database
@every_operation
@pytest.mark.parametrize("queue", ["sqlite", "postgresql"], indirect=True)
def test_what_is_right_is_answered_as_told(operation, queue):
    method, path, name = operation

    seen = []

    def change(case, data):
        if not seen or data.draw(st.booleans()):
            within_reach(case, queue, name, data, surely=not seen)
        seen.append(case)

    without = ["positive_data_acceptance"] if name in DECIDED_BY_MORE else []
    came = run(method, path, admin(), number=EXAMPLES, without=without, change=change)
    assert 200 in came


@with_database
@every_operation
def test_what_is_wrong_is_refused_as_told(operation, queue):
    method, path, _ = operation
    run(method, path, admin(), mode=GenerationMode.NEGATIVE, number=EXAMPLES)


@with_database
@pytest.mark.parametrize("status", [401, 403, 503])
def test_whoever_may_not_and_a_queue_that_is_off_are_answered_as_told(status, queue, settings):
    headers = {401: {}, 403: {"Authorization": f"Bearer {token(user())}"}, 503: admin()}[status]
    if status == 503:
        settings.WORKQUEUE = {"ENABLED": False}
    for method, path, _ in OPERATIONS:
        without = ["not_a_server_error"] if status == 503 else []
        assert {*run(method, path, headers, number=2, without=without)} == {status}
