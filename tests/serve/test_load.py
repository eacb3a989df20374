import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Awaitable, Callable
from contextlib import contextmanager

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from twinhull.errors import TwinhullError
from twinhull.serve.load import main, shots_of
from twinhull.serve.load_generator import Generator, Shot, constant, poisson

SHOT = Shot("/recommend", b'{"user": 1}')
ANSWER = b'{"value":[1],"source":"fresh","age_s":0.0,"model_version":3,"took_ms":1.0}'

Answers = Callable[[int, int], Awaitable[bytes | None]]


def http(body: bytes, status: str = "200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status.encode(), len(body), body)


class Server:
    """A server whose answer to the n-th request of the c-th connection is up to the test; None hangs up."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self.requests = 0
        self.connections = 0
        self.bodies: list[bytes] = []
        self.paths: list[bytes] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _start(self) -> asyncio.Server:
        return await asyncio.start_server(self._serve, "127.0.0.1", 0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        connection = self.connections
        try:
            for request in itertools.count(1):
                head = await reader.readuntil(b"\r\n\r\n")
                self.requests += 1
                self.paths.append(head.split()[1])
                length = int(head.lower().split(b"content-length:")[1].split()[0])
                self.bodies.append(await reader.readexactly(length))
                answer = await self._answers(connection, request)
                if answer is None:
                    break
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        writer.close()

    def close(self) -> None:
        async def end() -> None:
            self._server.close()
            rest = asyncio.all_tasks() - {asyncio.current_task()}
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@contextmanager
def serving(answers: Answers):
    server = Server(answers)
    try:
        yield server
    finally:
        server.close()


async def fresh(_connection: int, _request: int) -> bytes | None:
    return http(ANSWER)


def loaded(url, count, *, rate=1000.0, shots=None, **options):
    async def load():
        async with Generator(url, **options) as generator:
            generator.start("load", itertools.islice(shots or itertools.repeat(SHOT), count), constant(rate))
            return await generator.finish()

    return asyncio.run(load())


@pytest.fixture(scope="module")
def application():
    """Starlette on uvicorn, as the gateway is."""

    async def recommend(request):
        user = (await request.json())["user"]
        source = ("fresh", "cached", "default")[user % 3]
        return JSONResponse({"value": user, "source": source, "age_s": 0.0, "model_version": 7})

    app = Starlette(routes=[Route("/recommend", recommend, methods=["POST"])])
    bound = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    yield f"http://127.0.0.1:{bound.getsockname()[1]}"
    server.should_exit = True
    thread.join()


def test_every_answer_is_counted_by_its_source(application):
    shots = (Shot("/recommend", b'{"user": %d}' % n) for n in range(90))
    total = loaded(application, 90, shots=shots).total
    assert (total.asked, total.fresh, total.cached, total.default) == (90, 30, 30, 30)
    assert (total.answered_in_time, total.late, total.failed, total.unanswered) == (90, 0, 0, 0)
    assert total.versions == (7,)


def test_a_stall_is_charged_for_everyone_who_came_meanwhile():
    stalled = asyncio.Event()

    async def stall(_connection, _request):
        if not stalled.is_set():
            stalled.set()
            threading.Event().wait(0.5)  # the whole server, not this request alone
        return http(ANSWER)

    with serving(stall) as server:
        report = loaded(server.url, 100, rate=100.0, deadline_s=0.1)
    assert report.total.asked == report.total.fresh == 100
    assert report.total.late >= 35  # those that were due in the first 0.4 s of the stall
    assert report.total.failed == 0


def test_a_late_answer_is_late_and_not_failed():
    async def slow(_connection, _request):
        await asyncio.sleep(0.15)
        return http(ANSWER)

    with serving(slow) as server:
        total = loaded(server.url, 5, deadline_s=0.05).total
    assert (total.fresh, total.late, total.answered_in_time, total.failed) == (5, 5, 0, 0)


def test_a_request_without_an_answer_fails_after_its_time():
    async def silent(_connection, _request):
        await asyncio.sleep(60)

    with serving(silent) as server:
        total = loaded(server.url, 3, timeout_s=0.2).total
    assert total.reasons == {"no answer within 0.2 s": 3}


def test_a_kept_connection_that_the_server_has_closed_is_not_a_failure():
    async def hang_up_on_the_second(_connection, request):
        return http(ANSWER) if request == 1 else None

    with serving(hang_up_on_the_second) as server:
        total = loaded(server.url, 10, rate=100.0, connections=1).total
        assert (total.fresh, total.failed) == (10, 0)
        assert server.requests > 10


def test_a_new_connection_that_is_closed_without_a_byte_fails_at_once():
    async def hang_up(_connection, _request):
        return None

    with serving(hang_up) as server:
        total = loaded(server.url, 10).total
        assert total.reasons == {"connection closed before the answer was whole": 10}
        assert server.requests == 10


def test_an_answer_that_breaks_off_is_not_asked_again():
    async def break_off(_connection, request):
        return http(ANSWER) if request == 1 else b"HTTP/1.1 200 OK\r\ncontent-le\x00\r\n\r\n"

    with serving(break_off) as server:
        total = loaded(server.url, 2, rate=20.0, connections=1).total
        assert (total.fresh, total.failed) == (1, 1)
        assert server.requests == 2
    assert "not an HTTP answer" in next(iter(total.reasons))


def test_a_refusal_counts_as_failed_with_its_reason():
    async def refuse(_connection, _request):
        return http(b'{"error": "nothing to fall back on"}', "503 Service Unavailable")

    with serving(refuse) as server:
        assert loaded(server.url, 4).total.reasons == {"HTTP 503: nothing to fall back on": 4}


def test_beyond_its_connections_requests_wait_and_are_charged():
    async def slow(_connection, _request):
        await asyncio.sleep(0.02)
        return http(ANSWER)

    with serving(slow) as server:
        total = loaded(server.url, 20, connections=2, deadline_s=0.05).total
        assert server.connections == 2
    assert total.fresh == 20
    assert total.late > 0


def test_phases_and_streams_are_counted_apart():
    async def load(url):
        async with Generator(url, keep_records=True) as generator:
            generator.mark("quiet")
            generator.start("recommend", [SHOT] * 5, constant(1000))
            await generator.settle()
            generator.mark("kill-worker")
            generator.start("recommend", [SHOT] * 3, constant(1000))
            generator.start("events", [Shot("/events/sales", b"{}")] * 4, constant(1000))
            report = await generator.finish()
            return report, generator.records

    with serving(fresh) as server:
        report, records = asyncio.run(load(server.url))
    assert {p.phase: p.asked for p in report.phases} == {"quiet": 5, "kill-worker": 7}
    assert {s.phase: s.fresh for s in report.streams} == {"recommend": 8, "events": 4}
    assert report.total.asked == len(records) == 12
    assert all(r.asked_at <= r.sent_at <= r.answered_at for r in records)


def test_an_ended_load_asks_nothing_more_and_waits_for_its_answers():
    twenty = asyncio.Event()

    async def slow(_connection, _request):
        await asyncio.sleep(0.1)
        return http(ANSWER)

    def shots():
        yield from [SHOT] * 20
        twenty.set()
        yield from itertools.repeat(SHOT)

    async def load(url):
        async with Generator(url) as generator:
            generator.start("load", shots(), constant(1000))
            await twenty.wait()
            return await generator.end()

    with serving(slow) as server:
        total = asyncio.run(load(server.url)).total
        asked_later = len(server.bodies)
    assert total.fresh == total.asked == asked_later >= 20


def test_a_crowd_is_repeatable_and_as_large_as_asked():
    instants = list(itertools.islice(poisson(200, seed=4), 20_000))
    assert instants == list(itertools.islice(poisson(200, seed=4), 20_000))
    assert instants != list(itertools.islice(poisson(200, seed=5), 20_000))
    assert instants == sorted(instants)
    assert instants[-1] == pytest.approx(100, rel=0.03)


def test_a_file_says_where_what_and_when(tmp_path, capsys):
    file, out = tmp_path / "requests.ndjson", tmp_path / "records.ndjson"
    file.write_text(
        '{"path": "/a", "body": {"n": 1}, "at": 0}\n\n{"path": "/b", "body": {"n": 2}, "at": 0.25}\n'
    )
    with serving(fresh) as server:
        assert main(server.url, requests=file, arrivals="file", out=out, fmt="json") == 0
        assert (server.paths, server.bodies) == ([b"/a", b"/b"], [b'{"n": 1}', b'{"n": 2}'])
    assert json.loads(capsys.readouterr().out)["total"]["asked"] == 2
    first, second = map(json.loads, out.read_text().splitlines())
    assert second["asked_at"] - first["asked_at"] == pytest.approx(0.25, abs=1e-6)
    assert (first["status"], first["source"], first["version"]) == (200, "fresh", 3)


def test_a_short_file_of_bare_bodies_is_looped(tmp_path):
    file = tmp_path / "bodies.ndjson"
    file.write_text('{"user": 1}\n{"user": 2}\n')
    with serving(fresh) as server:
        assert (
            main(
                server.url,
                requests=file,
                path="/recommend",
                rate="100/s",
                duration="100 ms",
                arrivals="constant",
            )
            == 0
        )
        assert server.bodies == [b'{"user": 1}', b'{"user": 2}'] * 5
        assert set(server.paths) == {b"/recommend"}


def test_the_report_is_a_table_and_a_failed_request_is_exit_1(capsys):
    async def sometimes(_connection, request):
        return http(ANSWER) if request % 2 else http(b"{}", "500 Internal Server Error")

    with serving(sometimes) as server:
        code = main(
            server.url, path="/recommend", body="{}", rate="50/s", duration="200 ms", arrivals="constant"
        )
    printed = capsys.readouterr().out
    assert code == 1
    assert printed.splitlines()[0].split()[:2] == ["phase", "asked"]
    assert "failed: " in printed
    assert "x HTTP 500" in printed
    assert "own lag p99" in printed


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"url": "https://127.0.0.1/x"}, "is not an http:// URL"),
        ({"url": "127.0.0.1:80/x"}, "is not an http:// URL"),
        ({"url": "http://127.0.0.1:99999/x"}, "is not a URL"),
        ({"url": "http://127.0.0.1:1/x"}, "nobody listens at 127.0.0.1:1"),
        ({"url": "http://127.0.0.1:1"}, "nothing says which endpoint"),
        ({"path": "recommend"}, "must begin with /"),
        ({"path": "/zwei wege"}, "must begin with /"),
        ({"rate": "0/s"}, "rate is 0/s"),
        ({"rate": "fast"}, "rate: "),
        ({"duration": "never"}, "duration is never"),
        ({"deadline": "-1 s"}, "deadline: "),
        ({"body": "{"}, "not JSON"),
        ({"body": None}, "needs either a body or a file"),
        ({"arrivals": "file"}, "does not say when each request is due"),
    ],
)
def test_what_the_caller_can_mend_is_one_line(change, said):
    given = {"url": "http://127.0.0.1:1/recommend", "body": "{}", "duration": "1 s"} | change
    with pytest.raises(TwinhullError) as caught:
        main(given.pop("url"), **given)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"{}\n{]\n", ":2  not JSON"),
        (b"\xff\xfe\x00", ":1  not JSON"),
        (b'{"body": {}, "at": -1}', ":1  at is -1"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_file_is_told_with_its_line(tmp_path, content, said):
    file = tmp_path / "requests.ndjson"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(TwinhullError) as caught:
        shots_of(None, file, path="/recommend")
    assert said in str(caught.value)


def test_times_that_go_back_are_refused(tmp_path):
    file = tmp_path / "requests.ndjson"
    file.write_text('{"body": {}, "at": 2}\n{"body": {}, "at": 1}\n')
    with pytest.raises(TwinhullError, match="not in order"):
        main("http://127.0.0.1:1/x", requests=file, arrivals="file")


@pytest.mark.live
def test_ctrl_c_prints_what_is_known_and_leaves_with_130():
    asked = threading.Event()

    async def answer(_connection, _request):
        asked.set()
        return http(ANSWER)

    program = "import sys; from twinhull.serve import load; "
    program += "sys.exit(load.main(sys.argv[1], body='{}', duration='60 s'))"
    with serving(answer) as server:
        command = [sys.executable, "-c", program, f"{server.url}/recommend"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert asked.wait(10)
            os.kill(process.pid, signal.SIGINT)
            printed, _ = process.communicate(timeout=10)
    assert process.returncode == 130
    assert printed.splitlines()[1].startswith("total")
