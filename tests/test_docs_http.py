"""The manual's pages on `/queue`: examples run against a server, tables are those of the code."""

import json
import os
import re
import shutil
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType

import pytest
from django.core.cache import cache
from django.db import connections
from rest_framework import serializers
from sybil import Sybil
from sybil.parsers.myst import CodeBlockParser, PythonCodeBlockParser

from django_workqueue import QueuePolicy, Reject, WorkItem, checks
from django_workqueue.api import access, fleet, parameters, problems, shapes, urls
from django_workqueue.api.base import OperatorViewSet
from django_workqueue.api.words import STATUSES
from django_workqueue.conf import ApiSettings
from django_workqueue.failures import FailureKind
from django_workqueue.items import WorkState
from django_workqueue.jobs import COUNTED, STATEMENT_TIMEOUT
from django_workqueue.jobs.search import TIMES
from django_workqueue.models import Lease, QueueItem, WorkerProcess
from django_workqueue.moves import Release
from django_workqueue.testing import make_queue
from tests.api import ALL, SCOPE, bearing, token, user
from tests.test_docs import HTTP, LIKE, PYTHON, ROOT, blocks, name, plain, rows, section

INDEX = HTTP / "index.md"
PAGES = sorted(HTTP.glob("*.md"))
#: Where the pages say that the server is.
SERVER = "http://localhost:8000"
every_page = pytest.mark.parametrize("page", PAGES, ids=name)


# What the examples find.

#: The id of the first job of the shop.
FIRST_JOB = 40


def number_jobs_from(first):
    with connections["default"].cursor() as cursor:
        table = QueueItem._meta.db_table
        cursor.execute("delete from sqlite_sequence where name = %s", [table])
        cursor.execute(
            "insert into sqlite_sequence (name, seq) values (%s, %s)", [table, first - 1]
        )


class Shop:
    """A queue with jobs in each state but one, and a worker; and who asks for them."""

    boot = "0192f0c1-8a52-7c3e-b7a5-3d1f6e0a9b44"

    def __init__(self):
        self.queue = make_queue("sqlite", QueuePolicy(max_attempts=3))
        number_jobs_from(FIRST_JOB)
        invoice = self.claim("invoice-7", handler="orders.invoice", payload={"order": 7})
        self.queue.complete(**invoice, result={"pages": 2})
        for number, tenant in ((1, "acme"), (2, "acme"), (3, "bakery")):
            self.confirm_in_vain(number, tenant)
        self.queue.pause(**self.claim("bill-1", handler="bills.pay", payload={"cents": 900_000}))
        self.claim("report-9", handler="reports.total", payload={"year": 2026})
        report = self.claim("report-8", handler="reports.total", payload={"year": "MMXXVI"})
        self.fail(report, ValueError("the year must be a number"))
        self.enqueue("invoice-8", handler="orders.invoice")
        self.enqueue("news-1", "bakery", queue="mail", handler="news.send")
        news = self.queue.claim(worker="app-1", queue="mail")
        unknown = Release(item=news.job_id, fence=1, delay=3_600, cause="unknown_handler")
        self.queue.moves.release("app-1", [unknown])
        self.start_a_worker()
        ann = user("view_payload", "edit_payload")
        ann.username = "ann"
        ann.save()
        self.token = str(token(ann, scope=SCOPE))

    def enqueue(self, id, tenant="acme", **fields):
        return self.queue.enqueue(WorkItem(id=id, tenant=tenant, **fields))

    def claim(self, id, tenant="acme", **fields):
        self.enqueue(id, tenant, **fields)
        held = self.queue.claim(worker="app-1")
        assert held.id == id
        return {"item_id": id, "tenant": tenant, "worker": "app-1", "fence": held.fence}

    def fail(self, held, error):
        try:
            raise error
        except (Reject, ValueError) as raised:
            self.queue.fail(**held, error=raised, retryable=False)

    def confirm_in_vain(self, number, tenant):
        held = self.claim(
            f"order-{number}",
            tenant,
            handler="orders.confirm",
            payload={"order": number, "email": f"{tenant}@example.com"},
            dedupe_key=f"confirm-{number}",
        )
        self.fail(held, Reject("the order has no address"))

    def start_a_worker(self):
        now = datetime.now(UTC)
        WorkerProcess.objects.create(
            boot=self.boot,
            name="app-1",
            host="shop-1",
            pid=812,
            version="0.1",
            queues=["default"],
            settings={"processes": 1, "concurrency": 8},
            started_at=now,
            # Of later, so that a slow test doesn't outlive it.
            seen_at=now + timedelta(minutes=5),
        )
        Lease.objects.update(boot=self.boot)


@pytest.fixture
def shop(transactional_db):
    return Shop()


