"""Hosts on one machine: network namespaces on a bridge, with a cable that can be cut and a power button."""

import os
import shutil
import subprocess
from dataclasses import dataclass, field

NEEDS = "needs root and ip: apt-get install -y --no-install-recommends iproute2"


def can() -> bool:
    """Whether this machine lets us make them."""
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
