"""The embedded model: a small Qwen3-MoE trained on Python's documentation.

What ``launch_server`` serves when no ``--model-path`` is given. PROVENANCE.md beside this file says
what it was trained on, how, and what it can and cannot do.  It has a draft for speculation.
"""

from __future__ import annotations

from pathlib import Path

DESCRIPTION = (
    "the embedded Qwen3-MoE (5.4 M parameters, 4 layers, 12 experts, 4 a token), which has learnt "
    "Python's documentation by heart and knows nothing else"
)
SAMPLE_PROMPT = 'The "with" statement is used to'
SAMPLE_CHAT = "Explain the `with` statement."


def path() -> Path:
    """The checkpoint's directory, for ``--model-path``."""
    return Path(__file__).resolve().parent / "model"


def draft_path() -> Path:
    """The directory of its EAGLE-3 draft, for ``--speculative-draft-model-path``."""
    return Path(__file__).resolve().parent / "draft"
