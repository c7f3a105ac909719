"""Where the two commands of a deployment first meet: before their ranks do.

SGLang's node 0 hands its worker ports to node 1 here and waits for it without a bound.  Here the
wait is bounded, and the commands compare their ``--afd-*`` flags: with unequal counts their ranks
would never find each other.  On one machine they also compare where they listen for HTTP.
"""

from __future__ import annotations

import time
from typing import Any

from sglang_afd.addresses import Listener
from sglang_afd.config import AfdConfig, ConfigError, differences
from sglang_afd.topology import Role


class StartError(RuntimeError):
    """A rank or a command did not come up; the message names it and where to look."""


def worker_ports(
    config: AfdConfig, controller: Any, ports: list[int] | None, deadline: float
) -> list[int]:
    """The attention command's worker ports, on both commands.

    Args:
        ports: on the attention command, its ports; None on the FFN command.
        deadline: ``time.monotonic()`` at which the wait for the other command ends.

    Raises:
        StartError: the other command did not come in time.
        ConfigError: the commands' flags differ, or both would listen for HTTP at one port.
    """
    if config.command_role is None:
        assert ports is not None
        return ports
    serves = config.command_role is Role.ATTENTION
    socket, endpoint = _socket(controller, serves)
    own: dict[str, object] = {**config.agreement()}
    http = _http()
    message = {"agreement": own, "http": http}
    try:
        if serves:
            theirs = _receive(config, socket, endpoint, deadline)
            socket.send_json({**message, "ports": ports})
        else:
            socket.send_json(message)
            theirs = _receive(config, socket, endpoint, deadline)
            ports = theirs.get("ports")
    finally:
        socket.close(linger=2000)
    differing = differences(own, theirs["agreement"])
    if differing:
        raise ConfigError(
            f"the attention and the FFN command are configured differently: "
            f"{'; '.join(differing)}; start every command with the same flags and model"
        )
    if http.collides(Listener(*theirs["http"])):
        raise ConfigError(
            f"both commands would listen for HTTP at port {http.port} of this machine; give the "
            f"FFN command another --port (there it answers /health alone)"
        )
    assert ports is not None
    return ports


def _http() -> Listener:
    from sglang.srt.runtime_context import get_serving

    return Listener.here(get_serving().host, get_serving().port)


def _socket(controller: Any, serves: bool) -> tuple[Any, str]:
    import zmq
    from sglang.srt.managers.data_parallel_controller import DP_ATTENTION_HANDSHAKE_PORT_DELTA
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.utils.network import NetworkAddress, get_zmq_socket

    meeting = NetworkAddress.parse(get_parallel().dist_init_addr)
    meeting = NetworkAddress(meeting.host, meeting.port + DP_ATTENTION_HANDSHAKE_PORT_DELTA)
    kind = zmq.REP if serves else zmq.REQ
    return get_zmq_socket(controller.context, kind, meeting.to_tcp(), serves), meeting.to_tcp()


def _receive(config: AfdConfig, socket: Any, endpoint: str, deadline: float) -> dict[str, Any]:
    remaining = max(0.0, deadline - time.monotonic())
    if socket.poll(int(remaining * 1000)):
        return socket.recv_json()
    if config.command_role is Role.ATTENTION:
        missing = f"no FFN command came to {endpoint}"
    else:
        missing = f"no attention command answers at {endpoint}"
    raise StartError(
        f"{missing} within {config.startup_timeout:g} s (--afd-startup-timeout); check that both "
        f"commands run, and that --dist-init-addr is the attention command's address in both"
    )
