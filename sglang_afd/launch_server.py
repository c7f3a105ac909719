"""``python -m sglang_afd.launch_server``: SGLang's server, with AFD if ``--afd-*`` asks."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sglang_afd import on_ray, plugin, start
from sglang_afd.causes import INTERRUPTED
from sglang_afd.config import ConfigError
from sglang_afd.upstream import server

PROGRAM = "launch_server"
_PATIENCE = "each imports SGLang, about a minute on two cores"


def main(argv: Sequence[str] | None = None) -> None:
    """Start the server that the command line describes; returns when it ends.

    Raises:
        SystemExit: it could not start, or failed, or Ctrl-C ended it.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        wanted, rest = on_ray.take(argv)
        if wanted is not None and not start.asks_for_help(argv):
            raise SystemExit(on_ray.run(wanted, rest, program=PROGRAM))
        command = start.prepare(argv, program=PROGRAM)
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


if __name__ == "__main__":
    main()
