from pathlib import Path

import pytest

from twinhull.system.load import load, load_text
from twinhull.system.problems import SystemFileError

FILES = Path(__file__).parent / "files"


def told(text: str) -> list[str]:
    with pytest.raises(SystemFileError) as caught:
        load_text(text, Path("x.yaml"))
    return str(caught.value).splitlines()


def with_tasks(rest: str, tasks: str = "a: {task: m:a, pool: p}, b: {task: m:b, pool: p}") -> str:
    return f"name: x\npools: {{p: {{nodes: 1}}}}\nworkloads: {{{tasks}}}\n{rest}"


def test_all_mistakes_of_a_file_are_told_at_once_sorted_by_place():
    with pytest.raises(SystemFileError) as caught:
        load(FILES / "mistakes.yaml")
    report = (FILES / "mistakes.txt").read_text()
    assert f"{caught.value}\n".replace(f"{FILES}/", "") == report


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "name: x\npools: 5",
            "x.yaml:2:8  pools: 5 is not a mapping; write for example {web: {nodes: 4, cpus: 8}}",
        ),
        ("pools: {}", "x.yaml:1:1  name: is missing; write for example name: shop"),
        ("name: a/b", 'x.yaml:1:7  name: "a/b" is not a name;'),
        ("name: 5", 'x.yaml:1:7  name: 5 is not a text; write for example "5" in quotes'),
        ("name: x\nendpoints: {'': {}}", "x.yaml:2:13  endpoints.: a name is missing here"),
        ("name: x\npools: {'../etc': {}}", 'x.yaml:2:9  pools.../etc: "../etc" is not a name;'),
        ("name: x\nlinks: {}", "x.yaml:2:8  links: a mapping is not a list;"),
        ("name: x\npool: {}", 'x.yaml:2:1  pool: is no field of a system file. Did you mean "pools"?'),
        ("twinhull: '1'\nname: x", 'x.yaml:1:11  twinhull: "1" is no format version; write 1'),
        ("name: x\nworkloads: [a]", "x.yaml:2:12  workloads: a list is not a mapping;"),
        ("name: x\nworkloads: {a: b}", 'x.yaml:2:16  workloads.a: "b" is not a mapping;'),
        ("name: x\nworkloads: {a: {pool: p}}", "x.yaml:2:13  workloads.a: is neither a task nor a train;"),
        ("name: x\ncomponents: {a: {}}", "x.yaml:2:14  components.a: has no kind. Kinds: task, train,"),
        (
            "name: x\ncomponents: {a: {kind: [x]}}",
            "x.yaml:2:24  components.a.kind: a list is no kind of component.",
        ),
        ("name: x\nbudget: {covers: [gpus]}", '"gpus" is not one of gpu, cpu, storage'),
    ],
)
def test_a_broken_frame_is_told(text: str, message: str):
    assert any(message in line for line in told(text)), told(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (with_tasks("", "a: {task: m:a, pool: q}"), 'workloads.a.pool: there is no pool "q". Known: p'),
        (with_tasks("", "a: {task: m, pool: p}"), '"m" is not module:function; write for example app:fit'),
        (with_tasks("", "a: {task: app/main.py:f}"), 'is not module:function; write "app.main:f"'),
        (
            with_tasks("", "a: {task: m:a, model: b}, b: {task: m:b}"),
            '"b" is a task; a model has the name of the train',
        ),
        (
            with_tasks("", "a: {task: m:a, model: cache}"),
            '"cache" is no train; a model has the name of the train',
        ),
        (with_tasks("", "a: {task: m:a, host: c}"), 'workloads.a.host: there is no component "c"'),
        (
            with_tasks("", "a: {task: m:a, run: m:b}"),
            'workloads.a.run: is said by "task: m:a" already; remove it',
        ),
        (with_tasks("", "a: {task: m:a, train: m:b}"), "workloads.a: is a task and a train at once;"),
        (
            with_tasks("", "broker: {task: m:a}"),
            "workloads.broker: is the name of the broker that comes with",
        ),
        (
            with_tasks("", "p-queue: {task: m:a, pool: p}"),
            "workloads.p-queue: is the name of the queue that comes",
        ),
        (with_tasks("", "f: {train: m:f, checkpoint: 0}"), "workloads.f.checkpoint.every: 0 is no interval;"),
        (
            with_tasks("", "f: {train: m:f, checkpoint: {keep: 0}}"),
            "checkpoint.keep: 0 is too small; write 1 or more",
        ),
        (with_tasks("", "f: {train: m:f, checkpoint: {to: x}}"), 'checkpoint.to: there is no component "x"'),
        (
            with_tasks("", "f: {train: m:f, pool: p, checkpoint: auto}"),
            'workloads.f.checkpoint.every: "auto" needs to know how often a node fails; '
            'write it into pool "p": mtbf: 30 day',
        ),
        (
            with_tasks("", "f: {train: m:f, checkpoint: {every: auto}}"),
            'checkpoint.every: "auto" needs to know how often a node fails; name its pool',
        ),
        (with_tasks("", "f: {train: m:f, length: auto}"), 'f.length: "auto" is no length; write'),
        (
            with_tasks("", "f: {train: m:f, checkpoint: {evry: 3 s}}"),
            'is no field of checkpoint. Did you mean "every"?',
        ),
        (with_tasks("", "f: {train: m:f, elastic: -1}"), "elastic: -1 is outside 0 to 1000000000"),
        (
            with_tasks("components: {a: {kind: task}}"),
            "x.yaml:4:14  components.a: is a workload already; say it there",
        ),
        (
            with_tasks("components: {cache: {kind: store}}"),
            "components.cache: is the cache that comes with the workloads",
        ),
        (
            with_tasks("endpoints: {e: {path: [a, c]}}"),
            'x.yaml:4:27  endpoints.e.path.1: there is no task or component "c"',
        ),
        (
            with_tasks("endpoints: {e: {path: [[a, b], a]}}"),
            'endpoints.e.path.1: "a" is in this path twice; name it once',
        ),
        (
            with_tasks("endpoints: {e: {path: []}}"),
            "endpoints.e.path: a list with an empty list leads nowhere",
        ),
        (with_tasks("endpoints: {e: {path: [[a, [b]]]}}"), "in a list in a list is too deep"),
        (with_tasks("endpoints: {e: {path: a}}"), '"a" is not a list; write for example [features, rank]'),
        (
            with_tasks("endpoints: {e: {fallback: [cache, x]}}"),
            '"x" is neither cache nor a component nor module:function.',
        ),
        (
            with_tasks("endpoints: {e: {fallback: [cache, cache]}}"),
            'fallback.1: "cache" is there twice; remove one',
        ),
        (with_tasks("endpoints: {e: {deadline: 0}}"), "endpoints.e.deadline: 0 is no time at all"),
        (with_tasks("endpoints: {e: {deadline: -5 s}}"), 'endpoints.e.deadline: "-5 s" is negative'),
        (with_tasks("endpoints: {e: {deadline: .inf}}"), "endpoints.e.deadline: inf has no unit"),
        (
            with_tasks("endpoints: {e: {rate: 5/s, peak: 1/s}}"),
            'endpoints.e.peak: "1/s" is below the rate, "5/s"',
        ),
        (with_tasks("endpoints: {e: {client: x}}"), 'endpoints.e.client: there is no component "x"'),
        (
            with_tasks("endpoints: {events: {path: [a]}}"),
            "endpoints.events: /events is answered by the gateway itself",
        ),
        (with_tasks("links: [{from: a, to: x}]"), 'links.0.to: there is no component or pool "x"'),
        (
            with_tasks("links: [{from: a, to: p, task: p-queue}]"),
            'links.0.task: there is no task "p-queue". Known: a, b',
        ),
        (with_tasks("links: [5]"), "links.0: 5 is not a mapping"),
    ],
)
def test_a_name_that_leads_nowhere_and_a_contradiction_are_told(text: str, message: str):
    assert any(message in line for line in told(text)), told(text)


