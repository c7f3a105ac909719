"""The model gate: whether AFD can serve a checkpoint, and load it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from sglang_afd.command_line import is_on, last_value
from sglang_afd.facts import Facts, Refusal
from sglang_afd.families import MoeFacts, UnsupportedModel

MAX_TOP_K = 16
LOAD_FORMATS = ("auto", "safetensors", "dummy")
_BLOCK = 128
_LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
_CONTEXT_LENGTHS = (
    # where SGLang looks, in this order
    *("max_sequence_length", "seq_length", "max_seq_len", "model_max_length"),
    "max_position_embeddings",
)
_QUANTISE = "use an unquantised checkpoint, or one in FP8 with 128x128 blocks on CUDA devices"


def refusals(facts: Facts) -> Iterator[Refusal]:
    """What is wrong with the checkpoint or the way it is to be loaded."""
    checkpoint = facts.checkpoint
    yield from _loading(facts)
    if checkpoint.config is None:
        yield Refusal(checkpoint.problem, checkpoint.mend)
        return
    try:
        moe = checkpoint.moe_facts()
    except UnsupportedModel as error:
        yield Refusal.of(error)
        return
    if not moe.layers or not moe.num_experts:
        yield Refusal(
            f"{checkpoint.path} has no MoE layer, so FFN ranks would hold nothing",
            "serve it without --afd-* flags",
        )
    if moe.top_k > MAX_TOP_K:
        yield Refusal(
            f"the router picks {moe.top_k} experts a token; AFD carries {MAX_TOP_K} at most",
            "serve it without --afd-* flags",
        )
    yield from _context_length(facts)
    yield from _files(facts)
    yield from _quantisation(facts, moe)


def summary(facts: Facts) -> str:
    """What the gate let pass."""
    moe = facts.moe
    if moe is None:  # not after the gate has passed
        return ""
    quantised = declared_quantisation(facts)
    return (
        f"{facts.checkpoint.architecture}: {len(moe.layers)} MoE layers of {moe.num_experts} "
        f"experts, top {moe.top_k}, hidden size {moe.hidden_size}, "
        f"{f'{_BLOCK}x{_BLOCK}-block FP8' if quantised else 'unquantised'}"
    )


def declared_quantisation(facts: Facts) -> Mapping[str, Any] | None:
    """How the checkpoint says that it is quantised; None: it is not."""
    config, files = facts.checkpoint.config or {}, facts.checkpoint.files or frozenset()
    text = config.get("text_config") or {}
    for place in (config, text):
        for key in ("quantization_config", "compression_config"):
            if place.get(key):
                return place[key]
    return {"quant_method": "modelopt"} if "hf_quant_config.json" in files else None


def _loading(facts: Facts) -> Iterator[Refusal]:
    load_format = last_value(facts.args, "--load-format") or "auto"
    if load_format not in LOAD_FORMATS:
        yield Refusal(
            f"--load-format {load_format} reads whole checkpoints, but each rank reads only its "
            f"role's tensors",
            f"use --load-format {', '.join(LOAD_FORMATS[:-1])} or {LOAD_FORMATS[-1]}",
        )
    extra = last_value(facts.args, "--model-loader-extra-config") or "{}"
    try:
        options = json.loads(extra)
    except ValueError:
        options = None
    if not isinstance(options, dict):
        yield Refusal(f"--model-loader-extra-config is no JSON object: {extra}", "correct it")
    elif options.get("enable_multithread_load") or "num_threads" in options:
        yield Refusal(
            "--model-loader-extra-config asks for threads that each load whole files, but each "
            "rank reads only its role's tensors",
            "leave enable_multithread_load and num_threads out",
        )


def _context_length(facts: Facts) -> Iterator[Refusal]:
    asked = last_value(facts.args, "--context-length") or ""
    limit = longest_context(facts.checkpoint.config or {})
    if limit is None or not asked.isdigit() or is_on(facts.environment.get(_LONGER)):
        return  # SGLang also takes 8k, and says itself what it does not take
    if int(asked) <= limit:
        return
    yield Refusal(
        f"--context-length {asked} is over the {limit} tokens that config.json gives the model",
        f"lower it, or set {_LONGER}=1 if the model is known to go further",
    )


def longest_context(config: Mapping[str, Any]) -> int | None:
    """The context that SGLang derives from config.json, in tokens; None if it names none."""
    text = config.get("text_config") or config
    scaling = text.get("rope_scaling") or {}
    scaled = "original_max_position_embeddings" in scaling or scaling.get("rope_type") == "llama3"
    factor = 1 if scaled else scaling.get("factor", 1)
    named = (text[key] for key in _CONTEXT_LENGTHS if text.get(key) is not None)
    return next((int(factor * length) for length in named), None)


def _files(facts: Facts) -> Iterator[Refusal]:
    checkpoint = facts.checkpoint
    if checkpoint.files is None or last_value(facts.args, "--load-format") == "dummy":
        return
    if not any(name.endswith(".safetensors") for name in checkpoint.files):
        yield Refusal(
            f"{checkpoint.path} has no .safetensors file",
            "convert the weights to safetensors, or pass --load-format dummy for random ones",
        )
        return
    missing = sorted(checkpoint.shards - checkpoint.files)
    if missing:
        yield Refusal(
            f"{checkpoint.path} lacks {len(missing)} of the files its index names, first "
            f"{missing[0]}",
            "complete the download",
        )


def _quantisation(facts: Facts, moe: MoeFacts) -> Iterator[Refusal]:
    asked = last_value(facts.args, "--quantization")
    declared = declared_quantisation(facts)
    if declared is None:
        if asked not in (None, "unquant"):
            yield Refusal(
                f"--quantization {asked} would quantise the experts of an unquantised checkpoint "
                f"while loading, which FFN ranks do not",
                "leave it out, or use a checkpoint in FP8 with 128x128 blocks",
            )
        return
    method, block = declared.get("quant_method"), declared.get("weight_block_size")
    if method != "fp8" or asked not in (None, "fp8"):
        yield Refusal(f"{asked or method} quantisation is not served", _QUANTISE)
        return
    if list(block or ()) != [_BLOCK, _BLOCK]:
        yield Refusal(
            f"FP8 with {'x'.join(map(str, block)) + ' blocks' if block else 'no blocks'} is not "
            f"served",
            _QUANTISE,
        )
    if declared.get("activation_scheme", "dynamic") != "dynamic":
        yield Refusal("FP8 with static activation scales is not served", _QUANTISE)
    if moe.hidden_size % _BLOCK or moe.intermediate_size % _BLOCK:
        yield Refusal(
            f"FP8 blocks of {_BLOCK} do not divide the experts' sizes, {moe.hidden_size} and "
            f"{moe.intermediate_size}",
            _QUANTISE,
        )
    if facts.on_cpu:
        yield Refusal("FP8 experts need CUDA devices", "use an unquantised checkpoint on a CPU")
