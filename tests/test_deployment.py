"""The manual's units and probes, tried; and every exit code of a worker."""

import configparser
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml
from django.core.management import load_command_class
from django.db import connections

from django_workqueue.conf import WorkerSettings
from django_workqueue.worker.supervisor import EXIT_FAILED, EXIT_PROCESS_DIED
from tests.project import Project
from tests.proxy import Proxy, redirect
from tests.test_docs import DOCS, blocks
from tests.workers import eventually

DATABASE = pytest.mark.django_db(transaction=True, databases="__all__")
#: What a worker may take beyond its stop timeout, as the manual says.
MARGIN = 20


def shown(kind):
    (text,) = [text for info, text in blocks(DOCS / "deployment.md") if info == kind]
    return text


def parsed(words):
    """The options of a command line of the manual."""
    interpreter, script, command, *options = words
    assert (os.path.basename(interpreter), script, command) == ("python", "manage.py", "runworkers")
    parser = load_command_class("django_workqueue", command).create_parser("", command)
    return parser.parse_args(options)


# systemd.


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd")
def test_systemd_has_nothing_against_the_unit_of_the_manual(tmp_path):
    text, found = re.subn(r"(?<=ExecStart=)\S+", sys.executable, shown("ini"))
    assert found == 1
    unit = tmp_path / "shop-workers.service"
    unit.write_text(re.sub("(?<=WorkingDirectory=).*", str(tmp_path), text))
    verify = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False
    )
    assert (verify.returncode, verify.stderr) == (0, "")


def test_systemd_waits_for_a_drain_and_knows_the_exit_codes():
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read_string(shown("ini"))
    service = unit["Service"]
    assert parsed(service["ExecStart"].split()).name == "%H"
    assert int(service["TimeoutStopSec"]) == WorkerSettings().stop_timeout_seconds + MARGIN
    assert int(service["SuccessExitStatus"]) == EXIT_PROCESS_DIED
    assert int(service["RestartPreventExitStatus"]) == 2


# Kubernetes.


@pytest.fixture
def pod():
    return yaml.safe_load(shown("yaml"))["spec"]["template"]["spec"]


@pytest.fixture
def probe(pod, tmp_path):
    """Runs one of the probes as the kubelet would; the file is in the test's folder."""
    (container,) = pod["containers"]
    (mount,) = container["volumeMounts"]

    def run(name):
        command = container[f"{name}Probe"]["exec"]["command"]
        assert any(mount["mountPath"] in word for word in command)
        command = [word.replace(mount["mountPath"], str(tmp_path)) for word in command]
        return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0

    return run


def test_kubernetes_waits_for_a_drain_and_mounts_what_the_probes_look_at(pod):
    (container,) = pod["containers"]
    (mount,), (volume,) = container["volumeMounts"], pod["volumes"]
    assert mount["name"] == volume["name"]
    assert parsed(container["command"]).health_file == f"{mount['mountPath']}/health"
    wanted = WorkerSettings().stop_timeout_seconds + MARGIN
    assert pod["terminationGracePeriodSeconds"] == wanted


@DATABASE
@pytest.mark.skipif(sys.platform != "linux", reason="the probe is written for Linux")
def test_the_probes_follow_the_life_of_a_worker(scene, probe, tmp_path):
    it, file = scene("sqlite"), tmp_path / "health"
    states = [probe(name) for name in ("startup", "liveness", "readiness")]
    assert states == [False, False, False]
    worker = it.start("--processes", "1", "--health-file", str(file))
    eventually(lambda: probe("startup") and probe("liveness") and probe("readiness"))
    it.enqueue("wait", "one")
    it.started("one")
    worker.send(signal.SIGTERM)
    eventually(lambda: not probe("readiness"))
    assert probe("liveness")
    it.file("one").touch()
    assert worker.wait() == 0
    assert not probe("liveness")


