"""The transport gate: what each transport can carry, and which one ``auto`` stands for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sglang_afd.addresses import is_local
from sglang_afd.command_line import int_list, int_value, last_value, values
from sglang_afd.facts import Facts, Refusal
from sglang_afd.families import MoeFacts
from sglang_afd.flags import EXPERT_RUNNERS, GPU_LANE_MODELS, GPU_LANES, GRAPH_SIZES
from sglang_afd.observe.holdings import size
from sglang_afd.speculation import asked
from sglang_afd.topology import Mode, Role
from sglang_afd.transports import estimate

DEEPEP_HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
DEEPEP_MAX_TOP_K = 11
DEEPEP_MAX_SLOTS = (
    1848  # its dispatch kernel takes 14 slots for each of an H100's or H200's 132 SMs
)
DEEPEP_MAX_LOCAL_EXPERTS = 1024
DEEPEP_MAX_TOKENS = 1024
DEEPEP_CAPABILITY = (9, 0)
NVLINK_ROW_ALIGNMENT = 16
"""Elements that divide the hidden size."""
NVLINK_MAX_TOP_K = 16
MOST_OF_A_GPU = 0.25
"""Share of a GPU's memory that a transport may take: it is KV cache that AFD is there for."""
_ITEMSIZE = {"float32": 4}
_OTHERWISE = {
    "nvlink": "use --afd-transport deepep or gloo",
    "deepep": "use --afd-transport nvlink or gloo",
}


def refusals(facts: Facts) -> Iterator[Refusal]:
    """Why the transport that the deployment names cannot serve it."""
    yield from _REFUSALS[facts.config.transport](facts)


def summary(facts: Facts) -> str:
    """The transport, its rows and what it holds."""
    config = facts.config
    if config.mode is Mode.CAD:
        return f"{config.transport} ({facts.why_transport}), all rows of a step in one exchange"
    text = (
        f"{config.transport} ({facts.why_transport}), {config.max_tokens_per_rank} rows a rank and "
        f"exchange in decode, "
        f"{config.prefill_block if config.transport != 'deepep' else config.max_tokens_per_rank} "
        f"in prefill"
    )
    if config.lanes > 1:
        text += f", {config.lanes} lanes"
    if facts.moe is None:
        return text
    held = _held(facts, facts.moe)
    return (
        text
        + "; a rank keeps "
        + ", ".join(
            f"{size(kept)} on {role} ranks (a round: {size(passing)} more)"
            for role, (kept, passing) in zip(("attention", "FFN"), held, strict=True)
        )
    )


def choose(asked: Callable[[str], Facts], on_cpu: bool, two_commands: bool) -> tuple[str, str]:
    """What ``--afd-transport auto`` stands for.

    Args:
        asked: the deployment's facts if it named the given transport.
        two_commands: the roles are started apart, perhaps on two hosts.

    Returns:
        The transport, and why.
    """
    if on_cpu:
        return "gloo", "the ranks run on the CPU"
    why: list[str] = []
    # Two commands must choose alike, and neither knows whether the other is on its host.
    for name in ("deepep",) if two_commands else ("nvlink", "deepep"):
        try:
            first = next(refusals(asked(name)), None)
        except Exception:
            first = None  # the deployment cannot be right, and the gates say why
        if first is None:
            return name, "; ".join([*why, "the deployment fits it"])
        why.append(f"no {name}: {first.message}")
    return "gloo", "; ".join(why)


def _gloo(facts: Facts) -> Iterator[Refusal]:
    yield from _no_graphs(facts)
    if not facts.on_cpu:
        if facts.config.lanes > GPU_LANES["gloo"]:
            yield Refusal(
                f"gloo takes one lane on GPUs, not --afd-lanes {facts.config.lanes}: the host "
                f"waits for every layer's rows, so that lanes would overlap nothing",
                "use --afd-lanes 1",
            )
        yield from _runner(facts, "a row for each token", "leave it out")


