"""SGLang's own entry points, as the commands of this package call them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any


def is_imported() -> bool:
    """Whether this process has SGLang's runtime, and with it its platform, already."""
    return "sglang.srt.utils" in sys.modules


def install_plugins() -> None:
    """Load SGLang's plugins, ours among them; exits with one message if a hook does not take."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


def run(args: Sequence[str], *, program: str) -> None:
    """Run SGLang's server with `args`; returns when it ends, with no process left behind.

    Raises:
        SystemExit: it failed, or Ctrl-C ended it.
    """
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    from sglang_afd.upstream.ending import ending

    with ending(program):
        run_server(prepare_server_args(list(args)))


def add_sglang_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag of SGLang's server to `parser`."""
    from sglang.srt.server_args import ServerArgs

    ServerArgs.add_cli_args(parser)


def make_engine(args: Sequence[str]) -> Any:
    """SGLang's offline engine, started with the server's `args`."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import prepare_server_args

    return Engine(server_args=prepare_server_args(list(args)))
