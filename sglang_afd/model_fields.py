"""The fields of config.json that AFD reads: what each may be, checked once, and how they are read.

What passes here can be computed with: the gates and the families ask no further.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from sglang_afd.families import UnsupportedModel

CONTEXT_LENGTHS = (
    # where SGLang looks, in this order
    *("max_sequence_length", "seq_length", "max_seq_len", "model_max_length"),
    "max_position_embeddings",
)
_ALIASES = {"num_experts": "num_local_experts"}  # transformers writes either
_DEFAULTS: dict[str, Any] = {
    "mlp_only_layers": (),
    "decoder_sparse_step": 1,
    "head_dim": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attn_output_gate": True,
    "norm_topk_prob": True,
    "layer_types": None,
}
_MOST = 1_000_000  # of anything that is counted layer by layer or row by row
_LONGEST = 1_000_000_000  # tokens


class _Kind(NamedTuple):
    """What a field must be, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]


def _whole(least: int, most: int = _MOST) -> _Kind:
    def fits(value: Any) -> bool:
        return type(value) is int and least <= value <= most

    return _Kind(f"a whole number, {least} to {most}", fits)


def _is_list(of: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(type(item) is of for item in value)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < _LONGEST


def _or_null(kind: _Kind) -> _Kind:
    return _Kind(f"{kind.words}, or null", lambda value: value is None or kind.fits(value))


_TEXT = _Kind("a text", lambda value: isinstance(value, str))
_SWITCH = _Kind("true or false", lambda value: isinstance(value, bool))
_OBJECT = _or_null(_Kind("an object", lambda value: isinstance(value, dict)))
_KINDS: dict[str, _Kind] = {
    "architectures": _or_null(_Kind("a list of texts", _is_list(str))),
    "text_config": _OBJECT,
    "quantization_config": _OBJECT,
    "compression_config": _OBJECT,
    "rope_scaling": _OBJECT,
    "dtype": _or_null(_TEXT),
    "torch_dtype": _or_null(_TEXT),
    "hidden_act": _TEXT,
    "attention_bias": _SWITCH,
    "tie_word_embeddings": _SWITCH,
    "use_qk_norm": _SWITCH,
    "use_routing_bias": _SWITCH,
    "scoring_func": _TEXT,
    "rotary_dim": _whole(1),
    "attn_output_gate": _SWITCH,
    "norm_topk_prob": _SWITCH,
    "full_attention_interval": _whole(1),
    "layer_types": _or_null(_Kind("a list of texts", _is_list(str))),
    "linear_conv_kernel_dim": _whole(2),
    "linear_key_head_dim": _whole(1),
    "linear_value_head_dim": _whole(1),
    "linear_num_key_heads": _whole(1),
    "linear_num_value_heads": _whole(1),
    "shared_expert_intermediate_size": _whole(0),
    "topk_method": _TEXT,
    "n_group": _or_null(_whole(1)),
    "topk_group": _or_null(_whole(1)),
    "n_routed_experts": _whole(0),
    "n_shared_experts": _or_null(_whole(0)),
    "first_k_dense_replace": _whole(0),
    "moe_layer_freq": _whole(1),
    "q_lora_rank": _or_null(_whole(1)),
    "kv_lora_rank": _whole(1),
    "qk_nope_head_dim": _whole(1),
    "qk_rope_head_dim": _whole(1),
    "v_head_dim": _whole(1),
    "mlp_only_layers": _or_null(_Kind("a list of whole numbers", _is_list(int))),
    "decoder_sparse_step": _whole(1),
    "hidden_size": _whole(1),
    "intermediate_size": _or_null(_whole(1)),
    "moe_intermediate_size": _whole(1),
    "vocab_size": _whole(1),
    "num_hidden_layers": _whole(1),
    "num_attention_heads": _whole(1),
    "num_key_value_heads": _whole(1),
    "head_dim": _or_null(_whole(1)),
    "num_experts": _whole(0),
    "num_local_experts": _whole(0),
    "num_experts_per_tok": _whole(1),
    "draft_vocab_size": _whole(1),
    "num_aux_hidden_states": _or_null(_whole(1)),
    "eagle_config": _OBJECT,
    **dict.fromkeys(CONTEXT_LENGTHS, _or_null(_whole(1, _LONGEST))),
}
_INNER: dict[str, dict[str, _Kind]] = {
    "rope_scaling": {"factor": _Kind("a positive number", _is_number)},
    "quantization_config": {
        "quant_method": _or_null(_TEXT),
        "activation_scheme": _or_null(_TEXT),
        "weight_block_size": _or_null(_Kind("a list of whole numbers", _is_list(int))),
    },
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": _or_null(
            _Kind("a list of whole numbers", _is_list(int))
        ),
    },
}


def wrong_field(config: Mapping[str, Any]) -> str | None:
    """What is wrong with the first field of config.json that cannot be right; None: nothing."""
    return next(_wrong(config), None)


def _wrong(config: Mapping[str, Any], place: str = "") -> Iterator[str]:
    yield from _misfits(config, _KINDS, place)
    for name, kinds in _INNER.items():
        if isinstance(config.get(name), dict):
            yield from _misfits(config[name], kinds, f"{place}{name}.")
    if not place and isinstance(config.get("text_config"), dict):
        yield from _wrong(config["text_config"], "text_config.")


def _misfits(fields: Mapping[str, Any], kinds: dict[str, _Kind], place: str) -> Iterator[str]:
    for name, kind in kinds.items():
        if name in fields and not kind.fits(fields[name]):
            shown = json.dumps(fields[name])
            shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
            yield f"{place}{name} is {shown}; it must be {kind.words}"


class Fields:
    """A configuration's fields as attributes, as families read them of transformers' classes."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def __getattr__(self, name: str) -> Any:
        for key in (name, _ALIASES.get(name, name)):
            if key in self._fields:
                return self._fields[key]
        if name in _DEFAULTS:
            return _DEFAULTS[name]
        raise UnsupportedModel(
            f"config.json has no {name}; save the checkpoint with transformers, or "
            f"use the config.json that was published with it"
        )
