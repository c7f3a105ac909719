"""SGLang's entry points: install the hooks of this deployment, and check that every one took.

SGLang calls `register` in each of its processes.  Without a deployment in the environment (see
`sglang_afd.config.ENV`) nothing is installed: SGLang runs as if the package were not there.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

from sglang_afd.config import ENV, AfdConfig
from sglang_afd.observe.recording import RECORD_ENV

CPU_ENV = "SGLANG_AFD_CPU"
"""Set to 1 by the launcher: run on the CPU reference platform."""
PLUGIN = "sglang_afd"
"""Our name among SGLang's plugins, as ``SGLANG_PLUGINS`` lists them."""
_called = False


class PluginError(RuntimeError):
    """SGLang runs without our hooks; the message says why, and what to do."""


def check_called() -> None:
    """Check that SGLang has called `register`, if there is something to install.

    Raises:
        PluginError: it has not, and would run without a hook.
    """
    if _called or not (os.environ.get(ENV) or os.environ.get(CPU_ENV) == "1"):
        return
    listed = os.environ.get("SGLANG_PLUGINS")
    if listed and PLUGIN not in (name.strip() for name in listed.split(",")):
        why = f": SGLANG_PLUGINS={listed} leaves it out; add {PLUGIN} to it, or unset it"
    elif platform := os.environ.get("SGLANG_PLATFORM"):
        why = f": SGLANG_PLATFORM={platform} leaves it out; unset it"
    else:
        why = "; install this package where SGLang is installed (make setup)"
    raise PluginError(f"SGLang has not loaded its plugin {PLUGIN}{why}")


def register() -> None:
    """Entry point of ``sglang.srt.plugins``.

    Exits the process with one message if a hook did not take: SGLang would only log it, and a rank
    without its hooks hangs the others.
    """
    global _called
    try:
        _install()
        _called = True
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
    _end_if_orphaned()
    import sglang

    check_version(sglang.__version__)
    install(hooks)


def _end_if_orphaned() -> None:
    """End this process if the one that started it is gone already.

    SGLang's processes ask the kernel to be killed with their parent just before they load plugins,
    and a parent that dies while they import is gone by then: they would stay for ever.
    """
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        raise SystemExit(f"sglang_afd: process {parent.pid}, which started this one, is gone")
