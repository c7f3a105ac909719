"""What the gates say of speculation: the flags, the rows of a verify step, the draft checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from sglang_afd.command_line import last_value, values
from sglang_afd.facts import Facts, Refusal
from sglang_afd.flags import SIM_ACCEPT
from sglang_afd.observe.holdings import size
from sglang_afd.spec import draft
from sglang_afd.speculation import (
    ALGORITHM,
    DRAFT,
    SERVED,
    SHAPE,
    STEPS,
    TOKENS,
    TOPK,
    Speculation,
    asked,
    rows_needed,
)
from sglang_afd.transport_gate import row_dtype

ARCHITECTURES = ("Qwen3MoeForCausalLM",)
"""The targets with which it was shown."""
_MOST_TOKENS = 64
"""Tokens of a request in one verify step, more than any draft gets right."""


def execution_refusals(facts: Facts) -> Iterator[Refusal]:
    """What of the flags of speculation does not go together, or not with the deployment."""
    speculation = asked(facts.args)
    if speculation is None:
        if last_value(facts.args, ALGORITHM) is None and values(facts.args, *DRAFT, *SHAPE):
            yield Refusal(
                f"a draft's flags do nothing without {ALGORITHM} {SERVED}",
                f"add {ALGORITHM} {SERVED}, or leave them out",
            )
        for flag, given in (
            (draft.CHOSEN, facts.config.spec_aux_layers),
            (SIM_ACCEPT, facts.config.spec_sim_accept is not None),
        ):
            if given:
                yield Refusal(f"{flag} does nothing without {ALGORITHM} {SERVED}", "leave it out")
        return
    wrong = _wrong_shape(facts, speculation)
    if wrong is not None:
        yield wrong
        return
    simulated = facts.config.spec_sim_accept
    if simulated is not None and not 1 <= simulated <= speculation.steps + 1:
        yield Refusal(
            f"{SIM_ACCEPT} is {simulated:g}; a verify step of {speculation.steps} draft steps "
            f"gives 1 to {speculation.steps + 1} tokens",
            "choose a mean between",
        )
    if facts.config.lanes > 1 and not facts.on_cpu:
        yield Refusal(
            f"speculation on GPUs takes one lane, not --afd-lanes {facts.config.lanes}: a draft's "
            f"graphs and buffers are not kept apart by lane",
            "use --afd-lanes 1",
        )
    rows = rows_needed(facts.args, facts.config.attention_ranks, facts.config.attention_tp)
    cap = facts.config.max_tokens_per_rank
    if rows > cap:
        yield Refusal(
            f"a verify step has up to {rows} rows a rank ({speculation.tokens} for each running "
            f"request), over the {cap} of one exchange (--afd-max-tokens-per-rank)",
            f"leave --afd-max-tokens-per-rank out or raise it to {rows}, or lower "
            f"--max-running-requests",
        )


def model_refusals(facts: Facts) -> Iterator[Refusal]:
    """Why the target cannot have a draft, or not this one."""
    speculation = asked(facts.args)
    if speculation is None:
        return
    architecture = facts.checkpoint.architecture
    if architecture not in ARCHITECTURES:
        yield Refusal(
            f"speculation is not shown to work with {architecture} yet, only with "
            f"{', '.join(ARCHITECTURES)}",
            f"leave {ALGORITHM} out",
        )
    elif not speculation.draft:
        yield Refusal(
            f"{ALGORITHM} {SERVED} needs a draft", f"give {DRAFT[0]} the directory of one"
        )
    else:
        yield from draft.refusals(
            speculation.draft,
            target_of(facts),
            facts.config.attention_tp,
            facts.config.spec_aux_layers,
        )


def summary(facts: Facts) -> str:
    """What the gates let pass; empty without speculation."""
    speculation = asked(facts.args)
    if speculation is None:
        return ""
    config = draft.read_config(speculation.draft)
    layers = target_of(facts).num_layers
    described = draft.describe(config, layers, facts.config.spec_aux_layers)
    simulated = facts.config.spec_sim_accept
    if simulated is not None:
        described += f"; {simulated:g} tokens a step SIMULATED, answers are NOT the model's"
    elements = draft.kv_elements(config, facts.config.attention_tp)
    kv = elements * (4 if row_dtype(facts) == "float32" else 2)
    return (
        f"; {described}, {speculation.tokens} tokens a verify step: {size(kv)} of KV a token and "
        f"its share of {size(draft.stored_bytes(speculation.draft))} of weights on an attention "
        f"rank"
    )


def target_of(facts: Facts) -> draft.Target:
    """What of the served model a draft must fit."""
    text = facts.checkpoint.text_config
    return draft.Target(text.hidden_size, text.vocab_size, text.num_hidden_layers)


def _wrong_shape(facts: Facts, speculation: Speculation) -> Refusal | None:
    given = [flag for flag in SHAPE if values(facts.args, flag)]
    if 0 < len(given) < len(SHAPE):
        return Refusal(
            f"{', '.join(given)} alone do not say how to speculate",
            f"give {STEPS}, {TOPK} and {TOKENS}, or none of them",
        )
    _, steps, topk, tokens = speculation
    if min(steps, topk) < 1 or tokens < 2:
        return Refusal(
            f"{steps} steps of {topk} tokens that give {tokens} tokens to verify are no draft",
            f"give at least {STEPS} 1 {TOPK} 1 {TOKENS} 2",
        )
    if tokens > _MOST_TOKENS:
        return Refusal(
            f"{tokens} tokens of a request in one verify step are over {_MOST_TOKENS}",
            f"lower {TOKENS} and {STEPS}",
        )
    drafted = topk + (steps - 1) * topk * topk
    if tokens - 1 > drafted:
        return Refusal(
            f"{steps} steps of {topk} tokens draft {drafted} at most, not the {tokens - 1} that "
            f"{TOKENS} {tokens} verifies beside the last accepted one",
            f"lower {TOKENS}, or raise {STEPS} or {TOPK}",
        )
    return None
