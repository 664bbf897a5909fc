"""`manage.py workqueue` as a whole: its processes, its parts, and its page in the manual."""

import argparse
import json
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
from django.core.management import BaseCommand, call_command, load_command_class
from django.core.management.base import CommandError

from django_workqueue import WorkItem
from django_workqueue.management.commands.workqueue import VERBS
from django_workqueue.management.console.text import duration, first_line, moment, printable
from django_workqueue.management.console.text import table as as_table
from django_workqueue.queues import get_queue
from django_workqueue.testing import make_queue
from tests.console import MANAGE, bury, manage

ROOT = Path(__file__).parent.parent

pytestmark = pytest.mark.django_db(transaction=True, databases="__all__")


class TestUnusable:
    @pytest.mark.parametrize("name", ["x", ""])
    def test_an_unknown_database_is_told_by_its_option(self, name):
        told = f"--database: there is no database '{name}'; there are 'default', 'postgresql'"
        for verb in ("status", "doctor", "holds", "prune"):
            with pytest.raises(CommandError, match=told) as error:
                call_command("workqueue", verb, "--database", name)
            assert error.value.returncode == 2

    def test_a_wrong_setting_is_a_line(self, settings):
        for wrong, told in (
            ({"DATABASE": "x"}, r"WORKQUEUE\['DATABASE'\]: there is no database 'x'"),
            ({"QUEUE": {}}, "no key 'QUEUE'"),
        ):
            settings.WORKQUEUE = wrong
            with pytest.raises(CommandError, match=told) as error:
                call_command("workqueue", "status")
            assert error.value.returncode == 2

    def test_options_of_django_may_stand_behind_the_verb_and_before_it(self):
        parser = load_command_class("django_workqueue", "workqueue").create_parser("", "workqueue")
        common = ["--no-color", "--verbosity", "0", "--settings", "elsewhere"]
        for arguments in (["status", *common], [*common, "status"]):
            options = parser.parse_args(arguments)
            given = (options.no_color, options.verbosity, options.settings)
            assert given == (True, 0, "elsewhere")
        assert parser.parse_args(["status"]).verbosity == 1


def test_a_process_exits_with_the_documented_codes(process_environment):
    queue = make_queue("sqlite")
    then = queue.moves.now() - timedelta(seconds=100)
    queue.enqueue(WorkItem(tenant="acme", enqueued_at=then))
    fine = manage(process_environment, "status", "--fail-if-age", "1000")
    assert (fine.returncode, fine.stderr) == (0, "")
    late = manage(process_environment, "status", "--json", "--fail-if-age", "50")
    assert late.returncode == 1
    assert json.loads(late.stdout)["exceeded"]
    assert re.fullmatch(r"CommandError: queue 'default': the oldest item .*\n", late.stderr)
    for wrong in (["status", "--fail-if-age", "soon"], ["discard", "x", "--tenant", "t"], []):
        assert manage(process_environment, *wrong).returncode == 2


def test_a_database_that_cannot_be_reached_or_is_not_migrated_is_a_line_and_2(
    process_environment, tmp_path
):
    databases = json.loads(process_environment["WORKQUEUE_TEST_DATABASES"])
    databases["default"]["NAME"] = str(tmp_path / "empty.sqlite3")
    databases["postgresql"] |= {"HOST": "127.0.0.1", "PORT": "1"}
    environment = process_environment | {"WORKQUEUE_TEST_DATABASES": json.dumps(databases)}
    empty = manage(environment, "status")
    assert empty.returncode == 2
    assert empty.stderr == (
        "CommandError: Tables are missing in 'default': run manage.py migrate.\n"
    )
    gone = manage(environment, "status", "--json", "--database", "postgresql")
    assert (gone.returncode, gone.stdout) == (2, "")
    assert re.fullmatch(r"CommandError: the database of the queue can't be used: .*\n", gone.stderr)


