"""``python -m sglang_afd.launch_server``: SGLang's server, with AFD where ``--afd-*`` asks for it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from sglang_afd import start


def main(argv: Sequence[str] | None = None) -> None:
    """Start the server that the command line describes; returns when it ends."""
    command = start.prepare(sys.argv[1:] if argv is None else argv, program="launch_server")
    start.install_plugins()
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    try:
        run_server(prepare_server_args(command.sglang_args))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
