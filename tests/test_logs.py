import json
import subprocess
import sys
from typing import Any

import pytest

from twinhull.deploy import record


def run(code: str, fmt: str = "json") -> subprocess.CompletedProcess[str]:
    """What a process prints that sets up its logs and runs `code`."""
    setup = "import logging, sys, math; from twinhull import logs; logs.setup('worker:scorers-0')\n"
    program = setup + "log = logging.getLogger('somewhere')\n" + code
    environment = {"TWINHULL_LOG_FORMAT": fmt, "PATH": "/usr/bin:/bin", "PYTHONWARNINGS": "error"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        timeout=20,
    )
    assert done.returncode == 0, done.stderr
    return done


def said(code: str) -> list[dict[str, Any]]:
    done = run(code)
    assert done.stderr == ""
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_line_holds_the_event_the_facts_the_level_the_time_and_the_role():
    (line,) = said("log.info('swapped', extra={'model': 'fit', 'version': 12, 'took_s': 0.8})")
    assert line.pop("t") > 1.7e9
    about = {"event": "swapped", "level": "info", "role": "worker:scorers-0"}
    assert line == about | {"model": "fit", "version": 12, "took_s": 0.8}


def test_the_supervisor_reads_the_line_back():
    done = run("log.warning('node lost', extra={'rank': 3})")
    found = record.read("?", done.stdout.encode())
    assert found is not None
    assert (found.kind, found.level, found.role, found.facts) == (
        "node lost", "warning", "worker:scorers-0", {"rank": 3},
    )  # fmt: skip


def test_arguments_of_a_message_are_filled_in():
    assert said("log.info('%s of %d', 'one', 2)")[0]["event"] == "one of 2"


def test_an_exception_is_one_line_with_its_traceback():
    (line,) = said("try:\n 1 / 0\nexcept ZeroDivisionError:\n log.exception('broke', extra={'step': 3})")
    assert (line["event"], line["level"], line["step"]) == ("broke", "error", 3)
    assert line["exception"].startswith("Traceback (most recent call last):\n")
    assert line["exception"].endswith("ZeroDivisionError: division by zero")


def test_a_message_of_several_lines_is_one_line():
    assert [line["event"] for line in said("log.info('a\\nb\\r\\nc\\u2028d')")] == ["a\nb\r\nc\u2028d"]


def test_a_fact_that_is_no_json_is_said_as_well_as_can_be_and_the_others_as_they_are():
    values = {
        "pathlib.Path('/x')": "/x",
        "ValueError('no')": "no",
        "{1}": "{1}",
        "b'raw'": "b'raw'",
        "numpy.float32(0.5)": 0.5,
        "numpy.int64(7)": 7,
        "numpy.arange(3)": "[0 1 2]",
        "{(1, 2): 3}": "{(1, 2): 3}",
        "(x := [], x.append(x))[0]": "[[...]]",
        "type('Odd', (), {'__str__': lambda self: 1 / 0})()": "<Odd>",
    }
    code = "import numpy, pathlib\n" + "\n".join(
        f"log.info('odd', extra={{'fact': {value}, 'version': 3}})" for value in values
    )
    lines = said(code)
    assert [line["fact"] for line in lines] == list(values.values())
    assert {(line["event"], line["version"]) for line in lines} == {("odd", 3)}


def test_a_fact_cannot_displace_what_a_line_is_about():
    (line,) = said("log.info('swapped', extra=dict.fromkeys(['event', 'level', 'role', 't'], 'other'))")
    assert (line["event"], line["level"], line["role"]) == ("swapped", "info", "worker:scorers-0")
    assert line["t"] > 1.7e9


def test_text_outside_ascii_survives_any_locale():
    assert said("log.info('überholt', extra={'näme': '名\\ud800'})")[0]["event"] == "überholt"


def test_what_is_below_the_level_is_not_said():
    assert said("log.debug('detail')") == []


def test_setting_up_twice_says_things_once():
    assert len(said("logs.setup('again'); log.info('once')")) == 1


def test_samples_are_lines_of_their_own_between_the_logs():
    lines = said("log.info('a'); logs.sample({'train.fit.loss': 0.5, 'x': 1}); log.info('b')")
    assert [line.get("event") for line in lines] == ["a", None, "b"]
    assert lines[1]["sample"] == {"train.fit.loss": 0.5, "x": 1}
    assert lines[1]["role"] == "worker:scorers-0"


def test_numbers_of_numpy_can_be_sampled_and_what_is_not_finite_is_left_out():
    """SQLite has no NaN: one in the journal would cost all rows written with it."""
    code = "import numpy; logs.sample({'a': numpy.float32(0.5), 'b': math.nan, 'c': math.inf})"
    assert said(code)[0]["sample"] == {"a": 0.5}


def test_samples_go_nowhere_without_a_supervisor():
    assert run("logs.sample({'a': 1})", fmt="console").stdout == ""


def test_lines_of_many_threads_stay_whole():
    code = """
import threading
def speak(n):
    for i in range(200):
        log.info("x" * n * 500, extra={"i": i})
        logs.sample({"a": i})
threads = [threading.Thread(target=speak, args=(n,)) for n in range(8)]
[t.start() for t in threads]; [t.join() for t in threads]
"""
    assert len(said(code)) == 8 * 200 * 2


def test_console_lines_are_for_people():
    out = run("log.info('swapped', extra={'model': 'fit', 'version': 12})", fmt="console").stdout
    assert out.count("\n") == 1
    assert "swapped" in out
    assert "model=fit" in out
    assert "\x1b" not in out


def test_an_exception_on_the_console_keeps_its_traceback():
    out = run("try:\n 1 / 0\nexcept ZeroDivisionError:\n log.exception('broke')", fmt="console").stdout
    assert "Traceback" in out
    assert "ZeroDivisionError: division by zero" in out


@pytest.mark.parametrize("fmt", ["yaml", ""])
def test_an_unknown_format_is_the_console(fmt):
    assert run("log.info('swapped')", fmt=fmt).stdout.strip().endswith("swapped")


def test_setting_up_logs_is_all_that_imports_structlog():
    code = "import sys; from twinhull import logs; print('structlog' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
