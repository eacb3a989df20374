import math
from pathlib import Path

import pytest

from twinhull.system import places
from twinhull.system.places import compose, read
from twinhull.system.problems import SystemFileError


def refused(text: str) -> str:
    with pytest.raises(SystemFileError) as caught:
        compose(text, "f")
    return str(caught.value)


def test_each_key_and_value_has_its_place():
    document = compose("a: {b: [1, two]}\nc:\n  d: x\n", "f")
    assert document.data == {"a": {"b": [1, "two"]}, "c": {"d": "x"}}
    assert document.place(("a", "b", 1)) == (1, 12)
    assert document.place(("a", "b"), at_key=True) == (1, 5)
    assert document.place(("c", "d", "none")) == (3, 6)


def test_columns_count_characters_not_bytes():
    assert compose("é: {ü: x}", "f").place(("é", "ü")) == (1, 8)


def test_only_true_and_false_are_booleans():
    text = (
        "a: true\nb: on\nc: yes\nd: True\ne: 12:30:00\nf: 010\ng: 1e3\nh: 0x10\ni: .inf\nj: 1_000\nk: 'true'"
    )
    read_as = compose(text, "f").data
    assert read_as == {
        "a": True, "b": "on", "c": "yes", "d": "True", "e": "12:30:00", "f": 10, "g": 1000.0, "h": "0x10",
        "i": math.inf, "j": "1_000", "k": "true",
    }  # fmt: skip


def test_keys_are_text_whatever_they_look_like():
    assert compose("1: x\ntrue: y\n", "f").data == {"1": "x", "true": "y"}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\na: 2", "f:2:1  a: is there twice; the first is in line 1"),
        ("a:\nb: 1", "f:1:1  a: has no value; write one, or leave it out"),
        ("a: &x 1", "f:1:4  a: an anchor (&) is not read here; write the value out in each place"),
        ("a: &x 1\nb: *x", "f:2:4  b: an alias (*) is not read here; write the value out"),
        ("<<: {a: 1}", "f:1:1  <<: << is not read here; write the values out"),
        ("a: !!python/object:os.x y", 'a tag ("tag:yaml.org,2002:python/object:os.x") is not read here'),
        ("? [a]\n: b", "a key is a plain name, not a mapping, a list or an alias"),
        ("a: 1\n---\nb: 2", "f:2:1  a second document starts here; a system file has one"),
    ],
)
def test_what_can_be_read_past_is_told_with_all_else(text: str, told: str):
    assert told in "\n".join(map(str, compose(text, "f").problems))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "f:1:1  is empty;"),
        ("# only a remark\n", "f:1:1  is empty;"),
        ("---\n...\n", "f:2:1  is empty;"),
        ("text", 'f:1:1  is only "text", not a mapping;'),
        ("[a]", "f:1:1  is a list, not a mapping;"),
        ("a:\n\t- b", "f:2:1  a tab indents this line; YAML wants spaces"),
        ("\ta: b", "f:1:1  a tab indents this line; YAML wants spaces"),
        ("a: @b", "f:1:4  a value cannot start with @ unless it is in quotes"),
        ("a: b: c", "f:1:5  is not YAML: mapping values are not allowed in this context"),
        ("a: [b", "f:2:1  is not YAML: did not find expected ',' or ']' while parsing a flow sequence"),
        ('a: "\\ud800"', "f:1:7  is not YAML: found invalid Unicode character escape code"),
        ("- " * 50, "f:1:43  is nested deeper than 20 levels"),
        ("[" * 100_000, "is not YAML: exceeded maximum nesting depth"),
        ("a: " + "{b: " * 30, "is nested deeper than 20 levels"),
        ("a: [" + "x, " * 60_000 + "]", "has more than 50000 values"),
        ("?\n" * 60_000, "has more than 50000 values"),
    ],
)
def test_what_is_no_yaml_is_one_problem_with_its_place(text: str, told: str):
    assert told in refused(text)


def test_pure_python_yaml_reads_and_refuses_the_same(monkeypatch: pytest.MonkeyPatch):
    import yaml

    monkeypatch.setattr(places, "LOADER", yaml.SafeLoader)
    assert compose("a: {b: [1, two]}", "f").data == {"a": {"b": [1, "two"]}}
    assert "a tab indents this line" in refused("a:\n\t- b")
    assert "is nested deeper than 20 levels" in refused("[" * 5_000)


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        (b"name: x\nzone: \xff", "f.yaml:2:7  is not text in UTF-8; save it as UTF-8"),
        (b"\x7fELF\x02\x01\x01\x00", "f.yaml:1:1  the character U+007F cannot be in a text file; remove it"),
        (b"a: b\r\nc: \x00", "f.yaml:2:4  the character U+0000 cannot be in a text file; remove it"),
        ("a: b".encode("utf-16"), "is not text in UTF-8"),
        (b"a: \xed\xa0\x80", "f.yaml:1:4  is not text in UTF-8"),
        (b"x" * 50_000_000, "f.yaml:1:1  is larger than 2 MB; that is no system file"),
    ],
)
def test_a_file_that_is_no_text_is_one_problem(tmp_path: Path, raw: bytes, told: str):
    (tmp_path / "f.yaml").write_bytes(raw)
    with pytest.raises(SystemFileError) as caught:
        read(tmp_path / "f.yaml")
    assert told in str(caught.value)


def test_a_byte_order_mark_and_windows_line_ends_are_no_problem(tmp_path: Path):
    (tmp_path / "f.yaml").write_bytes(b"\xef\xbb\xbfname: x\r\nzone: y\r\n")
    document = compose(read(tmp_path / "f.yaml"), "f")
    assert (document.data, document.place(("zone",))) == ({"name": "x", "zone": "y"}, (2, 7))


def test_a_file_that_cannot_be_opened_is_one_problem(tmp_path: Path):
    for path, told in [
        (tmp_path / "none.yaml", "there is no such file"),
        (tmp_path, "is a directory"),
        (Path("\0"), "null byte"),
    ]:
        with pytest.raises(SystemFileError, match=told):
            read(path)
