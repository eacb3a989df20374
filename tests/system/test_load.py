from pathlib import Path

import pytest

from twinhull.system.load import Described, load_text
from twinhull.system.model import Link, Pool, Process, State, System, Task, Train
from twinhull.system.problems import SystemFileError
from twinhull.system.quantities import Batch, Gpus, Range, Retries, Span, Time
from twinhull.system.write import dump

HERE = Path("shop.yaml")


def test_what_the_file_says_is_in_the_system(everything: Described):
    system = everything.system
    web, fit, rank = system.pools["web"], system.components["fit"], system.components["rank"]
    assert (web.nodes, web.cpus, web.zone) == (Range(4, None), 8, "8")
    assert system.pools["scorers"].gpus == Gpus(None, "L4")
    assert isinstance(fit, Train)
    assert fit.checkpoint is not None
    assert fit.launch is not None
    assert (fit.run, fit.every, fit.length, fit.restarts) == (
        "jobs.fit:main",
        14400.0,
        Span(steps=20000),
        3.0,
    )
    assert (fit.checkpoint.every, fit.checkpoint.keep, fit.launch.processes) == (Span(steps=500), 2, 8)
    assert isinstance(rank, Task)
    assert (rank.model, rank.batch, rank.service_time) == (
        "fit",
        Batch(32, 0.005),
        Time(0.005, 0.0001, 0.012),
    )
    recommend = system.endpoints["recommend"]
    assert recommend.path == (("features", "price"), "rank")
    assert recommend.fallback == ("cache", "app:best_sellers")
    assert (recommend.deadline, recommend.objective) == (0.2, 0.999)
    assert system.endpoints["reprice"].fallback == ()


def test_what_comes_with_the_workloads_is_filled_in(shop: Described):
    components = shop.system.components
    worker, queue, broker = components["scorers-worker"], components["scorers-queue"], components["broker"]
    assert isinstance(worker, Process)
    assert (worker.replicas, worker.gpus, worker.concurrency) == (Range(2, 2), Gpus(1, "L4"), 1)
    assert isinstance(queue, State)
    assert (queue.host, queue.order, queue.deliveries, queue.dead_letter) == ("broker", "fifo", 3.0, True)
    assert isinstance(broker, State)
    assert (broker.software, broker.syncs, broker.lost_with) == ("redis", 1.0, "node")
    assert components["rank"].host == "scorers-worker"
    assert components["web-worker"].replicas == Range(4, 4)
    assert shop.system.endpoints["recommend"].client == "clients"


def test_training_restarts_without_end_and_keeps_checkpoints(shop: Described):
    fit = shop.system.components["fit"]
    assert isinstance(fit, Train)
    assert fit.checkpoint is not None
    assert (fit.restarts, fit.gang, fit.hang_timeout, fit.requeue) == (float("inf"), True, 300.0, True)
    assert (fit.checkpoint.every, fit.checkpoint.to, fit.checkpoint.keep) == (Span(600.0), "checkpoints", 3)
    assert (fit.checkpoint.atomic, fit.checkpoint.asynchronous) == (True, True)


def test_checkpoints_can_follow_from_what_they_cost():
    text = "name: x\npools: {p: {mtbf: 30 day}}\nworkloads: {f: {train: m:f, pool: p, checkpoint: auto}}"
    system = load_text(text, HERE).system
    fit = load_text(dump(system), HERE).system.components["f"]
    assert isinstance(fit, Train)
    assert fit.checkpoint is not None
    assert fit.checkpoint.every == Span(auto=True)


def test_the_way_of_a_request_is_filled_in_as_links(shop: Described):
    publishes = [link for link in shop.system.links if link.kind == "publish"]
    assert [(link.source, link.target, link.task) for link in publishes] == [
        ("gateway", "web-queue", "features"),
        ("gateway", "scorers-queue", "rank"),
    ]
    assert {(link.timeout, link.expires, link.retries, link.wait) for link in publishes} == {
        (0.2, 0.2, Retries(0.0), "await")
    }
    late = [(link.source, link.target) for link in shop.system.links if link.when == "late"]
    assert late == [("gateway", "cache")]


def test_what_the_file_says_wins_over_what_is_filled_in(everything: Described):
    components, links = everything.system.components, everything.system.links
    broker, queue = components["broker"], components["web-queue"]
    assert isinstance(broker, State)
    assert (broker.url, broker.software, broker.syncs) == ("redis://broker.internal:6379/0", None, None)
    assert isinstance(queue, State)
    assert (queue.bound, queue.order) == (float("inf"), "fifo")
    said = [link for link in links if link.kind == "publish" and link.task == "features"]
    assert [(link.timeout, link.expires) for link in said] == [(0.05, 0.2)]


def test_a_file_without_workloads_stays_as_it_is():
    described = load_text("name: x\ncomponents: {api: {kind: service}}\nendpoints: {e: {path: [api]}}", HERE)
    assert list(described.system.components) == ["api"]
    assert described.system.links == ()


def test_a_task_among_the_components_brings_nothing_along():
    text = "name: x\npools: {p: {}}\nworkloads: {f: {train: m:f, pool: p}}\n"
    text += "components: {t: {kind: task, pool: p}, p-queue: {kind: service}}\nendpoints: {e: {path: [t]}}"
    system = load_text(text, HERE).system
    assert "p-worker" not in system.components
    assert system.components["p-queue"].kind == "service"
    assert [link for link in system.links if link.kind == "publish"] == []


