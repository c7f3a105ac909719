"""Of a checkpoint that is more than a language model, the language model alone is served."""

from __future__ import annotations

from typing import Any

from sglang_afd.families import FAMILIES
from sglang_afd.upstream.hooks import Hook, Kind


def _leave_the_rest_out(config: Any, *args: Any, **kwargs: Any) -> None:
    family = FAMILIES.get((getattr(config, "architectures", None) or [""])[0])
    if family is not None and family.wrapped:
        config.language_model_only = True


HOOKS = (
    Hook(
        "sglang.srt.utils.hf_transformers.config.get_config",
        Kind.AFTER,
        _leave_the_rest_out,
        "a vision tower, whose input AFD refuses, would take A ranks' memory; SGLang's own flag "
        "--language-model-only is for a few other models",
    ),
)
