"""What a command line asks of the front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from sglang_afd.command_line import int_value, last_value, values
from sglang_afd.config import ConfigError
from sglang_afd.flags import FFN_PORT, RETRY, add_restart_flags, check_restart, take
from sglang_afd.topology import Role

_HOST, _PORT = "127.0.0.1", 30000  # SGLang's


class Settings(NamedTuple):
    """The front's part of a command line."""

    restarts: int
    """How often the world is started again, at most."""
    retry: bool
    """Requests whose world has died are sent to the next one; else they fail."""
    host: str
    port: int
    world: list[str]
    """The world's arguments, but for its host and port."""


def settings(argv: Sequence[str]) -> Settings | None:
    """What `argv`, in which no --config is left, asks for; None: no front.

    Raises:
        ConfigError: it cannot be right.
    """
    own, world = take(add_restart_flags, argv)
    check_restart(own)
    if not own.afd_restart:
        return None
    if values(world, "--ssl-certfile", "--ssl-keyfile"):
        raise ConfigError("--afd-restart serves no TLS; leave --ssl-* out, and end TLS before it")
    ffn = last_value(world, "--afd-role") == Role.FFN.value
    return Settings(
        restarts=own.afd_restart,
        retry=own.afd_restart_requests == RETRY,
        host=last_value(world, "--host") or _HOST,
        port=int_value(world, "--port", default=FFN_PORT if ffn else _PORT),
        world=world,
    )
