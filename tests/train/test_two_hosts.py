"""Two hosts as network namespaces: a power loss is silent, and a partition leaves both sides alive."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from training.network import NEEDS, Network, can

Start = Callable[..., Any]

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not can(), reason=NEEDS),
]


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    try:
        made.build(["a", "b"])
        yield made
    finally:
        made.remove()


def test_a_run_outlives_the_power_loss_of_the_host_with_the_store_and_grows_back(
    crew: Start, network: Network
) -> None:
    run = crew(save_every_steps=10, lease_s=2.0, listen=f"{network.address}:0")
    holder = run.host("a", enter=network.enter("a"))
    run.launcher.until_said("host joined")
    run.host("b", enter=network.enter("b"))
    run.until_steps(1, 3)
    assert run.launcher.said("generation started")[0]["hosts"] == ["a", "b"]  # the first one holds the store
    network.cut("a")
    holder.kill()
    run.until_steps(2, 2)
    assert run.launcher.said("host lost")[0]["reason"].startswith("silent")
    network.heal("a")
    run.host("a", enter=network.enter("a"))
    run.until_steps(3, 1)
    run.ends()
    assert run.ranks() == [4, 2, 4]
    assert run.causes() == ["host", "growth", "done"]
    run.assert_each_sample_once()


def test_a_partition_never_trains_two_worlds_and_heals_by_itself(crew: Start, network: Network) -> None:
    run = crew(save_every_steps=10, lease_s=2.0, listen=f"{network.address}:0")
    run.host("a", enter=network.enter("a"))
    cut_off = run.host("b", enter=network.enter("b"))
    run.until_steps(1, 3)
    network.cut("b")
    run.until_steps(2, 2)
    assert cut_off.process.poll() is None
    assert "ending our ranks" in cut_off.text()
    network.heal("b")
    run.until_steps(3, 1)
    run.ends()
    noted = run.noted()
    first_new = next(index for index, note in enumerate(noted) if note[0] == 2)
    assert all(note[0] > 1 for note in noted[first_new:])
    run.assert_each_sample_once()
