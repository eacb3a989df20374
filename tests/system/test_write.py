import functools
import math
import types
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from inline_snapshot import snapshot

from twinhull.system import quantities
from twinhull.system.load import Described, load_text
from twinhull.system.model import (
    CLASS_BY_KIND,
    Budget,
    Checkpoint,
    Endpoint,
    Launch,
    Link,
    Parallel,
    Part,
    Pool,
    Shape,
    System,
)
from twinhull.system.script import directory_problem, words_problem
from twinhull.system.write import dump

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_-]{0,8}", fullmatch=True)
positive = st.floats(min_value=1e-9, max_value=1e15) | st.integers(1, 10**6).map(float)
texts = st.text(
    st.characters(codec="utf-8", categories=["L", "M", "N", "P", "S", "Zs"]), min_size=1, max_size=20
)
words = texts.filter(lambda text: text.strip() and text.isprintable()) | st.sampled_from(
    [
        "8",
        "1e3",
        "true",
        "null",
        "~",
        "on",
        "0x1",
        "a: b",
        "a #b",
        "- a",
        "{a}",
        "'",
        '"',
        " a ",
        "2 x 3",
        ".inf",
        "é",
    ]
)
spans = st.builds(quantities.Span, positive | st.just(math.inf)) | st.integers(1, 10**9).map(
    lambda n: quantities.Span(steps=n)
)
BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    float: positive | st.just(math.inf),
    int: st.integers(1, 10**9),
    bool: st.booleans(),
    str: words,
    quantities.Range: st.builds(
        lambda low, more: quantities.Range(low, low + more), st.integers(0, 99), st.integers(0, 9)
    ),
    quantities.Gpus: st.builds(quantities.Gpus, st.integers(0, 99), st.none() | st.just("H100")),
    quantities.Network: st.builds(
        quantities.Network, st.integers(1, 9), positive, st.none() | st.just("Ethernet")
    ),
    quantities.Span: spans,
    quantities.Time: st.builds(quantities.Time, positive, st.none() | positive),
    quantities.Batch: st.builds(quantities.Batch, st.integers(1, 999), positive),
    quantities.Retries: st.builds(quantities.Retries, st.integers(0, 9).map(float), st.none() | positive),
}
REFERENCES = {
    "host",
    "pool",
    "model",
    "task",
    "client",
    "to",
    "run",
    "notice",
    "kind",
    "source",
    "target",
    "path",
    "fallback",
}
OF_FIELD: dict[str, st.SearchStrategy[Any]] = {  # those that not every value of their type fits
    "hit_rate": st.floats(0, 1),
    "objective": st.floats(0, 1),
    "command": words.filter(lambda text: not words_problem(text)),
    "publish": words.filter(lambda text: not directory_problem(text)),
}


@functools.cache
def parts(kind: type[Part]) -> st.SearchStrategy[Any]:
    """Parts of a class with any of its fields, apart from names of other parts."""
    fields = {
        name: st.none() | (OF_FIELD[name] if name in OF_FIELD else values(field.annotation))
        for name, field in kind.model_fields.items()
        if name not in REFERENCES
    }
    return st.fixed_dictionaries(fields).map(lambda chosen: kind.model_construct(**chosen))


def values(annotation: Any) -> st.SearchStrategy[Any]:
    options = [part for part in get_args(annotation) if part is not types.NoneType]
    if isinstance(annotation, types.UnionType) or "Union" in str(get_origin(annotation)):
        return st.one_of([values(option) for option in options])
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    if get_origin(annotation) is tuple:
        return st.lists(values(options[0]), max_size=3).map(tuple)
    if annotation in (Checkpoint, Launch, Parallel, Shape, Budget):
        return parts(annotation)
    return BY_TYPE[getattr(annotation, "__origin__", annotation)]


@st.composite
def systems(draw: st.DrawFn) -> System:
    pools = draw(st.dictionaries(names, parts(Pool), max_size=2))
    kinds = draw(st.dictionaries(names, st.sampled_from(list(CLASS_BY_KIND)), max_size=3))
    askable = [name for name, kind in kinds.items() if kind != "train"]
    ends = [*pools, *kinds]
    components = {
        name: draw(parts(CLASS_BY_KIND[kind])).model_copy(
            update={"kind": kind, "pool": draw(st.sampled_from([None, *pools]))}
        )
        for name, kind in kinds.items()
    }
    links = [
        draw(parts(Link)).model_copy(update={"source": draw(st.sampled_from(ends)), "target": ends[0]})
        for _ in range(draw(st.integers(0, 2)) if ends else 0)
    ]
    endpoint = draw(parts(Endpoint)).model_copy(
        update={
            "path": (draw(st.sampled_from(askable)),) if askable else None,
            "fallback": draw(st.sampled_from([None, (), ("cache", "app:best")])),
            "deadline": draw(st.sampled_from([None, 1e16, math.inf])),
            "peak": None,
        }
    )
    return System(
        name=draw(names),
        pools=pools,
        components=components,
        links=tuple(links),
        endpoints={"answer": endpoint},
        budget=draw(st.none() | parts(Budget)),
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(systems())
def test_what_is_written_loads_back_equal(system: System):
    assert load_text(dump(system), Path("x.yaml")).system == system


def test_a_system_with_all_that_was_filled_in_loads_back_equal(shop: Described, everything: Described):
    for described in (shop, everything):
        again = load_text(dump(described.system), Path("again.yaml"))
        assert again.system == described.system
        assert {origin.how for origin in again.origins.values()} == {"read"}


@pytest.mark.parametrize(
    "word", ["8", "true", "null", "a: b", "a #b", " a", "1e3", "-", "{}", "é\u00a0\u2028x", "'", "\\", "😀"]
)
def test_a_text_that_looks_like_something_else_stays_a_text(word: str):
    system = System.model_validate({"name": "x"}).model_copy(
        update={"pools": {"p": Pool.model_construct(zone=word)}}
    )
    text = dump(system)
    if word.isprintable():
        assert load_text(text, Path("x.yaml")).system == system


def test_the_written_file_is_made_for_reading():
    text = "name: x\npools: {web: {nodes: 2, cpus: 8}}\nworkloads: {a: {task: m:a, pool: web, retries: 2}}"
    assert dump(load_text(text, Path("x.yaml")).system) == snapshot("""\
twinhull: 1
name: x
pools:
  web: {nodes: 2, cpus: 8}
components:
  a: {kind: task, host: web-worker, pool: web, run: m:a, retries: 2, ack: late, redelivered: true}
  broker: {kind: broker, replicas: 1, software: redis, lost_with: node, syncs: 1 s}
  cache: {kind: cache, host: broker}
  web-queue:
    kind: queue
    host: broker
    bound: 10 k
    order: fifo
    deliveries: 3
    dead_letter: true
  web-worker: {kind: worker, pool: web, replicas: 2, concurrency: 8, prefetch: 1}
links:
  - {from: web-worker, to: web-queue, kind: consume}
""")
