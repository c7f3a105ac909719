"""The draft checkpoint, checked whole before anything starts.

SGLang skips tensors that it does not know and leaves those at random that it misses, so a draft of
another target would be served, and be of no use.  Here every tensor must be there with its shape,
none may be left over, and the hidden states that the draft reads must be those it was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from sglang_afd import weights
from sglang_afd.facts import Refusal
from sglang_afd.families import Shape, UnsupportedModel
from sglang_afd.families.family import Tensors, attention_widths, feed_forward
from sglang_afd.model_fields import Fields, wrong_field
from sglang_afd.weights import BrokenFile, Stored

ARCHITECTURE = "LlamaForCausalLMEagle3"
_LAYER = "midlayer"
_LAYER_TOO = "layers.0."
"""How some exports spell the one layer, which SGLang takes too."""
_TO_TARGET, _OF_TARGET = "d2t", "t2d"
_DTYPES = {_TO_TARGET: ("I64",), _OF_TARGET: ("BOOL", "U8")}
_PLAIN = ("BF16", "F16", "F32")
_OPTIONAL = "embed_tokens.weight"
"""Some exports have it; the target's is used."""
_UNSERVED = ("fc_norm", "use_aux_norm", "norm_before_fc", "norm_output", "bias", "attention_bias")
_AUX = "eagle_aux_hidden_state_layer_ids"
_DEFAULT_COUNT = 3
CHOSEN = "--afd-spec-aux-layers"
_ANOTHER = "give --speculative-draft-model-path a draft that was trained for this target"
_WHOLE = "give --speculative-draft-model-path a complete checkpoint of the draft"


class Target(NamedTuple):
    """What a draft must fit: the served model's width, vocabulary and layers."""

    hidden_size: int
    vocab_size: int
    num_layers: int


def refusals(
    path: str, target: Target, attention_tp: int, chosen: Sequence[int] = ()
) -> Iterator[Refusal]:
    """What is wrong with the draft checkpoint in the directory `path`.

    chosen: the layers that it is to read (--afd-spec-aux-layers); empty: not said.
    """
    directory = Path(path)
    if not directory.is_dir():
        yield Refusal(
            f"--speculative-draft-model-path: there is no directory {path!r}",
            "correct it; a draft of the Hugging Face Hub must be downloaded first, so that its "
            "tensors can be checked",
        )
        return
    try:
        config = _config(directory / "config.json")
    except ValueError as error:
        yield Refusal(f"the draft's config.json: {error}", _WHOLE)
        return
    wrong = list(_wrong_config(config, target, attention_tp, chosen))
    yield from wrong
    if not wrong:
        yield from _wrong_tensors(directory, config, target, chosen)


