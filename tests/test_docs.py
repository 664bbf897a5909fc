"""The manual: its examples run, its tables are those of the code, its commands exist."""

import ast
import dataclasses
import doctest
import inspect
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import unittest
from argparse import ArgumentParser
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest
from django.core.management import BaseCommand, CommandError, get_commands, load_command_class
from django.db import ConnectionHandler
from markdown_it import MarkdownIt
from sybil import Sybil
from sybil.parsers.myst import PythonCodeBlockParser

import django_workqueue
from django_workqueue import WorkItem, WorkQueue, checks, worker
from django_workqueue.conf import ApiSettings, WorkerSettings, WorkQueueSettings, parse
from django_workqueue.handlers import registry
from django_workqueue.items import WorkState
from django_workqueue.policy import MOVES, QueuePolicy
from django_workqueue.sql import ending, settling
from django_workqueue.worker.supervisor import EXIT_FAILED, EXIT_PROCESS_DIED

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(p for p in DOCS.rglob("*.md") if "_build" not in p.parts)]
#: The page whose examples are the files of a project, typed by `test_the_tutorial_can_be_typed`.
TUTORIAL = DOCS / "quickstart.md"
#: Pages whose examples call a server: test_docs_http.py does.
HTTP = DOCS / "http"


def name(page):
    return str(page.relative_to(ROOT))


def blocks(page):
    """The fenced blocks of *page*: (info, text)."""
    tokens = MarkdownIt("commonmark").parse(page.read_text())
    return [(token.info.strip(), token.content) for token in tokens if token.type == "fence"]


def pages_with(*kinds, but=None):
    pages = [page for page in PAGES if any(info in kinds for info, _ in blocks(page))]
    pages = [page for page in pages if page != but and HTTP not in page.parents]
    return pytest.mark.parametrize("page", pages, ids=name)


def section(page, heading):
    """The text of *page* under *heading*, down to the next one."""
    text = page.read_text()
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", text, re.S | re.M)
    assert found, f"{name(page)} has no heading {heading!r}"
    return found[1]


