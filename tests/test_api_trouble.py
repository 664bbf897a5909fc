"""What `/queue` answers when something is wrong: with the store, with the call, or with us."""

import json
from contextlib import contextmanager
from io import BytesIO
from wsgiref.util import setup_testing_defaults

import pytest
from django.apps import apps
from django.core.cache import cache
from django.core.handlers.wsgi import WSGIHandler
from django.db import connections
from django.test import Client
from rest_framework.test import APIClient

from django_workqueue import QueuePolicy, jobs
from django_workqueue.api import access, fleet
from django_workqueue.api.base import OperatorViewSet
from django_workqueue.jobs import finding
from django_workqueue.models import AuditEntry, Hold
from django_workqueue.testing import make_queue
from tests.api import (
    ALL,
    ENDPOINTS,
    SCOPE,
    check_problem,
    operator,
    post,
    strict,
    token,
    user,
    with_session,
)
from tests.elsewhere import Elsewhere
from tests.test_api_jobs import BULK, LIST, at, put, state

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")

#: Those that tell or change something of the store.
OF_THE_STORE = [each for each in ENDPOINTS if "schema" not in each.path]
TABLES = [model._meta.db_table for model in apps.get_app_config("django_workqueue").get_models()]


@pytest.fixture(params=["sqlite", "postgresql"])
def queue(request, settings):
    return opened(request.param, settings)


def opened(backend, settings):
    queue = make_queue(backend, QueuePolicy(max_attempts=1))
    settings.WORKQUEUE = {"DATABASE": queue.using}
    return queue


@pytest.fixture
def client(db):
    return operator(*ALL)


def check_unavailable(answer):
    check_problem(answer, 503, "unavailable")
    assert 1 <= int(answer["Retry-After"]) <= 60


class OnePlace:
    """A router that has everything in one database."""

    def db_for_read(self, model, **hints):
        return "postgresql"

    db_for_write = db_for_read


class Answer(dict):
    """The headers of an answer, with its status and its body."""

    status_code: int
    content: bytes


class Served:
    """The application as a server calls it: then Django looks after its connections."""

    def __init__(self, made):
        self.application = WSGIHandler()
        self.token = made

    def generic(self, method, path, data="", content_type="", headers=None):
        path, _, query = path.partition("?")
        body = data.encode() if isinstance(data, str) else data
        environ = {"HTTP_HOST": "testserver", "REQUEST_METHOD": method, "PATH_INFO": path}
        environ |= {"QUERY_STRING": query, "CONTENT_TYPE": content_type}
        environ |= {"wsgi.input": BytesIO(body), "CONTENT_LENGTH": str(len(body))}
        environ |= {"HTTP_AUTHORIZATION": f"Bearer {self.token}"}
        setup_testing_defaults(environ)
        answer = Answer()

        def start(status, headers, exc_info=None):
            answer.status_code = int(status.split()[0])
            answer.update(headers)

        response = self.application(environ, start)
        answer.content = b"".join(response)
        response.close()
        return answer

    def get(self, path):
        return self.generic("GET", path)


@pytest.fixture
def stoppable(private_database, private_postgres, settings):
    """
    All tables behind the alias "postgresql", on a server that can be stopped. The alias is one
    that was there when the views were made.
    """
    own, private = connections.settings["postgresql"], connections.settings[private_database]
    before = dict(own)
    connections["postgresql"].close()
    own.update({key: private[key] for key in ("NAME", "HOST", "PORT", "USER", "PASSWORD")})
    settings.DATABASE_ROUTERS = [OnePlace()]
    settings.WORKQUEUE = {"DATABASE": "postgresql"}
    yield private_postgres
    connections["postgresql"].close()
    own.clear()
    own.update(before)
    settings.DATABASE_ROUTERS = []


