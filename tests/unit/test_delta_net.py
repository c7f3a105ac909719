"""Gated DeltaNet of the CPU platform against transformers, which knows no slots and no batches of
mixed lengths."""

from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as theirs

from sglang_afd.platform import delta_net

pytestmark = pytest.mark.unit

KEY_HEADS, HEADS, K, V, WIDTH = 2, 4, 16, 8, 4
KEYS, VALUES = KEY_HEADS * K, HEADS * V
CHANNELS = 2 * KEYS + VALUES
SLOTS = 9
LENGTHS = [(1,), (3,), (64,), (130,), (1, 63, 2, 65, 5), (128, 1, 1, 200)]


class Layer(NamedTuple):
    """A layer's own tensors."""

    conv: torch.Tensor  # [CHANNELS, WIDTH]
    rate: torch.Tensor  # [HEADS]
    bias: torch.Tensor  # [HEADS]


class Pool(NamedTuple):
    """The slots of all requests."""

    conv: torch.Tensor  # [SLOTS, CHANNELS, WIDTH - 1]
    state: torch.Tensor  # [SLOTS, HEADS, V, K]

    def clone(self) -> Pool:
        return Pool(self.conv.clone(), self.state.clone())


class Rows(NamedTuple):
    """What the projections give of some tokens."""

    qkv: torch.Tensor  # [tokens, CHANNELS]
    a: torch.Tensor  # [tokens, HEADS]
    b: torch.Tensor

    def part(self, start: int, end: int) -> Rows:
        return Rows(*(x[start:end] for x in self))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(5)


def layer() -> Layer:
    return Layer(torch.randn(CHANNELS, WIDTH), torch.randn(HEADS) - 2, torch.randn(HEADS))


def pool() -> Pool:
    """Every slot holds something, so that a state too few or too many shows."""
    return Pool(torch.randn(SLOTS, CHANNELS, WIDTH - 1), torch.randn(SLOTS, HEADS, V, K))


def rows(tokens: int) -> Rows:
    return Rows(
        torch.randn(tokens, CHANNELS), torch.randn(tokens, HEADS), torch.randn(tokens, HEADS)
    )


