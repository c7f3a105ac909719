"""A planted checkpoint decides by its experts, and rounding decides nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang_afd.embedded.evaluate import load, zero_experts
from tests.support.checkpoints import seeded_qwen3_moe
from tests.support.planting import Planting

pytestmark = pytest.mark.unit

EXPERTS, TOP_K, VOCAB = 8, 2, 512
IDS = torch.randint(3, VOCAB, (4, 128), generator=torch.Generator().manual_seed(1))


def model(directory: Path, planting: Planting | None) -> torch.nn.Module:
    return load(
        seeded_qwen3_moe(
            directory,
            seed=5,
            layers=2,
            hidden=1024,
            experts=EXPERTS,
            top_k=TOP_K,
            moe_intermediate=128,
            vocab=VOCAB,
            router_spread=1.0,
            logit_spread=1.0,
            attention_scale=0.3,
            expert_scale=0.4,
            planting=planting,
        ),
        "cpu",
    )


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    return model(tmp_path_factory.mktemp("planted"), Planting())


@torch.no_grad()
def top1(net: torch.nn.Module) -> torch.Tensor:
    return net(input_ids=IDS).logits.float().argmax(-1)


def router_gaps(net: torch.nn.Module) -> torch.Tensor:
    """What the least of the chosen experts' router logits leads the others by, everywhere."""
    gaps: list[torch.Tensor] = []

    def note(gate: torch.nn.Module, args: tuple[torch.Tensor, ...], _: object) -> None:
        logits = args[0].reshape(-1, gate.weight.shape[1]) @ gate.weight.T
        ordered = logits.sort(dim=-1, descending=True).values
        gaps.append(ordered[:, TOP_K - 1] - ordered[:, TOP_K])

    hooks = [layer.mlp.gate.register_forward_hook(note) for layer in net.model.layers]
    top1(net)
    for hook in hooks:
        hook.remove()
    return torch.cat(gaps)


def test_no_router_decision_is_close(planted: torch.nn.Module, tmp_path: Path) -> None:
    assert (router_gaps(planted) < 0.1).float().mean() < 0.002
    # Without planting many are: else this would show nothing.
    assert (router_gaps(model(tmp_path, None)) < 0.1).float().mean() > 0.1


def test_the_experts_decide_most_tokens(planted: torch.nn.Module, tmp_path: Path) -> None:
    with_experts = top1(planted)
    assert len(with_experts.unique()) > VOCAB / 4
    other = model(tmp_path, Planting())
    zero_experts(other)
    assert (top1(other) == with_experts).float().mean() < 0.5


def test_wrong_experts_give_wrong_tokens(planted: torch.nn.Module, tmp_path: Path) -> None:
    right = top1(planted)
    other = model(tmp_path, Planting())
    with torch.no_grad():
        for layer in other.model.layers:
            for weight in layer.mlp.experts.parameters():
                weight.copy_(weight.roll(1, dims=0))
    assert (top1(other) == right).float().mean() < 0.5


def test_rounding_to_bf16_changes_few_tokens(planted: torch.nn.Module, tmp_path: Path) -> None:
    rounded = model(tmp_path, Planting()).bfloat16()
    assert (top1(rounded) == top1(planted)).float().mean() > 0.98
