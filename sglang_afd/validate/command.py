"""The validator's command line, and how it becomes `Settings`."""

from __future__ import annotations

import argparse
import difflib
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sglang_afd import embedded, start
from sglang_afd.command_line import expand_config_file, int_value, last_value, values
from sglang_afd.config import ConfigError
from sglang_afd.facts import Facts
from sglang_afd.gate import findings
from sglang_afd.model_gate import declared_quantisation, longest_context
from sglang_afd.platform.defaults import MAX_TOTAL_TOKENS
from sglang_afd.topology import Mode
from sglang_afd.validate import layers, presets
from sglang_afd.validate.prompts import SETS, BadPrompts, prompt_set
from sglang_afd.validate.settings import Settings
from sglang_afd.validation.thresholds import THRESHOLDS, Precision

_LAYOUT = ("--afd-attention-ranks", "1", "--afd-ffn-ranks", "1")
_MODEL = ("--model-path", "--model")
_PRECISIONS: dict[str, Precision] = {
    "float": "float32",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "half": "bfloat16",
    "float16": "bfloat16",
}
_NEW_TOKENS = 32
_SPARE = 2  # tokens of the context that requests need beside prompt and continuation


class Impossible(ValueError):
    """A command line that cannot be validated; the message says what to do."""


def parser() -> argparse.ArgumentParser:
    """The validator's own flags; every other one is the deployment's."""
    made = argparse.ArgumentParser(
        prog="python -m sglang_afd.validate",
        usage="python -m sglang_afd.validate [--reference hf|sglang|URL] [--prompts SET] "
        "[--afd-* and SGLang flags]\n       python -m sglang_afd.validate check REPORT",
        description="Does a deployment give the model's answers? Starts a reference, then the "
        "deployment, asks both the same, compares greedy tokens, ranks under teacher forcing, "
        "logprobs and MoE layers, and writes a report. Exits with 0 if it passes, 1 if it fails, "
        "2 if the command line cannot be right.",
        epilog="All other flags are launch_server's and describe the deployment: --model-path, "
        "--dtype, --afd-attention-ranks, --afd-ffn-ranks, --afd-attention-tp, --afd-transport and "
        "so on. Without --afd-* flags it has one attention and one FFN rank; without --model-path "
        f"the model is {embedded.DESCRIPTION}, in float32. docs/validating.md explains the report.",
        allow_abbrev=False,
    )
    made.add_argument(
        "--reference",
        help="hf: HF transformers, best in float32; sglang: SGLang without AFD, best in bfloat16 "
        "and fp8; or the URL of a running server with OpenAI's completions API, SGLang or vLLM "
        "for example (default: hf)",
    )
    made.add_argument(
        "--reference-python",
        default=sys.executable,
        metavar="PATH",
        help="interpreter that runs the reference, of an environment of its own; "
        "sglang_afd/validate/reference-requirements.txt pins one for hf (default: this one)",
    )
    made.add_argument(
        "--reference-model-path",
        metavar="DIR",
        help="the reference's checkpoint; its content must be the candidate's (default: the same)",
    )
    made.add_argument(
        "--reference-args",
        default="",
        metavar="FLAGS",
        help="more flags of the reference sglang, in one string, e.g. '--tp-size 2'",
    )
    made.add_argument(
        "--prompts",
        metavar="SET|FILE",
        help=f"{', '.join(SETS)} (to 16K tokens, cut to the model's context), or a file with a "
        'JSON object a line, {"text": "..."} or {"ids": [...]} (default: mixed)',
    )
    made.add_argument(
        "--seed", type=int, default=1, help="what the sets are made from (default: %(default)s)"
    )
    made.add_argument(
        "--new-tokens",
        type=int,
        metavar="N",
        help=f"tokens that each prompt is continued by (default: {_NEW_TOKENS})",
    )
    made.add_argument(
        "--preset",
        choices=presets.names(),
        help="layout and model of a published model, none of them run yet; flags that are given "
        "count more",
    )
    made.add_argument(
        "--out",
        type=Path,
        default=Path("validation.json"),
        metavar="FILE",
        help="where the report goes (default: %(default)s)",
    )
    made.add_argument(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw rank and margin of every position into this .png or .svg",
    )
    made.add_argument(
        "--work",
        type=Path,
        metavar="DIR",
        help="folder for logs and recordings, kept if it fails (default: the system's)",
    )
    made.add_argument(
        "--start-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="in which each side must be ready (default: %(default)g)",
    )
    made.add_argument(
        "--answer-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="in which each request must be answered (default: %(default)g)",
    )
    return made