def reference(layer: Layer, pool: Pool, slot: int, given: Rows, old: bool) -> torch.Tensor:
    """transformers' layer for one request alone; updates its slot.  [tokens, HEADS, V]"""
    conv = pool.conv[slot] if old else torch.zeros(CHANNELS, WIDTH - 1)
    inputs = torch.cat([conv, given.qkv.T], dim=1)
    pool.conv[slot] = inputs[:, -(WIDTH - 1) :]
    mixed = theirs.causal_conv1d_fn(inputs[None], layer.conv, activation="silu")[0]
    mixed = mixed[:, WIDTH - 1 :].T
    q, k, v = mixed.split([KEYS, KEYS, VALUES], dim=1)
    q, k = (x.unflatten(1, (KEY_HEADS, K)).repeat_interleave(HEADS // KEY_HEADS, 1) for x in (q, k))
    out, state = theirs.torch_chunk_gated_delta_rule(
        q[None],
        k[None],
        v.unflatten(1, (HEADS, V))[None],
        g=(-layer.rate.exp() * torch.nn.functional.softplus(given.a + layer.bias))[None],
        beta=given.b.sigmoid()[None],
        initial_state=pool.state[slot].transpose(1, 2)[None] if old else None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    pool.state[slot] = state[0].transpose(1, 2)
    return out[0]


def prefill(
    layer: Layer,
    pool: Pool,
    given: Rows,
    lengths: tuple[int, ...],
    slots: list[int],
    old: list[bool],
) -> tuple[torch.Tensor, torch.Tensor]:
    """What SGLang's backend does with a prefill: outputs, [tokens, HEADS, V], and the states before
    each chunk."""
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    indices = torch.tensor(slots, dtype=torch.int32)
    mixed = delta_net.convolve(
        given.qkv.T,
        layer.conv,
        None,
        pool.conv,
        starts,
        list(lengths),
        cache_indices=indices,
        has_initial_state=torch.tensor(old),
    ).T
    for slot, continues in zip(slots, old):
        if not continues and slot >= 0:
            pool.state[slot] = 0  # SGLang clears the slot of a new request
    q, k, v = mixed.split([KEYS, KEYS, VALUES], dim=1)
    g, beta = delta_net.gates(layer.rate, given.a, given.b, layer.bias)
    out, _, chunks = delta_net.delta_rule(
        q.unflatten(1, (KEY_HEADS, K))[None],
        k.unflatten(1, (KEY_HEADS, K))[None],
        v.unflatten(1, (HEADS, V))[None],
        g,
        beta,
        initial_state=pool.state,
        initial_state_indices=indices,
        cu_seqlens=starts,
    )
    return out[0], chunks[0]


def decode(layer: Layer, pool: Pool, given: Rows, slots: list[int]) -> torch.Tensor:
    """What SGLang's backend does with one more token of each request.  [requests, HEADS, V]"""
    indices = torch.tensor(slots, dtype=torch.int32)
    mixed = delta_net.convolve_step(
        given.qkv, pool.conv, layer.conv, None, "silu", conv_state_indices=indices
    )
    out, _ = delta_net.delta_rule_step(
        mixed_qkv=mixed,
        a=given.a,
        b=given.b,
        A_log=layer.rate,
        dt_bias=layer.bias,
        scale=K**-0.5,
        initial_state=pool.state,
        out=torch.full((len(slots), 1, HEADS, V), torch.nan),
        ssm_state_indices=indices,
    )
    return out[:, 0]


def assert_same(found: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(found, want, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("old", [False, True], ids=["new", "continued"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_prefill_of_mixed_lengths(lengths: tuple[int, ...], old: bool) -> None:
    own, given = layer(), rows(sum(lengths))
    ours = pool()
    wanted, slots = ours.clone(), list(range(2, 2 + len(lengths)))
    out, _ = prefill(own, ours, given, lengths, slots, [old] * len(lengths))
    start = 0
    for slot, length in zip(slots, lengths):
        part = given.part(start, start + length)
        assert_same(out[start : start + length], reference(own, wanted, slot, part, old))
        start += length
    assert_same(ours.conv, wanted.conv)
    assert_same(ours.state, wanted.state)


@pytest.mark.parametrize("length", [1, 2, 3, 64, 100])
def test_decode_after_prefill(length: int) -> None:
    """A batch of requests decodes what each would alone, from the states that prefill left."""
    own, ours, slots, steps = layer(), pool(), [5, 1, 7], 6
    wanted = ours.clone()
    first = rows(3 * length)
    prefill(own, ours, first, (length,) * 3, slots, [False] * 3)
    given = [rows(3) for _ in range(steps)]
    outs = [decode(own, ours, step, slots) for step in given]
    for index, slot in enumerate(slots):
        prompt = first.part(index * length, (index + 1) * length)
        alone = Rows(
            *(
                torch.cat([p, *(s[index : index + 1] for s in parts)])
                for p, *parts in zip(prompt, *given)
            )
        )
        want = reference(own, wanted, slot, alone, False)[length:]
        assert_same(torch.stack([out[index] for out in outs]), want)
    assert_same(ours.conv, wanted.conv)
    assert_same(ours.state, wanted.state)


def test_states_before_each_chunk() -> None:
    """A radix cache keeps the state where a chunk of the request begins."""
    own, ours, lengths, slots = layer(), pool(), (130, 64, 3), [2, 3, 4]
    given = rows(sum(lengths))
    _, chunks = prefill(own, ours, given, lengths, slots, [False] * 3)
    assert chunks.shape[0] == 3 + 1 + 1
    for chunk, slot, first, tokens in ((0, 2, 0, 0), (1, 2, 0, 64), (2, 2, 0, 128), (4, 4, 194, 0)):
        wanted = torch.zeros(HEADS, V, K)
        if tokens:
            alone = ours.clone()
            reference(own, alone, slot, given.part(first, first + tokens), False)
            wanted = alone.state[slot]
        assert_same(chunks[chunk], wanted)


def test_padding_moves_no_state() -> None:
    own, ours, given = layer(), pool(), rows(4)
    before = ours.clone()
    for out in (
        decode(own, ours, given, [-1] * 4),
        prefill(own, ours, given, (3, 1), [-1, -1], [True, True])[0],
    ):
        assert not out.any()
    assert ours.conv.equal(before.conv) and ours.state.equal(before.state)
    mixed, alone = ours.clone(), ours.clone()
    out = decode(own, mixed, given, [-1, 3, -1, 6])
    want = decode(own, alone, Rows(*(x[[1, 3]] for x in given)), [3, 6])
    assert_same(out[[1, 3]], want)
    assert mixed.state.equal(alone.state) and mixed.conv.equal(alone.conv)


def test_a_read_only_prefill_moves_no_state() -> None:
    ours, given = pool(), rows(5)
    before = ours.state.clone()
    q, k, v = given.qkv.split([KEYS, KEYS, VALUES], dim=1)
    delta_net.delta_rule(
        q.unflatten(1, (KEY_HEADS, K))[None],
        k.unflatten(1, (KEY_HEADS, K))[None],
        v.unflatten(1, (HEADS, V))[None],
        *delta_net.gates(torch.zeros(HEADS), given.a, given.b, torch.zeros(HEADS)),
        initial_state=ours.state,
        initial_state_indices=torch.tensor([3]),
        cu_seqlens=torch.tensor([0, 5]),
        inplace_update=False,
    )
    assert ours.state.equal(before)


def test_states_are_kept_in_all_layers() -> None:
    conv, state = torch.randn(2, SLOTS, CHANNELS, 3), torch.randn(2, SLOTS, HEADS, V, K)
    wanted = [x.clone() for x in (conv, state)]
    for x in wanted:
        x[:, 8] = x[:, 2]
    source, target = torch.tensor([1, 2, -1]), torch.tensor([7, 8, 6])
    delta_net.keep_states(conv, state, source, torch.tensor([False, True, True]), target, 3)
    assert conv.equal(wanted[0]) and state.equal(wanted[1])


def test_gated_norm() -> None:
    norm = theirs.Qwen3_5MoeRMSNormGated(V, eps=1e-3)
    norm.weight.data.normal_()
    x, z = torch.randn(11, V), torch.randn(11, V)
    ours = SimpleNamespace(weight=norm.weight, eps=1e-3, activation="swish")
    assert_same(delta_net.gated_norm(ours, x, z), norm(x, z))


def test_output_gates() -> None:
    x, gate = torch.randn(7, HEADS * V), torch.randn(7, HEADS, 2 * V)[:, :, V:]
    want = x * gate.reshape(7, -1).sigmoid()
    assert_same(delta_net.gate_output(x, gate), want)
    assert delta_net.gate_output(x, gate, inplace=True) is x
    assert_same(x, want)


def test_the_shared_expert_is_added_once() -> None:
    hidden, weight = torch.randn(7, K), torch.randn(K)
    shared, routed = torch.randn(7, K), torch.randn(7, K)
    want = routed + (hidden @ weight).sigmoid()[:, None] * shared
    delta_net.add_gated(hidden, weight, shared, routed)
    assert_same(routed, want)
