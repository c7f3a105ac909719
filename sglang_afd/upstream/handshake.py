"""Where the two commands of a deployment first meet: before their ranks do.

SGLang's node 0 hands its worker ports to node 1 here and waits for it without a bound.  Here the
wait is bounded, and the commands compare their ``--afd-*`` flags: with unequal counts their ranks
would never find each other.  On one machine they also compare where they listen for HTTP.

The one socket of ours is the attention command's, bound to the host of --dist-init-addr alone; what
it reads is JSON of one shape, sealed (HMAC-SHA256) with the token that both commands find in
`TOKEN_ENV`.  Anything else, a port scanner's or another deployment's, is turned away while the wait
goes on.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from typing import Any

import msgspec

from sglang_afd.addresses import Listener
from sglang_afd.config import AfdConfig, ConfigError, differences
from sglang_afd.topology import Role

TOKEN_ENV = "SGLANG_AFD_TOKEN"
"""A secret that both commands of a deployment share; without it the seal keeps nobody out."""


class _Message(msgspec.Struct, kw_only=True):
    """What one command tells the other."""

    agreement: dict[str, int | float | str | None]
    """`AfdConfig.agreement`."""
    http: tuple[str, int, str]
    """Its `Listener`."""
    ports: list[int] | None = None
    """Of the attention command's workers, which it alone tells."""


class _Sealed(msgspec.Struct):
    """A message as it travels."""

    body: str
    seal: str


class _Stranger(ValueError):
    """What came is not from a command of this deployment."""


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
    http = _http()
    own = _Message(agreement=config.agreement(), http=(http.host, http.port, http.network))
    try:
        if serves:
            theirs = _receive(config, socket, endpoint, deadline)
            socket.send(_sealed(msgspec.structs.replace(own, ports=ports)))
        else:
            socket.send(_sealed(own))
            theirs = _receive(config, socket, endpoint, deadline)
            ports = theirs.ports
    finally:
        socket.close(linger=2000)
    differing = differences({**own.agreement}, {**theirs.agreement})
    if differing:
        raise ConfigError(
            f"the attention and the FFN command are configured differently: "
            f"{'; '.join(differing)}; start every command with the same flags and model"
        )
    if http.collides(Listener(*theirs.http)):
        raise ConfigError(
            f"both commands would listen for HTTP at port {http.port} of this machine; give the "
            f"FFN command another --port (there it answers /health alone)"
        )
    assert ports is not None
    return ports


def _sealed(message: _Message) -> bytes:
    body = msgspec.json.encode(message)
    return msgspec.json.encode(_Sealed(body.decode(), _seal(body)))


def _opened(raw: bytes) -> _Message:
    """Read a message.

    Raises:
        msgspec.MsgspecError: it is none.
        _Stranger: its seal is not this deployment's.
    """
    sealed = msgspec.json.decode(raw, type=_Sealed)
    body = sealed.body.encode()
    if not hmac.compare_digest(sealed.seal.encode(), _seal(body).encode()):
        raise _Stranger("its seal does not fit")
    return msgspec.json.decode(body, type=_Message)


def _seal(body: bytes) -> str:
    token = os.environ.get(TOKEN_ENV, "")
    return hmac.new(token.encode(), body, hashlib.sha256).hexdigest()


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


def _receive(config: AfdConfig, socket: Any, endpoint: str, deadline: float) -> _Message:
    """The other command's message."""
    serves = config.command_role is Role.ATTENTION
    while socket.poll(int(max(0.0, deadline - time.monotonic()) * 1000)):
        try:
            return _opened(socket.recv())
        except (msgspec.MsgspecError, _Stranger) as error:
            if not serves:
                raise StartError(
                    f"what answers at {endpoint} is no attention command of this version and token "
                    f"({error}); check --dist-init-addr, and that both commands have the same "
                    f"{TOKEN_ENV}"
                ) from error
            socket.send(b"not a command of this deployment")  # it may only answer in turn
    if serves:
        missing = f"no FFN command came to {endpoint}"
    else:
        missing = f"no attention command answers at {endpoint}"
    raise StartError(
        f"{missing} within {config.startup_timeout:g} s (--afd-startup-timeout); check that both "
        f"commands run, and that --dist-init-addr is the attention command's address in both"
    )