def rows(page, heading, number=0):
    """The rows of a table under *heading*, as lists of cells; *number*: which of several."""
    tables = re.findall(r"(?:^\|.*\n)+", section(page, heading), re.M)
    lines = tables[number].strip().split("\n")[2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def plain(cell):
    return cell.strip().strip("`")


# Examples in Python.

PYTHON = ("python", "{code-block} python")

# The columns of a table are as wide as the run's own ids and moments make them.
LIKE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture
def own_registry(monkeypatch):
    """Handlers of an example are registered for its page only."""
    monkeypatch.setattr(registry, "_by_name", {**registry._by_name})
    monkeypatch.setattr(registry, "_catch_alls", {**registry._catch_alls})


def prove(made, settings, monkeypatch):
    """Do what a reader would do with what an example defines: run tests, check settings."""
    for each in made.values():
        if isinstance(each, type) and issubclass(each, unittest.TestCase):
            suite = unittest.defaultTestLoader.loadTestsFromTestCase(each)
            outcome = unittest.TestResult()
            suite.run(outcome)
            assert outcome.testsRun
            assert outcome.wasSuccessful(), outcome.failures + outcome.errors
        elif inspect.isfunction(each) and each.__name__.startswith("test_"):
            each()
    if "WORKQUEUE" in made:
        settings.WORKQUEUE = made["WORKQUEUE"]
        assert checks.check_settings(None) == []
        settings.WORKQUEUE = {}
    if "DATABASES" in made:
        with monkeypatch.context() as patch:
            patch.setattr(checks, "connections", ConnectionHandler(made["DATABASES"]))
            assert checks.check_database(None, databases=["default"]) == []


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("own_registry")
@pages_with(*PYTHON, but=TUTORIAL)
def test_the_python_examples_of_a_page_hold(page, settings, monkeypatch):
    document = Sybil([PythonCodeBlockParser(doctest_optionflags=LIKE)]).parse(page)
    namespace = document.namespace
    namespace["__name__"] = f"docs.{page.stem}"
    examples = list(document.examples())
    assert len(examples) >= sum(info in PYTHON for info, _ in blocks(page))
    for example in examples:
        before = dict(namespace)
        example.evaluate()
        made = {key: value for key, value in namespace.items() if before.get(key) is not value}
        prove(made, settings, monkeypatch)


def test_every_block_is_of_a_kind_that_is_proved():
    proved = {*PYTHON, "sh", "sql", "ini", "yaml"}  # the last two: test_deployment.py
    sphinx = {"{toctree}", "{eval-rst}", "{raw} html"}
    pages = [page for page in PAGES if HTTP not in page.parents]
    kinds = {(name(page), info) for page in pages for info, _ in blocks(page)}
    shown = {(name(TUTORIAL), "text")}  # what a command prints
    assert {kind for kind in kinds if kind[1] not in proved | sphinx} == shown


@pages_with("sql")
def test_sql_examples_are_quoted_from_the_statements(page):
    for info, text in blocks(page):
        if info == "sql":
            quoted = " ".join(text.split())
            for statement in (settling.COMPLETE, settling.RELEASE, ending.FAIL):
                assert quoted in " ".join(statement.split())


# Examples for a shell.

#: Commands that are not ours, and whose options we don't check.
FOREIGN = {"cd", "curl", ".", "kill"}


def check_command(words):
    match words:
        case ["python", "manage.py", command, *options] | ["django-admin", command, *options]:
            apps = get_commands()
            assert command in apps, f"there is no command {command}"
            parser = load_command_class(apps[command], command).create_parser("", command)
            parser.parse_args(options)
        case ["make", target, *variables]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.M)
            assert all("=" in variable for variable in variables)
        case ["python", "-m", "venv", _]:
            pass
        case ["pip", "install", *packages]:
            assert packages
            extras = re.findall(r"[\w-]+(?=[],])", " ".join(packages))
            known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
            assert set(extras) <= set(known["optional-dependencies"])
        case _:
            assert words[0] in FOREIGN, f"nobody checks {words}"


@pages_with("sh")
def test_shell_examples_name_commands_and_options_that_exist(page):
    for info, text in blocks(page):
        if info == "sh":
            for line in text.splitlines():
                if words := shlex.split(line, comments=True):
                    check_command(words)


# Tables against the code.


def told_defaults(heading):
    table = rows(DOCS / "settings.md", heading)
    return {plain(key): ast.literal_eval(plain(default)) for key, default, _ in table}


def defaults(kind):
    made = kind()
    return {spec.name: getattr(made, spec.name) for spec in dataclasses.fields(kind)}


def test_the_settings_page_has_every_key_with_its_default():
    told = told_defaults("WORKQUEUE")
    assert set(told) == {spec.name.upper() for spec in dataclasses.fields(WorkQueueSettings)}
    assert parse(told) == WorkQueueSettings()


@pytest.mark.parametrize(
    ("heading", "kind"),
    [("POLICY, and each of QUEUES", QueuePolicy), ("WORKER", WorkerSettings), ("API", ApiSettings)],
)
def test_the_settings_page_has_every_field_with_its_default(heading, kind):
    told = told_defaults(heading)
    assert told == defaults(kind)
    assert list(map(type, told.values())) == list(map(type, defaults(kind).values()))


def test_the_api_page_has_every_field_of_an_item_with_its_default():
    page = DOCS / "reference" / "api.md"
    given, set_by_the_store = rows(page, "Items"), rows(page, "Items", 1)
    told = [plain(row[0]) for row in given + set_by_the_store]
    fields = {spec.name: spec for spec in dataclasses.fields(WorkItem)}
    assert sorted(told) == sorted(fields)
    for field, default, _ in given:
        if field not in ("`tenant`", "`id`"):
            actual = getattr(WorkItem(tenant="acme"), plain(field))
            assert ast.literal_eval(plain(default)) == actual