def resolve(
    own: argparse.Namespace, passed_on: Sequence[str], work: Path, *, program: str
) -> Settings:
    """What the command line asks for.

    Exits with status 2, as ``launch_server`` does, if the deployment cannot be right.

    Raises:
        Impossible: the validator's own flags cannot be right.
    """
    _check_spelling(passed_on)
    if not own.out.absolute().parent.is_dir():
        raise Impossible(f"--out: there is no folder {own.out.absolute().parent}")
    preset = presets.load(own.preset) if own.preset else None
    given = [*(preset.args if preset else ()), *passed_on]
    try:
        expanded = expand_config_file(given)
    except ConfigError as error:
        raise Impossible(str(error)) from error
    args = [*given]
    if not any(arg.startswith("--afd-") for arg in expanded):
        args += _LAYOUT
    if not values(expanded, *_MODEL) and not values(expanded, "--dtype"):
        args += ["--dtype", "float32"]
    facts = start.read_facts(args, program=program)
    assert facts is not None, "there are --afd-* flags"
    refused = [finding for finding in findings(facts) if not finding.passed]
    if refused:
        raise Impossible("\n  ".join(f"{f.gate}: {f.message}; {f.mend}" for f in refused))
    if facts.config.command_role is not None:
        raise Impossible("--afd-role starts a part of a deployment; leave it out")
    if last_value(facts.args, "--load-format") == "dummy":
        raise Impossible("--load-format dummy makes random weights, which have no right answers")
    if facts.config.emulated_ffn_ranks is not None:
        raise Impossible("--afd-emulate-ffn-ranks leaves experts out, so no answer is the model's")
    if facts.config.spec_sim_accept is not None:
        raise Impossible("--afd-spec-sim-accept accepts any token, so no answer is the model's")
    reference = own.reference or (preset.reference if preset else "hf")
    _check_reference(reference, own)
    path = last_value(facts.args, *_MODEL) or ""
    model = _local(path, last_value(facts.args, "--revision"))
    if not Path(path).is_dir():
        args += ["--model-path", str(model)]
    if not values(expanded, *_MODEL):
        args += ["--model-path", str(embedded.path())]
    other = _local(own.reference_model_path, None) if own.reference_model_path else model
    config = facts.checkpoint.config or {}
    new_tokens = own.new_tokens
    if new_tokens is None:
        new_tokens = preset.new_tokens if preset else _NEW_TOKENS
    longest = _longest(facts, config) - new_tokens - _SPARE
    if new_tokens < 1 or longest < 1:
        raise Impossible(f"--new-tokens {new_tokens} leaves no room for a prompt in the context")
    try:
        prompts = prompt_set(
            own.prompts or (preset.prompts if preset else "mixed"),
            model=model,
            vocab=int(_text(config)["vocab_size"]),
            longest=longest,
            seed=own.seed,
        )
    except BadPrompts as error:
        raise Impossible(str(error)) from error
    dtype = last_value(facts.args, "--dtype") or "auto"
    extra = preset.reference_args if preset and not own.reference_args else []
    return Settings(
        candidate_args=tuple(args),
        layout=_layout(facts),
        model=model,
        reference=reference,
        reference_model=other,
        reference_args=(*extra, *shlex.split(own.reference_args)),
        reference_python=own.reference_python,
        prompts=prompts,
        seed=own.seed,
        new_tokens=new_tokens,
        record=tuple(layers.choose_prompts(prompts.prompts)),
        thresholds=THRESHOLDS[_precision(facts, dtype)],
        dtype=dtype,
        on_cpu=facts.on_cpu,
        replayed=_replayed(facts),
        start_timeout=own.start_timeout,
        answer_timeout=own.answer_timeout,
        work=work,
    )