@pytest.mark.skipif(sys.platform != "linux", reason="the probe is written for Linux")
def test_a_file_that_nobody_writes_any_more_is_no_sign_of_life(probe, tmp_path):
    file = tmp_path / "health"
    file.write_text("ready\n")
    for age, alive in ((25, True), (31, False)):
        os.utime(file, (time.time() - age,) * 2)
        assert probe("liveness") is alive


# Exit codes. 0 and 3 have more tests: test_worker_drains, test_worker_deaths.


@DATABASE
@pytest.mark.parametrize(
    ("options", "code", "says"),
    [
        (["--until-empty"], 0, "worker ended: .* code=0"),
        (["--stop-timeout", "60"], 1, "CommandError: The stop timeout of 60 s is not below"),
        (["--no-such-option"], 2, "unrecognized arguments: --no-such-option"),
    ],
)
def test_the_exit_code_tells_a_clean_end_from_a_refusal_and_a_wrong_line(
    options, code, says, scene
):
    worker = scene("sqlite").start(*options)
    assert worker.wait() == code
    assert re.search(says, worker.log)
    assert "Traceback" not in worker.log


@DATABASE
def test_a_death_shows_in_the_exit_code_of_an_orderly_end(scene):
    it = scene("sqlite")
    it.enqueue("die", "one", max_attempts=1)
    assert it.drain("--processes", "1") == EXIT_PROCESS_DIED == 3


@DATABASE
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_shows_in_the_exit_code(number, scene):
    it = scene("sqlite")
    it.enqueue("wait", "one")
    worker = it.start("--processes", "1")
    it.started("one")
    worker.send(signal.SIGTERM)
    eventually(lambda: "draining" in worker.log)
    worker.send(number)
    assert worker.wait() == 128 + number


@DATABASE
def test_a_supervisor_that_meets_an_error_of_its_own_ends_with_70(scene):
    it = scene("sqlite")
    Project(
        it,
        "from django_workqueue.worker.upkeep import Upkeep\n"
        "Upkeep.turn = lambda self: {}['no such key']\n",
    )
    worker = it.start("--processes", "1")
    assert worker.wait() == EXIT_FAILED == 70
    assert "duties failed: purpose=upkeep" in worker.log


@DATABASE
def test_a_queue_that_nobody_knows_is_pointed_out_and_served(scene):
    it = scene("sqlite")
    it.enqueue("nothing", "one", queue="used")
    worker = it.start("--queues", "defualt,default,used", "--until-empty", "--processes", "1")
    assert worker.wait() == 0
    warnings = re.findall("WARNING (.*)", worker.log)
    assert warnings == [
        "queue is neither in QUEUES nor ever used: queue=defualt did_you_mean=default"
    ]


# A start without the database.


@pytest.fixture
def away(scene):
    """The scene of a test whose processes don't reach their database, and what stops them."""
    it = scene("postgresql")
    with Proxy(int(connections.settings["postgresql"]["PORT"])) as proxy:
        proxy.refuse()
        redirect(it.environment, PORT=proxy.port)
        yield it, proxy


@DATABASE
def test_a_service_waits_for_its_database_and_says_so(away, tmp_path):
    it, proxy = away
    it.enqueue("leave_trace", "one")
    file = tmp_path / "health"
    worker = it.start("--health-file", str(file))
    eventually(lambda: worker.log.count("database trouble: duty=start") == 2)
    assert file.read_text() == "not ready: starting\n"
    proxy.accept()
    it.completed("one")
    assert "database back: duty=start" in worker.log
    assert "Traceback" not in worker.log


@DATABASE
@pytest.mark.parametrize("option", ["--until-empty", "--reload"])
def test_whoever_looks_on_is_told_that_there_is_no_database(option, away):
    worker = away[0].start(option)
    assert worker.wait() == 1
    assert "The database can't be reached: " in worker.log
    assert "Traceback" not in worker.log


@DATABASE
def test_a_wait_for_the_database_is_broken_off_by_a_signal(away):
    it, _ = away
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)):
        worker = it.start()
        eventually(lambda log=worker: "database trouble: duty=start" in log.log)
        worker.send(number)
        assert worker.wait() == code
        assert "Traceback" not in worker.log