def _nvlink(facts: Facts) -> Iterator[Refusal]:
    mend = _OTHERWISE["nvlink"]
    if facts.on_cpu:
        yield Refusal("nvlink moves rows between GPUs, but the ranks run on the CPU", _GLOO)
        return
    rendezvous = last_value(facts.args, "--dist-init-addr", "--nccl-init-addr")
    if facts.config.command_role is Role.FFN and rendezvous is not None:
        host = rendezvous.rpartition("//")[2].rpartition(":")[0]
        if not is_local(host):
            yield Refusal(f"nvlink stays within one host, {host} is another", mend)
    used = facts.gpus_used()
    here = {gpu.uuid for gpu in used}
    for gpu in used:
        if gpu.unreachable & here:
            yield Refusal(
                f"nvlink writes into peers' memory, which {gpu.name} {gpu.uuid} cannot for "
                f"{', '.join(sorted(gpu.unreachable & here))}",
                mend,
            )
            break
    yield from _lanes(facts)
    yield from _runner(facts, "a row for each token", mend)
    yield from _graph_sizes(facts)
    if facts.moe is not None:
        if facts.moe.hidden_size % NVLINK_ROW_ALIGNMENT:
            yield Refusal(
                f"nvlink moves rows in parts of {NVLINK_ROW_ALIGNMENT} elements, which do not "
                f"divide hidden size {facts.moe.hidden_size}",
                _GLOO,
            )
        if facts.moe.top_k > NVLINK_MAX_TOP_K:
            yield Refusal(
                f"nvlink carries {NVLINK_MAX_TOP_K} experts a token, the router picks "
                f"{facts.moe.top_k}",
                _GLOO,
            )
        yield from _memory(facts, facts.moe)


def _deepep(facts: Facts) -> Iterator[Refusal]:
    mend = _OTHERWISE["deepep"]
    if facts.on_cpu:
        yield Refusal("deepep moves rows between GPUs, but the ranks run on the CPU", _GLOO)
        return
    for package, wheel in (("deep_ep", "sgl-deep-ep"), ("deep_gemm", "sgl-deep-gemm")):
        if package not in facts.machine.packages:
            yield Refusal(
                f"deepep needs the package {package}, which is not installed",
                f"run: pip install {wheel}, or {mend}",
            )
    for gpu in facts.machine.gpus:
        if gpu.capability != DEEPEP_CAPABILITY:
            yield Refusal(
                f"deepep needs GPUs of compute capability 9.0 (Hopper), {gpu.name} has "
                f"{'.'.join(map(str, gpu.capability))}",
                mend,
            )
            break
    if facts.config.emulation.active:
        yield Refusal("deepep emulates no ranks: its kernels know real ones alone", mend)
    yield from _no_graphs(facts)
    yield from _runner(facts, "rows grouped by expert", mend)
    if facts.config.lanes > 1:
        yield Refusal(
            f"deepep takes one lane, not --afd-lanes {facts.config.lanes}: its kernels fill the "
            f"GPU while they wait for a peer, so that two lanes wait for each other for ever",
            "use --afd-lanes 1",
        )
    tokens = facts.config.max_tokens_per_rank
    if tokens > DEEPEP_MAX_TOKENS:
        yield Refusal(
            f"--afd-max-tokens-per-rank {tokens} is over deepep's {DEEPEP_MAX_TOKENS}",
            f"lower it (longer batches go in slices), or {mend}",
        )
    if facts.moe is not None:
        yield from _deepep_model(facts, facts.moe)