class TestStopped:
    def test_every_endpoint_is_unavailable_and_answers_again_after_a_restart(
        self, stoppable, settings
    ):
        queue = make_queue("postgresql", QueuePolicy(max_attempts=1))
        job = put(queue, "one", "failed")
        owner = user(*ALL)
        served = Served(token(owner, scope=SCOPE))
        assert strict(served.get("/queue/stats"))["counts"] == {"failed": 1}
        stoppable.stop("immediate")
        # Twice: with the connection that was cut, and with none.
        for _ in range(2):
            for each in ENDPOINTS:
                check_unavailable(each.call(served))
            check_unavailable(post(served, at(job, "requeue")))
        stoppable.start()
        for each in ENDPOINTS:
            assert each.call(served).status_code == each.status
        assert strict(served.get("/queue/stats"))["counts"] == {"failed": 1}
        assert strict(post(served, at(job, "requeue")))["status"] == "queued"

    def test_so_it_is_where_the_caller_is_looked_up(self, stoppable, settings):
        """The queue's own database goes on: it is that of the users that is gone."""
        queue = opened("sqlite", settings)
        put(queue, "one")
        owner = user(*ALL)
        session, bearer = with_session(owner), operator(*ALL)
        session.raise_request_exception = False
        assert session.get(LIST).status_code == 200
        assert bearer.get(LIST).status_code == 200
        stoppable.stop("immediate")
        for client in (session, bearer):
            check_unavailable(client.get(LIST))
            check_unavailable(client.get("/queue/stats"))
            check_unavailable(post(client, "/queue/holds", {"tenant": "acme"}))
        # What isn't looked up is told as always.
        answer = APIClient().get(LIST)
        check_problem(answer, 401, "not_authenticated")
        bad = APIClient(HTTP_AUTHORIZATION="Bearer nonsense")
        check_problem(bad.get(LIST), 401, "authentication_failed")

    def test_so_it_is_where_the_project_has_a_transaction_around_each_view(self, stoppable):
        own = connections.settings["postgresql"]
        own["ATOMIC_REQUESTS"] = True
        owner = user(*ALL)
        served = Served(token(owner, scope=SCOPE))
        for each in ENDPOINTS:
            assert each.call(served).status_code == each.status
        stoppable.stop("immediate")
        for _ in range(2):
            for each in ENDPOINTS:
                check_unavailable(each.call(served))
        stoppable.start()
        assert served.get("/queue/stats").status_code == 200


@pytest.fixture
def around_each_view(queue):
    own = connections.settings[queue.using]
    own["ATOMIC_REQUESTS"] = True
    yield
    own["ATOMIC_REQUESTS"] = False


def test_a_transaction_around_each_view_changes_no_answer(queue, client, around_each_view):
    job, live = put(queue, "one", "failed"), put(queue, "one")
    assert check_problem(post(client, at(job, "requeue")), 409, "live_twin")["twin"] == str(live)
    check_problem(post(client, at(job, "resume")), 400, "wrong_state")
    assert strict(post(client, at(live, "cancel")))["status"] == "cancelled"
    assert strict(post(client, at(job, "requeue")))["status"] == "queued"
    assert strict(client.get(LIST))["meta"]["total_count"] == 2


class TestCut:
    """Trouble of the store that comes in the middle."""

    def test_a_connection_that_is_cut_is_unavailable_once(self, settings):
        queue = opened("postgresql", settings)
        put(queue, "one")
        served = Served(token(user(*ALL), scope=SCOPE))
        connections[queue.using].settings_dict["CONN_MAX_AGE"] = None
        try:
            for path in (LIST, "/queue/stats", "/queue/tenants", "/queue/holds", "/queue/workers"):
                assert served.get(path).status_code == 200
                pid = connections[queue.using].connection.info.backend_pid
                with Elsewhere(queue.using) as other:
                    other.call(lambda pid=pid: terminate(queue.using, pid))
                check_unavailable(served.get(path))
                assert served.get(path).status_code == 200
        finally:
            connections[queue.using].settings_dict["CONN_MAX_AGE"] = 0

    def test_a_store_that_may_only_be_read_is_read_and_takes_nothing(self, settings, client):
        queue = opened("postgresql", settings)
        job = put(queue, "one", "failed")
        own = connections[queue.using].settings_dict
        before = own["OPTIONS"]
        own["OPTIONS"] = before | {"options": "-c default_transaction_read_only=on"}
        connections[queue.using].close()
        try:
            assert client.get(LIST).status_code == 200
            check_unavailable(post(client, at(job, "requeue")))
            check_unavailable(post(client, at(job, "discard"), {"reason": "x"}))
            check_unavailable(post(client, "/queue/holds", {"tenant": "acme"}))
            wish = {"filter": {"status": ["failed"]}, "expected_count": 1}
            check_unavailable(post(client, BULK, wish))
        finally:
            own["OPTIONS"] = before
            connections[queue.using].close()
        assert state(queue, job) == "failed"
        assert not AuditEntry.objects.using(queue.using).exists()

    def test_a_file_that_another_writes_to_is_read_and_takes_nothing(self, settings, client):
        queue = opened("sqlite", settings)
        job = put(queue, "one", "failed")
        with connections[queue.using].cursor() as cursor:
            cursor.execute("pragma busy_timeout = 10")
        try:
            with Elsewhere(queue.using) as other:
                other.begin()
                check_unavailable(post(client, at(job, "requeue")))
                assert client.get(LIST).status_code == 200
                other.rollback()
            assert strict(post(client, at(job, "requeue")))["status"] == "queued"
        finally:
            connections[queue.using].close()


