"""Requests that no model can compute: refused here, for they end the rank that gets them.

SGLang takes a prompt without tokens and tokens outside the vocabulary as they come; the rank then
fails inside its forward, and the deployment with it.
"""

from __future__ import annotations

from typing import Any

from sglang_afd.upstream.hooks import Hook, Kind


def _refuse_uncomputable(manager: Any, request: Any, input_ids: Any) -> None:
    """Raise ValueError, which the endpoints answer with 400, unless `request` can be computed.

    Args:
        input_ids: the prompt's tokens; None where it has embeddings in their place.
    """
    vocabulary = manager.model_config.vocab_size
    if getattr(request, "input_embeds", None) is None and input_ids is not None:
        continues = (getattr(request, "session_params", None) or {}).get("rid")
        if len(input_ids) == 0 and not continues:
            raise ValueError("the prompt has no tokens; give at least one")
        for token in (min(input_ids, default=0), max(input_ids, default=0)):
            if not 0 <= token < vocabulary:
                raise ValueError(
                    f"input_ids has token {token}; the model's are 0 to {vocabulary - 1}"
                )
    wanted = getattr(request, "top_logprobs_num", None) or 0
    if not 0 <= wanted <= vocabulary:
        raise ValueError(
            f"top_logprobs_num is {wanted}; the model has {vocabulary} tokens to choose from"
        )


HOOKS: tuple[Hook, ...] = (
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._validate_one_request",
        Kind.BEFORE,
        _refuse_uncomputable,
        "a request that fails in a forward ends the deployment: it gets a 400 in its place",
    ),
)
