"""What every way of starting SGLang with AFD has in common: server, offline engine, checker.

`prepare` turns a command line into SGLang's arguments and sets the environment; it must run before
SGLang is imported, because SGLang reads its platform from the environment at import.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from sglang_afd import embedded
from sglang_afd.config import ENV, ConfigError
from sglang_afd.flags import Command, add_flags, flag_value, has_flag, parse
from sglang_afd.plugin import CPU_ENV
from sglang_afd.topology import TopologyError

_MODEL_FLAGS = ("--model-path", "--model")


def prepare(argv: Sequence[str], *, program: str) -> Command:
    """Parse `argv`, add what this machine and AFD need, and export the deployment.

    Exits with a message and status 2 if the command line cannot be right, with 0 after ``--help``.
    """
    if any(arg in ("-h", "--help") for arg in argv):
        _print_help(program)
    on_cpu = _runs_on_cpu(argv)
    try:
        command = parse(argv, transport="gloo" if on_cpu or not _has_deep_ep() else "deepep")
    except (ConfigError, TopologyError) as error:
        fail(program, str(error))
    args = list(command.sglang_args)
    if not any(has_flag(args, flag) for flag in _MODEL_FLAGS):
        print(f"{program}: no --model-path given, serving {embedded.DESCRIPTION}", flush=True)
        args += ["--model-path", str(embedded.path())]
    if on_cpu:
        from sglang_afd.platform.defaults import cpu_environment, cpu_server_args

        ranks = command.config.topology.world_size if command.config else _plain_ranks(args)
        for name, value in cpu_environment(ranks).items():
            os.environ.setdefault(name, value)
        os.environ[CPU_ENV] = "1"
        args += cpu_server_args(args)
    if command.config is not None:
        os.environ[ENV] = command.config.to_json()
    return Command(command.config, args)


def fail(program: str, message: str) -> NoReturn:
    """End the command: one readable error, status 2."""
    print(f"{program}: error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def _runs_on_cpu(argv: Sequence[str]) -> bool:
    """Whether the server's ranks run on the CPU: asked for, or there is no accelerator."""
    device = flag_value(argv, "--device")
    if device is not None:
        return device == "cpu"
    import torch

    return not torch.cuda.is_available()


def _has_deep_ep() -> bool:
    return importlib.util.find_spec("deep_ep") is not None


def _plain_ranks(args: Sequence[str]) -> int:
    """Ranks of a server without AFD."""
    for flag in ("--tp-size", "--tp", "--tensor-parallel-size"):
        if value := flag_value(args, flag):
            return int(value)
    return 1


def _print_help(program: str) -> NoReturn:
    import argparse

    parser = argparse.ArgumentParser(
        prog=f"python -m sglang_afd.{program}",
        description="SGLang's server with attention-FFN disaggregation. Every SGLang flag keeps "
        "its meaning; the flags of the first group are added.",
    )
    add_flags(parser)
    from sglang_afd.upstream.server import add_sglang_flags

    os.environ[CPU_ENV] = "1"  # help must not depend on an accelerator
    add_sglang_flags(parser)
    parser.print_help()
    raise SystemExit(0)