def _check_spelling(passed_on: Sequence[str]) -> None:
    """SGLang would refuse a misspelt flag of ours only when the reference has long been asked."""
    if passed_on and not passed_on[0].startswith("-"):
        raise Impossible(f"{passed_on[0]} is no flag, and what is not may only be check REPORT")
    ours = [flag for action in parser()._actions for flag in action.option_strings]
    for arg in passed_on:
        name = arg.partition("=")[0]
        close = difflib.get_close_matches(name, ours, n=1, cutoff=0.87)
        if name.startswith("--") and close:
            raise Impossible(f"{name} is no flag; {close[0]} is meant, perhaps")


def _check_reference(reference: str, own: argparse.Namespace) -> None:
    if reference not in ("hf", "sglang") and not reference.startswith(("http://", "https://")):
        raise Impossible(
            f"--reference {reference} is none; give hf, sglang, or a URL that begins with http://"
        )
    if reference != "sglang" and own.reference_args:
        raise Impossible("--reference-args are the reference sglang's; leave them out")
    if own.reference_python != sys.executable and not os.access(own.reference_python, os.X_OK):
        raise Impossible(f"--reference-python {own.reference_python} is no program")


def _local(path: str, revision: str | None) -> Path:
    """The directory of a checkpoint; one on the Hugging Face Hub is fetched."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, revision=revision))
    except Exception as error:  # its errors come from several libraries
        raise Impossible(f"{path} is no directory and cannot be fetched: {error}") from error


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return config.get("text_config") or config


def _longest(facts: Facts, config: Mapping[str, Any]) -> int:
    """Tokens that one request may have."""
    context = longest_context(config) or 1 << 20
    pool = MAX_TOTAL_TOKENS if facts.on_cpu else 1 << 20
    try:
        context = int_value(facts.args, "--context-length", default=context)
        return min(context, int_value(facts.args, "--max-total-tokens", default=pool))
    except ConfigError as error:
        raise Impossible(str(error)) from error


def _replayed(facts: Facts) -> bool:
    """Whether decode steps are replayed from CUDA graphs."""
    backend = last_value(facts.args, "--cuda-graph-backend-decode")
    off = values(facts.args, "--disable-cuda-graph", "--disable-decode-cuda-graph")
    return backend != "disabled" and not off


def _precision(facts: Facts, dtype: str) -> Precision:
    """Which thresholds are the deployment's."""
    if declared_quantisation(facts.checkpoint):
        return "fp8"
    if dtype == "auto":
        text = _text(facts.checkpoint.config or {})
        dtype = str(text.get("dtype") or text.get("torch_dtype") or "bfloat16")
        dtype = "bfloat16" if dtype == "float32" else dtype  # as SGLang does
    try:
        return _PRECISIONS[dtype]
    except KeyError:
        raise Impossible(f"--dtype {dtype} is unknown; give {', '.join(_PRECISIONS)}") from None


def _layout(facts: Facts) -> str:
    config = facts.config
    if config.mode is Mode.CAD:
        return f"{config.attention_ranks}A{config.ffn_ranks}M over {config.transport}"
    width = f" (attention TP {config.attention_tp})" if config.attention_tp > 1 else ""
    whole = config.emulation.whole
    stood_for = f", measured as {whole.attention_ranks}A{whole.ffn_ranks}F"
    lanes = f", {config.lanes} lanes" if config.lanes > 1 else ""
    return (
        f"{config.attention_ranks}A{config.ffn_ranks}F{width} over {config.transport}{lanes}"
        f"{stood_for if config.emulation.active else ''}"
    )
