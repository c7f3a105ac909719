"""The exchange kernels without a GPU: in Triton's interpreter; their reference; the layouts.

tests/gpu/test_exchange.py runs the real ones.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise
from pathlib import Path as File
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from triton import JITFunction

from sglang_afd.dispatch.channel import Layout, Shape, Span, channel_bytes, layouts
from sglang_afd.dispatch.step_plan import Caps, Path, Round
from sglang_afd.dispatch.transport import RoutedRows
from sglang_afd.emulation import Emulation
from sglang_afd.kernels import exchange_reference as reference
from sglang_afd.topology import Topology
from tests.support.interpreted import run_in_interpreter
from tests.support.local_ends import make_ends, make_transports, run_experts

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("at_once", [False, True], ids=["flags in order", "flags at once"])
def test_kernels_in_the_interpreter(at_once: bool) -> None:
    run_in_interpreter(
        File(__file__).with_name("exchange_in_interpreter.py"),
        SGLANG_AFD_FLAGS_AT_ONCE=str(int(at_once)),
    )


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str], set[Any]]:
    """What launches give Triton to compile for, by kernel and parameter; nothing runs."""
    seen: dict[tuple[str, str], set[Any]] = defaultdict(set)

    def run(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        values = {**dict(zip(kernel.arg_names, args)), **options}
        for parameter in kernel.params:
            value: Any = values[parameter.name]
            if isinstance(value, torch.Tensor):
                unlike = value.data_ptr() % 16 and not parameter.do_not_specialize_on_alignment
                value = value.dtype, unlike
            elif not parameter.is_constexpr:
                value = not parameter.do_not_specialize and (value == 1, value % 16)
            seen[kernel.__name__, parameter.name].add(value)

    monkeypatch.setattr(JITFunction, "run", run)
    return seen


def test_no_exchange_compiles_a_kernel_anew(seen: dict[tuple[str, str], set[Any]]) -> None:
    """Whatever its counts and wherever its rows lie; compiling takes long, and lanes wait then."""
    ends = make_ends(Topology(3, 1), 6, Shape(32, 16, 5, torch.bfloat16))
    hidden, ids, weights = torch.zeros(22, 16).bfloat16(), torch.zeros(22, 5), torch.zeros(22, 5)
    for start, stop in ((0, 1), (1, 17), (17, 22)):
        rows = RoutedRows(*(part[start:stop] for part in (hidden, ids.long(), weights)))
        for first, sources in ((0, 1), (1, 1), (2, 1), (0, 3)):
            span = Span(first, sources, stop - start)
            sent = ends.attention[first].dispatch(rows, slots=stop - start)
            batch = ends.ffn[0].receive([span])
            ends.ffn[0].reply(run_experts(batch.hidden, batch.expert_ids), [span])
            ends.attention[first].combine(sent)
    assert {kernel for kernel, _ in seen} == {"_send_rows", "_wait", "_return_rows", "_sum_replies"}
    several = {name: values for name, values in seen.items() if len(values) > 1}
    # a role has one of them
    assert several == {("_wait", "COUNTS_HERE"): {True, False}, ("_wait", "PEERS"): {1, 4}}


def test_no_exchange_of_emulated_ranks_does(seen: dict[tuple[str, str], set[Any]]) -> None:
    """With as many rows as the real rank has, none among them, from wherever they lie."""
    emulation = Emulation(Topology(1, 1), Topology(4, 2))
    shape = Shape(16, 16, 5, torch.bfloat16)
    sender, _ = make_transports(
        emulation.real, 12, shape, Caps(16, 16), lanes=2, emulation=emulation
    )
    hidden, ids, weights = torch.zeros(22, 16).bfloat16(), torch.zeros(22, 5), torch.zeros(22, 5)
    for start, stop in ((0, 0), (0, 1), (1, 17), (17, 22)):
        for lane in range(2):
            rows = RoutedRows(*(part[start:stop] for part in (hidden, ids.long(), weights)))
            sender.dispatch(rows, Round(Path.DECODE, 0, (stop - start, 0), lane))
    assert {kernel for kernel, _ in seen} == {"_send_rows", "_send_drawn"}
    assert all(len(values) == 1 for values in seen.values()), seen


def test_own_rows_go_before_those_of_emulated_ranks(
    seen: dict[tuple[str, str], set[Any]],
) -> None:
    """A lane's turn ends in between: no real rank has the work that comes after."""
    emulation = Emulation(Topology(1, 1), Topology(4, 2))
    shape = Shape(16, 16, 5, torch.bfloat16)
    sender, _ = make_transports(
        emulation.real, 12, shape, Caps(16, 16), lanes=1, emulation=emulation
    )
    rows = RoutedRows(torch.zeros(3, 16).bfloat16(), torch.zeros(3, 5).long(), torch.zeros(3, 5))
    before: set[str] = set()
    sender.dispatch(
        rows,
        Round(Path.DECODE, 0, (3, 0), 0),
        lambda: before.update(kernel for kernel, _ in seen),
    )
    assert before == {"_send_rows"}
    assert {kernel for kernel, _ in seen} == {"_send_rows", "_send_drawn"}


