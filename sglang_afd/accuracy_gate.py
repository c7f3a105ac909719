"""The accuracy gate: has a validation shown that the deployment gives the model's answers?

A report counts for the deployment that it was made of: the same checkpoint, layout and flags that
decide the answers, with the same versions of SGLang and of this package.  Without a report the
gate passes and warns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sglang_afd.command_line import expand_config_file, last_value
from sglang_afd.config import ConfigError
from sglang_afd.facts import Facts, Refusal
from sglang_afd.flags import VALIDATION, parse
from sglang_afd.identity import checkpoint_identity
from sglang_afd.topology import TopologyError
from sglang_afd.validation import report
from sglang_afd.validation.report import CHECKPOINT, BadReport, Report

_AGAIN = f"validate this deployment (python -m sglang_afd.validate), or leave {VALIDATION} out"
_INDIFFERENT = (
    *("max_tokens_per_rank", "prefill_block", "startup_timeout", "exchange_timeout"),
    *("expert_placement", "emulated_attention_ranks", "command_role"),
)
"""What of a deployment's description may differ from the validated one's."""
_FLAGS = (
    *("--dtype", "--quantization", "--kv-cache-dtype", "--attention-backend"),
    *("--moe-runner-backend", "--load-format", "--json-model-override-args", "--revision"),
    *("--speculative-algorithm", "--speculative-draft-model-path", "--cuda-graph-backend-decode"),
)
"""SGLang's flags that decide which kernels, or which weights, give the answers."""
_PACKAGES = ("sglang", "sglang_afd")


def refusals(facts: Facts) -> Iterator[Refusal]:
    """Why the report that is given says nothing of this deployment."""
    if not facts.validation:
        return
    try:
        found = report.read(Path(facts.validation))
    except BadReport as error:
        yield Refusal(f"{VALIDATION}: {error}", _AGAIN)
        return
    for shortcoming in (*report.shortcomings(found), *_of_another(found, facts)):
        yield Refusal(f"{VALIDATION} {facts.validation}: {shortcoming}", _AGAIN)


def summary(facts: Facts) -> str:
    """What shows that the answers are right, or that nothing does."""
    if facts.validation:
        return f"{facts.validation} shows that this deployment gives the model's answers"
    if _has_no_answers(facts):
        return "the answers are not the model's, so there are none to validate"
    return "no report shows that this deployment gives the model's answers"


def advice(facts: Facts) -> str:
    """What to do about a missing report; empty: none is missing."""
    if facts.validation or _has_no_answers(facts):
        return ""
    return (
        f"run python -m sglang_afd.validate with these flags, and give its report to {VALIDATION}"
    )


def _has_no_answers(facts: Facts) -> bool:
    dummy = last_value(facts.args, "--load-format") == "dummy"
    return dummy or facts.config.emulated_ffn_ranks is not None


def _of_another(found: Report, facts: Facts) -> Iterator[str]:
    """In what the validated deployment differs from this one."""
    was = found.candidate.configuration
    if was.get(CHECKPOINT) != checkpoint_identity(facts.checkpoint.path):
        yield f"it is of another checkpoint than {facts.checkpoint.path}"
    said = was.get("afd")
    layout = said.get("config", {}) if isinstance(said, dict) else {}
    for name, here in json.loads(facts.config.to_json()).items():
        there = layout.get(name)
        if name not in _INDIFFERENT and here != there:
            yield f"it is of a deployment with {name} {there}, this one has {here}"
    device = "cpu" if facts.on_cpu else "cuda"
    if (was.get("arguments") or {}).get("device") != device:
        yield f"it is of a deployment on another device than {device}"
    try:
        command = expand_config_file([str(arg) for arg in was.get("command", ())])
        validated = parse(command, transport=facts.config.transport, on_cpu=facts.on_cpu)
    except (ConfigError, TopologyError) as error:
        yield f"its command line cannot be read: {error}"
        return
    for flag in _FLAGS:
        here, there = last_value(facts.args, flag), last_value(validated.sglang_args, flag)
        if here != there:
            yield f"it is of a deployment with {flag} {there}, this one has {here}"
    packages = found.candidate.software.get("packages") or {}
    for package in _PACKAGES:
        if packages.get(package) != _installed(package):
            yield (
                f"it is of {package} {packages.get(package)}, this environment has "
                f"{_installed(package)}"
            )


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
