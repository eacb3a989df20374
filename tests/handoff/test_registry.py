import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from twinhull.errors import ModelRefused, TwinhullError
from twinhull.handoff import registry
from twinhull.handoff.registry import Registry

WEIGHTS = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.float32([1])}


@pytest.fixture
def models(tmp_path):
    return Registry(tmp_path / "registry")


def publish(models: Registry, cycle: int = 0, value: float = 0.0) -> registry.Version:
    made_by = {"train": "fit", "cycle": cycle} if cycle else {}
    return models.publish("fit", {"w": np.full(4, value)}, metrics={"loss": value}, made_by=made_by)


def names(models: Registry) -> set[str]:
    return {path.name for path in (models.root / "fit").iterdir()} - {".lock"}


def test_a_published_model_is_read_back_equal(models):
    before = time.time()
    version = models.publish(
        "fit", WEIGHTS, metrics={"recall@10": np.float64(0.1)}, made_by={"train": "fit", "cycle": 2}
    )
    found = models.read(version)
    assert found.keys() == WEIGHTS.keys()
    for name, array in found.items():
        np.testing.assert_array_equal(array, WEIGHTS[name])
    assert models.newest("fit") == version
    assert (version.number, version.metrics, version.made_by) == (
        1,
        {"recall@10": 0.1},
        {"train": "fit", "cycle": 2},
    )
    assert before <= version.published_at <= time.time()
    assert version.tensors == {
        "w": {"shape": [2, 3], "dtype": "float32"},
        "b": {"shape": [1], "dtype": "float32"},
    }
    assert names(models) == {"1"}


def test_versions_count_up_and_each_keeps_its_own_weights(models):
    made = [publish(models, value=value) for value in (1.0, 2.0, 3.0)]
    assert [version.number for version in made] == [1, 2, 3]
    assert models.versions("fit") == made
    assert [models.read(version)["w"][0] for version in made] == [1.0, 2.0, 3.0]


def test_a_maker_that_publishes_again_after_a_crash_gets_what_it_published(models):
    first, other = publish(models, cycle=1, value=1.0), publish(models, cycle=2, value=2.0)
    assert publish(models, cycle=1, value=9.0) == first
    assert models.read(first)["w"][0] == 1.0
    assert models.newest("fit") == other


def test_nothing_published_is_none_and_no_directory_is_made(models):
    assert models.newest("fit") is None
    assert models.versions("fit") == []
    assert models.prune("fit", 1) == []
    assert not models.root.exists()


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../fit", "a/b", "/etc", ".hidden", "a\0b", "a b", "ü", "x" * 101, "a\n"]
)
def test_a_name_that_could_leave_the_registry_is_refused(models, name):
    for use in (models.newest, models.versions, lambda model: models.prune(model, 1)):
        with pytest.raises(TwinhullError, match="a model cannot be called"):
            use(name)
    with pytest.raises(TwinhullError, match="a model cannot be called"):
        models.publish(name, WEIGHTS, metrics={}, made_by={})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_a_metric_that_is_not_finite_stops_the_publish(models, value):
    with pytest.raises(TwinhullError, match=r"metric loss is .*diverged"):
        models.publish("fit", WEIGHTS, metrics={"loss": value}, made_by={})
    assert models.newest("fit") is None


@pytest.mark.parametrize("value", ["0.1", None, True, [1.0], 1j, np.zeros(2)])
def test_a_metric_that_is_no_number_is_refused(models, value):
    with pytest.raises(TwinhullError, match=r"metric loss is .* not a number"):
        models.publish("fit", WEIGHTS, metrics={"loss": value}, made_by={})


def test_a_maker_that_json_cannot_say_is_refused_and_leaves_nothing(models):
    with pytest.raises(TwinhullError, match="made_by cycle"):
        models.publish("fit", WEIGHTS, metrics={}, made_by={"cycle": np.int64(1)})
    assert not (models.root / "fit").exists()


def test_newest_ignores_whatever_else_lies_there(models):
    version = publish(models)
    place = models.root / "fit"
    for junk in ("2", "03", "four", ".making-1", "²", "-5", "9" * 30):
        (place / junk).mkdir()
    (place / "7").write_text("")
    (place / "8").mkdir()
    (place / "8" / "manifest.json").write_text("{}")
    (place / "9").mkdir()
    (place / "9" / "manifest.json").write_text("[1")
    assert models.newest("fit") == version
    assert models.versions("fit") == [version]
    assert publish(models).number == 10


def test_junk_is_told_once(models, caplog):
    (models.root / "fit" / "2").mkdir(parents=True)
    for _ in range(3):
        models.newest("fit")
    assert caplog.text.count("not a whole version") == 1


def test_a_changed_byte_is_refused_and_the_version_before_still_serves(models):
    first, second = publish(models, value=1.0), publish(models, value=2.0)
    weights = second.path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(ModelRefused, match="model fit version 2 is not what was published"):
        models.read(second)
    assert models.read(first)["w"][0] == 1.0


