from typing import Any

import pytest

from twinhull.serve.bodies import BadBody, Bodies
from twinhull.serve.entry import Entry, Parameter, Shape
from twinhull.serve.layout import Stop


def stop(run: str, *, batch: bool = False) -> Stop:
    return Stop(run, run, "web", "event", batch, 32, 0.001, None)


def entry(run: str, fields: dict[str, tuple[Shape, bool]], *, rows: bool | None = False) -> Entry:
    told = [Parameter(name=name, type=kind, required=need) for name, (kind, need) in fields.items()]
    return Entry(run=run, rows=rows, parameters=told, row=told if rows else None, model=None)


def bodies(*entries: Entry, batch: bool = False) -> Bodies:
    stops = tuple(stop(e["run"], batch=batch) for e in entries)
    return Bodies(stops, {e["run"]: e for e in entries})


SHOP = entry(
    "f", {"n": ("int", False), "user": ("int", True), "tags": (["either", ["list", "str"], "null"], False)}
)


def test_a_body_becomes_keyword_arguments_without_the_fields_left_out():
    assert bodies(SHOP).read(b'{"user": 3}').fields == {"user": 3}
    assert bodies(SHOP).read(b'{"tags": ["a"], "user": 3, "n": 1}').fields == {
        "user": 3,
        "n": 1,
        "tags": ["a"],
    }
    assert bodies(SHOP).read(b'{"user": 3, "tags": null}').fields == {"user": 3, "tags": None}


def test_equal_bodies_have_one_key_however_they_are_written():
    read = bodies(SHOP).read
    assert read(b'{"user":3,"n":1}').key == read(b'{ "n": 1, "user": 3 }').key
    assert read(b'{"user":3}').key != read(b'{"user":4}').key


def test_equal_objects_of_any_shape_have_one_key():
    read = Bodies((stop("g"),), {}).read
    assert read(b'{"a":{"x":1,"y":2}}').key == read(b'{"a":{"y":2,"x":1}}').key


def test_a_number_for_a_float_field_is_that_float():
    floats = bodies(entry("f", {"x": ("float", True)}))
    assert floats.read(b'{"x":1}').key == floats.read(b'{"x":1.0}').key


def test_tasks_that_begin_together_share_one_body():
    both = bodies(entry("f", {"a": ("int", True)}), entry("g", {"a": ("int", False), "b": ("str", True)}))
    assert both.read(b'{"a": 1, "b": "x"}').fields == {"a": 1, "b": "x"}
    with pytest.raises(BadBody, match="missing required field `b`"):
        both.read(b'{"a": 1}')


def test_a_row_of_unknown_fields_accepts_any_object():
    free = bodies(Entry(run="f", rows=True, parameters=[], row=None, model=None))
    assert free.read(b'{"anything": [1, {"x": null}]}').fields == {"anything": [1, {"x": None}]}
    with pytest.raises(BadBody):
        free.read(b"[1]")


@pytest.mark.parametrize(
    ("batch", "good", "bad"),
    [(True, b'{"user": 1}', b'{"rows": []}'), (False, b'{"rows": []}', b'{"user": 1}')],
)
def test_the_file_decides_what_an_open_signature_takes(batch: bool, good: bytes, bad: bytes):
    open_one = Entry(
        run="f",
        rows=None,
        parameters=[Parameter(name="rows", type="any", required=True)],
        row=[Parameter(name="user", type="int", required=True)],
        model=None,
    )
    read = bodies(open_one, batch=batch).read
    assert read(good)
    with pytest.raises(BadBody):
        read(bad)


@pytest.mark.parametrize("value", ["1", "null", '"x"', "[1]", "true"])
@pytest.mark.parametrize("shape", ["int", "null", "str", ["list", "int"], "bool"])
def test_only_the_told_type_passes(shape: Any, value: str):
    told = bodies(entry("f", {"x": (shape, True)}))
    match = {"int": "1", "null": "null", "str": '"x"', "bool": "true"}.get(
        shape if isinstance(shape, str) else "", "[1]"
    )
    data = f'{{"x": {value}}}'.encode()
    if value == match:
        assert told.read(data)
    else:
        with pytest.raises(BadBody):
            told.read(data)
