"""CAD in SGLang's terms: shares of heads and states, what is noted of states, what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache import memory_pool

from sglang_afd import context as context_module
from sglang_afd.cad.form import Form
from sglang_afd.cad.tables import CLEAR, StateTables, StepTables
from sglang_afd.config import AfdConfig
from sglang_afd.context import RankContext
from sglang_afd.families import MoeFacts, family_of
from sglang_afd.topology import Mode
from sglang_afd.upstream import cad_layers, cad_memory, cad_states
from sglang_afd.upstream.cad_model import backend_class, form_of

pytestmark = pytest.mark.unit

FULL = SimpleNamespace(
    layer_id=3, tp_q_head_num=4, tp_k_head_num=2, tp_v_head_num=2, qk_head_dim=8, v_head_dim=6
)
LINEAR = SimpleNamespace(
    layer_id=1, num_q_heads=2, num_k_heads=2, num_v_heads=4, head_v_dim=3, q_dim=4, k_dim=4,
    v_dim=12,
)  # fmt: skip


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make this process a rank of 1 model and 2 attention ranks: rank 0, 1 or 2."""

    def enter(number: int) -> RankContext:
        config = AfdConfig(attention_ranks=2, ffn_ranks=1, mode=Mode.CAD)
        moe = MoeFacts((0, 1), 4, 2, 8, 8)
        family = family_of("Qwen3_5MoeForCausalLM")
        context = RankContext(config, number, family, moe, {}, attention_layers=(0, 1, 2))
        monkeypatch.setattr(context_module, "_current", context)
        return context

    return enter


def hook(hooks: tuple[Any, ...], target: str) -> Any:
    [found] = [one for one in hooks if one.target.endswith(target)]
    return found.fn


def test_forms_are_read_off_the_layers() -> None:
    assert form_of(FULL) == Form(3, (32, 16, 12), 24)
    assert form_of(LINEAR) == Form(1, (4, 4, 12, 4, 4), 12)


def test_each_role_reads_its_tensors(rank: Any) -> None:
    names = ("embed_tokens.weight", "layers.0.mlp.experts.1.up_proj.weight", "mtp.fc.weight")
    recurrent = "model.layers.0.linear_attn.A_log"
    model, attention = rank(0), rank(1)
    assert [model.loads_tensor(name) for name in (*names, recurrent)] == [True, True, False, True]
    assert [attention.loads_tensor(name) for name in names] == [False] * 3
    assert attention.loads_tensor(recurrent)
    assert model.exchanged == attention.exchanged == (0, 1, 2)


@pytest.mark.parametrize("number", [1, 2])
def test_an_attention_rank_has_its_share_of_a_recurrence(rank: Any, number: int) -> None:
    """Channels of q, k and v are shared each for itself; the layer's widths are the share's."""
    rank(number)
    layer: Any = SimpleNamespace(q_dim=1, k_dim=1, v_dim=2)
    channels = torch.tensor([10, 11, 20, 21, 30, 31, 32, 33])
    own = cad_layers._share("conv1d.weight", channels, layer)
    place = number - 1
    assert own.tolist() == [10 + place, 20 + place, 30 + 2 * place, 31 + 2 * place]
    assert cad_layers._share("A_log", torch.arange(4), layer).tolist() == [2 * place, 2 * place + 1]


def test_pools_are_of_the_ranks_heads(rank: Any) -> None:
    shape = hook(cad_memory.HOOKS, "Mamba2StateShape.create")
    heads = hook(cad_memory.HOOKS, "KVCacheConfigurator.configure")
    for number, ranks, own in ((0, 1, 4), (1, 2, 2)):
        rank(number)
        assert shape(lambda **told: told["tp_world_size"], tp_world_size=1) == ranks
        model = SimpleNamespace(get_num_kv_heads=lambda tp, dcp=1: 4)
        heads(SimpleNamespace(model_config=model))
        assert model.get_num_kv_heads(1, 1) == own


def test_shapes_are_sglangs_where_there_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_module, "_current", None)
    shape = hook(cad_memory.HOOKS, "Mamba2StateShape.create")
    assert shape(lambda **told: told["tp_world_size"], tp_world_size=1) == 1


