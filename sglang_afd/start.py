"""What every way of starting SGLang with AFD has in common: server, offline engine, checker.

`prepare` turns a command line into SGLang's arguments and sets the environment; it must run before
SGLang is imported, because SGLang reads its platform from the environment at import.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

from sglang_afd import embedded, on_ray, transport_gate
from sglang_afd.checkpoint import read_checkpoint
from sglang_afd.command_line import expand_config_file, int_value, last_value, values
from sglang_afd.config import ENV, START_BY_ENV, ConfigError
from sglang_afd.facts import Facts
from sglang_afd.flags import NSYS, VALIDATION, Command, add_flags, parse, placement
from sglang_afd.gate import Finding, findings
from sglang_afd.machine import this_machine
from sglang_afd.plugin import CPU_ENV
from sglang_afd.topology import OTHER_ROLE, TopologyError

_PURPOSES = {
    "launch_server": "SGLang's server with attention-FFN disaggregation.",
    "check": "Would launch_server start with these flags? Says what every gate finds, and the mend "
    "of what fails; exits with 0 if all pass, with 1 if one does not, with 2 if the command line "
    "describes no deployment.",
}
_PROXIES = ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY")
_SGLANG_FLAGS = "SGLang's flags"
_MODEL_FLAGS = ("--model-path", "--model")


NAN_CHECK_ENV = "SGLANG_ENABLE_NAN_LOGITS_CHECK"
"""SGLang's check of every row that it samples from; without it a NaN becomes some token, and stays
in the request's KV and in the prefix cache."""
_STATES_ENV = "SGLANG_MAMBA_CONV_DTYPE"
_STATES = {"float": "float32", "float32": "float32", "half": "float16", "float16": "float16"}
"""--dtype -> that of the convolution's states in linear attention, which SGLang keeps in bfloat16
whatever the model's is, and then cannot write the model's inputs there."""


class Refused(ValueError):
    """The command line cannot be right, or a gate refuses it; the message says what to do."""


class _Request(NamedTuple):
    """A command line as read: what to start, and the facts for the gates (None: no AFD)."""

    command: Command
    facts: Facts | None
    on_cpu: bool


def prepare(argv: Sequence[str], *, program: str) -> Command:
    """`resolve` for a command: exits with the message and status 2 where it raises.

    Exits with 0 after ``--help``.
    """
    if asks_for_help(argv):
        _print_help(program)
    try:
        return resolve(argv, program=program)
    except Refused as refused:
        fail(program, str(refused))


def asks_for_help(argv: Sequence[str]) -> bool:
    """Whether a command line only asks what it may hold."""
    return any(arg in ("-h", "--help") for arg in argv)


def resolve(argv: Sequence[str], *, program: str) -> Command:
    """Parse `argv`, add what this machine and AFD need, and export the deployment.

    Raises:
        Refused: the command line cannot be right, or a gate refuses it.
    """
    began = time.monotonic()
    command, facts, on_cpu = _read(argv, program)
    args = list(command.sglang_args)
    if facts is not None:
        pass_gates(facts, program)
        print(
            f"{program}: {facts.config.mode.value.upper()} with {facts.config.attention_ranks} "
            f"attention and {facts.config.ffn_ranks} {OTHER_ROLE[facts.config.mode]} ranks; rows "
            f"travel over {facts.config.transport} "
            f"({facts.why_transport})",
            flush=True,
        )
        if facts.config.emulation.active:
            print(f"{program}: EMULATED: {facts.config.emulation.described()}", flush=True)
        if facts.config.spec_sim_accept is not None:
            print(
                f"{program}: SIMULATED: verify steps give {facts.config.spec_sim_accept:g} tokens "
                f"on average; answers are not the model's",
                flush=True,
            )
    if command.config is not None and not on_cpu:
        # Compiling for every number of rows, used or not, takes longer than a start may.
        os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "false")
    if command.config is not None:
        os.environ.setdefault(NAN_CHECK_ENV, "1")
    if on_cpu:
        from sglang_afd.platform.defaults import cpu_server_args, environment_problem

        ranks = command.config.topology.world_size if command.config else _plain_ranks(args)
        if facts is None and (problem := environment_problem(os.environ, ranks)):
            raise Refused(problem)  # the gates look at a deployment's
        _set_cpu_environment(ranks, program)
        args += cpu_server_args(args)
    states = _STATES.get(last_value(args, "--dtype") or "")
    if states and (on_cpu or command.config is not None):  # plain SGLang on GPUs is left alone
        os.environ.setdefault(_STATES_ENV, states)
    for name in (ENV, START_BY_ENV):  # an earlier command may have left them: not this one's
        os.environ.pop(name, None)
    if command.config is not None:
        _keep_proxies_off(args)
        os.environ[ENV] = command.config.to_json()
        os.environ[START_BY_ENV] = str(began + command.config.startup_timeout)
    return Command(command.config, args)


def pass_gates(facts: Facts, program: str) -> None:
    """Ask every gate, and print what those warn of that pass.

    Raises:
        Refused: one does not.
    """
    found = findings(facts)
    refused = [finding for finding in found if not finding.passed]
    if refused:
        raise Refused("\n  ".join(f"{f.gate}: {f.message}; {f.mend}" for f in refused))
    for warning in (finding for finding in found if finding.mend):
        print(
            f"{program}: {warning.gate}: {warning.message}; {warning.mend}",
            file=sys.stderr,
            flush=True,
        )


