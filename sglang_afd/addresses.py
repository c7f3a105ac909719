"""Checks of the ports and addresses that a command is about to use."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_LAST_PORT = 65535
_EVERYWHERE = ("0.0.0.0", "::", "")


class Address(NamedTuple):
    """A host, by name or number, and a port."""

    host: str
    port: int


class Listener(NamedTuple):
    """Where a process listens: an address and port, and the network that they belong to.

    network: of this machine and network namespace; empty where it cannot be told.
    """

    host: str
    port: int
    network: str

    @classmethod
    def here(cls, host: str, port: int) -> Listener:
        """`host` and `port` on this machine, in this process's network namespace."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            return cls(host, port, f"{boot} {os.stat('/proc/self/ns/net').st_ino}")
        except OSError:
            return cls(host, port, "")

    def collides(self, other: Listener) -> bool:
        """Whether only one of the two can listen."""
        if not self.network or (self.network, self.port) != (other.network, other.port):
            return False
        return self.host == other.host or not {self.host, other.host}.isdisjoint(_EVERYWHERE)


def is_port(number: int) -> bool:
    """Whether `number` can be a TCP port."""
    return 0 < number <= _LAST_PORT


def parse_address(text: str) -> Address:
    """Split ``HOST:PORT`` or ``[IPV6]:PORT``.

    Raises:
        ValueError: it is neither; the message says what is wrong.
    """
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"{text!r} is ambiguous; put an IPv6 address in brackets, [::1]:5000")
    if not colon or not host or not port.isdigit() or not is_port(int(port)):
        raise ValueError(f"{text!r} is not HOST:PORT with a port of 1 to {_LAST_PORT}")
    return Address(host, int(port))


def resolve_problem(host: str) -> str | None:
    """Why `host` cannot be resolved, or None."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"{host} cannot be resolved ({error.strerror})"
    return None


def is_local(host: str) -> bool:
    """Whether `host` is an address of this machine."""
    return any(_bind_error(info, 0) is None for info in _resolved(host))


def port_problem(host: str, port: int) -> str | None:
    """Why this machine cannot listen on `port` of its address `host`, or None."""
    for info in _resolved(host):
        error = _bind_error(info, port)
        if error is None:
            continue
        if error.errno == errno.EADDRINUSE:
            return f"port {port} of {host} is taken by another process"
        return f"port {port} of {host} cannot be used ({error.strerror})"
    return None


def _resolved(host: str) -> Iterator[tuple[int, tuple]]:
    """(family, socket address) of every TCP address of `host`; none if it has no address."""
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return
    for family, _, _, _, address in infos:
        yield family, address


def _bind_error(info: tuple[int, tuple], port: int) -> OSError | None:
    """What binding says; as SGLang does, ports of closed connections count as free."""
    family, address = info
    with socket.socket(family, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((address[0], port, *address[2:]))
        except OSError as error:
            return error
    return None