def test_a_train_is_no_part_of_a_path():
    tasks = "f: {train: m:f, pool: p}"
    assert '"f" is a train; a path holds tasks' in told(with_tasks("endpoints: {e: {path: [f]}}", tasks))[0]


def test_a_deadline_shorter_than_the_wait_for_a_batch_is_told_with_both():
    tasks = "a: {task: m:a, pool: p, batch: 32 within 200 ms}"
    line = told(with_tasks("endpoints: {e: {path: [a], deadline: 0.2 s}}", tasks))[0]
    wait = "the 200 ms that a waits to fill a batch"
    assert line == f'x.yaml:4:38  endpoints.e.deadline: "0.2 s" is not longer than {wait}'


def test_a_deadline_longer_than_the_wait_for_a_batch_is_fine():
    tasks = "a: {task: m:a, pool: p, batch: 32 within 199 ms}"
    found = load_text(with_tasks("endpoints: {e: {path: [a], deadline: 0.2 s}}", tasks), Path("x.yaml"))
    assert found.system.endpoints["e"].deadline == 0.2


def test_a_circle_of_hosts_is_told_once():
    hosts = "a: {kind: worker, host: b}, b: {kind: worker, host: c}, c: {kind: worker, host: b}"
    lines = told(f"name: x\ncomponents: {{{hosts}}}")
    assert lines == ["x.yaml:2:66  components.b.host: goes in a circle: b in c in b"]


def test_a_broken_workload_is_not_told_again_where_it_is_named():
    lines = told(
        with_tasks("endpoints: {e: {path: [a]}}\nlinks: [{from: p, to: p, task: a}]", "a: {pool: p}")
    )
    assert len(lines) == 1


def test_a_key_that_stands_twice_is_told_beside_all_other_mistakes():
    lines = told("name: x\nname: y\npools: {p: {nodes: x}}")
    assert [line.split("  ")[0] for line in lines] == ["x.yaml:2:1", "x.yaml:3:20"]


def test_a_flood_of_mistakes_is_cut():
    lines = told("name: x\n" + "".join(f"a{i}: 1\n" for i in range(300)))
    assert len(lines) == 51
    assert lines[-1] == "x.yaml: and 150 more"


def test_no_message_can_break_a_line_or_a_terminal():
    lines = told('name: x\npools: {"a\\nb\\e": {"\\0": 1}}')
    assert len(lines) == 2
    assert all(line.isprintable() for line in lines)