def terminate(using, pid):
    with connections[using].cursor() as cursor:
        # Waits until the backend is gone.
        cursor.execute("select pg_terminate_backend(%s, 10000)", [pid])


@contextmanager
def without(using, *tables):
    """Have these tables under other names meanwhile."""

    def rename(before, after):
        # On a cursor of its own: trouble may end the connection.
        with connections[using].cursor() as cursor:
            for table in tables:
                cursor.execute(f"alter table {table}{before} rename to {table}{after}")

    rename("", "_away")
    try:
        yield
    finally:
        rename("_away", "")


class TestMissingTables:
    def test_without_its_tables_every_endpoint_is_unavailable(self, queue, client):
        with without(queue.using, *TABLES):
            for each in OF_THE_STORE:
                check_unavailable(each.call(client))
        for each in OF_THE_STORE:
            assert each.call(client).status_code == each.status

    @pytest.mark.parametrize("table", TABLES)
    def test_without_one_of_them_nothing_is_an_error_of_ours(self, queue, client, table):
        job = put(queue, "one", "failed")
        with without(queue.using, table):
            for each in OF_THE_STORE:
                answer = each.call(client)
                if answer.status_code != each.status:
                    check_unavailable(answer)
            for path in (LIST, f"{LIST}?status=failed", f"{LIST}?tenant=acme", at(job)):
                answer = client.get(path)
                if answer.status_code != 200:
                    check_unavailable(answer)
                else:
                    assert b'"one"' in answer.content
            answer = post(client, at(job, "requeue"))
            if answer.status_code != 200:
                check_unavailable(answer)
        if answer.status_code != 200:
            assert state(queue, job) == "failed"

    @pytest.mark.parametrize("place", ["default", "postgresql"])
    def test_so_it_is_without_the_tables_of_users_and_sessions(self, settings, place):
        if place == "postgresql":
            settings.DATABASE_ROUTERS = [OnePlace()]
        opened("sqlite", settings)
        owner = user(*ALL)
        bearer, session = operator(*ALL), with_session(owner)
        session.raise_request_exception = False
        with without(place, "auth_user"):
            check_unavailable(bearer.get(LIST))
            check_unavailable(session.get(LIST))
        with without(place, "django_session"):
            check_unavailable(session.get(LIST))
            assert bearer.get(LIST).status_code == 200
        with without(place, "auth_permission"):
            check_unavailable(session.get(LIST))
        assert session.get(LIST).status_code == 200
        settings.DATABASE_ROUTERS = []


def test_switched_off_no_endpoint_answers_and_switched_on_all_do(queue, client, settings):
    here = settings.WORKQUEUE
    put(queue, "one")
    settings.WORKQUEUE = here | {"ENABLED": False}
    for each in ENDPOINTS:
        check_problem(each.call(client), 503, "switched_off")
    check_problem(client.get("/queue/jobs?colour=red"), 503, "switched_off")
    assert not Hold.objects.using(queue.using).exists()
    settings.WORKQUEUE = here
    for each in ENDPOINTS:
        assert each.call(client).status_code == each.status


