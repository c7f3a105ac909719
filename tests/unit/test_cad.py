"""CAD's own parts without SGLang: what travels, who expects what, what is refused."""

from __future__ import annotations

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_afd.cad.exchange import RemoteAttention
from sglang_afd.cad.experts import SharedExperts
from sglang_afd.cad.form import Form, scatter
from sglang_afd.cad.serve import AttentionServer, Layer
from sglang_afd.cad.tables import StateTables, StepTables
from sglang_afd.config import AfdConfig, ConfigError
from sglang_afd.context import RankContext
from sglang_afd.dispatch.gloo import GlooTransport
from sglang_afd.dispatch.step_plan import MOST_ROWS, Caps, PlanRow, StepKind, StepPlan
from sglang_afd.dispatch.transport import ExchangeError, RoutedRows, RowBatch
from sglang_afd.families import MoeFacts, family_of
from sglang_afd.features import FEATURES
from sglang_afd.features.cad import SERVED_IN_CAD
from sglang_afd.flags import parse
from sglang_afd.gate import findings
from sglang_afd.topology import Mode, Role, Topology, TopologyError
from sglang_afd.upstream.cad_memory import stretch
from tests.support.families import language_model
from tests.support.gate_facts import GPUS, make_facts, refused, write_model
from tests.support.processes import wait_until

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
FORMS = (Form(0, (4, 2, 2), 4), Form(1, (4, 2, 2), 4))


def facts(directory: Path, *flags: str, attention: int = 1, model: int = 1, **kwargs: Any) -> Any:
    """Facts of a CAD deployment."""
    ranks = ("--afd-attention-ranks", str(attention), "--afd-model-ranks", str(model))
    return make_facts(directory, *flags, counts=("--afd-mode", "cad", *ranks), **kwargs)


