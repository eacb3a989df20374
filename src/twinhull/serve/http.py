"""What does the gateway say over HTTP? Routes, bodies and statuses; nothing is decided here."""

import difflib
import logging
import re
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from twinhull import policy
from twinhull.errors import BrokerError
from twinhull.serve import record
from twinhull.serve.answer import Answer, Desk
from twinhull.serve.bodies import BadBody, Bodies
from twinhull.serve.metrics import SOURCES, Queues, Serving
from twinhull.serve.plane import AWAY, Plane
from twinhull.serve.record import Recorder, TooManyStreams

log = logging.getLogger(__name__)

MOST_BYTES = 1_000_000  # of a request's body
DRAINED_BYTES = 10 * MOST_BYTES  # read and thrown away, so that a client still sending hears the answer
MOST_EVENTS = 10_000  # in one post
_STREAM = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_KEY = re.compile(r"[\x21-\x7e]{1,200}")
_event_decoder = msgspec.json.Decoder(dict[str, Any] | list[dict[str, Any]])
_line_decoder = msgspec.json.Decoder(dict[str, Any])


@dataclass(frozen=True, slots=True)
class Front:
    """Everything that a request may be handed to."""

    desks: dict[str, Desk]
    bodies: dict[str, Bodies]
    recorder: Recorder
    metrics: Serving
    queues: Queues
    plane: Plane


def app(front: Front) -> Starlette:
    """The application: one POST route per endpoint, one for events, health and metrics."""
    routes = [
        Route(f"/{name}", partial(_ask, front, name), methods=["POST"], name=name) for name in front.desks
    ]
    routes += [
        Route("/events/{stream}", partial(_post_events, front), methods=["POST"], name="events"),
        Route("/health", partial(_health, front), methods=["GET"], name="health"),
        Route("/metrics", partial(_metrics, front), methods=["GET"], name="metrics"),
    ]
    handlers = {HTTPException: partial(_refuse, sorted(front.desks)), ClientDisconnect: _gone}
    return Starlette(routes=routes, exception_handlers=handlers)


async def _ask(front: Front, name: str, request: Request) -> Response:
    data = await _read(request)
    try:
        body = front.bodies[name].read(data)
    except BadBody as error:
        raise HTTPException(400, f"the body is not what {name} takes: {error}") from error
    answer = await front.desks[name].ask(body)
    if answer.source == policy.FAILED:
        return _json({"error": answer.reason, "took_ms": round(answer.took_s * 1000, 3)}, 503)
    source = SOURCES[answer.source]
    front.recorder.note(name, record.answered(body.sealed, answer.value, source, answer.version))
    return Response(_spoken(answer, source), media_type="application/json")


def _spoken(answer: Answer, source: str) -> bytes:
    version = "null" if answer.version is None else answer.version
    rest = (
        f',"source":"{source}","age_s":{answer.age_s:.3f},"model_version":{version}'
        f',"took_ms":{answer.took_s * 1000:.3f}}}'
    )
    return b'{"value":' + answer.value + rest.encode()


async def _post_events(front: Front, request: Request) -> Response:
    stream = request.path_params["stream"]
    if not _STREAM.fullmatch(stream):
        raise HTTPException(404, f"a stream of events cannot be called {stream!r}.")
    key = request.headers.get("idempotency-key")
    if key is not None and not _KEY.fullmatch(key):
        raise HTTPException(400, "the Idempotency-Key must be 1 to 200 printable characters without spaces.")
    events = _events(await _read(request))
    if not front.plane.link.is_up:
        return _json({"error": f"not accepted: {AWAY}"}, 503, {"retry-after": "1"})
    try:
        await front.recorder.post(stream, events, key)
    except BrokerError as error:
        return _json({"error": f"not accepted: {error}"}, 503, {"retry-after": "1"})
    except TooManyStreams as error:
        raise HTTPException(429, str(error)) from error
    return _json({"accepted": len(events)}, 202)


def _events(data: bytes) -> list[msgspec.Raw]:
    """The events of a body: one object, a list of them, or one a line. Raises HTTPException."""
    try:
        found = _decoded(data)
        if len(found) > MOST_EVENTS:
            raise HTTPException(413, f"{len(found)} events in one request; the most is {MOST_EVENTS}.")
        return [msgspec.Raw(msgspec.msgpack.encode(event)) for event in found]
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise HTTPException(
            400, f"the body is not one JSON object, a list of them or one a line: {error}"
        ) from error
    except OverflowError:
        raise HTTPException(400, "a whole number does not fit in 64 bits.") from None
    except RecursionError:
        raise HTTPException(400, "the body is nested too deeply.") from None


def _decoded(data: bytes) -> list[dict[str, Any]]:  # Any: whatever JSON can say
    lines = [line for line in data.splitlines() if line.strip()]
    if len(lines) > 1 and lines[0].lstrip().startswith(b"{") and lines[0].rstrip().endswith(b"}"):
        return [_line_decoder.decode(line) for line in lines]
    found = _event_decoder.decode(data)
    return [found] if isinstance(found, dict) else found


async def _health(front: Front, _request: Request) -> Response:
    queues = front.queues
    return _json(
        {
            "status": "ok",
            "broker": "up" if front.plane.link.is_up else "away",
            "queues": {
                pool: {"length": length, "oldest_s": round(queues.oldest_s[pool], 3)}
                for pool, length in queues.length.items()
            },
            "models": front.metrics.models(),
            "events_waiting": front.recorder.waiting,
        }
    )


async def _metrics(front: Front, _request: Request) -> Response:
    return Response(front.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _read(request: Request) -> bytes:
    """The whole body. Raises HTTPException 413 for one that is too large."""
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > DRAINED_BYTES:
            break
        if size <= MOST_BYTES:
            chunks.append(chunk)
    if size > MOST_BYTES:
        raise HTTPException(413, f"the body is larger than {MOST_BYTES} bytes.", {"connection": "close"})
    return b"".join(chunks)


async def _refuse(endpoints: list[str], request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = error.detail
    path = request.url.path
    if error.status_code == 404 and said == "Not Found":
        near = difflib.get_close_matches(path.strip("/"), [*endpoints, "events", "health", "metrics"], n=1)
        guess = f" Did you mean /{near[0]}?" if near else f" Endpoints: {', '.join(endpoints) or 'none'}."
        said = f"there is no {path}.{guess}"
    elif error.status_code == 405:
        said = f"{path} takes {(error.headers or {}).get('Allow', 'another method')}, not {request.method}."
    return _json({"error": said}, error.status_code, dict(error.headers or {}))


async def _gone(_request: Request, _error: Exception) -> Response:
    return Response(status_code=400)  # the client has left: nobody reads this


def _json(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, "application/json")
