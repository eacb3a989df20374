"""Two hosts as network namespaces: a power loss is silent, and a partition leaves both sides alive."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

REASON = "needs root and ip: apt-get install -y --no-install-recommends iproute2"


def can() -> bool:
    return os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("unshare") is not None


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@dataclass
class Network:
    """A bridge and its hosts. Names carry this process's id, so that two test runs never meet."""

    hosts: list[str] = field(default_factory=list)
    _tag: str = field(default_factory=lambda: format(os.getpid() % 0xFFFFF, "x"))

    @property
    def bridge(self) -> str:
        return f"thb{self._tag}"

    @property
    def _net(self) -> str:
        return f"10.{100 + os.getpid() % 100}.{os.getpid() // 100 % 250}"

    @property
    def address(self) -> str:
        """Of this side of the bridge."""
        return f"{self._net}.1"

    def build(self, names: list[str]) -> None:
        ip("link", "add", self.bridge, "type", "bridge")
        ip("addr", "add", f"{self.address}/24", "dev", self.bridge)
        ip("link", "set", self.bridge, "up")
        for number, name in enumerate(names):
            space, cable = self._space(name), self._cable(name)
            self.hosts.append(name)
            ip("netns", "add", space)
            ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("link", "set", cable, "master", self.bridge)
            ip("-n", space, "addr", "add", f"{self._net}.{11 + number}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
            ip("link", "set", cable, "up")

    def enter(self, name: str) -> list[str]:
        """What to put before a command to run it on a host; killing it is the host's power button."""
        inside = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return ["nsenter", f"--net=/run/netns/{self._space(name)}", *inside]

    def cut(self, name: str) -> None:
        ip("link", "set", self._cable(name), "down")

    def heal(self, name: str) -> None:
        ip("link", "set", self._cable(name), "up")

    def remove(self) -> None:
        """Links first: a namespace that is deleted before keeps its end for a while."""
        for kind, name in [("link", self._cable(h)) for h in self.hosts] + [
            ("netns", self._space(h)) for h in self.hosts
        ]:
            subprocess.run(["ip", kind, "del", name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", self.bridge], check=False, capture_output=True)

    def _space(self, name: str) -> str:
        return f"th{self._tag}{name}"

    def _cable(self, name: str) -> str:
        return f"thv{self._tag}{name}"


Start = Callable[..., Any]

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(120),
    pytest.mark.skipif(not can(), reason=REASON),
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