def read_facts(argv: Sequence[str], *, program: str) -> Facts | None:
    """What the gates look at for `argv`; None without ``--afd-*`` flags.

    Exits with a message and status 2 if the command line cannot be right, with 0 after ``--help``.
    """
    if asks_for_help(argv):
        _print_help(program)
    try:
        return _read(argv, program).facts
    except Refused as refused:
        fail(program, str(refused))


def fail(program: str, message: str) -> NoReturn:
    """End the command: one readable error, status 2."""
    print(f"{program}: error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def _read(argv: Sequence[str], program: str) -> _Request:
    machine = this_machine()
    try:
        expanded = expand_config_file(argv)
        device = last_value(expanded, "--device")
        on_cpu = device == "cpu" if device is not None else not machine.has_accelerator
        command = parse(expanded, transport="gloo", on_cpu=on_cpu)
    except (ConfigError, TopologyError) as error:
        raise Refused(str(error)) from error
    model = []
    if not values(expanded, *_MODEL_FLAGS):
        print(f"{program}: no --model-path given, serving {embedded.DESCRIPTION}", flush=True)
        model = ["--model-path", str(embedded.path())]
    if command.config is None:
        return _Request(Command(None, [*argv, *model]), None, on_cpu)
    added = list(model)
    if not on_cpu:
        added += placement(command.config, command.sglang_args, len(machine.gpus))
    checkpoint = read_checkpoint([*command.sglang_args, *added])

    def facts_with(transport: str) -> Facts:
        """The deployment's facts, `transport` being what ``auto`` stands for."""
        parsed = parse(expanded, transport=transport, on_cpu=on_cpu)
        assert parsed.config is not None
        return Facts(
            config=parsed.config,
            args=(*parsed.sglang_args, *added),
            checkpoint=checkpoint,
            machine=machine,
            on_cpu=on_cpu,
            environment=dict(os.environ),
            nsys=last_value(expanded, NSYS) or "",
            validation=last_value(expanded, VALIDATION) or "",
        )

    asked = last_value(expanded, "--afd-transport") or "auto"
    if asked == "auto":
        asked, why = transport_gate.choose(
            facts_with, on_cpu, two_commands=command.config.command_role is not None
        )
        facts = dataclasses.replace(facts_with(asked), why_transport=why)
    else:
        facts = facts_with(asked)
    return _Request(Command(facts.config, list(facts.args)), facts, on_cpu)


def _set_cpu_environment(ranks: int, program: str) -> None:
    """Set what the CPU platform needs; say which of the user's own values that replaces."""
    from sglang_afd.platform.defaults import REQUIRED_ENVIRONMENT, cpu_environment

    replaced = [
        f"{name}={value} in place of {os.environ[name]}"
        for name, value in REQUIRED_ENVIRONMENT.items()
        if os.environ.get(name) not in (None, "", value)
    ]
    if replaced:
        print(f"{program}: the ranks run on the CPU: {', '.join(replaced)}", flush=True)
    for name, value in cpu_environment(ranks).items():
        os.environ.setdefault(name, value)
    os.environ.update({**REQUIRED_ENVIRONMENT, CPU_ENV: "1"})


def _keep_proxies_off(args: Sequence[str]) -> None:
    """Have SGLang, which calls its own HTTP server when it starts, reach it without a proxy."""
    if not any(os.environ.get(name) for name in _PROXIES):
        return
    host = last_value(args, "--host")
    here = ["127.0.0.1", "localhost", *([host] if host else [])]
    for name in ("no_proxy", "NO_PROXY"):
        given = [part.strip() for part in os.environ.get(name, "").split(",") if part.strip()]
        os.environ[name] = ",".join(dict.fromkeys([*given, *here]))


def _plain_ranks(args: Sequence[str]) -> int:
    """Ranks of a server without AFD."""
    try:
        return int_value(args, "--tp-size", "--tensor-parallel-size", default=1)
    except ConfigError:
        return 1  # SGLang's parser will say what is wrong


def sglang_finding(facts: Facts, *, program: str) -> Finding:
    """Whether SGLang's own parser takes its flags; imports SGLang, which takes seconds."""
    if facts.on_cpu:
        _set_cpu_environment(facts.config.topology.world_size, program)
    from sglang_afd.upstream import server

    try:
        server.parse(facts.args)
    except server.FlagError as error:
        return Finding(_SGLANG_FLAGS, False, str(error), "correct the flag; --help lists them")
    return Finding(_SGLANG_FLAGS, True, "SGLang's parser takes every flag")


def own_parser(program: str) -> argparse.ArgumentParser:
    """The flags that this package adds to SGLang's, for the help of `program`."""
    name = f"python -m sglang_afd.{program}"
    ours = argparse.ArgumentParser(
        prog=name,
        usage=f"{name} --afd-attention-ranks A --afd-ffn-ranks F [--model-path DIR] [flag ...]",
        description=f"{_PURPOSES[program]} Every SGLang flag keeps its meaning; the flags of the "
        "first group are added. --model-path is optional: its default is "
        f"{embedded.DESCRIPTION}.",
        add_help=False,
    )
    add_flags(ours)
    if program == "launch_server":
        on_ray.add_flags(ours.add_argument_group("on a Ray cluster"))
    return ours


def _print_help(program: str) -> NoReturn:
    """Our flags first, then SGLang's hundreds, which take seconds to import."""
    own_parser(program).print_help()
    print("\nSGLang's own flags follow.\n", flush=True)
    from sglang_afd.upstream.server import add_sglang_flags

    os.environ[CPU_ENV] = "1"  # help must not depend on an accelerator
    theirs = argparse.ArgumentParser(usage=argparse.SUPPRESS)
    add_sglang_flags(theirs)
    theirs.print_help()
    raise SystemExit(0)
