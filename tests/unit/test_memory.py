"""F ranks on smaller or fuller GPUs change nothing of what A ranks give to their KV cache."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_afd import context as context_module
from sglang_afd.config import AfdConfig
from sglang_afd.context import RankContext
from sglang_afd.families import FAMILIES, MoeFacts
from sglang_afd.transports import estimate
from sglang_afd.upstream import groups, memory
from sglang_afd.upstream.hooks import Kind

pytestmark = pytest.mark.unit

FACTS = MoeFacts((0,), num_experts=4, top_k=2, hidden_size=4, intermediate_size=6)
FREE = {0: 140.0, 1: 138.0, 2: 22.0}  # GB of each world rank's GPU: 2 A ranks, an F rank
WORLD = "the world"
NO_DRAFT = SimpleNamespace(draft_model_config=None)


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """Become a rank; returns the fakes of SGLang's two modules that measure memory."""

    def become(rank: int, attention: int = 2) -> SimpleNamespace:
        config = AfdConfig(attention_ranks=attention, ffn_ranks=1)
        made = RankContext(config, rank, FAMILIES["Qwen3MoeForCausalLM"], FACTS, {})
        monkeypatch.setattr(context_module, "_current", made)
        of_attention = config.topology.attention_world
        monkeypatch.setattr(groups, "_attention_group", of_attention)

        def measure(
            device: str, gpu: int, distributed: bool = False, cpu_group: Any = None
        ) -> float:
            if not distributed:
                return FREE[rank]
            ranks = FREE if cpu_group is WORLD else cpu_group
            assert rank in ranks, "this rank is not in the group that it reduces over"
            return min(FREE[r] for r in ranks)

        module = SimpleNamespace(get_available_gpu_memory=measure)
        monkeypatch.setattr(memory, "import_module", lambda name: module)
        return module

    return become


def run(name: str, module: SimpleNamespace) -> float:
    """What SGLang's function `name` measures with its hook."""
    [hook] = [h for h in memory.HOOKS if h.target.endswith("." + name) and h.kind is Kind.AROUND]

    def measure_as_sglang_does(*args: Any, **kwargs: Any) -> float:
        assert module.get_available_gpu_memory("cuda", 0) == own, "its own, also inside the hook"
        return module.get_available_gpu_memory("cuda", 0, distributed=True, cpu_group=WORLD)

    own = module.get_available_gpu_memory("cuda", 0)
    before = module.get_available_gpu_memory
    measured = hook.fn(measure_as_sglang_does, device="cuda", is_draft_worker=False)
    assert module.get_available_gpu_memory is before, "the module keeps its own function"
    return measured


MEASUREMENTS = ("measure_pre_model_load_memory", "_profile_available_bytes")


@pytest.mark.parametrize("name", MEASUREMENTS)
@pytest.mark.parametrize("rank", [0, 1])
def test_attention_ranks_measure_their_own_minimum(
    as_rank: Callable[..., SimpleNamespace], name: str, rank: int
) -> None:
    assert run(name, as_rank(rank)) == 138.0


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_a_single_attention_rank_measures_alone(
    as_rank: Callable[..., SimpleNamespace], name: str
) -> None:
    assert run(name, as_rank(0, attention=1)) == 140.0


def test_an_ffn_rank_measures_alone(as_rank: Callable[..., SimpleNamespace]) -> None:
    """And takes part in no reduction of the attention ranks."""
    assert run(MEASUREMENTS[0], as_rank(2)) == 22.0


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_sglang_finds_the_memory_balanced(
    as_rank: Callable[..., SimpleNamespace], monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """SGLang's own function, over fakes of what it asks."""
    from sglang.srt.distributed import bootstrap

    measure = as_rank(rank).get_available_gpu_memory
    monkeypatch.setattr(memory, "import_module", lambda name: bootstrap)
    monkeypatch.setattr(bootstrap, "get_available_gpu_memory", measure)
    monkeypatch.setattr(bootstrap, "maybe_wait_for_gated_launch", lambda **kwargs: None)
    world = SimpleNamespace(world_size=3, cpu_group=WORLD)
    monkeypatch.setattr(bootstrap, "get_world_group", lambda: world)
    bag = SimpleNamespace(gpu_id=0, host="", gated_launch_port=None, tp_size=3)
    for getter in ("get_device", "get_serving", "get_parallel"):
        monkeypatch.setattr(bootstrap, getter, lambda: bag)
    original = bootstrap.measure_pre_model_load_memory
    asked = {"device": "cuda", "is_draft_worker": False}
    if rank < 2:
        with pytest.raises(RuntimeError, match="unbalanced"):
            original(**asked)
    [hook] = [h for h in memory.HOOKS if h.target.endswith("." + MEASUREMENTS[0])]
    assert hook.fn(original, **asked) == {0: 138.0, 1: 138.0, 2: 22.0}[rank]


def test_what_a_round_takes_is_no_room_for_kv(as_rank: Callable[..., SimpleNamespace]) -> None:
    as_rank(0)
    [hook] = [h for h in memory.HOOKS if h.fn is memory._leave_room_for_rounds]
    model = SimpleNamespace(dtype=SimpleNamespace(itemsize=2), quantization=None)
    configurator = SimpleNamespace(model_config=model)
    config = AfdConfig(attention_ranks=2, ffn_ranks=1)
    passing = estimate(config, FACTS, itemsize=2, fp8=False).attention.passing
    assert 0 < passing < 10**9
    assert hook.fn(10**9, configurator) == 10**9 - passing
    assert hook.fn(1, configurator) == 0


def test_states_of_linear_attention_lie_on_attention_ranks(
    as_rank: Callable[..., SimpleNamespace],
) -> None:
    [hook] = [h for h in memory.HOOKS if h.target.endswith("_get_mamba_layer_ids_for_req_pool")]
    for rank, layers in ((0, [0, 1, 2]), (2, [])):
        as_rank(rank)
        assert hook.fn(lambda configurator: [0, 1, 2], SimpleNamespace()) == layers


@pytest.mark.parametrize(("kv_heads", "tp", "bytes_"), [(4, 1, 2048), (8, 2, 2048), (1, 2, 512)])
def test_a_drafts_kv_is_counted_by_its_own_heads(kv_heads: int, tp: int, bytes_: int) -> None:
    """One layer of the draft: keys and values of 128 elements each a head, in BF16."""
    draft = SimpleNamespace(
        get_num_kv_heads=lambda ranks: max(1, kv_heads // ranks), head_dim=128, v_head_dim=128
    )
    configurator = SimpleNamespace(
        spec_aux_config=SimpleNamespace(draft_model_config=draft, draft_kv_num_layers=1),
        is_draft_worker=False,
        draft_attn_tp_size=tp,
        layer_info=SimpleNamespace(num_effective_layers=3),
        kv_cache_dtype=torch.bfloat16,
    )
    sizes = SimpleNamespace(_cell_size=4000, _compute_cell_size=lambda _, layers: 1000 * layers)
    [hook] = [h for h in memory.HOOKS if h.target.endswith("DefaultPoolConfigurator.__init__")]
    hook.fn(None, sizes, configurator)
    assert sizes._cell_size == 3000 + bytes_
    for change in ({"is_draft_worker": True}, {"spec_aux_config": NO_DRAFT}):
        sizes._cell_size = 4000
        hook.fn(None, sizes, SimpleNamespace(**{**vars(configurator), **change}))
        assert sizes._cell_size == 4000
