from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from twinhull.handoff.events import Reader

pytestmark = [pytest.mark.live, pytest.mark.timeout(60)]


def test_a_request_is_answered_freshly_through_all_stages(hull):
    answer = hull.fresh("/recommend", {"user": 3, "shift": 0.5})
    assert answer["value"] == 8.0
    assert answer["model_version"] == hull.version
    assert answer["age_s"] == 0.0
    assert answer["took_ms"] > 0


def test_an_inner_list_of_stages_gives_the_next_task_all_outputs(hull):
    assert hull.fresh("/sum", {"number": 4})["value"] == 20


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"[1]", "Expected `object`, got `array`"),
        (b"null", "Expected `object`, got `null`"),
        (b'{"user": "3"}', "Expected `int`, got `str` - at `$.user`"),
        (b'{"user": true}', "Expected `int`, got `bool` - at `$.user`"),
        (b'{"user": 1.5}', "Expected `int`, got `float` - at `$.user`"),
        (b'{"user": 1, "shift": NaN}', "malformed"),
        (b'{"user": 1, "shift": 1e999}', "out of range"),
        (b'{"user": 36893488147419103232}', "64 bits"),
        (b"{}", "missing required field `user`"),
        (b'{"usr": 3}', "unknown field `usr`. Did you mean `user`?"),
        (b'{"user": 3, "model": 1}', "unknown field `model`"),
        (b"\xff\xfe", "malformed"),
    ],
)
def test_a_body_that_the_first_task_cannot_take_is_refused(hull, body: bytes, said: str):
    status, answer = hull.ask("/recommend", body)
    assert status == 400
    assert said in answer["error"]


def test_a_body_that_is_too_large_is_refused(hull):
    status, answer = hull.ask("/recommend", b" " * 2_000_000)
    assert (status, answer["error"]) == (413, "the body is larger than 1000000 bytes.")


def test_an_unknown_endpoint_is_refused_with_the_nearest_name(hull):
    status, answer = hull.ask("/recomend", {})
    assert (status, answer["error"]) == (404, "there is no /recomend. Did you mean /recommend?")


def test_a_wrong_method_is_refused(hull):
    status, answer = hull.ask("/recommend", {}, method="GET")
    assert (status, answer["error"]) == (405, "/recommend takes POST, not GET.")


def test_a_row_that_fails_does_not_fail_its_neighbours(hull):
    hull.fresh("/bare", {"number": 0})

    def ask(number: int) -> tuple[int, dict[str, Any]]:
        return hull.ask("/bare", {"number": number})

    with ThreadPoolExecutor(20) as threads:
        answers = dict(zip(range(20), threads.map(ask, range(20)), strict=True))
    status, answer = answers.pop(13)
    assert (status, answer["error"]) == (503, "ValueError: thirteen")
    assert [answer["value"] for status, answer in answers.values()] == [2 * n for n in answers]


def test_a_row_that_fails_is_tried_again_as_the_file_says(hull, tmp_path: Path):
    answer = hull.ask("/retried", {"number": 5, "mark": str(tmp_path / "mark")})[1]
    assert (answer["value"], answer["source"]) == (5, "fresh")


def test_a_path_may_cross_into_the_job_lane(hull):
    hull.start_jobs("jobs")
    hull.start_worker("risky")
    answer = hull.ask("/crossing", {"number": 21})[1]
    assert (answer["value"], answer["source"]) == ("21!", "fresh")


def test_rungs_that_raise_or_are_too_slow_give_way_to_the_next(hull):
    status, answer = hull.ask("/ladder", {"number": 13})
    assert (status, answer["value"], answer["source"]) == (200, ["best"], "default")
    reasons = [line["reason"] for line in hull.said("gateway", "default failed")]
    assert reasons[0] == "RuntimeError: no default today"
    assert reasons[1].startswith("took longer than")


def test_a_default_that_takes_its_time_is_made_ready_before_it_is_needed(hull):
    status, answer = hull.ask("/careful", {"number": 7, "wait_s": 1.5})
    assert (status, answer["value"], answer["source"]) == (200, ["careful"], "default")


def test_a_reply_that_comes_too_late_is_kept_for_the_next_request(hull, until: Callable[..., Any]):
    body = {"number": 77, "wait_s": 0.6}
    status, _ = hull.ask("/late", body)
    assert status == 503
    cached = until(lambda: answer if (answer := hull.ask("/late", body)[1]).get("source") else None)
    assert (cached["value"], cached["source"]) == (77, "cached")
    assert cached["age_s"] >= 0.0


def test_answers_become_events_and_so_do_posted_outcomes(hull, until: Callable[..., Any]):
    hull.fresh("/recommend", {"user": 41})
    outcome = {"user": 41, "bought": 7}
    assert hull.ask("/events/recommend", outcome) == (202, {"accepted": 1})
    with hull.client as client:
        reader = Reader(client, hull.keys, "recommend", settle_s=0.0)

        def mine() -> list[Any]:
            bodies = [event.body for event in reader.read(limit=10_000)[0]]
            found = [b for b in bodies if b == outcome or b.get("body") == {"user": 41}]
            return found if len(found) > 1 and outcome in found else []

        answered = next(body for body in until(mine) if body != outcome)
    assert answered["value"] == 41.0
    assert (answered["source"], answered["version"]) == ("fresh", hull.version)
    assert answered["at"] > 0


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (b'{"a": 1}', 1),
        (b'[{"a": 1}, {"a": 2}]', 2),
        (b'{"a": 1}\n{"a": 2}\n\n{"a": 3}\n', 3),
        (b'{\n"a": 1\n}', 1),
        (b"[]", 0),
    ],
)
def test_outcomes_are_posted_as_one_object_a_list_or_lines(hull, data: bytes, count: int):
    assert hull.ask("/events/sales", data) == (202, {"accepted": count})


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"3",
        b"[3]",
        b'{"a": ' + b"[" * 100_000,
        b'{"a": 1}\n[3]',
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": 36893488147419103232}',
    ],
)
def test_what_is_no_event_is_refused(hull, data: bytes):
    assert hull.ask("/events/sales", data)[0] == 400


def test_a_post_with_the_same_key_is_appended_once(hull):
    headers = {"Idempotency-Key": "order-1"}
    for _ in range(2):
        assert hull.ask("/events/once", {"a": 1}, headers=headers)[0] == 202
    with hull.client as client:
        assert client.xlen(hull.keys.events("once")) == 1


def test_health_tells_of_the_broker_and_the_models(hull, until: Callable[..., Any]):
    hull.fresh("/recommend", {"user": 1})
    status, health = hull.ask("/health", b"", method="GET")
    assert (status, health["status"], health["broker"]) == (200, "ok", "up")
    assert health["models"]["fit"] == hull.version
    assert set(health["queues"]) == {"web", "scorers", "risky"}


def test_metrics_count_answers_by_source(hull):
    hull.fresh("/recommend", {"user": 1})
    status, metrics = hull.ask("/metrics", b"", method="GET")
    assert status == 200
    assert 'twinhull_answers_total{endpoint="recommend",source="fresh"}' in metrics["text"]
    assert 'twinhull_breaker_open{lane="event",outputs="0",task="features"} 0.0' in metrics["text"]