def test_a_version_cut_short_is_no_version(models):
    first, second = publish(models), publish(models)
    os.truncate(second.path / "model.safetensors", 50)
    assert models.newest("fit") == first
    (second.path / "model.safetensors").unlink()
    assert models.newest("fit") == first


def test_a_newer_manifest_is_refused_with_the_way_out(models):
    version = publish(models)
    manifest = version.path / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 2}))
    with pytest.raises(ModelRefused, match="format 2 and this Twinhull reads up to 1"):
        models.newest("fit")


def test_prune_keeps_the_newest_and_the_numbers_go_on(models):
    for _ in range(4):
        last = publish(models)
    assert models.prune("fit", 2) == [1, 2]
    assert [version.number for version in models.versions("fit")] == [3, 4]
    assert models.prune("fit", 0) == [3]
    assert models.newest("fit") == last
    assert publish(models).number == 5
    assert names(models) == {"4", "5"}


def test_a_prune_that_cannot_write_is_one_clear_error_and_removes_nothing(models):
    made = [publish(models) for _ in range(3)]
    (models.root / "fit" / ".lock").unlink()
    (models.root / "fit" / ".lock").mkdir()
    with pytest.raises(TwinhullError, match="old versions of model fit cannot be removed"):
        models.prune("fit", 1)
    assert models.versions("fit") == made


def test_a_version_pruned_while_held_is_refused_not_torn(models):
    first = publish(models)
    publish(models)
    models.prune("fit", 1)
    with pytest.raises(ModelRefused, match="cannot be read"):
        models.read(first)


def test_a_file_in_place_of_the_registry_is_one_clear_error(tmp_path):
    (tmp_path / "registry").write_text("")
    with pytest.raises(TwinhullError, match="cannot be published in"):
        publish(Registry(tmp_path / "registry"))


@pytest.mark.live
def test_a_full_disk_is_one_clear_error_and_leaves_nothing(tmp_path):
    code = """
import resource, sys, numpy
from pathlib import Path
from twinhull.errors import TwinhullError
from twinhull.handoff.registry import Registry
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    Registry(Path(sys.argv[1])).publish("fit", {"w": numpy.ones(100_000)}, metrics={}, made_by={})
except TwinhullError as error:
    print(error)
"""
    said = subprocess.run(
        [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=True
    ).stdout
    assert said.startswith("model fit cannot be published in")
    assert "File too large" in said
    assert [path.name for path in (tmp_path / "fit").iterdir()] == [".lock"]


PUBLISHER = """
import sys, numpy
from pathlib import Path
from twinhull.handoff.registry import Registry
models, name, count, size = Registry(Path(sys.argv[1])), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
print("begun", flush=True)
for cycle in range(count):
    weights = {f"w{part}": numpy.full(size, cycle) for part in range(4)}
    models.publish("fit", weights, metrics={}, made_by={"train": name, "cycle": cycle})
"""


def publisher(root: Path, name: str, count: int, size: int) -> subprocess.Popen[bytes]:
    arguments = [sys.executable, "-c", PUBLISHER, root, name, str(count), str(size)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE)


@pytest.mark.live
def test_publishers_at_once_lose_nothing_and_share_no_number(models):
    running = [publisher(models.root, f"train-{n}", 8, 10) for n in range(4)]
    for process in running:
        process.communicate()
        assert process.returncode == 0
    found = models.versions("fit")
    assert [version.number for version in found] == list(range(1, 33))
    assert len({(version.made_by["train"], version.made_by["cycle"]) for version in found}) == 32
    for version in found:
        models.read(version)


@pytest.mark.live
@pytest.mark.timeout(60)
def test_a_publisher_killed_at_any_moment_leaves_whole_versions_and_no_lasting_garbage(models):
    chance, torn = random.Random(5), 0
    stop = threading.Event()
    seen: list[str] = []

    def watch() -> None:
        while not stop.is_set():
            if (version := models.newest("fit")) is not None and models.read(version)["w0"].size != 100_000:
                seen.append(f"version {version.number} is torn")

    reader = threading.Thread(target=watch)
    reader.start()
    for attempt in range(30):
        process = publisher(models.root, f"train-{attempt}", 1000, 100_000)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(chance.uniform(0.0, 0.1))
        process.kill()
        process.communicate()
        torn += any(name.startswith(".making") for name in names(models))
        if torn >= 4:
            break
    stop.set()
    reader.join()
    assert torn >= 4, "no publisher was ever killed while it wrote"
    assert seen == []
    found = models.versions("fit")
    assert [version.number for version in found] == list(range(1, len(found) + 1))
    for version in found:
        values = models.read(version)
        assert {array[0] for array in values.values()} == {version.made_by["cycle"]}
    publish(models)
    assert all(name.isdigit() for name in names(models))


@pytest.mark.live
def test_a_publisher_that_hangs_is_not_waited_for_without_end(models, monkeypatch):
    publish(models)
    monkeypatch.setattr(registry, "LOCK_S", 0.05)
    with registry._turn(models.root / "fit"), pytest.raises(TwinhullError, match="for too long"):
        publish(models)