#: The moves of the rules, as (from, verb, to); and how an item comes into being.
ALL_MOVES = {
    (state.value, verb, to.value)
    for state, verbs in MOVES.items()
    for verb, targets in verbs.items()
    for to in targets
}
ACCEPTED = ("", "enqueue", "queued")


def test_the_table_of_states_has_every_move():
    table = rows(DOCS / "states.md", "Every move")
    told = {tuple(plain(cell).replace("–", "") for cell in row[:3]) for row in table}
    assert told == ALL_MOVES | {ACCEPTED}
    assert len(table) == len(told)
    assert all(len(row) == 5 and row[3] and row[4] for row in table)


def test_the_table_of_states_says_which_are_live():
    table = rows(DOCS / "states.md", "States")
    told = {re.search(r"`(\w+)`", state)[1]: live for state, _, live in table}
    assert told == {state.value: "yes" if state.live else "no" for state in WorkState}


@pytest.mark.parametrize("state", WorkState)
def test_the_part_on_a_state_names_the_verbs_that_lead_to_it_and_from_it(state):
    text = section(DOCS / "states.md", state.value)
    points = dict(re.findall(r"^- \*\*(.+?)\*\*(.*?)(?=^- |\Z)", text, re.S | re.M))
    told = {
        (way, verb)
        for way in ("Here by", "Stays by", "Away by")
        for verb in re.findall(r"`(\w+)`\]\(verbs/", points.get(way, ""))
    }
    own = state.value
    assert told == {
        ("Stays by" if old == new else "Here by" if new == own else "Away by", verb)
        for old, verb, new in ALL_MOVES | {ACCEPTED}
        if own in (old, new)
    }
    assert {"Id and dedupe key", "An operator", "Retention"} <= set(points)


VERBS = {
    name
    for name, value in vars(WorkQueue).items()
    if inspect.isfunction(value) and not name.startswith("_")
}
VERB_PAGES = sorted(page for page in (DOCS / "verbs").glob("*.md") if page.stem != "index")


def verbs_of(page):
    """The verbs whose page it is."""
    return re.findall(r"^\.\. automethod:: WorkQueue\.(\w+)$", page.read_text(), re.M)


def test_every_verb_has_its_page():
    told = [verb for page in VERB_PAGES for verb in verbs_of(page)]
    assert sorted(told) == sorted(VERBS)
    for page in VERB_PAGES:
        examples = "".join(text for info, text in blocks(page) if info in PYTHON)
        for verb in verbs_of(page):
            assert f"queue.{verb}(" in examples, f"{name(page)} shows no {verb}"


def test_the_list_of_verbs_leads_to_their_pages():
    table = rows(DOCS / "verbs" / "index.md", "The verbs")
    for _, cell, _ in table:
        verbs, target = re.fullmatch(r"\[(.+)\]\((.+)\)", cell).groups()
        assert set(re.findall(r"`(\w+)`", verbs)) <= {*verbs_of(DOCS / "verbs" / target)}
    told = re.findall(r"`(\w+)`", " ".join(cell for _, cell, _ in table))
    assert sorted(told) == sorted(VERBS)


@pytest.mark.parametrize("page", VERB_PAGES, ids=name)
def test_a_page_of_verbs_names_refusals_by_their_facts(page):
    text = section(page, "Refusals")
    for error, says in re.findall(r"^\| `(\w+)`[^|]* \| ([^|]+) \|", text, re.M):
        facts = vars(getattr(django_workqueue, error)())
        told = re.findall(r"`(\w+)`", says.partition(":")[0])
        linked = re.findall(r"\[`(\w+)`\]", says)
        assert told, (error, says)
        assert {*told, *linked} - {"after"} <= set(facts), (error, says)