def _deepep_model(facts: Facts, moe: MoeFacts) -> Iterator[Refusal]:
    mend = _OTHERWISE["deepep"]
    dtype = row_dtype(facts)
    if dtype != "bfloat16":
        yield Refusal(
            f"deepep carries BF16 rows, the model's are {dtype}",
            f"pass --dtype bfloat16, or {mend}",
        )
    if moe.hidden_size not in DEEPEP_HIDDEN_SIZES:
        yield Refusal(
            f"deepep has no kernel for hidden size {moe.hidden_size}, only for "
            f"{', '.join(map(str, DEEPEP_HIDDEN_SIZES))}",
            mend,
        )
    if moe.top_k > DEEPEP_MAX_TOP_K:
        yield Refusal(
            f"deepep carries {DEEPEP_MAX_TOP_K} experts a token, the router picks {moe.top_k}",
            mend,
        )
    topology = facts.config.topology
    per_rank = -(-(moe.num_experts + facts.config.expert_replicas) // len(topology.ffn_world))
    slots = topology.world_size * per_rank
    if slots > DEEPEP_MAX_SLOTS or per_rank > DEEPEP_MAX_LOCAL_EXPERTS:
        yield Refusal(
            f"{per_rank} experts on each of {topology.world_size} ranks make {slots} slots; deepep "
            f"takes {DEEPEP_MAX_SLOTS} slots and {DEEPEP_MAX_LOCAL_EXPERTS} experts a rank",
            f"use more FFN or fewer attention ranks, or {mend}",
        )
    else:
        yield from _memory(facts, moe)


def _graph_sizes(facts: Facts) -> Iterator[Refusal]:
    """A graph must fit one exchange; SGLang takes the list of sizes before the largest one."""
    config = facts.config
    listed = int_list(facts.args, GRAPH_SIZES[1])
    flag = GRAPH_SIZES[1] if listed else GRAPH_SIZES[0]
    largest = max(listed) if listed else int_value(facts.args, flag, default=0)
    speculation = asked(facts.args)
    rows = -(-largest * (speculation.tokens if speculation else 1) // config.attention_tp)
    if rows > config.max_tokens_per_rank:
        yield Refusal(
            f"{flag} {largest} makes a graph of {rows} rows a rank, over the "
            f"{config.max_tokens_per_rank} of one exchange (--afd-max-tokens-per-rank)",
            "lower the former or raise the latter",
        )


def _no_graphs(facts: Facts) -> Iterator[Refusal]:
    backends = {value for value in values(facts.args, "--cuda-graph-backend-decode") if value}
    if backends - {"disabled"} or values(facts.args, *GRAPH_SIZES):
        yield Refusal(
            f"steps over {facts.config.transport} are not recorded in CUDA graphs",
            "leave the --cuda-graph-* flags out, or use --afd-transport nvlink (GPUs of one host)",
        )


def _lanes(facts: Facts) -> Iterator[Refusal]:
    """Of ranks on GPUs, over nvlink."""
    config = facts.config
    if config.lanes > 1 and config.topology.attention_tp > 1:
        yield Refusal(
            f"--afd-lanes {config.lanes} does not go with --afd-attention-tp "
            f"{config.topology.attention_tp} on GPUs: lanes would use one communicator at once",
            "use one of the two",
        )
    if config.lanes == 1 or facts.moe is None:
        return
    architecture = facts.checkpoint.architecture
    if architecture not in GPU_LANE_MODELS:
        yield Refusal(
            f"--afd-lanes {config.lanes} on GPUs is for {', '.join(GPU_LANE_MODELS)} so far: lanes "
            f"of {architecture} would share streams of the whole model's",
            "use --afd-lanes 1",
        )


def _runner(facts: Facts, form: str, mend: str) -> Iterator[Refusal]:
    wanted = EXPERT_RUNNERS[facts.config.transport]
    runner = last_value(facts.args, "--moe-runner-backend")
    if runner not in (None, wanted):
        yield Refusal(
            f"{facts.config.transport} gives the experts {form}, as --moe-runner-backend "
            f"{runner} does not take them",
            f"use {wanted}, or {mend}" if mend != "leave it out" else f"use {wanted}",
        )


def _memory(facts: Facts, moe: MoeFacts) -> Iterator[Refusal]:
    known = [gpu.memory for gpu in facts.machine.gpus if gpu.memory]
    if not known:
        return
    for role, (kept, passing) in zip(("attention", "FFN"), _held(facts, moe), strict=True):
        if kept + passing > MOST_OF_A_GPU * min(known):
            yield Refusal(
                f"{facts.config.transport} would take {size(kept + passing)} of an {role} rank's "
                f"{size(min(known))}, over {MOST_OF_A_GPU:.0%}",
                "lower --afd-max-tokens-per-rank or --afd-prefill-block, or use another transport",
            )


def _held(facts: Facts, moe: MoeFacts) -> Iterator[tuple[int, int]]:
    quantised = (facts.checkpoint.config or {}).get("quantization_config") or {}
    fp8 = quantised.get("quant_method") == "fp8"
    itemsize = _ITEMSIZE.get(row_dtype(facts), 2)
    buffers = estimate(facts.config, moe, itemsize=itemsize, fp8=fp8)
    return ((held.kept, held.passing) for held in buffers)


def row_dtype(facts: Facts) -> str:
    """The type of the model's rows, as SGLang chooses it: ``float16`` for ``auto`` and float32."""
    asked = last_value(facts.args, "--dtype") or "auto"
    named = {"half": "float16", "float": "float32"}.get(asked, asked)
    if named != "auto":
        return named
    config = facts.checkpoint.config or {}
    text = config.get("text_config") or {}
    named_there = [place.get(key) for place in (config, text) for key in ("dtype", "torch_dtype")]
    declared = next((str(dtype) for dtype in named_there if dtype), "float32")
    return "float16" if declared == "float32" else declared


_GLOO = "use --afd-transport gloo"
_REFUSALS: dict[str, Callable[[Facts], Iterator[Refusal]]] = {
    "gloo": _gloo,
    "nvlink": _nvlink,
    "deepep": _deepep,
}
