"""SGLang's own FP8 layers take each expert's blocks and scales from a checkpoint of every family.

No kernel runs here: those need CUDA devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from sglang_afd import context as context_module
from sglang_afd import embedded
from sglang_afd.config import AfdConfig
from sglang_afd.context import RankContext
from sglang_afd.families import FAMILIES, ExpertTensor, Family, MoeFacts
from sglang_afd.upstream.expert_layers import ExpertModel, _no_dispatcher

pytestmark = [pytest.mark.unit, pytest.mark.upstream]

LAYERS, BLOCK = (1, 2), 128
FACTS = MoeFacts(LAYERS, num_experts=4, top_k=2, hidden_size=2 * BLOCK, intermediate_size=BLOCK)
PUBLISHED = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
}


@pytest.fixture(params=FAMILIES.values(), ids=lambda family: family.name)
def family(request: pytest.FixtureRequest) -> Family:
    return request.param


@pytest.fixture
def model(family: Family, monkeypatch: pytest.MonkeyPatch) -> Iterator[ExpertModel]:
    """The second of two F ranks: experts 2 and 3."""
    from sglang.srt.layers.moe.fused_moe_triton import layer
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.runtime_context import create_context, use_context
    from sglang.srt.server_args import ServerArgs

    monkeypatch.setattr(layer, "create_moe_dispatcher", _no_dispatcher)
    rank = RankContext(AfdConfig(attention_ranks=1, ffn_ranks=2), 2, family, FACTS, {})
    monkeypatch.setattr(context_module, "_current", rank)
    args = ServerArgs(str(embedded.path()), device="cpu", attention_backend="torch_native")
    with use_context(create_context(args, role="scheduler")):
        yield ExpertModel(SimpleNamespace(num_hidden_layers=3), Fp8Config.from_config(PUBLISHED))


def tensors(family: Family) -> Iterator[tuple[str, torch.Tensor]]:
    """All experts' weights, and scales that name their place."""
    for layer, expert, projection in product(LAYERS, range(4), ("w1", "w2", "w3")):
        shape = (2, 1) if projection == "w2" else (1, 2)
        place = 1000 * layer + 100 * expert + 10 * int(projection[1])
        weight, scale = (
            family.experts.spell(ExpertTensor(layer, expert, projection, suffix))
            for suffix in ("weight", "weight_scale_inv")
        )
        rows, columns = (BLOCK * blocks for blocks in shape)
        yield weight, torch.full((rows, columns), expert + 0.25).to(torch.float8_e4m3fn)
        yield scale, place + torch.arange(2.0).view(shape)


def test_scales_are_loaded_with_their_experts(model: ExpertModel, family: Family) -> None:
    model.load_weights(tensors(family))
    for layer, local in product(LAYERS, range(2)):
        experts, expert = model.layers[str(layer)], local + 2
        place = 1000 * layer + 100 * expert
        for weight, blocks, scales in (
            (experts.w13_weight, (2, 2), experts.w13_weight_scale_inv),
            (experts.w2_weight, (2, 1), experts.w2_weight_scale_inv),
        ):
            assert weight.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32
            assert weight[local].shape == tuple(BLOCK * n for n in blocks)
            assert scales[local].shape == blocks
            assert (weight[local].float() == expert + 0.25).all()
        w13, w2 = experts.w13_weight_scale_inv[local], experts.w2_weight_scale_inv[local]
        assert w13.tolist() == [[place + 10, place + 11], [place + 30, place + 31]]
        assert w2.flatten().tolist() == [place + 20, place + 21]


@pytest.mark.parametrize("projection", ["w1", "w2"])
def test_a_missing_scale_is_named(model: ExpertModel, family: Family, projection: str) -> None:
    lost = family.experts.spell(ExpertTensor(2, 3, projection, "weight_scale_inv"))
    with pytest.raises(ValueError, match=f"found no {lost} .1 tensors are missing"):
        model.load_weights((name, value) for name, value in tensors(family) if name != lost)