def test_the_drawing_of_the_states_has_every_move():
    drawing = ElementTree.parse(DOCS / "_static" / "states.svg").getroot()
    groups = [group for group in drawing.iter() if group.tag.endswith("}g")]
    drawn = set()
    for group in groups:
        texts = " ".join(text.text for text in group if text.tag.endswith("}text"))
        if group.get("class") == "state":
            assert group.get("data-state") in texts
        else:
            for verb in group.get("data-verbs").split():
                assert verb in texts.split()
                drawn.add((group.get("data-from"), verb, group.get("data-to")))
    assert drawn == ALL_MOVES | {ACCEPTED}


def test_the_checks_page_has_every_id():
    source = Path(checks.__file__).read_text()
    table = rows(DOCS / "reference" / "checks.md", "System checks")
    assert {plain(row[0]) for row in table} == set(
        re.findall(r'"(django_workqueue\.[A-Z]\d{3})"', source)
    )
    for check, level, *_ in table:
        assert level == {"E": "error", "W": "warning"}[plain(check).partition(".")[2][0]]


def test_the_commands_page_has_every_option_of_runworkers():
    table = rows(DOCS / "reference" / "commands.md", "runworkers")
    parser = load_command_class("django_workqueue", "runworkers").create_parser("", "")
    common = BaseCommand().create_parser("", "")
    own = {option for action in parser._actions for option in action.option_strings}
    own -= {option for action in common._actions for option in action.option_strings}
    assert {plain(row[0]) for row in table} == own
    names = {spec.name for spec in dataclasses.fields(WorkerSettings)}
    names |= {spec.name.upper() for spec in dataclasses.fields(WorkQueueSettings)}
    for _, default, _ in table:
        assert set(re.findall(r"`(\w+)`", default)) <= names


def test_the_running_page_has_the_exit_codes():
    told = [plain(row[0]) for row in rows(DOCS / "running.md", "Stop")]
    with pytest.raises(SystemExit) as unreadable:
        ArgumentParser(exit_on_error=True).parse_args(["--no-such-option"])
    refused = CommandError().returncode
    codes = [0, refused, unreadable.value.code, EXIT_PROCESS_DIED, EXIT_FAILED]
    assert told == [*map(str, codes), "128 + n"]


def test_the_log_phrases_of_the_running_page_are_those_of_the_code():
    source = "".join(path.read_text() for path in Path(worker.__path__[0]).glob("*.py"))
    phrases = [row[0].split("`")[1] for row in rows(DOCS / "running.md", "At 3 a.m.")]
    assert phrases
    for phrase in phrases:
        assert re.search(rf'"{phrase}[:"]', source), phrase


def test_the_reference_has_every_public_name():
    text = "".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    documented = set(re.findall(r"^ *\.\. auto\w+:: (\w+)$", text, re.M))
    assert set(django_workqueue.__all__) - documented == set()


# Links, and the pages as they are built.


def test_links_of_the_readme_lead_somewhere():
    targets = re.findall(r"]\(([^)#]+)[^)]*\)", (ROOT / "README.md").read_text())
    assert targets
    for target in targets:
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_the_pages_are_built_without_warnings_and_load_nothing_from_elsewhere(tmp_path):
    sphinx = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
    made = subprocess.run(
        [*sphinx, "-d", str(tmp_path / "doctrees"), str(DOCS), str(tmp_path / "html")],
        capture_output=True,
        text=True,
    )
    assert made.returncode == 0, made.stderr
    elsewhere = re.compile(
        r"""(?:src|srcset|<link[^>]*href)=["'](?:https?:)?//|url\(['"]?https?:|@import"""
    )
    for page in [*tmp_path.rglob("*.html"), *tmp_path.rglob("*.css")]:
        assert not elsewhere.search(page.read_text()), page.name


# The tutorial, typed.


