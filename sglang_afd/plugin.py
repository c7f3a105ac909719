"""SGLang's entry points: install the hooks of this deployment, and check that every one took.

SGLang calls `register` in each of its processes.  Without a deployment in the environment (see
`sglang_afd.config.ENV`) nothing is installed: SGLang runs as if the package were not there.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sglang_afd.config import AfdConfig
from sglang_afd.observe.recording import RECORD_ENV

CPU_ENV = "SGLANG_AFD_CPU"
"""Set to 1 by the launcher: run on the CPU reference platform."""


def register() -> None:
    """Entry point of ``sglang.srt.plugins``.

    Exits the process with one message if a hook did not take: SGLang would only log it, and a rank
    without its hooks hangs the others.
    """
    try:
        _install()
    except Exception as error:  # SGLang swallows Exceptions of plugins
        print(f"sglang_afd: {error}", file=sys.stderr, flush=True)
        raise SystemExit(1) from error


def cpu_platform() -> str | None:
    """Entry point of ``sglang.srt.platforms``: the CPU reference platform, if asked for."""
    if os.environ.get(CPU_ENV) == "1":
        return "sglang_afd.platform.cpu.CpuReferencePlatform"
    return None


def _install() -> None:
    from sglang_afd.upstream.hooks import Hook, check_version, install

    hooks: list[Hook] = []
    if os.environ.get(CPU_ENV) == "1":
        from sglang_afd.platform.hooks import HOOKS

        hooks.extend(HOOKS)
    config = AfdConfig.from_environment()
    if config is not None:
        from sglang_afd.upstream import all_hooks

        hooks.extend(all_hooks(config))
    if folder := os.environ.get(RECORD_ENV):
        from sglang_afd.upstream import record

        hooks.extend(record.hooks(Path(folder)))
    if not hooks:
        return
    import sglang

    check_version(sglang.__version__)
    install(hooks)
