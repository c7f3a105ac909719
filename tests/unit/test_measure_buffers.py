"""What is measured around the making of a transport on a GPU, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang_afd.upstream import holdings

pytestmark = pytest.mark.unit

GROUP = object()


class Device:
    """Free memory that shrinks by what is made, in the order that it is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.communicator = 1000, False
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (self.free, 1000))
        monkeypatch.setattr(torch.distributed, "barrier", self.use)

    def use(self, group: Any) -> None:
        """The first collective over the group creates its communicator."""
        assert group is GROUP
        if not self.communicator:
            self.free, self.communicator = self.free - 300, True

    def make(self) -> str:
        """A transport whose making uses the group, as DeepEP's does."""
        self.use(GROUP)
        self.free -= 40
        return "transport"


def test_the_communicator_is_measured_apart_from_the_buffers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(holdings, "_measured", {})
    device = Device(monkeypatch)
    assert holdings.measure_buffers(device.make, GROUP) == "transport"
    assert holdings._measured == {"communicator": 300, "buffers": 40}


def test_a_host_without_a_gpu_holds_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holdings, "_measured", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert holdings.measure_buffers(lambda: "transport", GROUP) == "transport"
    assert holdings._measured == {"communicator": 0, "buffers": 0}
