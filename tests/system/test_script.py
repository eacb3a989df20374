import json
import re
from pathlib import Path

import pytest

from twinhull.system.load import load_text
from twinhull.system.model import Train
from twinhull.system.problems import SystemFileError
from twinhull.system.runnable import missing
from twinhull.system.schema import json_schema
from twinhull.system.script import directory_problem, words, words_problem
from twinhull.system.write import dump

COMMAND = "torchrun --nproc-per-node {ranks} t.py --resume {checkpoint}"
FIT = f'{{train: {{command: "{COMMAND}", publish: out/}}, pool: p}}'


def file_with(fit: str) -> str:
    return f"name: x\npools: {{p: {{nodes: 1}}}}\nworkloads:\n  fit: {fit}\n"


def test_a_command_is_a_training_job_that_can_be_run_and_loads_back_equal():
    described = load_text(file_with(FIT), Path("x.yaml"))
    fit = described.system.components["fit"]
    assert isinstance(fit, Train)
    assert (fit.run, fit.publish) == (None, "out/")
    assert fit.command == COMMAND
    assert missing(described.system) == []
    assert load_text(dump(described.system), Path("y.yaml")).system == described.system
    assert str(described.origin("components.fit.publish")) == "read, x.yaml:4:99"


def test_a_function_may_be_spelled_out_too():
    short = load_text(file_with("{train: app:fit, pool: p}"), Path("x.yaml"))
    assert load_text(file_with("{train: {run: app:fit}, pool: p}"), Path("x.yaml")).system == short.system


@pytest.mark.parametrize(
    ("fit", "problem"),
    [
        ("{train: {run: app:fit, command: a}}", "4:31  workloads.fit.train.command: stands beside run, a"),
        ("{train: {run: app:fit, publish: a}}", "4:31  workloads.fit.train.publish: is where a command"),
        ("{train: {publish: a}}", "4:9  workloads.fit.train: says nothing to run; write train: app:func"),
        ("{train: {}}", "4:9  workloads.fit.train: says nothing to run;"),
        ("{train: {comand: a, run: m:f}}", '4:17  workloads.fit.train.comand: is no field of train. Did'),
        ('{train: {command: "a {chekpoint}"}}', '{chekpoint} is nothing that can be filled in. Did you mean'),
        ('{train: {command: ""}}', "4:26  workloads.fit.train.command: is empty; write it"),
        ("{train: {command: \"''\"}}", "workloads.fit.train.command: has no program; write for example"),
        ("{train: {command: \"a 'b\"}}", "cannot be split into words: No closing quotation; close the quote"),
        ("{train: {command: [a]}}", "4:26  workloads.fit.train.command: a list is not a text;"),
        ('{train: {command: a, publish: "{ranks}"}}', "workloads.fit.train.publish: {ranks} is no place for"),
        ("{train: m:f, command: a}", "4:21  workloads.fit.command: belongs into train; write train: {"),
        ("{train: {command: a}, run: m:f}", "4:30  workloads.fit.run: is said by"),
        ("{task: {command: a}}", "workloads.fit.task: a mapping is not module:function;"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_command_is_told_at_its_place(fit: str, problem: str):
    with pytest.raises(SystemFileError) as caught:
        load_text(file_with(fit), Path("x.yaml"))
    assert [line for line in str(caught.value).splitlines() if problem in line], str(caught.value)
    assert len(caught.value.problems) == 1


def test_what_is_in_braces_and_no_name_is_left_to_the_command():
    command = 'train --config \'{"a": {"b": 1}}\' --format {:d} ${} {}'
    assert words_problem(command) == ""
    assert words(command, {"checkpoint": ""})[2:] == ['{"a": {"b": 1}}', "--format", "{:d}", "${}", "{}"]


@pytest.mark.parametrize(
    ("command", "without"),
    [
        ("python t.py --resume {checkpoint} --lr 1", ["python", "t.py", "--lr", "1"]),
        ("python t.py --resume={checkpoint}", ["python", "t.py"]),
        ("python t.py {checkpoint}", ["python", "t.py"]),
        ("python t.py resume={checkpoint}/state --lr 1", ["python", "t.py", "--lr", "1"]),
        ("python t.py --to {checkpoints}", ["python", "t.py", "--to", "/c"]),
    ],
)
def test_an_argument_that_wants_a_checkpoint_is_dropped_while_there_is_none(command: str, without: list[str]):
    assert words(command, {"checkpoint": "", "checkpoints": "/c"}) == without
    given = words(command, {"checkpoint": "/c/step 5", "checkpoints": "/c"})
    assert given == [re.sub(r"\{checkpoint(s?)\}", lambda m: "/c" if m[1] else "/c/step 5", word)
                     for word in command.split()]  # fmt: skip


def test_a_model_may_lie_in_the_run_directory():
    assert directory_problem("{run}/out") == ""
    assert "Did you mean" in directory_problem("{rnu}/out")


def test_editors_know_both_spellings():
    train = json.loads(json_schema())["$defs"]["TrainWorkload"]["properties"]["train"]
    short, spelled_out = train["anyOf"]
    assert short["type"] == "string"
    assert set(spelled_out["properties"]) == {"run", "command", "publish"}