#: Takes doctest examples as JSON, one text a line, and answers with what is wrong with them.
SHELL = """
import django, doctest, json, sys
django.setup()
names = {}
for line in sys.stdin:
    test = doctest.DocTestParser().get_doctest(json.loads(line), names, "tutorial", None, 0)
    names, trouble = test.globs, []
    doctest.DocTestRunner(verbose=False).run(test, out=trouble.append, clear_globs=False)
    print(json.dumps("".join(trouble)), flush=True)
"""


class Project:
    """The project that a reader of the tutorial builds, step by step."""

    environment = os.environ | {"DJANGO_SETTINGS_MODULE": "shop.settings"}

    def __init__(self, folder):
        self.folder = folder
        self.output = ""
        self.shell = None
        self.login = {"username": "reader", "password": "a reader's password"}

    def run(self, *command, **environment):
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}"
        self.output = done.stdout

    def django(self, code, *arguments):
        """Run *code* in the project, with Django set up."""
        self.run(sys.executable, "-c", f"import django, sys\ndjango.setup()\n{code}", *arguments)

    def type(self, words):
        match words:
            case ["python", "manage.py", "runserver"]:
                pass
            case ["python", "manage.py", "createsuperuser"]:
                answers = self.login | {"email": "reader@example.com"}
                self.run(
                    *(sys.executable, "manage.py", "createsuperuser", "--noinput"),
                    **{f"DJANGO_SUPERUSER_{key.upper()}": text for key, text in answers.items()},
                )
            case ["python", "manage.py", *rest]:
                self.run(sys.executable, "manage.py", *rest)
            case ["django-admin", *rest]:
                self.run(sys.executable, "-m", "django", *rest, DJANGO_SETTINGS_MODULE="")
            case ["cd", folder]:
                self.folder /= folder
            case ["curl", "-d", data, url]:
                self.post(urlsplit(url).path, data)
            case _:
                assert words[0] in ("python", ".", "pip"), words

    def post(self, path, data):
        code = """
from django.test import Client
path, data = sys.argv[1:]
client = Client(HTTP_HOST="127.0.0.1:8000", enforce_csrf_checks=True)
answer = client.post(path, data, content_type="application/x-www-form-urlencoded")
assert answer.status_code == 200, answer
"""
        self.django(code, path, data)

    def write(self, caption, text):
        path, _, where = caption.partition(", ")
        old = (self.folder / path).read_text() if where == "at the end" else ""
        (self.folder / path).write_text(old + text)

    def evaluate(self, examples):
        """Type doctest *examples* into the shell, which stays open."""
        if self.shell is None:
            self.shell = subprocess.Popen(
                [sys.executable, "-c", SHELL],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        self.shell.stdin.write(json.dumps(examples) + "\n")
        self.shell.stdin.flush()
        trouble = json.loads(self.shell.stdout.readline())
        assert trouble == "", trouble

    def close(self):
        if self.shell is not None:
            self.shell.communicate()

    def expect(self, text):
        """Find each line of *text* in the output of the last command; … stands for anything."""
        for line in text.splitlines():
            pattern = re.escape(line).replace("…", r"\S+")
            found = re.search(pattern + "$", self.output, re.M)
            assert found, f"{line}\nis not in\n{self.output}"

    def look_into_the_admin(self):
        code = """
from django.test import Client
client = Client(HTTP_HOST="127.0.0.1:8000")
assert client.login(username=sys.argv[1], password=sys.argv[2])
print(client.get("/admin/django_workqueue/deadletter/").content.decode())
"""
        self.django(code, *self.login.values())


def test_the_tutorial_can_be_typed(tmp_path):
    with closing(Project(tmp_path)) as project:
        for info, text in blocks(TUTORIAL):
            match info:
                case "sh":
                    for line in text.splitlines():
                        project.type(shlex.split(line))
                case "{code-block} python":
                    caption = re.match(r":caption: (.*)\n\n", text)
                    project.write(caption[1], text[caption.end() :])
                case "python":
                    project.evaluate(text)
                case "text":
                    project.expect(text)
                    project.look_into_the_admin()
                    assert "Reject: the order has no address" in project.output