def unread(environment, *arguments):
    """Run a verb whose standard output nobody reads; return its exit code and standard error."""
    with subprocess.Popen(
        [sys.executable, MANAGE, "workqueue", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        process.stdout.close()
        error = process.stderr.read()
    return process.returncode, error


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_process_whose_output_nobody_reads_does_its_work_and_ends_in_silence(
    process_environment, unbuffered
):
    environment = process_environment | {"PYTHONUNBUFFERED": unbuffered}
    queue = make_queue("sqlite")
    bury(queue, "one", "two")
    assert unread(environment, "status") == (141, "")
    assert unread(environment, "requeue", "one", "two", "--tenant", "acme") == (141, "")
    assert queue.stats().due == 2
    code, error = unread(environment, "requeue", "one", "--tenant", "acme")
    assert (code, error) == (1, "CommandError: requeue: 1 of 1 item skipped\n")
    assert unread(environment, "--help")[1] == ""


def test_output_that_is_closed_stops_nothing(process_environment):
    bury(make_queue("sqlite"), "one")
    line = f'"{sys.executable}" "{MANAGE}" workqueue requeue one --tenant acme >&-'
    done = subprocess.run(
        ["sh", "-c", line], env=process_environment, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert get_queue("default").stats().due == 1


def test_what_the_output_cannot_encode_is_escaped(process_environment):
    bury(make_queue("sqlite"), "zwölf")
    environment = process_environment | {"PYTHONIOENCODING": "ascii"}
    shown = manage(environment, "list", "dead_lettered")
    assert shown.returncode == 0
    assert "zw\\xf6lf is broken" in shown.stdout
    assert "\\u2013" in shown.stdout  # the dash of an item without a handler
    named = ("requeue", "zwölf", "--tenant", "acme")
    assert manage(environment, *named).stdout.startswith("zw\\xf6lf: now queued")
    assert "zw\\xf6lf" in manage(environment, *named).stdout


# The parts.


def test_spans_are_told_in_their_two_largest_units():
    spans = {0: "0 s", 59.9: "59 s", 60: "1 min", 3_725: "1 h 2 min", 86_405: "1 d"}
    assert {seconds: duration(seconds) for seconds in spans} == spans


def test_times_are_told_in_the_projects_zone_with_its_distance():
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\+05:45", moment(get_queue("default").moves.now())
    )


def test_the_first_line_that_says_something_is_taken_and_cut():
    assert first_line("\n \n one \r\ntwo", 9) == "one"
    assert first_line("one two", 3) == "one…"
    assert first_line("", 3) == ""


def test_text_that_turns_or_breaks_a_line_is_escaped_and_other_text_is_not():
    assert printable("zwölf 十二 א") == "zwölf 十二 א"
    assert printable("\x9b\u2028\u200f\ud800") == "\\x9b\\u2028\\u200f\\ud800"


def test_columns_are_aligned_and_numbers_stand_on_the_right():
    text = as_table(("name", "number"), [("a", 1), ("long name", 12_000)])
    assert text == "name       number\na               1\nlong name  12,000"


# The page.


def own_options(verb):
    parser = load_command_class("django_workqueue", "workqueue").create_parser("", "")
    [verbs] = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
    known = {action.dest for action in BaseCommand().create_parser("", "")._actions}
    own = [action for action in verbs.choices[verb]._actions if action.dest not in known]
    assert all(action.help for action in own)
    return {(action.option_strings or [action.metavar])[0] for action in own}


@pytest.mark.parametrize("verb", VERBS)
def test_the_page_has_every_option_of_each_verb(verb):
    page = (ROOT / "docs" / "reference" / "commands.md").read_text()
    heading = f"## workqueue {verb}\n"
    assert heading in page
    section = page.partition(heading)[2].partition("\n## ")[0]
    [table, *_] = re.findall(r"(?:^\|.*\n)+", section, re.M)
    told = re.findall(r"^\| `([^` ]+)", table, re.M)
    assert sorted(told) == sorted(own_options(verb) - {"--database"})
