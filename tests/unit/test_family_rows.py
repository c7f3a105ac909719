"""Every family's adapter against transformers, and what its small checkpoint is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_afd import context as context_module
from sglang_afd.config import AfdConfig
from sglang_afd.context import RankContext
from sglang_afd.embedded.evaluate import greedy
from sglang_afd.families import Family, family_of
from sglang_afd.gate import findings
from sglang_afd.upstream.loading import HOOKS
from tests.support.families import ROWS, language_model
from tests.support.family_checkpoints import seeded_family
from tests.support.gate_facts import make_facts

pytestmark = [pytest.mark.unit, pytest.mark.parametrize("row", ROWS)]

PROMPT = [300, 41, 1207, 88, 960]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The checkpoint of each row."""
    return {row: seeded_family(tmp_path_factory.mktemp(row), row) for row in ROWS}


def loaded(folder: Path) -> tuple[Any, dict[str, Any]]:
    """transformers' model, and what it says of the loading."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        experts_implementation="eager",
        output_loading_info=True,
    )
    return model.eval(), report


def family(row: str) -> Family:
    return family_of(ROWS[row]().architectures[0])


def answers(model: Any, tokens: list[int]) -> bool:
    """Whether the model's greedy answer to `PROMPT` is `tokens`; in one pass, as it is if each of
    them is the best after those before it."""
    with torch.inference_mode():
        best = model(torch.tensor([PROMPT + tokens])).logits[0].argmax(-1)
    return best[len(PROMPT) - 1 : -1].tolist() == tokens


def test_transformers_finds_its_tensors_and_no_other(row: str, folders: dict[str, Path]) -> None:
    _, report = loaded(folders[row])
    assert not any(report.values()), report


def test_the_gate_lets_the_checkpoint_pass(row: str, folders: dict[str, Path]) -> None:
    failed = [f for f in findings(make_facts(folders[row])) if f.gate == "model" and not f.passed]
    assert not failed, failed


def test_the_facts_are_those_that_transformers_builds(row: str, folders: dict[str, Path]) -> None:
    facts = family(row).facts(language_model(row))
    model, _ = loaded(folders[row])
    layers = [i for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "experts")]
    assert facts.layers == tuple(layers) and len(layers) >= 2
    for layer in layers:
        experts = model.model.layers[layer].mlp.experts
        assert experts.down_proj.shape == (
            facts.num_experts,
            facts.hidden_size,
            facts.intermediate_size,
        )
        assert facts.top_k < facts.num_experts == experts.num_experts


def test_every_kind_of_tensor_matters(row: str, folders: dict[str, Path]) -> None:
    """Were one lost or mixed up on the way, the tests of equality would notice."""
    model, _ = loaded(folders[row])
    with_all, _ = greedy(model, PROMPT, NEW_TOKENS)
    assert len(set(with_all)) > 4, "a loop"
    assert answers(model, with_all)
    kinds: dict[str, list[torch.Tensor]] = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in name:
            kinds.setdefault(".".join(p for p in name.split(".") if not p.isdigit()), []).append(
                tensor
            )
    assert len(kinds) > 12
    for kind, tensors in kinds.items():
        kept = [tensor.clone() for tensor in tensors]
        for tensor in tensors:
            # a norm's weights in another order, anything else gone
            tensor.data.copy_(tensor.flip(0) if "norm" in kind else torch.zeros_like(tensor))
        assert not answers(model, with_all), f"the answer does not depend on {kind}"
        for tensor, values in zip(tensors, kept):
            tensor.data.copy_(values)
    assert answers(model, with_all)


def test_all_experts_are_used(row: str, folders: dict[str, Path]) -> None:
    model, _ = loaded(folders[row])
    facts, used = family(row).facts(language_model(row)), []
    for layer in facts.layers:
        model.model.layers[layer].mlp.experts.register_forward_hook(
            lambda _m, args, _out: used.append(set(args[1].flatten().tolist()))
        )
    model(torch.tensor([list(range(100, 612))]))
    assert used == [set(range(facts.num_experts))] * len(facts.layers)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.rpartition(".")[2])
def test_each_role_reads_its_own_tensors(
    row: str, folders: dict[str, Path], hook: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tensor on one rank alone; experts on F ranks, by their numbers, all else on A."""
    files = sorted(map(str, folders[row].glob("*.safetensors")))
    ours, ffn = family(row), 2
    facts = ours.facts(language_model(row))
    read: list[set[str]] = []
    for rank in range(1 + ffn):
        config = AfdConfig(attention_ranks=1, ffn_ranks=ffn)
        monkeypatch.setattr(context_module, "_current", RankContext(config, rank, ours, facts, {}))
        read.append({name for name, _ in hook.fn(None, files)})
    assert (
        sum(map(len, read))
        == len(set().union(*read))
        == len(dict(ours.tensors(language_model(row))))
    )
    assert not [name for name in read[0] if ".experts." in name]
    owned = facts.num_experts // ffn
    for rank, names in enumerate(read[1:]):
        numbers = {int(name.partition(".experts.")[2].split(".")[0]) for name in names}
        assert numbers == set(range(rank * owned, (rank + 1) * owned))
        assert len(names) == len(facts.layers) * owned * 3


def test_a_draft_models_experts_are_not_read(row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published checkpoints keep them in layers past the model's."""
    ours = family(row)
    facts = ours.facts(language_model(row))
    config = AfdConfig(attention_ranks=1, ffn_ranks=1)
    for layer, reads in ((max(facts.layers), True), (max(facts.layers) + 1, False)):
        name = f"{ours.experts.prefix(layer)}.0.{ours.experts.gate}.weight"
        assert RankContext(config, 1, ours, facts, {}).loads_tensor(name) == reads
        assert not RankContext(config, 0, ours, facts, {}).loads_tensor(name)


def test_names_are_read_as_they_are_spelt(row: str) -> None:
    config = language_model(row)
    ours = family(row)
    found = 0
    for name, shape in ours.tensors(config):
        tensor = ours.expert_tensor(name)
        assert (tensor is not None) == (".experts." in name)
        if tensor is not None:
            found += 1
            assert ours.experts.spell(tensor) == name
            facts = ours.facts(config)
            sizes = (facts.intermediate_size, facts.hidden_size)
            assert shape == (sizes[::-1] if tensor.projection == "w2" else sizes)
    assert found
