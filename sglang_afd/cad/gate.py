"""What ``--afd-mode cad`` does not serve: refused by name, with the reason."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_afd.config import AfdConfig
from sglang_afd.facts import Facts, Refusal
from sglang_afd.features import asked_of
from sglang_afd.features.cad import SERVED_IN_CAD
from sglang_afd.flags import DEFAULT_BLOCK, DEFAULT_ROWS
from sglang_afd.topology import Mode

FAMILIES = ("Qwen3-MoE", "MiniMax-M2", "Qwen3.5-MoE, text")
"""Families whose attention CAD serves, by name."""
_AFD = "leave it out, or use --afd-mode afd"
_ONE_EXCHANGE = "a step's attention is one exchange a layer, of as many rows as there are"
_SLICES = "model ranks have equal slices of the experts, in order"
_UNSERVED: tuple[tuple[str, str], ...] = (
    # fields of AfdConfig, which are flags, and why another value than the default is refused
    ("attention_tp", "attention ranks share key-value heads (--afd-attention-ranks), and model "
     "ranks share nothing"),
    ("max_tokens_per_rank", _ONE_EXCHANGE),
    ("prefill_block", _ONE_EXCHANGE),
    ("expert_replicas", _SLICES),
    ("expert_placement", _SLICES),
    ("emulated_attention_ranks", "emulation stands for FFN exchanges"),
    ("emulated_ffn_ranks", "emulation stands for FFN exchanges"),
    ("command_role", "both roles start from one command so far"),
)  # fmt: skip
_FLAGS = {
    "command_role": "--afd-role",
    "emulated_attention_ranks": "--afd-emulate-attention-ranks",
    "emulated_ffn_ranks": "--afd-emulate-ffn-ranks",
}
_DEFAULTS = AfdConfig(
    attention_ranks=1,
    ffn_ranks=1,
    max_tokens_per_rank=DEFAULT_ROWS,
    prefill_block=DEFAULT_BLOCK,
)


def model(facts: Facts) -> Iterator[Refusal]:
    """Models whose attention is not served."""
    family = facts.checkpoint.family
    if family.name not in FAMILIES:
        yield Refusal(
            f"--afd-mode cad serves the attention of {', '.join(FAMILIES)}, not of {family.name}",
            "use --afd-mode afd",
        )


def topology(facts: Facts) -> Iterator[Refusal]:
    """Where the ranks run, and how they share heads."""
    if not facts.on_cpu:
        yield Refusal(
            "--afd-mode cad runs on CPUs alone so far: its exchange is gloo's, without graphs",
            "pass --device cpu, or use --afd-mode afd",
        )
    experts, owners = facts.moe.num_experts if facts.moe else 0, facts.config.ffn_ranks
    if experts % owners:
        yield Refusal(
            f"{experts} experts do not divide over --afd-model-ranks {owners}",
            f"choose one of {_divisors(experts)}",
        )
    text, ranks = facts.checkpoint.text_config, facts.config.attention_ranks
    shared = {"key-value heads": text.num_key_value_heads}
    if facts.checkpoint.family.recurrent:
        shared["key heads of linear attention"] = text.linear_num_key_heads
    for what, heads in shared.items():
        if heads % ranks:
            yield Refusal(
                f"{heads} {what} do not divide over --afd-attention-ranks {ranks}",
                f"choose one of {_divisors(heads)}",
            )


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if not number % n)


def execution(facts: Facts) -> Iterator[Refusal]:
    """Flags, ours and SGLang's, that are served in AFD mode alone."""
    for field, reason in _UNSERVED:
        if getattr(facts.config, field) != getattr(_DEFAULTS, field):
            flag = _FLAGS.get(field, "--afd-" + field.replace("_", "-"))
            yield Refusal(f"{flag} does not go with --afd-mode cad: {reason}", _AFD)
    for feature, by in asked_of(facts.args, served=True):
        if feature.name not in SERVED_IN_CAD:
            yield Refusal(
                f"{by} asks for {feature.name}, which is not shown to work with --afd-mode cad",
                _AFD,
            )


def topology_summary(facts: Facts) -> str:
    """What the topology gate let pass."""
    config = facts.config
    assert config.mode is Mode.CAD
    heads = facts.checkpoint.text_config.num_key_value_heads // config.attention_ranks
    experts = facts.checkpoint.moe_facts().num_experts // config.ffn_ranks
    return (
        f"{config.attention_ranks} attention ranks with {heads} key-value heads each, "
        f"{config.ffn_ranks} model ranks with all of the rest but the "
        f"others' experts, {experts} of a layer each, on the CPU"
    )
