"""The step's synchronisation carries each rank's row and becomes the plan, on the CPU group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.runtime_context as runtime_context
import torch

from sglang_afd import context as context_module
from sglang_afd.config import AfdConfig
from sglang_afd.context import RankContext
from sglang_afd.dispatch.step_plan import PLAN_WIDTH, Caps, PlanMismatch, PlanRow, StepKind
from sglang_afd.families import FAMILIES, MoeFacts
from sglang_afd.upstream.hooks import Hook, Kind
from sglang_afd.upstream.step_sync import HOOKS

pytestmark = pytest.mark.unit

FACTS = MoeFacts((0,), num_experts=4, top_k=2, hidden_size=4, intermediate_size=6)
CONFIG = AfdConfig(attention_ranks=2, ffn_ranks=1, attention_tp=2, max_tokens_per_rank=8)
CAPS = Caps(8, 32)
UPSTREAM = [11, 22, 33]  # columns of SGLang's own


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], RankContext]]:
    """Make this process the world rank given."""

    def become(rank: int) -> RankContext:
        made = RankContext(CONFIG, rank, FAMILIES["Qwen3MoeForCausalLM"], FACTS, {"model": "m"})
        made.caps = CAPS
        monkeypatch.setattr(context_module, "_current", made)
        return made

    return become


def hook(name: str, kind: Kind) -> Hook:
    [found] = [h for h in HOOKS if h.target.endswith("." + name) and h.kind is kind]
    return found


def contribute(num_tokens: int, extend: bool = False) -> list[int]:
    """This rank's row, as the sync sends it."""
    info = SimpleNamespace(num_tokens=num_tokens, is_extend_in_batch=extend)
    row = torch.tensor(UPSTREAM, dtype=torch.int64)
    return hook("_get_local_tensor", Kind.AFTER).fn(row, info, device="cpu").tolist()


def gathered(*rows: list[int]) -> SimpleNamespace:
    return SimpleNamespace(tp0_info_cpu=torch.tensor(rows))


@pytest.mark.parametrize(
    ("tokens", "extend", "kind", "rows"),
    [
        (0, False, StepKind.IDLE, 0),
        (0, True, StepKind.IDLE, 0),  # a peer extends
        (1, False, StepKind.DECODE, 1),
        (5, False, StepKind.DECODE, 3),  # padded to 6, sharded over 2 ranks
        (64, True, StepKind.EXTEND, 32),
    ],
)
def test_a_rank_announces_its_share_of_the_padded_rows(
    as_rank: Callable[[int], RankContext], tokens: int, extend: bool, kind: int, rows: int
) -> None:
    context = as_rank(1)
    row = contribute(tokens, extend)
    assert row[: len(UPSTREAM)] == UPSTREAM
    assert PlanRow(*row[len(UPSTREAM) :]) == PlanRow(0, kind, rows, context.config_hash)
    assert contribute(tokens)[len(UPSTREAM)] == 1, "every sync is a step of its own"


@pytest.mark.parametrize(
    ("tokens", "extend", "rows"),
    [(0, False, 0), (1, False, 2), (3, False, 5), (7, True, 4)],  # over 2 ranks of attention TP
)
def test_requests_that_verify_have_several_rows(
    as_rank: Callable[[int], RankContext], tokens: int, extend: bool, rows: int
) -> None:
    as_rank(1).rows_per_request = 3
    assert PlanRow(*contribute(tokens, extend)[len(UPSTREAM) :]).rows == rows


def test_an_inactive_ranks_row_has_the_same_width() -> None:
    row = torch.tensor(UPSTREAM, dtype=torch.int64)
    fallback = hook("_get_fallback_tensor", Kind.AFTER).fn(row, SimpleNamespace(), device="cpu")
    assert fallback.tolist() == UPSTREAM + [0] * PLAN_WIDTH


@pytest.mark.parametrize("rank", range(6))
def test_every_rank_reads_the_plan(as_rank: Callable[[int], RankContext], rank: int) -> None:
    context = as_rank(rank)
    tokens = [7, 0, 0][context.topology.dp_rank_of(rank)]
    own = contribute(tokens)
    busy, idle = (
        [*UPSTREAM, *PlanRow(0, kind, rows, context.config_hash)]
        for kind, rows in ((StepKind.DECODE, 4), (StepKind.IDLE, 0))
    )
    assert own == (busy if tokens else idle)
    hook("all_gather", Kind.AFTER).fn(None, gathered(busy, idle, idle), "cpu", group=None)
    assert context.plan is not None
    assert context.plan.rows == (4, 4, 0, 0, 0, 0)
    assert context.plan.caps == CAPS


@pytest.mark.parametrize(
    ("rank", "rows", "allowed"),
    [
        (0, (8, 0), True),
        (0, (8, 64), True),  # the other one's prefill goes in blocks
        (0, (8, 9), False),  # the other one's rows take two rounds
        (2, (8, 64), False),  # extends
        (2, (8, 0), True),  # idle
    ],
)
def test_every_rank_chooses_its_graph_by_itself(
    as_rank: Callable[[int], RankContext], rank: int, rows: tuple[int, int], allowed: bool
) -> None:
    """Ranks 0 and 1 decode, 2 and 3 extend, decode or are idle; SGLang's vote is the minimum."""
    context = as_rank(rank)
    kinds = [StepKind.DECODE, StepKind.EXTEND if rows[1] == 64 else StepKind.DECODE]
    kinds = [kind if n else StepKind.IDLE for kind, n in zip(kinds, rows, strict=True)]
    contribute(2 * rows[context.topology.dp_rank_of(rank)], kinds[rank // 2] is StepKind.EXTEND)
    sent = [
        [*UPSTREAM, *PlanRow(0, kind, n, context.config_hash)]
        for kind, n in (*zip(kinds, rows, strict=True), (StepKind.IDLE, 0))
    ]
    info = gathered(*sent)
    info.can_run_decode_cuda_graph = False
    hook("all_gather", Kind.AFTER).fn(None, info, "cpu", group=None)
    assert info.can_run_decode_cuda_graph is allowed


@pytest.mark.parametrize("column", [0, 3], ids=["step", "hash"])
def test_the_second_rank_of_a_dp_rank_notices_that_it_differs(
    as_rank: Callable[[int], RankContext], column: int
) -> None:
    """What is gathered is the first rank's row: it says nothing of the second one's."""
    as_rank(3)
    row = contribute(0)
    row[len(UPSTREAM) + column] += 1
    with pytest.raises(PlanMismatch, match=r"^attention rank 1.1 \(world rank 3\)"):
        hook("all_gather", Kind.AFTER).fn(None, gathered(row, row, row))


@pytest.mark.parametrize("given", [("cuda:0", "device group"), ("cpu", "cpu group")])
def test_the_gather_is_on_the_cpu_group_whatever_the_schedule(
    monkeypatch: pytest.MonkeyPatch, given: tuple[Any, Any]
) -> None:
    group = SimpleNamespace(cpu_group="cpu group", device_group="device group")
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(tp_group=group))
    before = hook("all_gather", Kind.BEFORE).fn
    device, chosen = given
    args, kwargs = before("info", device=device, group=chosen, use_all_reduce=False)
    assert args == ("info", "cpu", "cpu group")
    assert kwargs == {"use_all_reduce": False}
