"""Two hosts on one machine: network namespaces with a cable between them, which can be cut."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from tests.support.faults import NETWORK, join

_PREFIX = 30  # bits


class Host(NamedTuple):
    """One of the two: the name of its namespace, its address, and its end of the cable."""

    name: str
    address: str
    interface: str

    @property
    def environment(self) -> dict[str, str]:
        """What a world needs to run there."""
        return {
            NETWORK: self._path,
            "GLOO_SOCKET_IFNAME": self.interface,
            "SGLANG_HOST_IP": self.address,  # there is no way out by which to find it
        }

    @property
    def _path(self) -> str:
        return f"/run/netns/{self.name}"

    @contextmanager
    def inside(self) -> Iterator[None]:
        """In the block this thread, and threads that it starts, talk from there."""
        with open("/proc/thread-self/ns/net") as home:
            join(self._path)
            try:
                yield
            finally:
                join(f"/proc/self/fd/{home.fileno()}")

    def cut(self) -> None:
        """Pull the cable: what is sent from now on is lost, and nobody is told."""
        _ip("-n", self.name, "link", "set", self.interface, "down")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that see only each other; skips the test where that takes rights it lacks."""
    tag = f"afd{os.getpid() % 100000}"
    hosts = Host(f"{tag}a", "10.73.0.1", f"{tag}a"), Host(f"{tag}b", "10.73.0.2", f"{tag}b")
    try:
        try:
            for host in hosts:
                _ip("netns", "add", host.name)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces need root and iproute2: {error}")
        ends = [(host.interface, "netns", host.name) for host in hosts]
        _ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for host in hosts:
            _ip(
                "-n",
                host.name,
                "address",
                "add",
                f"{host.address}/{_PREFIX}",
                "dev",
                host.interface,
            )
            for interface in ("lo", host.interface):
                _ip("-n", host.name, "link", "set", interface, "up")
        yield hosts
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host.name], capture_output=True, timeout=20)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)
