"""How do a launcher and its hosts talk? One TCP connection each, opened after both have proved the token.

Every message is a frame: its length in four bytes, then msgpack, never a pickle. The token itself does not
travel and what follows is not encrypted: the network between hosts should be a private one.
"""

import hmac
import os
import queue
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Any

import msgspec

from twinhull.errors import TwinhullError

PROTOCOL = 1  # raise it whenever a message changes
LONGEST = 1 << 22  # bytes of a frame; lines and tracebacks are cut long before
HANDSHAKE_S = 5.0
SEND_S = 5.0  # a peer that takes nothing for so long is as good as gone
_GREETING, _LENGTH = struct.Struct("!14sH"), struct.Struct("!I")
_MAGIC, _NONCE = b"twinhull-join\n", 32
_NO = bytes(32)


class Refused(TwinhullError):
    """Raised when the two sides of a connection do not fit, whatever the network does."""


class Ping(msgspec.Struct, frozen=True, tag="ping"):
    """A host lives; `sent` is a time of its own clock. The reader of a connection answers by itself."""

    sent: float


class Pong(msgspec.Struct, frozen=True, tag="pong"):
    """The answer to the ping that was `sent` then."""

    sent: float


def now() -> float:
    """Seconds of a clock that nobody can set; on Linux it also counts while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def accept(sock: socket.socket, token: bytes) -> None:
    """Prove the token to a host that has connected, after it has proved it. Raises Refused, OSError."""
    _greet(sock)
    mine = os.urandom(_NONCE)
    sock.sendall(mine)
    theirs, proof = _receive(sock, _NONCE), _receive(sock, 32)
    if not hmac.compare_digest(proof, _proof(token, b"host", mine, theirs)):
        sock.sendall(_NO)
        raise Refused("it has another token.")
    sock.sendall(_proof(token, b"launcher", mine, theirs))


def introduce(sock: socket.socket, token: bytes) -> None:
    """Prove the token to a launcher, and have it prove the same. Raises Refused, OSError."""
    _greet(sock)
    theirs, mine = _receive(sock, _NONCE), os.urandom(_NONCE)
    sock.sendall(mine + _proof(token, b"host", theirs, mine))
    proof = _receive(sock, 32)
    if proof == _NO:
        raise Refused(
            "the launcher does not accept the token.", hint="Take the one in join.token of its run directory."
        )
    if not hmac.compare_digest(proof, _proof(token, b"launcher", theirs, mine)):
        raise Refused("who answers there does not know the token: it is not our launcher.")


class Connection:
    """An open connection. States: open, closed (`closed` says why).

    The law: once it is closed no ping is answered.
    """

    def __init__(self, sock: socket.socket, messages: Any) -> None:  # Any: a union of Struct classes
        sock.settimeout(SEND_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.closed, self._inbox = "", queue.SimpleQueue[Any]()  # Any: of `messages`
        self._sock, self._heard, self._peer_left = sock, now(), False
        self._lock = threading.Lock()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(messages | Ping | Pong).decode
        threading.Thread(target=self._read, daemon=True).start()

    def take(self, within_s: float) -> Any:  # Any: of `messages`
        """The next message that was received; None if none comes within that time."""
        try:
            return self._inbox.get(timeout=within_s) if within_s > 0 else self._inbox.get_nowait()
        except queue.Empty:
            return None

    def send(self, message: msgspec.Struct) -> None:
        """Send it, if the connection is still open."""
        with self._lock:
            self._send(message)

    def close(self, why: str, *, peer_left: bool = False) -> None:
        """Close it; the peer notices, sooner or later."""
        with self._lock:
            self._close(why, peer_left=peer_left)

    def lost(self, after_s: float) -> str:
        """Why the peer can be given up: it has left, or was not heard for so long; "" if it cannot yet.

        An error of the network proves nothing about the peer.
        """
        with self._lock:
            if (silent_s := now() - self._heard) > after_s:
                self._close(f"silent for {silent_s:.1f} s", peer_left=True)
            return self.closed if self._peer_left else ""

    def _send(self, message: msgspec.Struct) -> None:
        if self.closed:
            return
        content = self._encode(message)
        try:
            self._sock.sendall(_LENGTH.pack(len(content)) + content)
        except (ConnectionResetError, BrokenPipeError):
            self._close("connection closed", peer_left=True)
        except OSError as error:
            self._close(f"cannot be reached: {error}", peer_left=False)

    def _close(self, why: str, *, peer_left: bool) -> None:
        self.closed, self._peer_left = self.closed or why, self._peer_left or peer_left
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes the reader, which closes the socket

    def _read(self) -> None:
        try:
            while not self.closed:
                self._take(self._decode(self._frame()))
        except (EOFError, ConnectionResetError):
            self.close("connection closed", peer_left=not self.closed)
        except OSError as error:
            self.close(f"cannot be reached: {error}")
        except (msgspec.DecodeError, Refused) as error:
            self.close(f"said what cannot be understood: {error}")
        self._sock.close()

    def _take(self, message: Any) -> None:  # Any: of the messages of this connection
        with self._lock:
            if self.closed:
                return
            self._heard = now()
            if isinstance(message, Ping):
                self._send(Pong(message.sent))
        if not isinstance(message, Ping):
            self._inbox.put(message)

    def _frame(self) -> bytes:
        (size,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if size > LONGEST:
            raise Refused(f"a message of {size} bytes, more than {LONGEST}.")
        return self._exactly(size)

    def _exactly(self, size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            with suppress(TimeoutError):  # the limit is meant for sending; silence is judged by pings
                if not (chunk := self._sock.recv(size - len(content))):
                    raise EOFError
                content += chunk
            if self.closed:
                raise EOFError
        return bytes(content)


def _greet(sock: socket.socket) -> None:
    sock.settimeout(HANDSHAKE_S)
    sock.sendall(_GREETING.pack(_MAGIC, PROTOCOL))
    magic, protocol = _GREETING.unpack(_receive(sock, _GREETING.size))
    if magic != _MAGIC:
        raise Refused("who speaks there is not Twinhull.")
    if protocol != PROTOCOL:
        raise Refused(
            f"it speaks version {protocol} of the protocol between hosts, this Twinhull version {PROTOCOL}.",
            hint="Install the same Twinhull on all hosts.",
        )


def _receive(sock: socket.socket, size: int) -> bytes:
    content = b""
    while len(content) < size:
        if not (chunk := sock.recv(size - len(content))):
            raise ConnectionResetError("closed during the handshake")
        content += chunk
    return content


def _proof(token: bytes, role: bytes, launchers: bytes, hosts: bytes) -> bytes:
    """A role is part of it, so that no side can be made to answer its own question."""
    return hmac.digest(token, role + launchers + hosts, "sha256")
