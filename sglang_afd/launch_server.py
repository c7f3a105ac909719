"""``python -m sglang_afd.launch_server``: SGLang's server, with AFD if ``--afd-*`` asks."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sglang_afd import start
from sglang_afd.upstream import server

PROGRAM = "launch_server"


def main(argv: Sequence[str] | None = None) -> None:
    """Start the server that the command line describes; returns when it ends.

    Raises:
        SystemExit: it could not start, or failed, or Ctrl-C ended it.
    """
    try:
        command = start.prepare(sys.argv[1:] if argv is None else argv, program=PROGRAM)
        server.install_plugins()
    except KeyboardInterrupt:
        raise SystemExit(start.INTERRUPTED) from None
    server.run(command.sglang_args, program=PROGRAM)


if __name__ == "__main__":
    main()
