"""Another host, as far as the network is concerned: a network namespace at the end of a virtual cable."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["OtherHost", "other_host"]


@dataclass(frozen=True)
class OtherHost:
    """What runs under its ``prefix`` has its ``address``; this host has ``our_address`` there."""

    namespace: str
    our_address: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """What turns a command into one that runs there."""
        return ["ip", "netns", "exec", self.namespace]

    def vanish(self) -> None:
        """Lose all packets from now on, without a word to anybody."""
        _ip("-n", self.namespace, "link", "set", "cable", "down")

    def come_back(self) -> None:
        """Take packets again."""
        _ip("-n", self.namespace, "link", "set", "cable", "up")


@contextlib.contextmanager
def other_host() -> Iterator[OtherHost]:
    """Make a host for as long as the block lasts; the test is skipped where that cannot be done."""
    if shutil.which("ip") is None:
        pytest.skip("no ip command: another host cannot be made")
    number = os.getpid() % 4096
    network = f"10.{200 + number // 256}.{number % 256}"
    host = OtherHost(f"orca-{os.getpid()}", f"{network}.1", f"{network}.2")
    try:
        _ip("netns", "add", host.namespace)
    except subprocess.CalledProcessError as refusal:
        pytest.skip(f"another host cannot be made: {refusal.stderr.strip()}")
    try:
        cable = f"orca{os.getpid()}"
        try:
            _ip("link", "add", cable, "type", "veth", "peer", "name", "cable", "netns", host.namespace)
        except subprocess.CalledProcessError as refusal:
            pytest.skip(f"another host cannot be made: {refusal.stderr.strip()}")
        _ip("address", "add", f"{host.our_address}/24", "dev", cable)
        _ip("link", "set", cable, "up")
        _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "cable")
        _ip("-n", host.namespace, "link", "set", "cable", "up")
        _ip("-n", host.namespace, "link", "set", "lo", "up")
        yield host
    finally:
        # The cable goes with its end.
        _ip("netns", "delete", host.namespace)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