# The examples, in the order in which a page has them.


class Terminal:
    """Runs a page's examples for a shell, and holds what they print against what is shown."""

    def __init__(self, environment):
        self._environment = environment
        self._printed = None
        self.has_curl = shutil.which("curl") is not None
        self.left_out = 0

    def run(self, example):
        if not self.has_curl:
            self.left_out += 1
            return
        # Who reads on has seen what the last one printed.
        assert self._printed is None, f"nobody shows what was printed before line {example.line}"
        done = subprocess.run(
            ["sh", "-c", example.parsed],
            cwd=ROOT / "testproject",
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.stderr == ""
        # A probe says by its code what it has found.
        assert done.returncode == ("sys.exit" in example.parsed)
        self._printed = done.stdout

    def shows_answer(self, example):
        if (printed := self._take()) is not None:
            assert_shown(shown(example.parsed), json.loads(printed))

    def shows_text(self, example):
        if (printed := self._take()) is not None:
            assert printed == example.parsed

    def _take(self):
        printed, self._printed = self._printed, None
        assert printed is not None or not self.has_curl
        return printed


ANY = "\N{HORIZONTAL ELLIPSIS}"


def shown(text):
    """An answer as a page shows it, with `ANY` for what is left open."""
    text = re.sub(r"\.\.\.(?=\s*\})", f'"{ANY}": 0', re.sub(r": \.\.\.", f': "{ANY}"', text))
    return json.loads(re.sub(r"\.\.\.(?=\s*\])", f'"{ANY}"', text))


def assert_shown(told, real, where="the answer"):
    """All that is *told* is so; only where it is left open there is more."""
    if told == ANY:
        return
    if isinstance(told, dict):
        assert isinstance(real, dict), where
        names = told.keys() - {ANY}
        assert names <= real.keys() if ANY in told else names == real.keys(), where
        for each in names:
            assert_shown(told[each], real[each], f"{where}: {each}")
    elif isinstance(told, list) and told:
        assert isinstance(real, list), where
        items = told[:-1] if told[-1] == ANY else told
        assert len(real) >= len(items) if told[-1] == ANY else len(real) == len(items), where
        for number, each in enumerate(items):
            assert_shown(each, real[number], f"{where}: {number}")
    else:
        assert told == real, where


def test_what_is_shown_must_be_so():
    real = {"a": 1, "b": [{"c": 2}, 3], "d": None}
    for text in ("{...}", '{"a": 1, "b": ..., "d": null}', '{"b": [{"c": 2}, ...], ...}'):
        assert_shown(shown(text), real)
    for text in (
        '{"a": 1}',
        '{"a": 2, ...}',
        '{"e": ..., ...}',
        '{"b": [{...}], ...}',
        '{"d": {...}, ...}',
    ):
        with pytest.raises(AssertionError):
            assert_shown(shown(text), real)


@pytest.mark.parametrize("stem", [page.stem for page in PAGES])
def test_the_examples_of_a_page_hold(
    stem, shop, live_server, settings, monkeypatch, tmp_path, process_environment
):
    page = HTTP / f"{stem}.md"
    monkeypatch.setenv("TOKEN", shop.token)
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    terminal = Terminal(process_environment | {"TOKEN": shop.token, "PATH": path})
    copy = tmp_path / page.name
    copy.write_text(page.read_text().replace(SERVER, live_server.url))
    parsers = [
        PythonCodeBlockParser(doctest_optionflags=LIKE),
        CodeBlockParser("sh", terminal.run),
        CodeBlockParser("javascript", terminal.shows_answer),
        CodeBlockParser("text", terminal.shows_text),
    ]
    document = Sybil(parsers).parse(copy)
    namespace = document.namespace
    [call] = [text for _, text in blocks(INDEX) if "def call(" in text]
    exec(call.replace(SERVER, live_server.url), namespace)
    examples = list(document.examples())
    proved = {*PYTHON, "sh", "javascript", "text"}
    kinds = [info for info, _ in blocks(page)]
    assert {*kinds} <= proved | {"{toctree}"}
    assert len(examples) >= sum(kind in proved for kind in kinds)
    for example in examples:
        example.evaluate()
        obey(namespace, settings, monkeypatch)
    if terminal.left_out:
        pytest.skip(f"no curl: {terminal.left_out} examples for a shell are left out")


def obey(namespace, settings, monkeypatch):
    """Take over the settings that an example makes."""
    if made := namespace.pop("WORKQUEUE", None):
        module, _, function = made["API"]["redact"].rpartition(".")
        there = ModuleType(module)
        setattr(there, function, namespace[function])
        monkeypatch.setitem(sys.modules, module, there)
        settings.WORKQUEUE = made
        assert checks.check_settings(None) == []
    if made := namespace.pop("REST_FRAMEWORK", None):
        settings.REST_FRAMEWORK = made


@every_page
def test_every_page_has_examples_for_a_shell_and_in_python(page):
    kinds = [(info, "curl" in text, "call(" in text) for info, text in blocks(page)]
    assert ("sh", True, False) in kinds
    assert ("python", False, True) in kinds


def test_every_endpoint_is_called_by_an_example():
    told = "".join(text for page in PAGES for info, text in blocks(page) if info == "sh")
    for method, path in ENDPOINTS:
        address = SERVER + path.replace("{job_id}", r"\d+")
        calls = [
            text for text in re.split(r"(?=curl )", told) if re.search(rf'{address}["\s?]', text)
        ]
        methods = [(re.search(r"-X (\w+)", text) or ["", "GET"])[1] for text in calls]
        assert method in methods, (method, path)


# Tables against the code.


def endpoints():
    """(method, path) of each endpoint, with the permission that it needs."""
    found = {}
    for pattern in urls.urlpatterns:
        view, actions = pattern.callback.cls, pattern.callback.actions
        path = re.sub(r"\(\?P<(\w+)>[^)]*\)", r"{\1}", str(pattern.pattern))
        path = "/queue/" + re.sub(r"[\^$]|\\Z", "", path)
        for method, action in actions.items():
            if method != "head":
                found[method.upper(), path] = view.permissions.get(action, access.VIEW)
    return found


ENDPOINTS = endpoints()


def test_the_first_page_has_every_endpoint_with_its_permission():
    table = rows(INDEX, "Endpoints")
    told = {tuple(plain(call).split(" ")): plain(permission) for call, _, permission in table}
    assert len(told) == len(table)
    assert told == ENDPOINTS


def test_the_first_page_has_every_code_with_its_status():
    table = rows(INDEX, "Refusals")
    told = {plain(code): int(status) for code, status, *_ in table}
    assert len(told) == len(table)
    assert told == {code: status for code, (status, _) in problems.PROBLEMS.items()}
    assert all(len(row) == 4 and row[2] and row[3] for row in table)


def test_the_first_page_has_the_names_of_states():
    told = {plain(here): plain(python) for here, python, _ in rows(INDEX, "States")}
    assert told == {shown: state.value for shown, state in STATUSES.items()}


def test_the_first_page_has_every_scope_of_rates():
    told = {plain(scope) for scope, _ in rows(INDEX, "Rates")}
    view = OperatorViewSet()
    scopes = set()
    for view.bulk in ({"many"}, set()):
        for method in ("GET", "POST"):
            view.action, view.request = "many", type("", (), {"method": method})
            scopes.add(view.throttle_scope)
    assert told == scopes
    [example] = [text for info, text in blocks(INDEX) if text.startswith("REST_FRAMEWORK")]
    assert set(re.findall(r'"(workqueue-\w+)"', example)) == scopes


def test_the_rates_of_the_example_are_kept(shop, settings):
    cache.clear()
    client = bearing(shop.token)
    settings.REST_FRAMEWORK = {"DEFAULT_THROTTLE_RATES": {"workqueue-bulk": "1/min"}}
    wish = {"filter": {"tenant": "nobody"}, "expected_count": 0, "dry_run": True}
    answers = [client.post("/queue/jobs/requeue", wish, format="json") for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 429]
    assert answers[1].json()["code"] == "throttled"
    assert 0 < int(answers[1]["Retry-After"]) <= 60


def test_the_page_on_access_has_every_permission():
    told = [plain(permission) for permission, _ in rows(HTTP / "access.md", "Sessions")]
    assert told == [*ALL]
    needed = {*ENDPOINTS.values(), access.VIEW_PAYLOAD, access.EDIT_PAYLOAD}
    assert needed == {*told}
    ours = {codename for codename, _ in QueueItem._meta.permissions}
    assert {*told} == ours | {"view_queueitem"}


def test_the_page_on_access_has_the_settings():
    text = (HTTP / "access.md").read_text()
    defaults = ApiSettings()
    assert f"`{defaults.admin_scope}`" in text
    assert re.findall(r"`(\w+)`", section(HTTP / "access.md", "Scopes"))[:3] == [
        *defaults.scope_claims
    ]


def test_the_page_on_access_has_every_kind_of_what_is_redacted():
    told = {plain(kind) for kind, _ in rows(HTTP / "access.md", "Redact")}
    sources = [Path(module.__file__).read_text() for module in (shapes, fleet)]
    kinds = re.findall(r"\b(?:shown|redacted)\(\s*\"(\w+)\"", "".join(sources))
    assert told == {*kinds}


def names(table, column=0):
    return [each for row in table for each in re.findall(r"`(\w+)`", row[column])]


def fields(serializer):
    return [*serializer().fields]


@pytest.mark.parametrize(
    ("page", "heading", "number", "kind"),
    [
        ("jobs", "Filters", 0, parameters.JobFilter),
        ("jobs", "Fields", 0, shapes.JobSerializer),
        ("figures", "Dead letters", 0, shapes.ErrorSerializer),
        ("figures", "Workers", 0, shapes.WorkerSerializer),
        ("figures", "Tenants", 0, shapes.TenantSerializer),
        ("holds", "List", 0, shapes.HoldSerializer),
    ],
)
def test_a_table_has_every_member_in_its_order(page, heading, number, kind):
    assert names(rows(HTTP / f"{page}.md", heading, number)) == fields(kind)


def test_the_page_on_jobs_has_how_much_and_in_which_order():
    page = HTTP / "jobs.md"
    table = rows(page, "How much, and in which order")
    own = parameters.Listing().fields
    assert names(table) == [each for each in own if each not in parameters.JobFilter().fields]
    for parameter, default, _ in table:
        field = own[plain(parameter)]
        if field.default is not serializers.empty:
            assert plain(default) == str(field.default)
    text = page.read_text()
    assert f"up to {parameters.MAX_LIMIT:,}" in text
    assert f"is {COUNTED:,} at most" in text
    assert f"up to {shapes.SHOWN_ERROR:,} characters" in text
    assert STATEMENT_TIMEOUT == 2_000
    assert "longer than two seconds" in text


def test_the_page_on_jobs_tells_which_times_go_with_which_status():
    line = re.search(r"^`updated_at` goes with .*$", (HTTP / "jobs.md").read_text(), re.M)[0]
    updated, completed = line.split("; ")
    of_time = {
        time: [status for status, state in STATUSES.items() if state in states]
        for time, states in TIMES.items()
    }
    assert sorted(names([[updated]])[1:]) == sorted(of_time["updated_at"])
    assert sorted(names([[updated]])[-3:]) == sorted(of_time["completed_at"])
    assert completed == "`completed_at` with the last three."


def test_the_page_on_jobs_has_what_only_one_job_has():
    page = HTTP / "jobs.md"
    table = rows(page, "Fields", 1)
    more = [
        each
        for each in fields(shapes.JobDetailSerializer)
        if each not in fields(shapes.JobSerializer)
    ]
    assert [plain(row[0]) for row in table] == more
    assert names(table[:1], 1) == fields(shapes.FailureSerializer)
    kinds = re.findall(r"`(\w+)`", section(page, "Fields").rpartition("The `kind` of")[2])
    assert [*kinds] == [kind.value for kind in FailureKind]


def test_the_page_on_moves_has_the_members_of_bodies():
    page = HTTP / "moves.md"
    told = names(rows(page, "Requeue many"))
    assert sorted(told) == sorted(fields(parameters.BulkRequeue))
    assert f"up to {parameters.MAX_BULK:,} jobs" in page.read_text()
    bodies = {"requeue": parameters.Requeue, "resume": parameters.Requeue}
    for move, _, _, body in rows(page, "Move jobs"):
        if verb := re.search(r"`(\w+)`", move):
            assert names([[body]]) == fields(bodies.get(verb[1], parameters.Reason))
            assert ("required" in body) == (verb[1] == "discard")


def test_the_page_on_moves_has_every_refusal_of_a_move():
    told = {plain(code) for code, *_ in rows(HTTP / "moves.md", "Refusals")}
    assert told <= problems.PROBLEMS.keys()
    assert {code for code, (status, _) in problems.PROBLEMS.items() if status in (404, 409)} <= told


def test_the_page_on_figures_has_every_figure(shop):
    page = HTTP / "figures.md"
    client = bearing(shop.token)
    told = names(rows(page, "Stats"))
    stats = client.get("/queue/stats").json()
    assert told == [*stats]
    of_tenant = client.get("/queue/stats?tenant=acme").json()
    assert of_tenant.keys() - {"counts_are_capped"} <= {*told}
    # What is alerted on is there.
    for condition, *_ in rows(page, "What to alert on"):
        for each in re.findall(r"`([a-z_.]+)`", condition):
            top, _, member = each.partition(".")
            inner = [*stats["unknown_handlers"][0], *stats["counts"]]
            assert top in stats or top in inner, each
            assert not member or member in STATUSES, each


@pytest.mark.parametrize("state", WorkState)
def test_the_old_name_of_a_state_is_not_used_for_a_status(state):
    if state.value in STATUSES:
        return
    for page in PAGES:
        text = page.read_text().replace(section(INDEX, "States"), "")
        assert f"`{state.value}`" not in text, name(page)