class TestBodies:
    MALFORMED = (
        "{",
        "{} x",
        "reason=x",
        "{'reason': 'x'}",
        '{"reason": NaN}',
        '{"reason": Infinity}',
        '{"reason": -Infinity}',
        '{"reason": "\x01"}',
        '{"reason": "x",}',
        '{"x": ' + "9" * 5000 + "}",
        b"\xff\xfe{}",
        b'{"reason": "\xff"}',
        b'{"reason": "\xed\xa0\x80"}',
        b"\x1f\x8b\x08\x00",
        "[" * 100_000 + "]" * 100_000,
        '{"a":' * 100_000 + "1" + "}" * 100_000,
        "[" * 100_000,
        '{"reason": ' + "[" * 5_000 + "]" * 5_000 + "}",
    )

    def test_what_is_no_json_is_refused(self, client):
        make_queue("sqlite")
        paths = ("/queue/jobs/1/cancel", BULK, "/queue/holds")
        for body in self.MALFORMED:
            for path in paths:
                answer = post(client, path, body)
                assert answer.status_code == 400, body[:50]
                told = check_problem(answer, 400, "malformed")
                for word in ("Traceback", "site-packages"):
                    assert word not in told["detail"], told

    def test_what_is_json_and_no_object_is_refused(self, client):
        make_queue("sqlite")
        for body in ("[]", "[1]", "1", '"reason"', "true", "null", '[{"reason": "x"}]'):
            for path in ("/queue/jobs/1/cancel", BULK, "/queue/holds"):
                answer = post(client, path, body)
                assert (answer.status_code, strict(answer)["code"]) == (400, "invalid_parameter")

    def test_however_deep_it_is_nested_it_is_refused(self, client):
        """Also where Python's own limit is near, which differs from place to place."""
        make_queue("sqlite")
        shapes = (
            '{"reason": %s}',
            '{"colour": %s}',
            '{"payload": %s}',
            '{"filter": %s, "expected_count": 1}',
            '{"filter": {"status": %s}, "expected_count": 1}',
            '{"filter": {"status": [%s]}, "expected_count": 1}',
            '{"filter": {"tenant": "a"}, "expected_count": %s}',
        )
        for depth in (101, 300, 700, *range(850, 1000, 4)):
            for text in ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth):
                for shape in shapes:
                    path = BULK if "filter" in shape else "/queue/jobs/1/requeue"
                    answer = post(client, path, shape % text)
                    assert answer.status_code in (400, 404), (shape, depth)
                    wanted = ("malformed", "invalid_parameter", "not_found")
                    assert strict(answer)["code"] in wanted

    NAMES = ('{"\\ud800": 1}', '{"a\\u0000": 1}', '{"<script>": 1}', '{"\\u2028": 1}', '{"": 1}')

    def test_an_odd_name_is_refused_in_json(self, client):
        make_queue("sqlite")
        for body in self.NAMES:
            for path in ("/queue/jobs/1/cancel", BULK, "/queue/holds"):
                answer = post(client, path, body)
                assert answer.status_code == 400, body
                assert strict(answer)["code"] == "invalid_parameter"

    def test_one_that_is_too_large_is_refused_and_one_that_is_as_large_is_not(
        self, client, settings
    ):
        make_queue("sqlite")
        settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 1_000
        body = json.dumps({"tenant": "a", "reason": "x" * 900})
        body = body[:-1] + " " * (1_000 - len(body)) + "}"
        assert post(client, "/queue/holds", body).status_code == 200
        for extra in (" ", " " * 1_000_000):
            check_problem(post(client, "/queue/holds", body + extra), 413, "too_large")
        settings.DATA_UPLOAD_MAX_MEMORY_SIZE = None
        assert post(client, "/queue/holds", body + " " * 3_000_000).status_code == 200

    def test_one_of_another_type_is_refused(self, client):
        make_queue("sqlite")
        types = (
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "multipart/form-data",
            "text/plain",
            "application/xml",
            "application/x-yaml",
            "application/json-patch+json",
            "json",
            "\x7f",
        )
        for kind in types:
            answer = client.generic("POST", "/queue/holds", '{"tenant": "a"}', kind)
            assert answer.status_code == 415, kind
            check_problem(answer, 415, "unsupported_media_type")
        assert not Hold.objects.exists()
        kind = "application/json; charset=utf-8"
        assert client.generic("POST", "/queue/holds", '{"tenant": "a"}', kind).status_code == 200

    def test_a_form_of_a_session_is_refused_as_all_else(self):
        """Where its token is looked for, the form isn't read."""
        make_queue("sqlite")
        kinds = ("application/x-www-form-urlencoded", "multipart/form-data; boundary=")
        session = with_session(user(*ALL), enforce_csrf_checks=True)
        session.raise_request_exception = False
        session.cookies["csrftoken"] = secret = "x" * 32
        for kind in kinds:
            for body in (f"csrfmiddlewaretoken={secret}", "x=1&" * 2_000, "x" * 3_000_000):
                answer = session.generic("POST", "/queue/holds", body, kind)
                check_problem(answer, 415, "unsupported_media_type")
        assert not Hold.objects.exists()


