from pathlib import Path

import pytest

from twinhull.system.lanes import lane_of, lanes_of
from twinhull.system.load import load_text
from twinhull.system.model import System


def system(tasks: str, path: str = "[a, b]", deadline: str = "200 ms") -> System:
    endpoint = f"{{path: {path}, deadline: {deadline}}}"
    text = f"name: x\npools: {{p: {{nodes: 1}}}}\nworkloads: {{{tasks}}}\nendpoints: {{e: {endpoint}}}"
    return load_text(text, Path("x.yaml")).system


def test_a_quick_task_in_a_hurry_is_an_event():
    assert lane_of(system("a: {task: m:a}, b: {task: m:b}"), "e", "b") == "event"


def test_a_call_of_50_ms_is_a_job():
    tasks = "a: {task: m:a, service_time: 49 ms}, b: {task: m:b, service_time: 50 ms}"
    assert [lane_of(system(tasks), "e", task) for task in "ab"] == ["event", "job"]


def test_a_second_left_of_the_deadline_makes_a_job():
    assert lane_of(system("a: {task: m:a}, b: {task: m:b}", deadline="1 s"), "e", "b") == "job"


def test_what_is_left_is_what_the_tasks_before_leave():
    tasks = "a: {task: m:a, service_time: 5 ms}, b: {task: m:b, service_time: 20 ms}, c: {task: m:c}"
    assert lane_of(system(tasks, "[[a, b], c]", "1020 ms"), "e", "c") == "job"
    assert lane_of(system(tasks, "[[a, b], c]", "1019 ms"), "e", "c") == "event"
    assert lane_of(system(tasks, "[[a, b], c]", "1019 ms"), "e", "b") == "job"


def test_the_file_can_choose_the_lane():
    tasks = "a: {task: m:a, lane: job}, b: {task: m:b, lane: event, service_time: 3 s}"
    assert [lane_of(system(tasks), "e", task) for task in "ab"] == ["job", "event"]


def test_a_task_that_no_endpoint_needs_is_a_job():
    other = system("a: {task: m:a}, b: {task: m:b}, c: {task: m:c}")
    assert lane_of(other, None, "c") == "job"
    assert lanes_of(other, "c") == {"job"}


def test_a_task_that_is_asked_for_and_runs_by_itself_travels_both_lanes():
    assert lanes_of(system("a: {task: m:a, every: 1 h}, b: {task: m:b}"), "a") == {"event", "job"}


def test_only_a_task_has_a_lane():
    with pytest.raises(KeyError):
        lane_of(system("a: {task: m:a}, b: {task: m:b}"), "e", "broker")
