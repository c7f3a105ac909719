"""The TCP ports that SGLang derives and binds for a deployment, known before it starts.

Mirrors ``PortArgs.init_new`` and ``_broadcast_worker_ports``; SGLang itself would notice a taken
port after half a minute of imports and half a minute of waiting.
"""

from __future__ import annotations

from typing import NamedTuple

LOOPBACK = "127.0.0.1"
_DIST_FROM_HTTP = 233  # ZMQ_TCP_PORT_DELTA
_HANDSHAKE = 13  # DP_ATTENTION_HANDSHAKE_PORT_DELTA
_DERIVED = 6  # NUM_DERIVED_PORTS
_LAST_PORT = 65535


class Port(NamedTuple):
    """A port to bind, and what it is for."""

    host: str
    port: int
    use: str


def one_command_ports(http_port: int) -> list[Port]:
    """Ports next to the HTTP port, when one command starts all ranks."""
    rendezvous = http_port + _DIST_FROM_HTTP
    if rendezvous > _LAST_PORT:
        rendezvous = http_port - _DIST_FROM_HTTP
    return [Port(LOOPBACK, port, use) for port, use in _derived(rendezvous).items()]


def first_command_ports(host: str, rendezvous: int) -> list[Port]:
    """Ports of the command that owns ``--dist-init-addr``."""
    handshake = {rendezvous + _HANDSHAKE: "the handshake of the commands"}
    return [Port(host, port, use) for port, use in {**_derived(rendezvous), **handshake}.items()]


def _derived(rendezvous: int) -> dict[int, str]:
    first = rendezvous + 1
    if rendezvous + _DERIVED > _LAST_PORT:
        first = rendezvous - _DERIVED - 1
    messages = {first + index: "messages between the processes" for index in range(_DERIVED)}
    return {rendezvous: "the rendezvous of the ranks", **messages}