def test_what_is_known_to_come_along_does_come_along():
    text = "name: x\npools: {p: {}}\nworkloads: {t: {task: m:t, model: f}}\n"
    text += "components: {f: {kind: train}}\nlinks: [{from: t, to: registry}]"
    assert "registry" in load_text(text, HERE).system.components


def test_a_path_may_name_what_comes_along():
    text = (
        "name: x\npools: {p: {}}\nworkloads: {t: {task: m:t, pool: p}}\nendpoints: {e: {path: [p-worker, t]}}"
    )
    links = load_text(text, HERE).system.links
    assert [link.task for link in links if link.kind == "publish"] == ["t"]


def test_the_name_of_a_pool_leaves_room_for_what_is_named_after_it():
    for name, fine in [("p" * 50, True), ("p" * 51, False)]:
        text = f"name: x\npools: {{{name}: {{}}}}\nworkloads: {{t: {{task: m:t, pool: {name}}}}}"
        if fine:
            assert load_text(dump(load_text(text, HERE).system), HERE)
        else:
            with pytest.raises(SystemFileError, match="use at most 50 characters"):
                load_text(text, HERE)


def test_the_largest_file_with_workloads_can_be_written_and_read_back():
    tasks = "".join(f"  t{i}: {{task: a:b, pool: p{i}}}\n" for i in range(900))
    pools = "".join(f"  p{i}: {{}}\n" for i in range(900))
    ends = "".join(f"  e{i}: {{path: [t{i}]}}\n" for i in range(400))
    system = load_text(f"name: x\npools:\n{pools}workloads:\n{tasks}endpoints:\n{ends}", HERE).system
    assert load_text(dump(system), HERE).system == system


def test_a_file_with_more_workloads_is_refused():
    tasks = "".join(f"  t{i}: {{task: a:b, lane: job}}\n" for i in range(2000))
    with pytest.raises(SystemFileError, match="has more than 5000 values"):
        load_text(f"name: x\nworkloads:\n{tasks}", HERE)


def test_python_builds_the_same_system_with_the_same_texts():
    built = System.model_validate(
        {"name": "x", "pools": {"web": Pool(nodes=Range(4, 4))}, "links": [Link(source="web", target="web")]}
    )
    written = load_text("name: x\npools: {web: {nodes: 4}}\nlinks: [{from: web, to: web}]", HERE)
    assert built == written.system


def test_python_spellings_of_fields_are_refused_in_a_file():
    with pytest.raises(SystemFileError, match=r"links\.0\.source: is no field of a link"):
        load_text("name: x\npools: {web: {}}\nlinks: [{source: web, to: web}]", HERE)


def test_a_newer_format_is_refused_with_nothing_else():
    with pytest.raises(SystemFileError) as caught:
        load_text("twinhull: 2\nworkflows: {}", HERE)
    assert (
        str(caught.value)
        == "shop.yaml:1:11  twinhull: format 2 needs a newer twinhull; this one reads format 1. Upgrade it"
    )


def test_every_value_knows_where_it_came_from(shop: Described):
    origins = {
        path: str(shop.origin(path)).replace(str(shop.source), "shop.yaml")
        for path in (
            "name",
            "pools.trainers.gpus",
            "components.fit.run",
            "components.fit.checkpoint.every",
            "components.fit.checkpoint.keep",
            "components.fit.replicas",
            "components.scorers-worker.concurrency",
            "components.broker",
            "endpoints.recommend.deadline",
            "endpoints.recommend.objective",
            "budget.money",
        )
    }
    assert origins == {
        "name": "read, shop.yaml:1:7",
        "pools.trainers.gpus": "read, shop.yaml:3:30",
        "components.fit.run": "read, shop.yaml:7:21",
        "components.fit.checkpoint.every": "read, shop.yaml:7:70",
        "components.fit.checkpoint.keep": "default, shop.yaml:7:58",
        "components.fit.replicas": "default, shop.yaml:7:3",
        "components.scorers-worker.concurrency": "default, shop.yaml:9:3",
        "components.broker": "default, shop.yaml:8:3",
        "endpoints.recommend.deadline": "read, shop.yaml:11:63",
        "endpoints.recommend.objective": "read, shop.yaml:11:3",
        "budget.money": "read, shop.yaml:12:9",
    }


def test_no_value_is_without_an_origin(everything: Described):
    data = everything.system.model_dump(exclude_none=True, by_alias=True)

    def paths(value: object, path: str):
        pairs = list(value.items()) if isinstance(value, dict) else []
        if isinstance(value, tuple) and value and isinstance(value[0], dict):
            pairs = list(enumerate(value))
        if not pairs and value not in ({}, ()):
            yield path
        for key, inner in pairs:
            yield from paths(inner, f"{path}.{key}" if path else str(key))

    assert [path for path in paths(data, "") if path not in everything.origins] == []


def test_a_generated_kind_is_a_default_and_a_written_one_is_read(everything: Described):
    assert everything.origin("components.gateway.kind").how == "default"
    assert everything.origin("components.gateway.replicas").how == "read"
    assert everything.origin("components.sales.kind").how == "read"
    assert everything.origin("components.rank.kind").how == "read"


def test_a_path_that_nothing_is_above_has_no_origin(shop: Described):
    with pytest.raises(KeyError):
        shop.origin("nothing.of.that")