class Slots(memory_pool.HybridReqToTokenPool):
    """SGLang's pool of requests, without its memory."""

    def __init__(self, states: Any = None) -> None:
        self.req_index_to_mamba_index_mapping = torch.tensor([0, 7, 8, 9], dtype=torch.int32)
        self.mamba_pool = states


def batch(*rows: int, **fields: Any) -> Any:
    nothing = dict.fromkeys(("mamba_track_mask", "mamba_track_indices", "mamba_track_seqlens"))
    return SimpleNamespace(req_pool_indices=torch.tensor(rows), **{**nothing, **fields})


def test_what_happens_to_states_is_noted_on_model_ranks_in_order(rank: Any) -> None:
    cleared = hook(cad_states.HOOKS, "MambaPool.clear_slots")
    copied = hook(cad_states.HOOKS, "MambaPool.copy_from")
    rank(0)
    never: Any = None
    cleared(never, None, torch.tensor([7, 8]))
    copied(never, None, torch.tensor([5]), torch.tensor([7]))
    told = cad_states.tables_of(batch(1, 3), Slots())
    assert told is not None
    assert told.slots.tolist() == [7, 9]
    assert told.changes.tolist() == [[CLEAR, 7], [CLEAR, 8], [5, 7]]
    again = cad_states.tables_of(batch(1), Slots())
    assert again is not None and not len(again.changes), "each is told once"
    assert again.keep.tolist() == [-1], "nothing is to be kept"
    rank(1)
    assert cleared(lambda pool, slots: "SGLang's", None, torch.tensor([1])) == "SGLang's"
    assert cad_states.tables_of(batch(1), SimpleNamespace()) is None


def test_where_states_are_kept_is_told(rank: Any) -> None:
    rank(0)
    tracked = batch(
        1,
        2,
        mamba_track_mask=torch.tensor([False, True]),
        mamba_track_indices=torch.tensor([3, 4]),
        mamba_track_seqlens=torch.tensor([-1, 64]),
    )
    told = cad_states.tables_of(tracked, Slots())
    assert told is not None
    assert told.keep.tolist() == [-1, 4] and told.at.tolist() == [-1, 64]


def test_an_attention_rank_changes_states_in_order_before_the_step() -> None:
    done: list[tuple[str, list[int]]] = []

    class States:
        def clear_slots(self, slots: torch.Tensor) -> None:
            done.append(("clear", slots.tolist()))

        def copy_from(self, source: torch.Tensor, target: torch.Tensor) -> None:
            done.append(("copy", [*source.tolist(), *target.tolist()]))

    ones = torch.ones(2, dtype=torch.int64)
    states = StateTables(
        torch.tensor([5, 6]),
        torch.tensor([-1, 4]),
        torch.tensor([-1, 64]),
        torch.tensor([[CLEAR, 5], [5, 6]]),
    )
    pool = Slots(States())
    step = StepTables(True, ones, ones, ones, ones, states)
    told = cad_states.take(step, pool, range(1, 3), 100)
    assert done == [("clear", [105]), ("copy", [105, 106])]
    assert pool.req_index_to_mamba_index_mapping.tolist() == [0, 105, 106, 9]
    assert told["mamba_track_mask"].tolist() == [False, True]
    assert told["mamba_track_indices"].tolist() == [-1, 104]
    assert told["mamba_track_seqlens"].tolist() == [-1, 64]
    decode = step._replace(extends=False)
    assert cad_states.take(decode, pool, range(1, 3), 100)["mamba_track_seqlens"] is None
    assert cad_states.take(step._replace(states=None), pool, range(1, 3), 0) == {}


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"save_kv_cache": False}, "keys that are not stored"),
        ({"k": None}, "keys that are not stored"),
        ({"sinks": torch.ones(1)}, "sinks"),
    ],
)
def test_attention_of_other_kinds_is_refused(asked: dict[str, Any], named: str) -> None:
    pool: Any = SimpleNamespace()
    runner = SimpleNamespace(req_to_token_pool=pool, token_to_kv_pool=pool, page_size=1)
    backend = backend_class()(runner, lambda form, rows: rows[0])
    rows = {"q": torch.ones(2, 32), "k": torch.ones(2, 2, 8), "v": torch.ones(2, 2, 6)}
    assert len(backend.forward(**rows, layer=FULL, forward_batch=None)) == 2
    with pytest.raises(RuntimeError, match=named):
        backend.forward(**{**rows, **asked}, layer=FULL, forward_batch=None)
