"""The ``--afd-*`` flags, and what they become in SGLang's own flags."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sglang_afd.addresses import is_local, parse_address
from sglang_afd.command_line import int_value, last_value, values
from sglang_afd.config import MOST_LANES, MOST_ROWS, TRANSPORTS, AfdConfig, ConfigError
from sglang_afd.speculation import asked, rows_needed
from sglang_afd.topology import COMMANDS, Mode, Role

_DP_RANKS = "DP ranks are --afd-attention-ranks + --afd-ffn-ranks"
_WORLD = "the world is (--afd-attention-ranks + --afd-ffn-ranks) x --afd-attention-tp"
_ROWS = "--afd-transport says how rows travel"
_OTHERS = {Mode.AFD: "--afd-ffn-ranks", Mode.CAD: "--afd-model-ranks"}
RETRY, FAIL = "retry", "fail"
FFN_PORT = 30001
"""Where an FFN command answers /health unless ``--port`` says.  SGLang's default, 30000, is where
the attention command serves, on the same host maybe."""
NOT_THE_MODEL = "--afd-emulation-is-not-the-model"
VALIDATION = "--afd-validation"
NSYS, NSYS_PROGRAM = "--afd-nsys", "nsys"
SIM_ACCEPT, SIM_SEED = "--afd-spec-sim-accept", "--afd-spec-sim-seed"
SWITCHES = (NOT_THE_MODEL,)
"""Our flags that take no value."""
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

EXPERT_RUNNERS = {"deepep": "deep_gemm", "nvlink": "triton", "gloo": "triton"}
"""SGLang's GPU kernels for what a transport delivers: rows grouped by expert (masked grouped
GEMMs), or a row for each token, whose experts' outputs are wanted one by one."""

GPU_LANES = {"nvlink": MOST_LANES, "deepep": 1, "gloo": 1}
"""Lanes that a rank on a GPU can run, by transport."""
GPU_LANE_MODELS = ("Qwen3MoeForCausalLM", "MiniMaxM2ForCausalLM")
"""Models of which nothing but what lanes have of their own holds a step's state: others run shared
experts on a stream of the whole model's."""
GRAPH_TRANSPORTS = ("nvlink",)
"""Transports whose decode rounds CUDA graphs can hold: those with `Transport.graphs`."""
DEFAULT_ROWS = 128
"""T, unless --afd-max-tokens-per-rank says."""
DEFAULT_BLOCK = 4096
"""P, unless --afd-prefill-block says."""
GRAPH_SIZES = ("--cuda-graph-max-bs-decode", "--cuda-graph-bs-decode")
"""SGLang's flags for the batch sizes that have a graph."""


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
        "--afd-mode",
        default=Mode.AFD.value,
        choices=[mode.value for mode in Mode],
        help="afd: experts on FFN ranks; cad: KV cache and core attention alone on the attention "
        "ranks, all else on model ranks (see docs/cad.md; on CPUs so far) (default: %(default)s)",
    )
    group.add_argument(
        "--afd-model-ranks",
        type=int,
        metavar="M",
        help="with --afd-mode cad, in place of --afd-ffn-ranks: DP ranks with requests and all of "
        "the model but attention",
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
        help="how rows travel; auto: the first of nvlink (the GPUs of one host), deepep (GPUs) and "
        "gloo (any host) that fits the deployment",
    )
    group.add_argument(
        "--afd-max-tokens-per-rank",
        type=int,
        metavar="T",
        help="rows a rank sends in one exchange, the size of the buffers; longer batches go in "
        f"slices (default: {DEFAULT_ROWS}, or what speculation needs if that is more)",
    )
    group.add_argument(
        "--afd-prefill-block",
        type=int,
        default=DEFAULT_BLOCK,
        metavar="P",
        help="rows of prefills that go in one exchange, of all ranks together; smaller blocks read "
        "the experts more often, larger ones take more memory; deepep has none and sends slices "
        "of T (default: %(default)s)",
    )
    group.add_argument(
        "--afd-lanes",
        type=int,
        default=1,
        metavar="n",
        help=f"decode batches in flight in turn, 1 to {MOST_LANES}, each with its own requests: "
        "while one waits for the FFN ranks, the next one's attention runs; on GPUs with nvlink "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--afd-expert-replicas",
        type=int,
        default=0,
        metavar="R",
        help="slots on the FFN ranks beyond one for each expert: busy experts lie on several ranks "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--afd-expert-placement",
        default="",
        metavar="FILE",
        help="which expert each slot holds, or how many rows each expert got, as SGLang's "
        "--init-expert-location has it; python -m sglang_afd.trace --expert-counts writes one "
        "(default: in order, then the first R again)",
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
        help="fail a rank that waits longer for a peer in one exchange (default: %(default)g); "
        "deepep's own kernels give up after about 100 s, whatever is given here",
    )
    group.add_argument(
        "--afd-emulate-attention-ranks",
        type=int,
        metavar="M",
        help="for studies on few GPUs: serve decode rows of M attention ranks, of which the one "
        "real rank is the first and sends the others' rows too, routed by draws",
    )
    group.add_argument(
        "--afd-emulate-ffn-ranks",
        type=int,
        metavar="N",
        help="for studies on few GPUs: the one real FFN rank is the first of N and owns 1/N of the "
        "experts; the others' add nothing",
    )
    group.add_argument(
        NOT_THE_MODEL,
        action="store_true",
        help="must be given with the two flags above, and with --afd-spec-sim-accept: says that "
        "the answers are not the model's",
    )
    _add_speculation_flags(group)
    group.add_argument(
        VALIDATION,
        default="",
        metavar="REPORT",
        help="a report of python -m sglang_afd.validate: start only if it passes and is of this "
        "deployment",
    )
    add_nsys_flag(group)
    add_restart_flags(group)
    group.add_argument(
        "--afd-role",
        choices=[role.value for role in COMMANDS],
        help="start only this role's ranks here; the other role is a second command with the same "
        "flags (with --nnodes 2 --node-rank 0|1 --dist-init-addr HOST:PORT; attention is rank 0). "
        "On one machine with a GPU for every rank of both, FFN ranks take the GPUs after those of "
        "the attention ranks; --base-gpu-id chooses others",
    )


