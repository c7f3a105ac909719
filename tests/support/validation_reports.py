"""Reports of validations as tests want them."""

from __future__ import annotations

from typing import Any

from sglang_afd.validation import report
from sglang_afd.validation.report import (
    Asked,
    Identity,
    LayerError,
    Layers,
    PromptResult,
    Report,
    figures_of,
    judge,
)
from sglang_afd.validation.thresholds import THRESHOLDS

GOOD_LAYER = LayerError(
    layer=0, rows=9, rerouted=0, input_largest=0, input_p90=0, output_largest=1e-6, output_p90=1e-6
)


def result(prompt: int, **changes: Any) -> PromptResult:
    fields: dict[str, Any] = {
        "prompt": prompt,
        "length": 5,
        "tokens": 2,
        "first_divergence": None,
        "divergence_gap": None,
        "decode_errors": [0.0, 1e-6],
        "ranks": [1, 1],
        "margins": [0.0, 0.0],
        "errors": [0.0, 1e-6],
    }
    return PromptResult(**{**fields, **changes})


def make(**changes: Any) -> Report:
    """A report that passes, but for `changes`; its figures and verdict are what it calls for."""
    side = {"configuration": {}, "checkpoint": {"model.safetensors": "aa"}, "software": {}}
    fields: dict[str, Any] = {
        "version": report.VERSION,
        "created": "2026-11-30T00:00:00+00:00",
        "command": [],
        "seconds": 1.0,
        "layout": "1A1F over gloo",
        "candidate": Identity(kind="afd", **side),
        "reference": Identity(kind="hf", **side),
        "asked": Asked(
            name="short", seed=1, sha256="00", lengths=[5, 5], new_tokens=2, of_text=True
        ),
        "thresholds": THRESHOLDS["float32"],
        "problems": [],
        "results": [result(0), result(1)],
        "layers": Layers(available=True, note="all agree", layers=[GOOD_LAYER]),
        "figures": {},
        "verdict": "fail",
        "reasons": [],
    }
    made = Report(**{**fields, **changes})
    made.figures = figures_of(made.results, made.layers)
    made.verdict, made.reasons = judge(made)
    return made
