"""The model gate: whether AFD can serve a checkpoint, and load it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from sglang_afd import weights
from sglang_afd.checkpoint import Checkpoint
from sglang_afd.command_line import is_on, last_value, values
from sglang_afd.facts import Facts, Refusal
from sglang_afd.families import MoeFacts, UnsupportedModel
from sglang_afd.model_fields import CONTEXT_LENGTHS
from sglang_afd.spec import gate as spec_gate
from sglang_afd.weights import FP8_BLOCK, BrokenFile

MAX_TOP_K = 16
_ACTIVATION = "silu"
_TOKENIZERS = ("tokenizer.json", "vocab.json", "tokenizer.model")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
_LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
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
    elif moe.top_k > moe.num_experts > 0:
        yield Refusal(
            f"the router picks {moe.top_k} experts a token of {moe.num_experts}",
            "correct num_experts_per_tok or num_experts in config.json",
        )
    activation = checkpoint.text_config.hidden_act
    if activation != _ACTIVATION:
        yield Refusal(
            f"the experts' activation is {activation}; SGLang's {checkpoint.architecture} has "
            f"{_ACTIVATION} alone",
            "correct hidden_act in config.json",
        )
    yield from _context_length(facts)
    yield from _tokenizer(facts)
    unserved = list(_quantisation(facts, moe))
    yield from unserved
    if last_value(facts.args, "--load-format") != "dummy":
        yield from weight_refusals(checkpoint, look_inside=bool(moe.layers) and not unserved)
    yield from spec_gate.model_refusals(facts)


def summary(facts: Facts) -> str:
    """What the gate let pass."""
    moe = facts.moe
    if moe is None:  # not after the gate has passed
        return ""
    quantised = declared_quantisation(facts.checkpoint)
    return (
        f"{facts.checkpoint.architecture}: {len(moe.layers)} MoE layers of {moe.num_experts} "
        f"experts, top {moe.top_k}, hidden size {moe.hidden_size}, "
        f"{f'{FP8_BLOCK}x{FP8_BLOCK}-block FP8' if quantised else 'unquantised'}"
        f"{spec_gate.summary(facts)}"
    )


def declared_quantisation(checkpoint: Checkpoint) -> Mapping[str, Any] | None:
    """How the checkpoint says that it is quantised; None: it is not."""
    config, files = checkpoint.config or {}, checkpoint.files or frozenset()
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
    named = (text[key] for key in CONTEXT_LENGTHS if text.get(key) is not None)
    return next((int(factor * length) for length in named), None)


def _tokenizer(facts: Facts) -> Iterator[Refusal]:
    files = facts.checkpoint.files
    if files is None or values(facts.args, "--skip-tokenizer-init", "--tokenizer-path"):
        return
    if files.isdisjoint(_TOKENIZERS) and not any(name.endswith(".tiktoken") for name in files):
        yield Refusal(
            f"{facts.checkpoint.path} has no tokenizer: no {', '.join(_TOKENIZERS)}",
            "complete the checkpoint, give --tokenizer-path, or pass --skip-tokenizer-init",
        )


def weight_refusals(checkpoint: Checkpoint, look_inside: bool) -> Iterator[Refusal]:
    """What is wrong with the weight files.

    Args:
        look_inside: AFD serves the checkpoint's quantisation, so it knows its tensors.
    """
    if checkpoint.files is None:
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
        return
    try:
        stored = weights.stored_tensors(checkpoint.weight_files())
    except BrokenFile as error:
        yield Refusal.of(error)
        return
    if look_inside:
        fp8, family = declared_quantisation(checkpoint) is not None, checkpoint.family
        expected = family.tensors(checkpoint.text_config)
        yield from weights.refusals(stored, expected, family, fp8)


def _quantisation(facts: Facts, moe: MoeFacts) -> Iterator[Refusal]:
    asked = last_value(facts.args, "--quantization")
    declared = declared_quantisation(facts.checkpoint)
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
    if list(block or ()) != [FP8_BLOCK, FP8_BLOCK]:
        yield Refusal(
            f"FP8 with {'x'.join(map(str, block)) + ' blocks' if block else 'no blocks'} is not "
            f"served",
            _QUANTISE,
        )
    if declared.get("activation_scheme", "dynamic") != "dynamic":
        yield Refusal("FP8 with static activation scales is not served", _QUANTISE)
    if moe.hidden_size % FP8_BLOCK or moe.intermediate_size % FP8_BLOCK:
        yield Refusal(
            f"FP8 blocks of {FP8_BLOCK} do not divide the experts' sizes, {moe.hidden_size} and "
            f"{moe.intermediate_size}",
            _QUANTISE,
        )
    if facts.on_cpu:
        yield Refusal("FP8 experts need CUDA devices", "use an unquantised checkpoint on a CPU")
