"""The ``--afd-*`` flags, and what they become in SGLang's own flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from sglang_afd.command_line import last_value, values
from sglang_afd.config import TRANSPORTS, AfdConfig, ConfigError
from sglang_afd.topology import Role

_DP_RANKS = "DP ranks are --afd-attention-ranks + --afd-ffn-ranks"
_WORLD = "the world is (--afd-attention-ranks + --afd-ffn-ranks) x --afd-attention-tp"
_ROWS = "--afd-transport says how rows travel"
FFN_PORT = 30001
"""Where an FFN command answers /health unless ``--port`` says.  SGLang's default, 30000, is where
the attention command serves, on the same host maybe."""
OWNED: tuple[tuple[tuple[str, ...], str], ...] = (
    # spellings of a flag of SGLang that only the --afd-* flags may set, and why
    (("--tp-size", "--tensor-parallel-size"), _WORLD),
    (("--dp-size", "--data-parallel-size"), _DP_RANKS),
    (("--attn-dp-size", "--attention-data-parallel-size"), _DP_RANKS),
    (("--enable-dp-attention",), "AFD always runs attention data-parallel"),
    (("--ep-size", "--expert-parallel-size", "--ep"), "experts lie on the FFN ranks"),
    (("--moe-a2a-backend",), _ROWS),
    (("--deepep-mode",), _ROWS),
    (("--moe-dense-tp-size",), "dense layers run on each attention rank"),
    (("--enable-dp-lm-head",), "AFD always runs the lm_head data-parallel"),
)


class Command(NamedTuple):
    """A parsed command line: the deployment (None: plain SGLang) and SGLang's own arguments."""

    config: AfdConfig | None
    sglang_args: list[str]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the ``--afd-*`` flags to `parser`, in a group of their own."""
    group = parser.add_argument_group(
        "attention-FFN disaggregation",
        "Experts on ranks of their own. Counts are DP ranks: a deployment takes "
        "(attention ranks + FFN ranks) x attention TP accelerators. Without these flags the "
        "command starts plain SGLang.",
    )
    group.add_argument(
        "--afd-attention-ranks", type=int, metavar="A", help="DP ranks with requests and attention"
    )
    group.add_argument(
        "--afd-ffn-ranks", type=int, metavar="F", help="DP ranks with the experts, and nothing else"
    )
    group.add_argument(
        "--afd-attention-tp",
        type=int,
        default=1,
        metavar="t",
        help="tensor-parallel size of each DP rank's attention (default: %(default)s)",
    )
    group.add_argument(
        "--afd-transport",
        default="auto",
        metavar="|".join(("auto", *TRANSPORTS)),
        help="how rows travel; auto: deepep where the ranks have GPUs and the package, else gloo",
    )
    group.add_argument(
        "--afd-max-tokens-per-rank",
        type=int,
        default=128,
        metavar="T",
        help="rows a rank sends in one exchange, the size of the buffers; longer batches go in "
        "slices (default: %(default)s)",
    )
    group.add_argument(
        "--afd-startup-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="fail unless every rank is ready by then (default: %(default)g)",
    )
    group.add_argument(
        "--afd-exchange-timeout",
        type=float,
        default=100.0,
        metavar="SECONDS",
        help="fail a rank that waits longer for a peer in one exchange (default: %(default)g)",
    )
    group.add_argument(
        "--afd-role",
        choices=[role.value for role in Role],
        help="start only this role's ranks here; the other role is a second command with the same "
        "flags (with --nnodes 2 --node-rank 0|1 --dist-init-addr HOST:PORT; attention is rank 0)",
    )


def parse(argv: Sequence[str], *, transport: str) -> Command:
    """Split a command line into the deployment and SGLang's arguments.

    Args:
        argv: arguments without the program name.
        transport: what ``--afd-transport auto`` stands for on this machine.

    Raises:
        ConfigError: the ``--afd-*`` flags, or they with SGLang's, cannot be right.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add_flags(parser)
    try:
        known, rest = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}; see --help for the --afd-* flags") from error
    unknown = [arg for arg in rest if arg.startswith("--afd-")]
    if unknown:
        raise ConfigError(f"unknown flag {unknown[0]}; see --help for the --afd-* flags")
    if known.afd_attention_ranks is None and known.afd_ffn_ranks is None:
        given = [arg for arg in argv if arg.startswith("--afd-")]
        if given:
            raise ConfigError(
                f"{given[0]} needs a deployment: give --afd-attention-ranks and --afd-ffn-ranks"
            )
        return Command(None, rest)
    if known.afd_attention_ranks is None or known.afd_ffn_ranks is None:
        raise ConfigError("give both --afd-attention-ranks and --afd-ffn-ranks")
    config = AfdConfig(
        attention_ranks=known.afd_attention_ranks,
        ffn_ranks=known.afd_ffn_ranks,
        attention_tp=known.afd_attention_tp,
        transport=transport if known.afd_transport == "auto" else known.afd_transport,
        max_tokens_per_rank=known.afd_max_tokens_per_rank,
        startup_timeout=known.afd_startup_timeout,
        exchange_timeout=known.afd_exchange_timeout,
        command_role=Role(known.afd_role) if known.afd_role else None,
    )
    _refuse_owned(rest)
    _check_commands(config, rest)
    return Command(config, [*rest, *_sglang_flags(config, rest)])


def _refuse_owned(args: Sequence[str]) -> None:
    for spellings, reason in OWNED:
        if values(args, *spellings):
            raise ConfigError(
                f"{spellings[0]} is set by the --afd-* flags ({reason}); leave it out"
            )


def _check_commands(config: AfdConfig, args: Sequence[str]) -> None:
    nnodes, node_rank = last_value(args, "--nnodes"), last_value(args, "--node-rank")
    address = last_value(args, "--dist-init-addr", "--nccl-init-addr")
    if config.command_role is None:
        if nnodes not in (None, "1"):
            raise ConfigError(
                f"--nnodes {nnodes} needs --afd-role: one command for each role (two in all)"
            )
        return
    want = "0" if config.command_role is Role.ATTENTION else "1"
    if nnodes != "2" or (node_rank or "0") != want or address is None:
        raise ConfigError(
            f"--afd-role {config.command_role.value} needs --nnodes 2 --node-rank {want} "
            f"--dist-init-addr HOST:PORT (the attention command's address)"
        )


def _sglang_flags(config: AfdConfig, args: Sequence[str]) -> list[str]:
    """The SGLang flags that make one world of both roles."""
    flags = [
        *("--tp-size", str(config.topology.world_size)),
        *("--attn-dp-size", str(config.topology.dp_size)),
        *("--moe-a2a-backend", "deepep"),  # models then take their expert-parallel path
        *("--moe-dense-tp-size", "1"),
        "--enable-dp-lm-head",
        "--disable-custom-all-reduce",
        *("--cuda-graph-backend-decode", "disabled"),
        *("--cuda-graph-backend-prefill", "disabled"),
    ]
    if config.command_role is Role.FFN and not values(args, "--port"):
        flags += ["--port", str(FFN_PORT)]
    if config.transport == "deepep" and not values(args, "--moe-runner-backend"):
        flags += ["--moe-runner-backend", "deep_gemm"]  # has masked grouped GEMMs, BF16 and FP8
    return flags
