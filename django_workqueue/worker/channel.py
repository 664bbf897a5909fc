"""
The channel between the supervisor and one of its processes.

Messages are JSON lists, one a line, over a pair of connected sockets. What was sent
before a process died can still be read, and then the channel ends: each side learns at
once that the other is gone.

From a process: ``ready``; ``beat``; ``held`` (claims it has taken); ``started`` (before
the handler runs); ``left`` (claims that it gave up without knowing how they stand);
``gone`` (claims it no longer has); ``hungry`` (free slots, nothing more
due); ``leaving`` (it drains). To a process: ``configure``; ``wake`` (queues with due work);
``renewed``; ``lost``; ``cancel``; ``drain``.
"""

from __future__ import annotations

import json
import socket
import threading
from typing import Any, Final

#: Seconds between two beats of a process that holds nothing: what it costs to do nothing.
RESTING_BEAT: Final = 10.0

Message = list[Any]
_CHUNK: Final = 65_536
_CHUNKS_AT_ONCE: Final = 16


class ChannelClosedError(Exception):
    """The other side is gone."""


class Channel:
    """One end. `send` may be called by any thread, `receive` by one."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._lock = threading.Lock()
        self._unread = bytearray()
        self._unsent = bytearray()
        self._ended = False

    def fileno(self) -> int:
        """Return the descriptor, for a selector."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close this end."""
        self._socket.close()

    def send(self, kind: str, *parts: Any) -> None:
        """
        Hand a message to the kernel; once this returns, the death of this process can't
        stop it. Wait while the other side doesn't read. Raise `ChannelClosedError`.
        """
        try:
            with self._lock:
                self._socket.sendall(_line(kind, parts))
        except OSError as error:
            raise ChannelClosedError from error

    def post(self, kind: str, *parts: Any) -> None:
        """Send without ever waiting: what the kernel doesn't take is kept for `flush`."""
        self._unsent += _line(kind, parts)
        self.flush()

    def flush(self) -> bool:
        """Send what is kept, as far as it goes now; return whether some is still kept."""
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent, socket.MSG_DONTWAIT)
                del self._unsent[:sent]
        except BlockingIOError:
            return True
        except OSError:
            self._unsent.clear()  # nobody is there; reading tells
        return False

    def receive(self) -> list[Message]:
        """
        Return what has arrived, without waiting; once all is read and the other side is
        gone, raise `ChannelClosedError`.
        """
        self._read()
        *lines, rest = self._unread.split(b"\n")
        self._unread = bytearray(rest)
        if not lines and self._ended:
            raise ChannelClosedError
        return [json.loads(line) for line in lines]

    def _read(self) -> None:
        try:
            for _ in range(_CHUNKS_AT_ONCE):  # one busy process must not keep out the others
                chunk = self._socket.recv(_CHUNK, socket.MSG_DONTWAIT)
                self._unread += chunk
                if not chunk:
                    self._ended = True
                    break
        except BlockingIOError:
            pass
        except OSError:
            self._ended = True


def _line(kind: str, parts: tuple[Any, ...]) -> bytes:
    return json.dumps((kind, *parts), separators=(",", ":")).encode() + b"\n"