class TestOurOwnErrors:
    def check(self, answer):
        assert answer.status_code == 500
        text = answer.content.decode()
        for word in ("geheim", "RuntimeError", "Traceback", "django", "select", "nonsense"):
            assert word not in text

    def test_they_show_nothing_of_what_went_wrong(self, client, monkeypatch):
        make_queue("sqlite")

        def fails(self, request, *args, **kwargs):
            raise RuntimeError("geheim")

        monkeypatch.setattr(OperatorViewSet, "initial", fails)
        for each in ENDPOINTS:
            self.check(each.call(client))

    def test_they_are_no_trouble_of_the_store(self, settings, client, monkeypatch):
        """A statement that is wrong won't be right a minute later."""
        queue = opened("postgresql", settings)

        def fails(*args):
            with connections[queue.using].cursor() as cursor:
                cursor.execute("select nonsense of geheim")

        monkeypatch.setattr(fleet, "look", fails)
        self.check(client.get("/queue/stats"))


class TestRates:
    @pytest.fixture(autouse=True)
    def _empty(self):
        make_queue("sqlite")
        cache.clear()
        yield
        cache.clear()

    def rates(self, settings, **rates):
        named = {f"workqueue-{scope}": rate for scope, rate in rates.items()}
        settings.REST_FRAMEWORK = {"DEFAULT_THROTTLE_RATES": named}

    def check_throttled(self, answer):
        check_problem(answer, 429, "throttled")
        assert 1 <= int(answer["Retry-After"]) <= 60

    def test_each_scope_has_its_own_rate(self, client, settings):
        self.rates(settings, read="3/min", write="2/min", bulk="1/min")
        wish = {"filter": {"tenant": "a"}, "expected_count": 0, "dry_run": True}
        assert client.get(LIST).status_code == 200
        assert client.get(at(1)).status_code == 404
        assert client.head("/queue/stats").status_code == 200
        self.check_throttled(client.get("/queue/holds"))
        assert post(client, at(1, "cancel")).status_code == 404
        assert post(client, "/queue/holds", {"tenant": "a"}).status_code == 200
        self.check_throttled(post(client, "/queue/holds", {"tenant": "b"}))
        self.check_throttled(client.delete("/queue/holds?tenant=a"))
        assert Hold.objects.get().tenant == "a"
        assert post(client, BULK, wish).status_code == 200
        self.check_throttled(post(client, BULK, wish))

    def test_it_counts_for_each_caller(self, client, settings):
        self.rates(settings, read="1/min")
        assert client.get(LIST).status_code == 200
        self.check_throttled(client.get(LIST))
        assert operator().get(LIST).status_code == 200
        assert with_session(user("view_queueitem")).get(LIST).status_code == 200
        settings.WORKQUEUE = {"API": {"open": True}}
        assert APIClient().get(LIST).status_code == 200
        self.check_throttled(APIClient().get(LIST))
        assert APIClient(REMOTE_ADDR="127.0.0.9").get(LIST).status_code == 200

    def test_whoever_is_refused_is_not_counted(self, client, settings):
        self.rates(settings, read="1/min")
        for _ in range(3):
            check_problem(APIClient().get(LIST), 401, "not_authenticated")
        settings.WORKQUEUE = {"API": {"open": True}}
        assert APIClient().get(LIST).status_code == 200

    def test_after_its_time_it_goes_on(self, client, settings, monkeypatch):
        self.rates(settings, read="1/min")
        now = [1_000_000.0]
        monkeypatch.setattr(access.Throttle, "timer", staticmethod(lambda: now[0]))
        assert client.get(LIST).status_code == 200
        now[0] += 59
        answer = client.get(LIST)
        self.check_throttled(answer)
        now[0] += int(answer["Retry-After"])
        assert client.get(LIST).status_code == 200

    @pytest.mark.parametrize("rate", [{}, {"read": None, "write": None}, {"bulk": "1/min"}])
    def test_without_a_rate_there_is_no_limit(self, client, settings, rate):
        self.rates(settings, **rate)
        for _ in range(30):
            assert client.get(LIST).status_code == 200
            assert post(client, at(1, "cancel")).status_code == 404