def add_nsys_flag(parser: argparse._ActionsContainer) -> None:
    """Add the flag of `sglang_afd.on_nsys` to `parser`."""
    parser.add_argument(
        NSYS,
        default="",
        metavar="DIR",
        help="run each role under NVIDIA's Nsight Systems, which must be installed, and write its "
        "reports there; profiles with the activity CUDA_PROFILER are recorded",
    )


def _add_speculation_flags(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--afd-spec-aux-layers",
        metavar="I,J,K",
        help="layers of the target, from 0, whose outputs the EAGLE-3 draft reads, where the "
        "draft's config.json does not name them; must be those that it was trained on (default: "
        "what config.json names, else SGLang's choice)",
    )
    group.add_argument(
        SIM_ACCEPT,
        type=float,
        metavar="L",
        help="for studies of speed: verify steps give L tokens on average, the bonus token "
        "included, whatever the draft gets right",
    )
    group.add_argument(
        SIM_SEED,
        type=int,
        metavar="S",
        help="seed of the draws of --afd-spec-sim-accept (default: 0)",
    )


def add_restart_flags(parser: argparse._ActionsContainer) -> None:
    """Add the flags of the front (see `sglang_afd.front`) to `parser`."""
    parser.add_argument(
        "--afd-restart",
        type=int,
        default=0,
        metavar="N",
        help="start the deployment again when it fails, N times at most, behind a process that "
        "keeps the HTTP port: new requests wait meanwhile (default: %(default)s)",
    )
    parser.add_argument(
        "--afd-restart-requests",
        default=RETRY,
        metavar=f"{RETRY}|{FAIL}",
        help="what becomes of requests that ran: asked again once, from their prompt, unless a "
        "part of the answer is sent already; or a 503 (default: %(default)s)",
    )


def check_restart(known: argparse.Namespace) -> None:
    """Check the flags of `add_restart_flags`.

    Raises:
        ConfigError: they cannot be right.
    """
    if known.afd_restart < 0:
        raise ConfigError(f"--afd-restart is {known.afd_restart}; it must be at least 0")
    if known.afd_restart_requests not in (RETRY, FAIL):
        raise ConfigError(
            f"--afd-restart-requests is {known.afd_restart_requests}; it must be {RETRY} or {FAIL}"
        )


