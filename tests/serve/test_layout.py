from pathlib import Path

import pytest

from twinhull.errors import TwinhullError
from twinhull.serve import layout
from twinhull.serve.layout import Stop
from twinhull.system.load import load_text
from twinhull.system.model import System

TEXT = """
twinhull: 1
name: shop
pools:
  web: {nodes: 2, cpus: 2}
  scorers: {nodes: 1, cpus: 1}
workloads:
  fit: {train: app:fit, pool: scorers}
  features: {task: app:features, pool: web, retries: "2 after 100 ms"}
  rank: {task: app:rank, pool: scorers, model: fit, batch: 32 within 5 ms}
  sum_up: {task: app:sum_up, pool: web, every: 1 h}
endpoints:
  recommend: {path: [features, rank], deadline: 200 ms, fallback: [cache, app:best]}
  similar: {path: [[features, rank], sum_up], deadline: 300 ms, fallback: []}
  asked: {path: [features]}
components:
  cache: {ttl: 1 min, size: 5 MB}
  web-queue: {bound: 500, deliveries: 5}
"""


def system(text: str = TEXT) -> System:
    return load_text(text, Path("shop.yaml")).system


def test_an_endpoint_is_its_stages_its_deadline_and_its_ladder():
    promise = layout.promises(system())["recommend"]
    assert promise.stages == (
        (Stop("features", "app:features", "web", "event", False, 32, 0.001, None, 2.0, 0.1, 0.1),),
        (Stop("rank", "app:rank", "scorers", "event", True, 32, 0.005, "fit", 0.0, 0.0, 0.1),),
    )
    assert (promise.deadline_s, promise.fallback, promise.defaults) == (
        0.2,
        ("cache", "app:best"),
        ("app:best",),
    )


def test_an_inner_list_is_one_stage():
    stages = layout.promises(system())["similar"].stages
    assert [[stop.task for stop in stage] for stage in stages] == [["features", "rank"], ["sum_up"]]


def test_what_the_file_leaves_out_is_a_cache_and_a_second():
    promise = layout.promises(system())["asked"]
    assert (promise.deadline_s, promise.fallback) == (1.0, ("cache",))


def test_an_empty_ladder_is_empty():
    assert layout.promises(system())["similar"].fallback == ()


def test_a_pool_has_the_event_tasks_that_endpoints_ask_for():
    assert set(layout.event_stops(system(), "web")) == {"features", "sum_up"}
    assert set(layout.event_stops(system(), "scorers")) == {"rank"}


def test_the_longest_deadline_of_a_pool_is_that_of_its_endpoints():
    assert layout.longest_deadline_s(system(), "scorers") == 0.3


def test_the_cache_and_the_queue_are_as_the_file_says():
    assert layout.cache_times(system()) == layout.CacheTimes(60.0, 600.0, 5e6)
    assert layout.queue_bound(system(), "web") == 500
    assert layout.most_deliveries(system(), "web") == 5
    assert layout.most_deliveries(system(), "scorers") == 3


def test_an_endless_deadline_is_cut_to_an_hour():
    endless = TEXT.replace("deadline: 200 ms", "deadline: 30 day")
    assert layout.promises(system(endless))["recommend"].deadline_s == 3600.0


def test_a_path_over_something_that_cannot_run_is_an_error():
    odd = system().model_copy(update={"components": {}})
    with pytest.raises(TwinhullError, match="features is no task with a function to run"):
        layout.promises(odd)
