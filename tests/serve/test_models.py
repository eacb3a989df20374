from collections.abc import Callable
from typing import Any

import pytest

from twinhull.serve import wire

pytestmark = [pytest.mark.live, pytest.mark.timeout(60)]

SCORER = "worker-scorers-0"


def test_a_new_version_replaces_the_one_before_and_no_request_fails(hull, until: Callable[..., Any]):
    hull.publish([2.0, 0.0])
    answers = []
    while not answers or answers[-1].get("model_version") != hull.version + 1:
        status, answer = hull.ask("/recommend", {"user": 3})
        assert status == 200
        answers.append(answer)
    value_of = {hull.version: 3.0, hull.version + 1: 6.0}
    assert all(answer["value"] == value_of[answer["model_version"]] for answer in answers)
    [line] = hull.said(SCORER, "swapped")
    assert (line["model"], line["version"]) == ("fit", hull.version + 1)


def test_a_task_whose_model_is_not_published_yet_falls_back_at_once(hull, until: Callable[..., Any]):
    status, answer = hull.ask("/drafted", {"user": 1})
    assert (status, answer["source"]) == (200, "default")
    hull.publish([1.0, 0.0], "draft")
    assert hull.fresh("/drafted", {"user": 1})["model_version"] == 1


def refusal(hull: Any, until: Callable[..., Any]) -> dict[str, Any]:
    """The one refusal of the version after `hull.version`, when a good one after that has been taken."""
    until(lambda: hull.said(SCORER, "model refused"))
    assert hull.fresh("/recommend", {"user": 3})["model_version"] == hull.version
    hull.publish([3.0, 0.0])
    until(lambda: hull.fresh("/recommend", {"user": 3})["model_version"] == hull.version + 2)
    [line] = hull.said(SCORER, "model refused")
    assert (line["model"], line["version"]) == ("fit", hull.version + 1)
    return line


def test_a_version_with_a_wrong_hash_is_refused_and_the_old_one_stays(hull, until: Callable[..., Any]):
    place = hull.run.registry / "fit" / str(hull.version)
    torn = hull.run.registry / "fit" / ".torn"
    torn.mkdir()
    for file in place.iterdir():
        (torn / file.name).write_bytes(file.read_bytes())
    weights = torn / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    torn.rename(place.with_name(str(hull.version + 1)))
    assert "its hash differs" in refusal(hull, until)["reason"]


def test_a_version_of_a_wrong_shape_is_refused_and_the_old_one_stays(hull, until: Callable[..., Any]):
    hull.publish([1.0, 2.0, 3.0])
    assert refusal(hull, until)["reason"] == "ValueError: weights have shape (3,), not (2,)"


def test_a_version_that_fails_its_warm_up_is_refused_and_the_old_one_stays(hull, until: Callable[..., Any]):
    hull.publish([float("nan"), 0.0])
    assert refusal(hull, until)["reason"] == "FloatingPointError: weights are not finite"


def test_rows_of_an_older_form_of_the_code_are_no_reason_to_refuse_a_model(hull):
    hull.kill(SCORER)
    with hull.client as client:
        client.set(hull.keys.sample("rank"), wire.encode((1, [{"customer": 3}])))
    hull.start_worker("scorers")
    assert hull.fresh("/recommend", {"user": 3})["model_version"] == hull.version
    assert not hull.said(SCORER, "model refused")


def test_a_restarted_worker_serves_the_newest_version_that_is_good(hull, until: Callable[..., Any]):
    hull.publish([1.0, 2.0, 3.0])
    hull.kill(SCORER)
    hull.start_worker("scorers")
    until(lambda: hull.said(SCORER, "worker ready"))
    assert hull.fresh("/recommend", {"user": 3})["model_version"] == hull.version