class TestTooBroad:
    def test_a_search_that_takes_too_long_is_refused_with_a_hint(
        self, settings, client, monkeypatch
    ):
        queue = opened("postgresql", settings)
        job = put(queue, "one", "failed")
        monkeypatch.setattr(jobs, "STATEMENT_TIMEOUT", 100)
        wish = {"filter": {"status": ["failed"]}, "expected_count": 1}
        with Elsewhere(queue.using) as other:
            other.begin()
            other.call(lambda: lock(queue.using))
            for path in (LIST, f"{LIST}?status=failed", f"{LIST}?tenant=acme"):
                told = check_problem(client.get(path), 400, "too_broad")
                assert "narrow it" in told["detail"]
            check_problem(post(client, BULK, wish), 400, "too_broad")
            other.rollback()
        assert client.get(LIST).status_code == 200
        assert state(queue, job) == "failed"

    def test_one_that_would_ask_too_many_tenants_is_refused_with_a_hint(
        self, queue, client, monkeypatch
    ):
        monkeypatch.setattr(finding, "TENANTS", 2)
        for tenant in "abcd":
            put(queue, "one", tenant=tenant, dedupe_key="k")
        for name in ("item_id", "dedupe_key"):
            told = check_problem(client.get(LIST, {name: "one"}), 400, "too_broad")
            assert "name the tenant" in told["detail"]
            assert client.get(LIST, {name: "one", "tenant": "a"}).status_code == 200
        wish = {"filter": {"item_id": "one"}, "expected_count": 4}
        check_problem(post(client, BULK, wish), 400, "too_broad")


def lock(using):
    with connections[using].cursor() as cursor:
        cursor.execute(
            "lock table django_workqueue_queueitem, django_workqueue_deadletter,"
            " django_workqueue_counter in access exclusive mode"
        )


def test_nothing_may_be_kept_by_whoever_passes_it_on(client):
    make_queue("sqlite")
    answers = [each.call(client) for each in ENDPOINTS]
    answers += [each.call(APIClient()) for each in ENDPOINTS]
    answers += [each.call(with_session(user())) for each in ENDPOINTS]
    answers += [client.patch(LIST), client.options(LIST), client.head(LIST)]
    answers += [client.get(f"{LIST}?colour=red"), post(client, BULK, "{")]
    assert {answer.status_code for answer in answers} >= {200, 400, 401, 403, 404, 405}
    for answer in answers:
        assert answer["Cache-Control"] == "no-store"
        assert answer["X-Request-ID"]


def test_answers_are_json_whatever_is_asked_for(client):
    make_queue("sqlite")
    for wanted in ("text/html", "application/xml", "*/*", "nonsense", "text/html;q=0.9, */*;q=0"):
        answer = client.get("/queue/stats", headers={"Accept": wanted})
        assert (answer.status_code, answer["Content-Type"]) == (200, "application/json")
        answer = client.get(at("x"), headers={"Accept": wanted})
        check_problem(answer, 404, "not_found")
    assert client.get("/queue/stats?format=api").status_code == 400
    # No browsable page, nor an address with a suffix.
    for path in ("/queue/stats.json", "/queue/stats/", "/queue/", "/queue/jobs/"):
        assert Client().get(path).status_code == 404