shapes = st.builds(
    Shape,
    cap=st.integers(1, 600),
    hidden_size=st.integers(1, 300).map(lambda n: 16 * n),
    top_k=st.integers(1, 16),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
topologies = st.builds(Topology, st.integers(1, 12), st.integers(1, 4), st.integers(1, 2))


def stretches(layout: Layout) -> list[tuple[int, int]]:
    """Beginning and end of what each peer writes, field by field."""
    return [
        (field.part(peer), field.part(peer + 1))
        for field in layout[:4]
        for peer in range(field.shape[0])
        if field.size
    ]


@given(topologies, shapes)
@example(Topology(3, 1), Shape(1, 16, 1, torch.bfloat16))
def test_no_two_peers_or_fields_overlap(topology: Topology, shape: Shape) -> None:
    on_attention, on_ffn = layouts(topology, shape)
    assert channel_bytes(topology, shape) == max(on_attention.size, on_ffn.size)
    assert on_attention.ids.size == on_attention.weights.size == 0  # rows alone come back
    for layout, peers in (
        (on_attention, len(topology.ffn_world)),
        (on_ffn, len(topology.attention_world)),
    ):
        parts = sorted(stretches(layout))
        assert parts[0][0] >= 0 and parts[-1][1] <= layout.size
        assert all(end <= start for (_, end), (start, _) in pairwise(parts))
        assert layout.size % 256 == 0  # so that the next channel is aligned too
        for field in layout[:4]:
            assert field.offset % 256 == 0 and field.shape[0] == peers
            assert field.part(1) - field.part(0) == field.size // peers
        assert all(layout.rows.part(peer) % 16 == 0 for peer in range(peers))
        assert all(layout.flags.part(peer) % 8 == 0 for peer in range(peers))


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9), st.sampled_from([0, 256, 4096]))
def test_ranks_write_where_their_peers_look(
    attention: int, ffn: int, cap: int, offset: int
) -> None:
    """Every address that a rank writes to is its own part of a field of that peer's arena."""
    shape = Shape(cap, 48, 3, torch.bfloat16)
    ends = make_ends(Topology(attention, ffn), 6, shape, offset=offset)
    here, there = layouts(ends.topology, shape)
    sides = [
        (ends.attention, list(ends.topology.ffn_world), there),
        (ends.ffn, list(ends.topology.attention_world), here),
    ]
    for writers, peers, layout in sides:
        for index, writer in enumerate(writers):
            for name, addresses in writer._to._asdict().items():
                if addresses is None:
                    continue
                for address, peer in zip(addresses.tolist(), peers, strict=True):
                    field = getattr(layout, name).of(ends.memory[peer][offset:])
                    assert address == field[index].data_ptr(), (name, index, peer)


def test_the_reference_is_the_weighted_sum() -> None:
    """Over any split of the experts, up to rounding."""
    generator = torch.Generator().manual_seed(5)
    rows, places, hidden, experts = 40, 6, 32, 12
    outputs = torch.randn(rows, places, hidden, generator=generator)
    weights = torch.rand(rows, places, generator=generator)
    ids = torch.randint(-1, experts, (rows, places), generator=generator)
    ids[0] = -1
    outputs[ids < 0] = torch.nan  # what stands in an empty place is not looked at
    wanted = (outputs.double() * weights.double()[..., None]).nan_to_num().sum(dim=1)
    for ffn_ranks in (1, 2, 3):
        per_rank = experts // ffn_ranks
        replies = [
            reference.reduce_places(outputs, reference.local_ids(ids, n, per_rank), weights)
            for n in range(ffn_ranks)
        ]
        for n, reply in enumerate(replies):
            unsent = (reference.local_ids(ids, n, per_rank) < 0).all(dim=1)
            reply[unsent] = torch.nan  # as is a row that was not sent there
        got = reference.sum_replies(torch.stack(replies), ids, per_rank)
        assert torch.allclose(got.double(), wanted, atol=1e-5)
