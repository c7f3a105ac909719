"""SGLang's own entry points, as the commands of this package call them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn


def is_imported() -> bool:
    """Whether this process has SGLang's runtime, and with it its platform, already."""
    return "sglang.srt.utils" in sys.modules


def install_plugins() -> None:
    """Load SGLang's plugins, ours among them; exits with one message if a hook does not take."""
    from sglang.srt.plugins import load_plugins

    load_plugins()


class FlagError(ValueError):
    """SGLang does not take its arguments; the message is what it says, in one line."""


def parse(args: Sequence[str]) -> Any:
    """SGLang's server arguments, as its own parser understands `args`.

    Raises:
        FlagError: it does not.
    """
    from sglang.srt.server_args import prepare_server_args

    try:
        if "--config" not in args:  # else SGLang merges the file's options first
            parser = _Parser()
            add_sglang_flags(parser)
            parser.parse_args(list(args))
        return prepare_server_args(list(args))
    except (ValueError, AssertionError) as error:
        raise FlagError(" ".join(str(error).split()) or repr(error)) from error


def run(server_args: Any, *, program: str) -> None:
    """Run SGLang's server; returns when it ends, with no process left behind.

    Raises:
        SystemExit: it failed, or Ctrl-C ended it.
    """
    from sglang.launch_server import run_server

    from sglang_afd.upstream.ending import ending

    with ending(program):
        run_server(server_args)


def add_sglang_flags(parser: argparse.ArgumentParser) -> None:
    """Add every flag of SGLang's server to `parser`."""
    from sglang.srt.server_args import ServerArgs

    ServerArgs.add_cli_args(parser)


def switched_off(names: Iterable[str]) -> list[str]:
    """Command-line arguments that give False to the server's arguments `names`.

    Raises:
        ValueError: SGLang has no argument of a name, or none of its flags gives it False.
    """
    parser = argparse.ArgumentParser(add_help=False)
    add_sglang_flags(parser)
    flags = {name: action for action in parser._actions for name in action.option_strings}
    found: list[str] = []
    for name in names:
        flag = "--" + name.replace("_", "-")
        action = flags.get(flag)
        if action is None:
            raise ValueError(f"{name}=False: SGLang's server has no argument {name}")
        if isinstance(action, argparse.BooleanOptionalAction):
            found.append(flag.replace("--", "--no-", 1))
        elif action.default is not False:
            raise ValueError(f"{name}=False: no flag of SGLang's says that; leave {name} out")
    return found


def make_engine(server_args: Any) -> Any:
    """SGLang's offline engine, started with the server's arguments."""
    from sglang.srt.entrypoints.engine import Engine

    return Engine(server_args=server_args)


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would print hundreds of lines of usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise FlagError(message)
