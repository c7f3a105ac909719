"""The `nvlink` transport's ends of a rank, on CPU tensors, with kernels that do nothing."""

from __future__ import annotations

import pytest
import torch
from triton import JITFunction

from sglang_afd.dispatch.channel import Arena
from sglang_afd.dispatch.nvlink import NvlinkTransport
from sglang_afd.dispatch.step_plan import Caps, Path, Round
from sglang_afd.topology import Topology

pytestmark = pytest.mark.unit

CAPS = Caps(decode=8, bulk=32)


@pytest.mark.parametrize("attention_ranks", [1, 3])
def test_samples_have_the_form_of_what_is_received(
    monkeypatch: pytest.MonkeyPatch, attention_ranks: int
) -> None:
    """Experts choose their kernels by the number of rows, and load them while peers wait."""
    monkeypatch.setattr(JITFunction, "run", lambda *args, **kwargs: None)
    topology = Topology(attention_ranks, 1)
    transport = NvlinkTransport(
        topology=topology,
        rank=topology.ffn_world.start,
        num_experts=6,
        hidden_size=16,
        top_k=4,
        dtype=torch.bfloat16,
        caps=CAPS,
        timeout=5.0,
        make_arena=lambda size: Arena(
            torch.zeros(size, dtype=torch.uint8), (0,) * topology.world_size
        ),
    )
    blocks = [(Path.BULK, (rows, *[0] * attention_ranks)) for rows in (1, 2, 4, 8, 16, 32)]
    received = [
        transport.receive(Round(path, 0, counts))[0]
        for path, counts in ((Path.DECODE, ()), *blocks)
    ]
    samples = transport.samples()
    assert len(samples) == len(received)
    for sample, batch in zip(samples, received, strict=True):
        assert [(part.shape, part.dtype, part.device) for part in sample] == [
            (part.shape, part.dtype, part.device) for part in batch
        ]
        assert sample.expert_ids[0].tolist() == [0, -1, -1, -1]
        assert (sample.expert_ids[1:] == -1).all()
