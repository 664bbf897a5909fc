"""A proxy in front of PostgreSQL that does to connections what networks do."""

import contextlib
import json
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Self

#: Seconds after which what a test waits for will never come.
PATIENCE = 30.0

_HOST = "127.0.0.1"
_ENCRYPTION_REQUESTS = {80877103, 80877104}


def redirect(environment: dict[str, str], **address: object) -> None:
    """Have the processes that a test starts find the database "postgresql" elsewhere."""
    databases = json.loads(environment["WORKQUEUE_TEST_DATABASES"])
    databases["postgresql"] |= {key: str(value) for key, value in address.items()}
    environment["WORKQUEUE_TEST_DATABASES"] = json.dumps(databases)


class Trap:
    """
    Keeps the answer to the next statement that contains a text, once the server has given it:
    then what the statement did is done, committed if it was a COMMIT, and the client can't know.
    """

    def __init__(self, text: str, name: str | None) -> None:
        self._text = text
        self._name = name
        self._link: _Link | None = None
        self._kept: list[bytes] = []
        self._answered = threading.Event()

    def wait(self) -> None:
        """Return once the answer is kept."""
        assert self._answered.wait(PATIENCE), f"no answer to {self._text!r}"

    def let_go(self) -> None:
        """Pass the answer on after all."""
        assert self._link is not None
        self._link.trap = None
        self._link.send(b"".join(self._kept))

    def swallow(self) -> None:
        """Cut the connection instead of passing the answer on."""
        assert self._link is not None
        self._link.close()

    # For the link.

    def takes(self, link: "_Link", statement: str) -> bool:
        fits = self._text in statement and self._name in (None, link.name)
        if self._link is not None or not fits:
            return False
        self._link = link
        return True

    def keep(self, kind: bytes, message: bytes) -> None:
        self._kept.append(message)
        if kind == b"Z":  # ready for the next one
            self._answered.set()