def aux_layers(
    config: Mapping[str, Any], num_layers: int, chosen: Sequence[int] = ()
) -> tuple[int, ...]:
    """The target's layers, from 0, whose outputs the draft reads.

    Those that its config.json names, else those that are `chosen`, else SGLang's own choice, which
    names layers by their inputs.
    """
    named = (config.get("eagle_config") or {}).get(_AUX)
    if named is not None:
        return tuple(named)
    if chosen:
        return tuple(chosen)
    return tuple(layer - 1 for layer in (2, num_layers // 2, num_layers - 3))


def read_config(path: str) -> Mapping[str, Any]:
    """config.json of a draft that `refusals` lets pass."""
    return _config(Path(path) / "config.json")


def _config(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no JSON object")
    if problem := wrong_field(found):
        raise ValueError(problem)
    return found


def _wrong_config(
    config: Mapping[str, Any], target: Target, tp: int, chosen: Sequence[int]
) -> Iterator[Refusal]:
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture != ARCHITECTURE:
        yield Refusal(
            f"the draft's architecture is {architecture}; served is {ARCHITECTURE}",
            "use a draft in that format",
        )
        return
    fields = Fields(config)
    try:
        yield from _wrong_sizes(fields, target, tp)
        list(_tensors(fields, target, 1))  # the rest of the fields are there
    except UnsupportedModel as error:
        yield Refusal(f"the draft's {error}".partition("; ")[0], _WHOLE)
        return
    for name in _UNSERVED:
        if config.get(name) or (config.get("eagle_config") or {}).get(name):
            yield Refusal(
                f"the draft's config.json sets {name}, which is not shown to work yet",
                "use a draft without it",
            )
    if config.get("tie_word_embeddings"):
        yield Refusal("the draft has no lm_head of its own (tie_word_embeddings)", _ANOTHER)
    yield from _wrong_layers(config, target, chosen)


def _wrong_sizes(fields: Fields, target: Target, tp: int) -> Iterator[Refusal]:
    expected = {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "num_hidden_layers": 1,
    }
    for name, size in expected.items():
        if getattr(fields, name) != size:
            of = "one layer is served" if size == 1 else f"the target's is {size}"
            yield Refusal(f"the draft's {name} is {getattr(fields, name)}; {of}", _ANOTHER)
    heads, kv_heads = fields.num_attention_heads, fields.num_key_value_heads
    if heads % tp or (kv_heads % tp and tp % kv_heads):
        yield Refusal(
            f"the draft's {heads} attention heads and {kv_heads} key-value heads do not divide "
            f"over --afd-attention-tp {tp}",
            "lower --afd-attention-tp",
        )


def _wrong_layers(
    config: Mapping[str, Any], target: Target, chosen: Sequence[int]
) -> Iterator[Refusal]:
    named = config.get("eagle_config") or {}
    if not named.get("use_aux_hidden_state", True):
        yield Refusal(
            "the draft reads the target's last hidden states alone (use_aux_hidden_state is off)",
            "use a draft that reads three layers",
        )
        return
    layers = aux_layers(config, target.num_layers, chosen)
    if chosen and tuple(chosen) != layers:
        yield Refusal(
            f"{CHOSEN} {','.join(map(str, chosen))} are not the layers that the draft was trained "
            f"on, which its config.json names: {','.join(map(str, layers))} (by their outputs, "
            f"from 0)",
            f"leave {CHOSEN} out",
        )
        return
    last = target.num_layers - 2  # that of the last layer leaves the model without being captured
    ascending = all(a < b for a, b in pairwise(layers))
    if not layers or not ascending or layers[0] < 0 or layers[-1] > last:
        whose = f"its config.json names ({_AUX})"
        if _AUX not in named:
            whose = f"{CHOSEN} names" if chosen else "its config.json leaves to SGLang's choice"
        yield Refusal(
            f"the layers that the draft reads, which {whose}, are "
            f"{', '.join(map(str, layers))} of the target's {target.num_layers}; they must be of 0 "
            f"to {last}, ascending",
            _ANOTHER,
        )
    counted = config.get("num_aux_hidden_states")
    if counted is None and _AUX not in named:
        counted = _DEFAULT_COUNT  # that SGLang's draft takes where its config.json says nothing
    if counted not in (None, len(layers)):
        yield Refusal(
            f"the draft's num_aux_hidden_states is {counted}, but it reads {len(layers)} layers",
            _ANOTHER,
        )


def _tensors(fields: Fields, target: Target, aux: int) -> Tensors:
    """All tensors of a draft that reads `aux` layers, with their shapes."""
    hidden, words = fields.hidden_size, fields.draft_vocab_size
    query, key = attention_widths(fields)
    yield "fc.weight", (hidden, aux * hidden)
    yield "norm.weight", (hidden,)
    yield "lm_head.weight", (words, hidden)
    yield _TO_TARGET, (words,)
    yield _OF_TARGET, (target.vocab_size,)
    for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm"):
        yield f"{_LAYER}.{norm}.weight", (hidden,)
    for projection, width in (("q", query), ("k", key), ("v", key)):
        # of the token's embedding and the target's hidden state, one after the other
        yield f"{_LAYER}.self_attn.{projection}_proj.weight", (width, 2 * hidden)
    yield f"{_LAYER}.self_attn.o_proj.weight", (hidden, query)
    yield from feed_forward(f"{_LAYER}.mlp", hidden, fields.intermediate_size)


def _wrong_tensors(
    directory: Path, config: Mapping[str, Any], target: Target, chosen: Sequence[int]
) -> Iterator[Refusal]:
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        yield Refusal(f"{directory} has no .safetensors file", _WHOLE)
        return
    try:
        stored = weights.stored_tensors(files)
    except BrokenFile as error:
        yield Refusal.of(error)
        return
    found = {_spelt(name): tensor for name, tensor in stored.items()}
    aux = len(aux_layers(config, target.num_layers, chosen))
    expected = dict(_tensors(Fields(config), target, aux))
    wrong = list(_differences(found, expected))
    yield from wrong
    if not wrong and (problem := _wrong_map(directory, found)):
        yield Refusal(f"the draft's {problem}", _ANOTHER)


def _spelt(name: str) -> str:
    return name.replace(_LAYER_TOO, f"{_LAYER}.", 1) if name.startswith(_LAYER_TOO) else name


def _differences(found: Mapping[str, Stored], expected: Mapping[str, Shape]) -> Iterator[Refusal]:
    missing = sorted(expected.keys() - found)
    if missing:
        yield Refusal(f"the draft lacks {', '.join(missing)}", _WHOLE)
    unknown = sorted(found.keys() - expected - {_OPTIONAL})
    if unknown:
        yield Refusal(
            f"the draft has tensors that {ARCHITECTURE} does not read: {', '.join(unknown)}",
            _ANOTHER,
        )
    for name in sorted(expected.keys() & found):
        tensor, shape = found[name], expected[name]
        if tensor.shape != shape:
            yield Refusal(
                f"the draft's {name} is {weights.text(tensor.shape)}; its config.json and the "
                f"target make it {weights.text(shape)}",
                _ANOTHER,
            )
        elif tensor.dtype not in _DTYPES.get(name, _PLAIN):
            yield Refusal(
                f"the draft's {name} is {tensor.dtype}; served is "
                f"{', '.join(_DTYPES.get(name, _PLAIN))}",
                "use an unquantised draft",
            )


def _wrong_map(directory: Path, found: Mapping[str, Stored]) -> str | None:
    """What is wrong with the draft's words as the target's: d2t tells how much further on in the
    target's vocabulary each is, t2d which of the target's words the draft has."""
    import numpy as np
    from safetensors import safe_open

    def read(name: str) -> Any:
        with safe_open(directory / found[name].file, framework="np") as opened:
            return opened.get_tensor(name)

    further, has = read(_TO_TARGET), read(_OF_TARGET).astype(bool)
    words = further + np.arange(len(further))
    if words.min() < 0 or words.max() >= len(has):
        return f"{_TO_TARGET} leads outside of the target's {len(has)} words"
    named = np.zeros_like(has)
    named[words] = True
    if named.sum() != len(words) or (named != has).any():
        return f"{_TO_TARGET} and {_OF_TARGET} name different words"
    return None


def kv_elements(config: Mapping[str, Any], attention_tp: int) -> int:
    """Elements of the KV cache that a token takes on each rank of an attention group."""
    fields = Fields(config)
    _, key = attention_widths(fields)
    head = key // fields.num_key_value_heads
    return 2 * head * max(1, fields.num_key_value_heads // attention_tp)


def stored_bytes(path: str) -> int:
    """Size of the draft's weight files."""
    return sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))


def describe(config: Mapping[str, Any], num_layers: int, chosen: Sequence[int] = ()) -> str:
    """A draft in a few words, for the gate's summary."""
    layers = aux_layers(config, num_layers, chosen)
    return (
        f"a draft of {config['draft_vocab_size']} words that reads layers "
        f"{', '.join(map(str, layers))}"
    )
