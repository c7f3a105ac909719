"""`Engine`: SGLang's offline engine with AFD, without a server."""

from __future__ import annotations

import os
import re
from typing import Any

from sglang_afd import start
from sglang_afd.command_line import as_flag
from sglang_afd.flags import SWITCHES
from sglang_afd.plugin import CPU_ENV, check_called
from sglang_afd.running import free_port
from sglang_afd.upstream import server


def Engine(**arguments: Any) -> Any:
    """Start an engine and return it: what ``sglang.Engine`` gives, over a deployment.

    Args:
        arguments: SGLang's server arguments, and these of AFD, all by the names of the flags:
            ``afd_attention_ranks`` and ``afd_ffn_ranks`` (both, or this is SGLang's engine),
            ``afd_mode``, with which ``afd_model_ranks`` may stand in place of the latter,
            ``afd_attention_tp``, ``afd_transport``, ``afd_max_tokens_per_rank``,
            ``afd_prefill_block``, ``afd_lanes``, ``afd_expert_replicas``,
            ``afd_expert_placement``, ``afd_startup_timeout``, ``afd_exchange_timeout``,
            ``afd_emulate_attention_ranks``, ``afd_emulate_ffn_ranks``,
            ``afd_emulation_is_not_the_model``, ``afd_spec_aux_layers``, ``afd_spec_sim_accept``,
            ``afd_spec_sim_seed``, ``afd_role``, ``afd_validation``.  ``afd_nsys``, ``afd_restart``
            and ``afd_restart_requests`` are for servers alone.
            ``python -m sglang_afd.launch_server --help`` explains them.  Without `model_path` it
            runs the embedded model.

    Raises:
        sglang_afd.start.Refused: the arguments cannot be right, or a gate refuses them.
        ValueError: a False that SGLang's flags cannot say.
        RuntimeError: SGLang was imported earlier, for another platform than it will run on, or the
            environment keeps it from loading this package's plugin.

    A process holds one deployment.  As with ``sglang.Engine``, call it under
    ``if __name__ == "__main__"``: child processes import the main module.
    """
    if "server_args" in arguments:
        raise start.Refused(
            "Engine takes no server_args, which would bring AFD's settings along unchecked; give "
            "its fields by their names"
        )
    if {"afd_restart", "afd_restart_requests"} & set(arguments):
        raise start.Refused(
            "afd_restart keeps a server's port and requests, of which an Engine has none; leave it "
            "and afd_restart_requests out"
        )
    if "afd_nsys" in arguments:
        raise start.Refused(
            "afd_nsys is a server's; run the program that makes the Engine under nsys profile"
        )
    imported_before = server.is_imported() and os.environ.get(CPU_ENV) != "1"
    arguments.setdefault("log_level", "error")
    arguments.setdefault("port", free_port())  # ranks take ports next to it; none is served
    try:
        command = start.resolve(to_argv(arguments), program="Engine")
    except start.Refused as refused:
        raise start.Refused(in_keywords(str(refused))) from None
    if imported_before and os.environ.get(CPU_ENV) == "1":
        raise RuntimeError(
            "SGLang was imported before sglang_afd.Engine chose the CPU platform, which it reads "
            "at import; make the Engine first, or set SGLANG_AFD_CPU=1 before the import"
        )
    server.install_plugins()
    check_called()
    off = [n for n, value in arguments.items() if value is False and not n.startswith("afd_")]
    try:
        server_args = server.parse([*command.sglang_args, *server.switched_off(off)])
    except server.FlagError as error:
        raise start.Refused(in_keywords(str(error))) from None
    return server.make_engine(server_args)


def in_keywords(message: str) -> str:
    """A message about flags, about keyword arguments: ``--tp-size`` is ``tp_size``."""
    return re.sub(r"--(?!help\b)([a-z][a-z0-9-]*)", lambda m: m[1].replace("-", "_"), message)


def to_argv(arguments: dict[str, Any]) -> list[str]:
    """Keyword arguments as command-line arguments (see `as_flag`); None is left out.

    A False of SGLang's is left out too: `sglang_afd.upstream.server.switched_off` says it.
    """
    return [
        part
        for name, value in arguments.items()
        if value is not None
        for part in as_flag(name, str(value) if _takes_a_value_of_ours(name) else value)
    ]


def _takes_a_value_of_ours(name: str) -> bool:
    return name.startswith("afd_") and as_flag(name, True)[0] not in SWITCHES
