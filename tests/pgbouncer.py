"""A PgBouncer in transaction mode that a test starts in front of a server, and stops again."""

import os
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest

from tests.postgres import _temporary_folder, _unprivileged_account, free_port
from tests.workers import eventually

#: Few, so that the clients share them.
SERVER_CONNECTIONS = 3

CONFIGURATION = """
[databases]
* = {server}

[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen}
unix_socket_dir =
auth_type = any
pool_mode = transaction
default_pool_size = {connections}
max_client_conn = 200
server_login_retry = 1
logfile = {folder}/log
"""

# Ends with the test's process, however that ends: then nobody holds the other end of the pipe.
GUARDED = '"$0" "$1" & cat; kill $!; wait'


class PgBouncer:
    """
    A pooler on `port`, as an unprivileged user where the tests are root. Each of its clients has a
    connection of the server's for a transaction, and then another.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        program = shutil.which("pgbouncer", path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")
        if program is None:
            pytest.skip("no pgbouncer on this machine")
        account = _unprivileged_account() if os.geteuid() == 0 else None
        self._folder = _temporary_folder(for_others=account is not None)
        self.port = free_port()
        configuration = self._folder / "pgbouncer.ini"
        server = {key.lower(): settings[key] for key in ("HOST", "PORT", "USER", "PASSWORD")}
        configuration.write_text(
            CONFIGURATION.format(
                server=" ".join(f"{key}='{value}'" for key, value in server.items() if value),
                listen=self.port,
                folder=self._folder,
                connections=SERVER_CONNECTIONS,
            )
        )
        identity: dict[str, Any] = {}
        if account is not None:
            for path in (self._folder, configuration):
                os.chown(path, account.pw_uid, account.pw_gid)
            identity = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        self._process = subprocess.Popen(
            ("sh", "-c", GUARDED, program, str(configuration)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            **identity,
        )

    def __enter__(self) -> Self:
        eventually(self._answers)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        log = Path(self._folder, "log")
        if kind is not None and log.exists():
            print(log.read_text()[-4000:])
        shutil.rmtree(self._folder, ignore_errors=True)

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port)).close()
        except OSError:
            return False
        return True
