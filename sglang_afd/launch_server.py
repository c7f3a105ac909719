"""``python -m sglang_afd.launch_server``: SGLang's server, with AFD if ``--afd-*`` asks."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sglang_afd import on_nsys, on_ray, plugin, start
from sglang_afd.causes import INTERRUPTED
from sglang_afd.command_line import expand_config_file
from sglang_afd.config import ConfigError
from sglang_afd.flags import NSYS
from sglang_afd.front.settings import settings as front_settings
from sglang_afd.upstream import server

PROGRAM = "launch_server"
_PATIENCE = "each imports SGLang, about a minute on two cores"


def main(argv: Sequence[str] | None = None) -> None:
    """Start the server that the command line describes; returns when it ends.

    Raises:
        SystemExit: it could not start, or failed, or Ctrl-C ended it.
    """
    args = sys.argv[1:] if argv is None else list(argv)
    try:
        if not start.asks_for_help(args):
            args = _with_config_file(args)
            _hand_over(args)
        command = start.prepare(args, program=PROGRAM)
        if command.config is not None:
            ranks = len(command.config.local_ranks())
            plural = "s" if ranks > 1 else ""
            print(f"{PROGRAM}: starting {ranks} rank{plural} here; {_PATIENCE}", flush=True)
        server.install_plugins()
        plugin.check_called()
        arguments = server.parse(command.sglang_args)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
    except (plugin.PluginError, ConfigError) as error:
        start.fail(PROGRAM, str(error))
    except server.FlagError as error:
        start.fail(PROGRAM, f"{error}; see --help")
    server.run(arguments, program=PROGRAM)


def _with_config_file(args: list[str]) -> list[str]:
    """`args` with the options of their --config file, read once, if AFD is asked for anywhere.

    Plain SGLang is left to read the file itself.

    Raises:
        ConfigError: it cannot be read.
    """
    expanded = expand_config_file(args)
    return expanded if any(arg.startswith("--afd-") for arg in expanded) else args


def _hand_over(args: Sequence[str]) -> None:
    """Let other processes serve, if `args` ask for that; does not return then.

    Raises:
        ConfigError: they cannot.
    """
    behind, (on_cluster, rest) = front_settings(args), on_ray.take(args)
    reports, profiled = on_nsys.take(args)
    if behind is not None and on_cluster is not None:
        raise ConfigError(
            "--afd-restart keeps no deployment on a Ray cluster; leave one of them out"
        )
    if reports is not None:
        if behind is not None or on_cluster is not None:
            raise ConfigError(f"{NSYS} goes with neither --afd-restart nor --afd-ray; leave it out")
        raise SystemExit(on_nsys.run(reports, profiled, program=PROGRAM))
    if behind is not None:
        from sglang_afd.front.command import run  # its HTTP library is for the front alone

        raise SystemExit(run(behind, program=PROGRAM))
    if on_cluster is not None:
        raise SystemExit(on_ray.run(on_cluster, rest, program=PROGRAM))


if __name__ == "__main__":
    main()