class Proxy:
    """
    Passes on to the server at a port whatever comes to `port`, until it is told otherwise.

    A *name* is the `application_name` of connections. None: all.
    """

    def __init__(self, port: int) -> None:
        self._upstream = port
        self._listener = socket.create_server((_HOST, 0))
        self.port = self._listener.getsockname()[1]
        self._changed = threading.Condition()
        self._stalled: set[_Link | None] = set()
        self._refusing = False
        self._over = False
        self._links: set[_Link] = set()
        self._threads: deque[threading.Thread] = deque()
        self._traps: list[Trap] = []
        #: How many connections were made, or refused, and the statements that came, each with
        #: the name of the application.
        self.connects = 0
        self.statements: list[tuple[str, str]] = []
        self.most_open = 0
        self.start_thread(self._listen)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._over = True
        socket.create_connection((_HOST, self.port)).close()  # the listener sees that it is over
        self._join(self._threads.popleft())
        self.resume()
        self.cut()
        while self._threads:
            self._join(self._threads.popleft())

    def _join(self, thread: threading.Thread) -> None:
        thread.join(PATIENCE)
        assert not thread.is_alive()

    # What a test tells it.

    def stall(self, name: str | None = None) -> None:
        """Let connections live, and pass nothing on: of those so named that there are, or of all
        that there are and will be."""
        stalled = {None} if name is None else {*self.links(name)}
        with self._changed:
            self._stalled |= stalled

    def resume(self) -> None:
        """Pass on what has come meanwhile, and whatever comes."""
        with self._changed:
            self._stalled.clear()
            self._changed.notify_all()

    def cut(self, name: str | None = None) -> None:
        """Close the connections that there are."""
        for link in self.links(name):
            link.close()

    def refuse(self) -> None:
        """Close new connections at once, and the old ones too."""
        with self._changed:
            self._refusing = True
        self.cut()

    def accept(self) -> None:
        """Take new connections again."""
        with self._changed:
            self._refusing = False

    def trap(self, text: str, name: str | None = None) -> Trap:
        """Return a trap for the answer to the next statement that contains *text*."""
        trap = Trap(text, name)
        with self._changed:
            self._traps.append(trap)
        return trap

    def sent(self, text: str, name: str = "") -> int:
        """Return how many statements have come that contain *text*, of applications so named."""
        return sum(text in said and name in who for who, said in [*self.statements])

    def links(self, name: str | None = None) -> "list[_Link]":
        """Return the connections that there are."""
        with self._changed:
            return [link for link in self._links if name in (None, link.name)]

    # Its threads.

    def start_thread(self, run: Callable[[], None]) -> None:
        thread = threading.Thread(target=run, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _listen(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if self._over:
                client.close()
                return self._listener.close()
            with self._changed:
                self.connects += 1
            try:
                server = socket.create_connection((_HOST, self._upstream))
            except OSError:
                client.close()
                continue
            link = _Link(self, client, server)
            with self._changed:
                self._links.add(link)
                refused = self._refusing
                self.most_open = max(self.most_open, len(self._links))
            if refused:
                link.close()
                continue
            self.start_thread(link.pass_requests)
            self.start_thread(link.pass_answers)

    def wait_while_stalled(self, link: "_Link") -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: not self._stalled & {None, link} or link not in self._links
            )

    def note(self, link: "_Link", statement: str) -> None:
        with self._changed:
            self.statements.append((link.name, statement))
            link.trap = next((trap for trap in self._traps if trap.takes(link, statement)), None)

    def forget(self, link: "_Link") -> None:
        with self._changed:
            self._links.discard(link)
            self._changed.notify_all()


class _Link:
    """The connection of a client, and the one to the server that it stands for."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        with contextlib.suppress(OSError):  # one that is gone already
            for end in (client, server):  # messages are sent one by one
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._prepared: dict[bytes, str] = {}
        self.name = ""
        self.trap: Trap | None = None

    def pass_requests(self) -> None:
        with contextlib.suppress(OSError):
            self._start()
            for kind, message in _messages(self._client):
                self._read(kind, message[5:])
                self._proxy.wait_while_stalled(self)
                self._server.sendall(message)
        self.close()

    def pass_answers(self) -> None:
        with contextlib.suppress(OSError):
            for kind, message in _messages(self._server):
                self._proxy.wait_while_stalled(self)
                if (trap := self.trap) is not None:
                    trap.keep(kind, message)
                else:
                    self.send(message)
        self.close()

    def send(self, answer: bytes) -> None:
        self._client.sendall(answer)

    def close(self) -> None:
        for end in (self._client, self._server):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._proxy.forget(self)

    def _start(self) -> None:
        while True:
            head = _exactly(self._client, 8)
            length, code = struct.unpack("!II", head)
            if code not in _ENCRYPTION_REQUESTS:
                break
            self._client.sendall(b"N")
        body = _exactly(self._client, length - 8)
        words = body.split(b"\0")
        settings = dict(zip(words[::2], words[1::2], strict=False))
        self.name = settings.get(b"application_name", b"").decode()
        self._proxy.wait_while_stalled(self)
        self._server.sendall(head + body)

    def _read(self, kind: bytes, body: bytes) -> None:
        """Note the statements: those sent as text, and the runs of prepared ones."""
        if kind == b"Q":
            self._proxy.note(self, _text(body))
        elif kind == b"P":
            name, _, rest = body.partition(b"\0")
            self._prepared[name] = _text(rest)
        elif kind == b"B":
            _, name, _ = body.split(b"\0", 2)
            self._proxy.note(self, self._prepared[name])


def _text(body: bytes) -> str:
    return body.partition(b"\0")[0].decode()


def _messages(source: socket.socket) -> Iterator[tuple[bytes, bytes]]:
    while True:
        head = _exactly(source, 5)
        kind, length = struct.unpack("!cI", head)
        yield kind, head + _exactly(source, length - 4)


def _exactly(source: socket.socket, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        chunk = source.recv(length - len(data))
        if not chunk:
            raise ConnectionResetError
        data += chunk
    return bytes(data)
