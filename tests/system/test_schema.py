import json
import re
from pathlib import Path
from typing import Any

import pytest

from twinhull.system.places import compose
from twinhull.system.schema import json_schema

FILES = Path(__file__).parent / "files"
SCHEMA = json.loads(json_schema())
TYPES: dict[str, Any] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "object": dict,
    "array": list,
}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value fits a schema, as far as the words go that ours uses."""
    if "$ref" in schema:
        schema = {
            **SCHEMA["$defs"][schema["$ref"].rsplit("/", 1)[1]],
            **{k: v for k, v in schema.items() if k != "$ref"},
        }
    kinds = schema.get("type", list(TYPES))
    checks = [
        any(isinstance(value, TYPES[kind]) for kind in ([kinds] if isinstance(kinds, str) else kinds)),
        "const" not in schema or value == schema["const"],
        "enum" not in schema or value in schema["enum"],
        "anyOf" not in schema or any(fits(value, option) for option in schema["anyOf"]),
        "oneOf" not in schema or sum(fits(value, option) for option in schema["oneOf"]) == 1,
        not isinstance(value, str) or re.search(schema.get("pattern", ""), value) is not None,
        not isinstance(value, list) or all(fits(item, schema.get("items", {})) for item in value),
        isinstance(value, bool) or not isinstance(value, int) or value >= schema.get("minimum", value),
        not isinstance(value, dict) or fits_object(value, schema),
    ]
    return all(checks)


def fits_object(value: dict[str, Any], schema: dict[str, Any]) -> bool:
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for key, item in value.items():
        inner = (
            [named[key]]
            if key in named
            else [one for pattern, one in patterns.items() if re.search(pattern, key)]
        )
        for one in inner or [schema.get("additionalProperties", {})]:
            if one is False or not fits(item, one):
                return False
        if not fits(key, schema.get("propertyNames", {})):
            return False
    return all(key in value for key in schema.get("required", []))


@pytest.mark.parametrize("name", ["shop.yaml", "everything.yaml"])
def test_a_valid_file_fits_the_schema(name: str):
    assert fits(compose((FILES / name).read_text(), name).data, SCHEMA)


@pytest.mark.parametrize(
    "text",
    [
        "pools: {}",
        "name: x\nworkload: {}",
        "twinhull: 2\nname: x",
        "name: x\npools: {a b: {}}",
        "name: x\npools: {p: {market: gold}}",
        "name: x\npools: {p: {start_time: 5}}",
        "name: x\npools: {p: {start_time: 5 mins}}",
        "name: x\nworkloads: {a: {pool: p}}",
        "name: x\nworkloads: {a: {task: m}}",
        "name: x\nworkloads: {a: {task: m:a, ttl: 3 s}}",
        "name: x\ncomponents: {a: {}}",
        "name: x\ncomponents: {broker: {bond: 3}}",
        "name: x\nendpoints: {e: {path: []  , deadline: 5}}",
        "name: x\nbudget: 50",
    ],
)
def test_a_broken_file_does_not(text: str):
    assert not fits(compose(text, "x").data, SCHEMA)


def test_editors_can_explain_each_field_of_a_workload():
    for name in ("TaskWorkload", "TrainWorkload"):
        fields = SCHEMA["$defs"][name]["properties"]
        unexplained = [
            key for key, field in fields.items() if "description" not in field and "$ref" not in field
        ]
        assert unexplained == []


def test_nothing_in_the_schema_is_null_for_a_file_never_is():
    assert "null" not in json_schema()