def take(
    add: Callable[[argparse.ArgumentParser], None], argv: Sequence[str]
) -> tuple[argparse.Namespace, list[str]]:
    """Split a command line into the flags that `add` adds to a parser, and the rest.

    Raises:
        ConfigError: one of those flags lacks its value, or has one that it cannot take.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    add(parser)
    try:
        known, rest = parser.parse_known_args(list(argv))
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error}; see --help for the --afd-* flags") from error
    for name, value in vars(known).items():
        if isinstance(value, list):  # argparse's own reading of ``--flag=--``
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} has no value; see --help for the --afd-* flags")
    return known, rest


def parse(argv: Sequence[str], *, transport: str, on_cpu: bool = False) -> Command:
    """Split a command line into the deployment and SGLang's arguments.

    Args:
        argv: arguments without the program name.
        transport: what ``--afd-transport auto`` stands for in this deployment.
        on_cpu: the ranks run on the CPU.

    Raises:
        ConfigError: the ``--afd-*`` flags, or they with SGLang's, cannot be right.
    """
    known, rest = take(add_flags, argv)
    check_restart(known)
    unknown = [arg for arg in rest if arg.startswith("--afd-")]
    if unknown:
        raise ConfigError(f"unknown flag {unknown[0]}; see --help for the --afd-* flags")
    mode = Mode(known.afd_mode)
    others = _other_ranks(known, mode)
    if known.afd_attention_ranks is None and others is None:
        given = [arg for arg in argv if arg.startswith("--afd-")]
        if given:
            raise ConfigError(
                f"{given[0]} needs a deployment: give --afd-attention-ranks and --afd-ffn-ranks"
            )
        return Command(None, rest)
    if known.afd_attention_ranks is None or others is None:
        raise ConfigError(f"give both --afd-attention-ranks and {_OTHERS[mode]}")
    config = AfdConfig(
        attention_ranks=known.afd_attention_ranks,
        ffn_ranks=others,
        mode=mode,
        attention_tp=known.afd_attention_tp,
        transport=transport if known.afd_transport == "auto" else known.afd_transport,
        max_tokens_per_rank=_rows(known, rest),
        prefill_block=known.afd_prefill_block,
        lanes=known.afd_lanes,
        expert_replicas=known.afd_expert_replicas,
        expert_placement=known.afd_expert_placement,
        startup_timeout=known.afd_startup_timeout,
        exchange_timeout=known.afd_exchange_timeout,
        emulated_attention_ranks=known.afd_emulate_attention_ranks,
        emulated_ffn_ranks=known.afd_emulate_ffn_ranks,
        spec_aux_layers=_layers(known.afd_spec_aux_layers),
        spec_sim_accept=known.afd_spec_sim_accept,
        spec_sim_seed=known.afd_spec_sim_seed or 0,
        command_role=Role(known.afd_role) if known.afd_role else None,
    )
    _check_marked(config, known)
    _refuse_owned(rest)
    _check_commands(config, rest)
    return Command(config, [*rest, *_sglang_flags(config, rest, on_cpu)])


def _other_ranks(known: argparse.Namespace, mode: Mode) -> int | None:
    """The count that the mode has beside attention ranks; None: it is not given."""
    other = Mode.AFD if mode is Mode.CAD else Mode.CAD
    counts = {Mode.AFD: known.afd_ffn_ranks, Mode.CAD: known.afd_model_ranks}
    if counts[other] is not None:
        raise ConfigError(
            f"{_OTHERS[other]} does not go with --afd-mode {mode.value}; give {_OTHERS[mode]}"
        )
    return counts[mode]


def _rows(known: argparse.Namespace, args: Sequence[str]) -> int:
    """T: rows of one exchange.  All of a verify step's fit one; a multiple of 4, for deepep."""
    if known.afd_max_tokens_per_rank is not None:
        return known.afd_max_tokens_per_rank
    needed = rows_needed(args, known.afd_attention_ranks, known.afd_attention_tp)
    return min(MOST_ROWS, max(DEFAULT_ROWS, -(-needed // 4) * 4))


def _layers(text: str | None) -> tuple[int, ...]:
    """What --afd-spec-aux-layers names; the gate says whether a draft can read them."""
    if text is None:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--afd-spec-aux-layers is {text!r}; it must be layers' numbers with commas between, "
            f"such as 1,23,44"
        ) from None


def placement(config: AfdConfig, args: Sequence[str], gpus: int) -> list[str]:
    """The flags that keep an FFN command off the GPUs of an attention command on this machine.

    Args:
        gpus: devices that this command sees; if there are fewer than ranks, roles may share them.

    Raises:
        ConfigError: --gpu-id-step is no integer.
    """
    address = last_value(args, "--dist-init-addr", "--nccl-init-addr")
    if config.command_role is not Role.FFN or address is None or values(args, "--base-gpu-id"):
        return []
    step = int_value(args, "--gpu-id-step", default=1)
    first = step * config.topology.ffn_world.start
    last = step * (config.topology.world_size - 1)
    try:
        together = is_local(parse_address(address).host)
    except ValueError:
        return []  # the address gate says what is wrong with it
    return ["--base-gpu-id", str(first)] if together and last < gpus else []


def _check_marked(config: AfdConfig, known: argparse.Namespace) -> None:
    """Nobody emulates ranks by accident."""
    marked = known.afd_emulation_is_not_the_model
    simulated = config.spec_sim_accept is not None
    if known.afd_spec_sim_seed is not None and not simulated:
        raise ConfigError(f"{SIM_SEED} does nothing without {SIM_ACCEPT}; leave it out")
    if marked and not config.emulation.active and not simulated:
        raise ConfigError(
            f"{NOT_THE_MODEL} is given, but nothing is emulated; leave it out, or give "
            f"--afd-emulate-attention-ranks, --afd-emulate-ffn-ranks or {SIM_ACCEPT}"
        )
    if (config.emulation.active or simulated) and not marked:
        name = "attention" if config.emulated_attention_ranks is not None else "ffn"
        flag = SIM_ACCEPT if simulated else f"--afd-emulate-{name}-ranks"
        raise ConfigError(
            f"{flag} makes answers that are not the model's; say that this is "
            f"wanted with {NOT_THE_MODEL}, or leave it out"
        )


def _refuse_owned(args: Sequence[str]) -> None:
    for spellings, reason in OWNED:
        if values(args, *spellings):
            raise ConfigError(
                f"{spellings[0]} is set by the --afd-* flags ({reason}); leave it out"
            )


def _check_commands(config: AfdConfig, args: Sequence[str]) -> None:
    nnodes = int_value(args, "--nnodes", default=1)
    node_rank = int_value(args, "--node-rank", default=0)
    address = last_value(args, "--dist-init-addr", "--nccl-init-addr")
    if config.command_role is None:
        if node_rank != 0:
            raise ConfigError(
                f"--node-rank {node_rank} needs --afd-role: without it this is the only command; "
                f"leave it out"
            )
        if nnodes != 1:
            raise ConfigError(
                f"--nnodes {nnodes} needs --afd-role: one command for each role (two in all)"
            )
        return
    want = 0 if config.command_role is Role.ATTENTION else 1
    if nnodes != 2 or node_rank != want or address is None:
        raise ConfigError(
            f"--afd-role {config.command_role.value} needs --nnodes 2 --node-rank {want} "
            f"--dist-init-addr HOST:PORT (the attention command's address)"
        )


def _sglang_flags(config: AfdConfig, args: Sequence[str], on_cpu: bool) -> list[str]:
    """The SGLang flags that make one world of both roles."""
    flags = [
        *("--tp-size", str(config.topology.world_size)),
        *("--attn-dp-size", str(config.topology.dp_size)),
        *("--moe-a2a-backend", "deepep"),  # models then take their expert-parallel path
        *("--moe-dense-tp-size", "1"),
        "--enable-dp-lm-head",
        "--disable-custom-all-reduce",
        *("--cuda-graph-backend-prefill", "disabled"),
    ]
    if config.transport not in GRAPH_TRANSPORTS or on_cpu:
        flags += ["--cuda-graph-backend-decode", "disabled"]
    elif not values(args, *GRAPH_SIZES):
        # a batch's rows are spread over the ranks of attention TP, each of which sends its own
        rows, speculation = config.max_tokens_per_rank * config.attention_tp, asked(args)
        size = rows // speculation.tokens if speculation and speculation.tokens else rows
        flags += [GRAPH_SIZES[0], str(max(1, size))]
    if config.command_role is Role.FFN and not values(args, "--port"):
        flags += ["--port", str(FFN_PORT)]
    if not on_cpu and not values(args, "--moe-runner-backend"):
        flags += ["--moe-runner-backend", EXPERT_RUNNERS[config.transport]]
    return flags
