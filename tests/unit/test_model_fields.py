"""config.json may hold anything: a field that cannot be right is refused by its name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from sglang_afd import gate, transport_gate
from sglang_afd.facts import Facts
from sglang_afd.gate import Gate, findings
from sglang_afd.model_fields import _INNER, _KINDS, wrong_field
from tests.support.gate_facts import FP8, GPUS, MODEL, make_facts, write_model

pytestmark = pytest.mark.unit

SENSELESS: tuple[Any, ...] = (
    *(None, True, "12", "", 5, 0, -12, 1.5, 10**12, float("nan")),
    *([], [1], ["x"], [[0]], {}, {"a": 1}, "fp8"),
)


def look(directory: Path, config: dict[str, Any], *, gpus: bool = True) -> list[str]:
    """What all gates refuse of a checkpoint, those that ``auto`` looks at first too."""
    (write_model(directory) / "config.json").write_text(json.dumps(config))
    facts = make_facts(directory, machine=GPUS if gpus else None)

    def asked(transport: str) -> Facts:
        return dataclasses.replace(facts, config=facts.config.__class__(
            attention_ranks=1, ffn_ranks=1, transport=transport))  # fmt: skip

    name, _ = transport_gate.choose(asked, not gpus, two_commands=False)
    chosen = dataclasses.replace(asked(name), args=facts.args)
    return [f"{f.message}; {f.mend}" for f in findings(chosen) if not f.passed]


@pytest.mark.parametrize(
    "name", [*_KINDS, *(f"{o}.{i}" for o, inner in _INNER.items() for i in inner)]
)
def test_no_value_of_a_field_surprises_a_gate(tmp_path: Path, name: str) -> None:
    """Each value is either refused by the field's name, or one that the gates can compute with."""
    outer, _, inner = name.partition(".")
    for value in SENSELESS:
        changed = {**FP8, inner: value} if inner else value
        for config in (
            {**MODEL, outer: changed},
            {"architectures": MODEL["architectures"], "text_config": {**MODEL, outer: changed}},
        ):
            texts = look(tmp_path, config)
            assert not [text for text in texts if "could not check" in text], (name, value, texts)
            if problem := wrong_field(config):
                assert name in problem and len([t for t in texts if name in t]) == 1, texts


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_experts": None}, "config.json: num_experts is null; it must be a whole number"),
        ({"num_experts": "12"}, 'num_experts is "12"; it must be a whole number'),
        ({"num_hidden_layers": "4"}, 'num_hidden_layers is "4"'),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000; it must be a whole"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0; it must be a whole number, 1 to"),
        ({"num_key_value_heads": 0}, "num_key_value_heads is 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"architectures": 5}, "architectures is 5; it must be a list of texts, or null"),
        ({"architectures": "Qwen3MoeForCausalLM"}, "it must be a list of texts"),
        ({"quantization_config": "fp8"}, 'quantization_config is "fp8"; it must be an object'),
        (
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": 5}},
            "quantization_config.weight_block_size is 5; it must be a list of whole numbers",
        ),
        ({"text_config": [1]}, "text_config is [1]; it must be an object, or null"),
        ({"hidden_act": "gelu"}, "activation is gelu; SGLang's Qwen3MoeForCausalLM has silu alone"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "the router picks 5 experts a token of 4"),
    ],
)  # fmt: skip
def test_a_senseless_config_is_one_refusal(
    tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    texts = [t for t in look(tmp_path, {**MODEL, **changes}, gpus=False) if "tensors" not in t]
    assert len(texts) == 1 and expected in texts[0], texts


def test_fields_may_be_null_where_transformers_writes_null(tmp_path: Path) -> None:
    nulls = dict.fromkeys(("head_dim", "rope_scaling", "quantization_config", "mlp_only_layers"))
    assert look(tmp_path, {**MODEL, **nulls}) == []


def test_an_override_of_a_wrong_type_is_named(tmp_path: Path) -> None:
    flags = ("--json-model-override-args", '{"num_experts": "16"}')
    [finding] = [f for f in findings(make_facts(write_model(tmp_path), *flags)) if not f.passed]
    assert 'num_experts is "16"' in finding.message
    assert "--json-model-override-args says it" in finding.mend
    facts = make_facts(tmp_path, "--json-model-override-args", "{bad")
    [finding] = [f for f in findings(facts) if not f.passed]
    assert finding.message == "--json-model-override-args is no JSON object: {bad"
    assert finding.mend == "correct it"


def test_whatever_a_gate_raises_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(facts: Facts) -> Any:
        raise TypeError("'<' not supported")

    facts = make_facts(write_model(tmp_path))
    for index, whole in enumerate(gate.GATES):
        broken = Gate(whole.name, fail, whole.summary)
        gates = (*gate.GATES[:index], broken, *gate.GATES[index + 1 :])
        monkeypatch.setattr(gate, "GATES", gates)
        [refusal] = [f for f in findings(facts) if not f.passed]
        assert refusal.gate == whole.name and refusal.mend
        assert f"the {whole.name} gate could not check" in refusal.message
        assert "TypeError: '<' not supported" in refusal.message
        monkeypatch.undo()