# --- the step's tables


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepTables, torch.Tensor, int]:
    """A step, the table of slots that it was read off, and the page size."""
    page = draw(st.sampled_from([1, 4, 16]))
    requests = draw(st.lists(st.tuples(st.integers(1, 70), st.integers(1, 9)), min_size=1))
    lengths = torch.tensor([length for length, _ in requests])
    new = torch.tensor([min(length, rows) for length, rows in requests])
    pages = -(-70 // page)
    order = torch.randperm(len(requests) * pages, generator=torch.Generator().manual_seed(page))
    first = order.view(len(requests), pages, 1) * page + page
    table = (first + torch.arange(page)).flatten(1)
    slots = torch.cat([row[n - k : n] for row, n, k in zip(table, lengths, new)])
    states = None
    if draw(st.booleans()):
        numbers = st.lists(st.integers(-1, 99), min_size=len(requests), max_size=len(requests))
        of_each = [torch.tensor(draw(numbers)) for _ in range(3)]
        changes = draw(st.lists(st.tuples(st.integers(-1, 99), st.integers(0, 99))))
        states = StateTables(*of_each, torch.tensor(changes, dtype=torch.int64).view(-1, 2))
    return StepTables.of(draw(st.booleans()), lengths, new, slots, table, page, states), table, page


@given(steps(), st.integers(0, 1000))
def test_tables_travel_unchanged(step: tuple[StepTables, torch.Tensor, int], base: int) -> None:
    sent, table, page = step
    header, body = sent.pack()
    assert StepTables.body(header).shape == body.shape
    got = StepTables.unpack(header, body)
    assert got.extends == sent.extends
    for mine, theirs in zip(sent[1:-1], got[1:-1], strict=True):
        assert torch.equal(mine, theirs)
    assert (got.states is None) == (sent.states is None)
    for mine, theirs in zip(sent.states or (), got.states or (), strict=True):
        assert torch.equal(mine, theirs)
    for row, length, slots in zip(table, got.lengths, got.table(page, base), strict=True):
        assert torch.equal(slots, row[:length] + base)


def test_a_page_takes_one_number() -> None:
    table = torch.arange(64).view(1, 64)
    tables = StepTables.of(False, torch.tensor([33]), torch.tensor([1]), table[0, 32:33], table, 16)
    assert tables.pages.tolist() == [0, 16, 32]


@pytest.mark.parametrize(
    "header",
    [
        [1, 0, 0, 0, 0, 0],
        [1, 3, 2, 9, 0, 0],
        [0, 2, 2, 1, 0, 0],
        [0, 2, 2, 2, 1, -1],
    ],
)
def test_a_step_that_no_rank_has_is_noticed(header: list[int]) -> None:
    with pytest.raises(ValueError, match="a step of"):
        StepTables.body(torch.tensor(header))


# --- heads


def test_each_attention_rank_gets_its_heads() -> None:
    """Of four query heads and two key-value heads of width 1, two of each kind go together."""
    q, k, v = torch.tensor([[0, 1, 2, 3]]), torch.tensor([[10, 11]]), torch.tensor([[20, 21]])
    first, second = scatter([q, k, v], 2)
    assert first.tolist() == [[0, 1, 10, 20]] and second.tolist() == [[2, 3, 11, 21]]
    assert FORMS[0].share(2) == Form(0, (2, 1, 1), 2)


@given(st.integers(1, 5000), st.sampled_from([1, 16, 64]), st.integers(1, 5))
def test_stretches_fit_the_pool(pages: int, page: int, ranks: int) -> None:
    """A pool of n tokens has n + page slots; so has what a rank's allocator believes is its own."""
    tokens = stretch(pages * page, page, ranks)
    assert tokens % page == 0
    assert ranks * (tokens + page) <= pages * page + page
    assert ranks * (tokens + 2 * page) > pages * page + page, "a page more would fit"
    assert ranks > 1 or tokens == pages * page


# --- who leads


def test_model_ranks_lead() -> None:
    topology = Topology(2, 3, mode=Mode.CAD)
    assert topology.leading_world == topology.ffn_world == range(3)
    assert topology.serving_world == topology.attention_world == range(3, 5)
    assert [topology.role_of(rank) for rank in (0, 4)] == [Role.MODEL, Role.ATTENTION]
    assert topology.name_of(2) == "model rank 2 (world rank 2)"
    assert topology.name_of(4) == "attention rank 1 (world rank 4)"
    with pytest.raises(TopologyError, match="--afd-model-ranks is 0"):
        Topology(1, 0, mode=Mode.CAD)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--afd-mode", "cad", "--afd-ffn-ranks", "1"), "--afd-ffn-ranks does not go with"),
        (("--afd-model-ranks", "1"), "--afd-model-ranks does not go with --afd-mode afd"),
        (("--afd-mode", "cad"), "give both --afd-attention-ranks and --afd-model-ranks"),
        (("--afd-mode", "dac", "--afd-ffn-ranks", "1"), "--afd-mode"),
    ],
)
def test_counts_are_those_of_the_mode(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(["--afd-attention-ranks", "1", *flags], transport="gloo")


# --- gates


def test_gates_pass(tmp_path: Path) -> None:
    found = findings(facts(write_model(tmp_path)))
    assert all(f.passed for f in found), found
    assert "1 attention ranks with 4 key-value heads each, 1 model ranks" in found[1].message


REFUSED = [
    (("--afd-attention-tp", "2"), "--afd-attention-tp does not go with --afd-mode cad"),
    (("--afd-max-tokens-per-rank", "64"), "--afd-max-tokens-per-rank does not go with"),
    (("--afd-prefill-block", "64"), "--afd-prefill-block does not go with"),
    (("--afd-expert-replicas", "2"), "--afd-expert-replicas does not go with"),
    (("--afd-expert-placement", "x.json"), "--afd-expert-placement does not go with"),
    (
        ("--afd-emulate-attention-ranks", "4", "--afd-emulation-is-not-the-model"),
        "--afd-emulate-attention-ranks does not go with",
    ),
    (("--afd-emulate-ffn-ranks", "4", "--afd-emulation-is-not-the-model"), "--afd-emulate-ffn"),
    (
        ("--afd-role", "attention", "--nnodes", "2", "--node-rank", "0")
        + ("--dist-init-addr", "127.0.0.1:1"),
        "--afd-role does not go with",
    ),
    (("--speculative-algorithm", "EAGLE3"), "Speculative decoding, which is not shown to work"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED, ids=lambda x: x[0] if x[0] else "")
def test_what_is_not_served_is_refused_by_name(
    tmp_path: Path, flags: tuple[str, ...], message: str
) -> None:
    found = refused(facts(write_model(tmp_path), *flags), "execution mode")
    assert any(message in one for one in found), found


def test_heads_must_divide(tmp_path: Path) -> None:
    [one] = refused(facts(write_model(tmp_path), attention=3), "topology")
    assert one == (
        "4 key-value heads do not divide over --afd-attention-ranks 3; choose one of 1, 2, 4"
    )


def test_experts_must_divide(tmp_path: Path) -> None:
    found = refused(facts(write_model(tmp_path), model=3), "topology")
    assert found == [
        "16 experts do not divide over --afd-model-ranks 3; choose one of 1, 2, 4, 8, 16"
    ]


def test_heads_of_linear_attention_must_divide(tmp_path: Path) -> None:
    config = language_model("qwen3.5").to_dict()
    changes = {**config, "num_key_value_heads": 4, "linear_num_key_heads": 2}
    directory = write_model(tmp_path, weights=False, **changes)
    found = refused(facts(directory, attention=4), "topology")
    assert any("2 key heads of linear attention do not divide" in one for one in found), found


def test_gpus_are_refused(tmp_path: Path) -> None:
    found = refused(facts(write_model(tmp_path), machine=GPUS), "topology")
    assert any("CPUs alone so far" in one for one in found), found


@pytest.mark.parametrize("name", SERVED_IN_CAD)
def test_what_is_served_is_a_row_and_has_a_test(name: str) -> None:
    [row] = [feature for feature in FEATURES if feature.name == name]
    assert row.served and row.switches, "only flags are looked at"
    file, _, function = SERVED_IN_CAD[name].partition("::")
    assert f"def {function}(" in (ROOT / file).read_text()


# --- one step of both roles


class Wire:
    """Messages among ranks of one process, each from rank to rank in order."""

    def __init__(self) -> None:
        self.sent: dict[tuple[int, int], deque[torch.Tensor]] = {}

    def end(self, rank: int) -> Any:
        """Rank `rank`'s end."""
        wire = self

        class End:
            def send(self, tensor: torch.Tensor, peer: int, doing: str = "") -> None:
                wire.sent.setdefault((rank, peer), deque()).append(tensor.clone())

            def wait(self, sending: None, doing: str = "") -> None:
                pass

            def receive(self, into: torch.Tensor, peer: int, doing: str = "") -> None:
                assert wait_until(lambda: bool(wire.sent.get((peer, rank))), 10, step=0.001)
                into.copy_(wire.sent[peer, rank].popleft())

        return End()


def context_of(rank: int, attention: int = 1, model: int = 1) -> RankContext:
    """A rank's context, in the middle of serving."""
    config = AfdConfig(attention_ranks=attention, ffn_ranks=model, mode=Mode.CAD)
    moe = MoeFacts((0, 1), 4, 2, 8, 8)
    return RankContext(config, rank, family_of("Qwen3MoeForCausalLM"), moe, {}, serving=True)


def plan_of(context: RankContext, *rows: int) -> StepPlan:
    """Make `context` be in a step in which the model ranks decode `rows`."""
    gathered = [PlanRow(0, StepKind.DECODE if n else StepKind.IDLE, n, 1) for n in rows]
    gathered += [PlanRow(0, StepKind.IDLE, 0, 1)] * context.config.attention_ranks
    own = gathered[context.rank]
    context.plan = StepPlan.from_rows(
        gathered, context.topology, Caps(MOST_ROWS, None), context.rank, own
    )
    return context.plan


def tables(rows: int) -> StepTables:
    """A step in which `rows` requests decode their first token."""
    ones = torch.ones(rows, dtype=torch.int64)
    return StepTables(False, ones, ones, torch.arange(rows), torch.arange(rows))


def remote(rows: int, announce: int | None = None) -> tuple[RemoteAttention, Wire]:
    """A model rank's exchange, whose step is to have `rows`; `announce`: tables of as many."""
    context, wire = context_of(0), Wire()
    plan_of(context, rows)
    return RemoteAttention(context, wire.end(0), FORMS), wire


def test_a_step_of_both_roles() -> None:
    """Two attention ranks that double their queries: every head comes back at its place."""
    wire, model = Wire(), context_of(0, attention=2)
    plan_of(model, 3)
    inputs = [torch.arange(3 * width, dtype=torch.float32).view(3, width) for width in (4, 2, 2)]
    exchange = RemoteAttention(model, wire.end(0), FORMS)
    with exchange.step():
        exchange.announce(tables(3))
        for rank in (1, 2):  # what is in order on the wire may all be served at once
            for form in FORMS:
                share = torch.full((3, form.share(2).output), float(10 * form.layer + rank))
                wire.end(rank).send(share, 0)
        for form in FORMS:
            output = exchange(form, inputs)
            assert output.tolist() == [[10 * form.layer + rank for rank in (1, 1, 2, 2)]] * 3
    seen: list[tuple[int, list[Any]]] = []
    for rank in (1, 2):
        context = context_of(rank, attention=2)
        plan = plan_of(context, 3)

        def attend(batch: Any, *parts: torch.Tensor) -> torch.Tensor:
            seen.append((batch, [part.tolist() for part in parts]))
            return parts[0]

        layers = [Layer(form.share(2), attend) for form in FORMS]
        server = AttentionServer(context, wire.end(rank), layers, lambda s: {0: "b"}, torch.float32)
        server.serve(plan)
    wanted = [[part.tolist() for part in one] for one in _split(inputs)]
    assert [parts for _, parts in seen] == [wanted[0]] * 2 + [wanted[1]] * 2
    assert not any(wire.sent[0, rank] for rank in (1, 2)), "all that was sent was taken"


def _split(inputs: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    return [[rows.chunk(2, dim=1)[share] for rows in inputs] for share in (0, 1)]


def test_idle_model_ranks_send_nothing() -> None:
    exchange, wire = remote(0)
    assert exchange.idle() and not wire.sent
    busy, _ = remote(2)
    assert not busy.idle()


def test_a_layer_left_out_is_noticed() -> None:
    exchange, wire = remote(1)
    wire.end(1).send(torch.zeros(1, 4), 0)
    with pytest.raises(RuntimeError, match="left out 1 of 2 attention layers"), exchange.step():
        exchange.announce(tables(1))
        exchange(FORMS[0], [torch.zeros(1, 4), torch.zeros(1, 2), torch.zeros(1, 2)])


def test_a_layer_out_of_turn_is_noticed() -> None:
    exchange, _ = remote(1)
    with pytest.raises(RuntimeError, match="layer 1 as number 0"), exchange.step():
        exchange.announce(tables(1))
        exchange(FORMS[1], [torch.zeros(1, 4), torch.zeros(1, 2), torch.zeros(1, 2)])


def test_attention_before_the_tables_is_noticed() -> None:
    exchange, _ = remote(1)
    with pytest.raises(RuntimeError, match="do not expect"), exchange.step():
        exchange(FORMS[0], [torch.zeros(1, 4), torch.zeros(1, 2), torch.zeros(1, 2)])


@pytest.mark.parametrize(("announced", "rows"), [(2, 1), (1, 2)])
def test_other_rows_than_planned_are_noticed(announced: int, rows: int) -> None:
    exchange, _ = remote(1)
    with pytest.raises(RuntimeError, match="announced 1 rows"), exchange.step():
        exchange.announce(tables(announced))
        exchange(FORMS[0], [torch.zeros(rows, 4), torch.zeros(rows, 2), torch.zeros(rows, 2)])


def test_attention_outside_of_a_step_is_noticed() -> None:
    exchange, _ = remote(1)
    with pytest.raises(RuntimeError, match="outside of an agreed step"):
        exchange(FORMS[0], [torch.zeros(1, 4)])


def test_tables_of_other_rows_than_planned_are_noticed() -> None:
    context, wire = context_of(1), Wire()
    plan = plan_of(context, 3)
    for part in tables(2).pack():
        wire.end(0).send(part, 1)
    server = AttentionServer(context, wire.end(1), [], lambda s: {}, torch.float32)
    with pytest.raises(ExchangeError, match="was told of 2 rows by model rank 0"):
        server.serve(plan)


# --- experts of several model ranks


def shared_experts(rank: int, wire: Wire) -> SharedExperts:
    """Of one of two model ranks, over a wire that keeps order; experts 0 and 1 are rank 0's."""
    context = context_of(rank, model=2)
    transport = GlooTransport(
        topology=context.topology,
        rank=rank,
        num_experts=4,
        hidden_size=2,
        top_k=2,
        dtype=torch.float32,
        caps=Caps(MOST_ROWS, None),
        timeout=1,
        both_sides=wire.end(rank),
    )
    return SharedExperts(context, transport)


@pytest.mark.parametrize("counts", [(3, 2), (2, 0), (0, 1)])
def test_model_ranks_serve_each_other(counts: tuple[int, int]) -> None:
    """Expert e multiplies by e + 1; both ranks at once, each waiting only for what was sent."""
    wire, outputs = Wire(), {}
    generator = torch.Generator().manual_seed(3)
    rows = {
        rank: RoutedRows(
            torch.randn(n, 2, generator=generator),
            torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(n)])
            if n
            else torch.empty(0, 2, dtype=torch.int64),
            torch.rand(n, 2, generator=generator),
        )
        for rank, n in enumerate(counts)
    }

    def one(rank: int) -> None:
        experts = shared_experts(rank, wire)
        plan_of(experts._context, *counts)

        def run(batch: RowBatch) -> torch.Tensor:
            factor = (batch.expert_ids + 1 + 2 * rank).float()
            return batch.hidden.unsqueeze(1) * factor.unsqueeze(2)

        outputs[rank] = experts(rows[rank], run)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, range(2)))
    for rank, (hidden, ids, weights) in rows.items():
        wanted = hidden * ((ids + 1) * weights).sum(dim=1, keepdim=True)
        torch.testing.assert_close(outputs[rank], wanted)


def test_experts_outside_of_a_step_are_noticed() -> None:
    experts = shared_experts(0, Wire())
    nothing = RoutedRows(torch.ones(1, 2), torch.zeros(1, 2), torch.ones(1, 2))
    with pytest.raises(RuntimeError, match="outside of an agreed step"):
        experts(nothing, lambda batch: batch.hidden)
    plan_of(experts._context, 2, 0)
    with pytest.raises(RuntimeError, match="announced 2 rows"):
        experts(nothing, lambda batch: batch.hidden)
