import socket
import threading
from collections.abc import Iterator

import msgspec
import pytest

from twinhull.train.supervise import wire
from twinhull.train.supervise.wire import Connection, Ping, Pong, Refused


class Word(msgspec.Struct, frozen=True, tag="word"):
    text: str


Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        theirs = socket.create_connection(server.getsockname())
        ours, _ = server.accept()
    yield ours, theirs
    ours.close()
    theirs.close()


def shake(pair: Pair, launcher: bytes, host: bytes) -> list[str]:
    """What launcher and host say of each other; "" is nothing."""
    said = ["", ""]

    def of(number: int, prove: object, token: bytes) -> None:
        try:
            prove(pair[number], token)  # type: ignore[operator]
        except (Refused, OSError) as error:
            said[number] = str(error)
            pair[number].close()

    other = threading.Thread(target=of, args=(0, wire.accept, launcher))
    other.start()
    of(1, wire.introduce, host)
    other.join()
    return said


def test_both_sides_are_content_when_both_know_the_token(pair: Pair) -> None:
    assert shake(pair, b"token", b"token") == ["", ""]


def test_another_token_is_refused_and_both_sides_say_so(pair: Pair) -> None:
    launcher, host = shake(pair, b"token", b"token2")
    assert launcher == "it has another token."
    assert "does not accept the token" in host


def test_a_launcher_that_does_not_know_the_token_is_found_out(
    pair: Pair,
) -> None:
    pair[0].sendall(wire._GREETING.pack(wire._MAGIC, wire.PROTOCOL) + bytes(32) + b"x" * 32)
    with pytest.raises(Refused, match="does not know the token"):
        wire.introduce(pair[1], b"token")


def test_messages_arrive_and_pings_are_answered_until_the_connection_is_closed(pair: Pair) -> None:
    ours, theirs = Connection(pair[0], Word), Connection(pair[1], Word)
    theirs.send(Word("hello"))
    assert ours.take(5.0) == Word("hello")
    theirs.send(Ping(1.5))
    assert theirs.take(5.0) == Pong(1.5)
    assert ours.lost(5.0) == ""
    theirs.close("enough")
    assert ours.take(0.5) is None
    assert ours.lost(5.0) == "connection closed"


def test_a_silent_peer_is_lost_only_after_the_time_and_is_then_not_answered(pair: Pair) -> None:
    ours, theirs = Connection(pair[0], Word), Connection(pair[1], Word)
    assert ours.lost(60.0) == ""
    assert ours.lost(-1.0).startswith("silent for")
    theirs.send(Ping(1.5))
    assert theirs.take(0.2) is None


@pytest.mark.parametrize(
    "content", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x02\xc1\xc1"], ids=["huge", "no msgpack"]
)
def test_what_cannot_be_understood_closes_the_connection_and_proves_nothing(
    pair: Pair, content: bytes
) -> None:
    ours = Connection(pair[0], Word)
    pair[1].sendall(content)
    pair[1].settimeout(5.0)
    assert pair[1].recv(1) == b""
    assert "cannot be understood" in ours.closed
    assert ours.lost(60.0) == ""  # its ranks may well live
