"""Which rows of a batch are recorded, and on which rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_afd.observe.recording import MAX_POSITION, RECORD_ENV, request_id
from sglang_afd.upstream import record

pytestmark = pytest.mark.unit


def batch(rids: list[str] | None, lengths: list[int] | None = None) -> Any:
    """A decode batch, or with `lengths` an extend batch."""
    mode = SimpleNamespace(is_extend=lambda: lengths is not None)
    return SimpleNamespace(rids=rids, forward_mode=mode, extend_seq_lens_cpu=lengths)


def test_rows_belong_to_the_requests_that_asked() -> None:
    rids = ["plain", request_id(3, "a"), request_id(0, "b")]
    assert record._numbers(batch(rids, [2, 3, 1])) == [-1, -1, 3, 3, 3, 0]
    assert record._numbers(batch(rids)) == [-1, 3, 0]


@pytest.mark.parametrize("rids", [None, [], ["plain", "other"]])
def test_a_batch_that_nobody_asked_about_is_not_recorded(rids: list[str] | None) -> None:
    assert record._numbers(batch(rids)) is None


def test_lengths_that_do_not_fit_the_requests_are_an_error() -> None:
    with pytest.raises(ValueError):
        record._numbers(batch([request_id(1, "a")], [2, 3]))


def kept(numbers: list[int], here: int, place: int, first: int = 0) -> Any:
    """Rows 0, 1, 2, ... of a batch, of which this rank has `here` from its place on."""
    rows = torch.arange(place * here, (place + 1) * here)
    positions = first + torch.arange(len(numbers))
    return record._kept(torch.tensor(numbers), positions, {"0.output": rows[:, None]}, place)


def test_all_rows_on_a_rank_alone_without_the_padding() -> None:
    found = kept([4, -1, 4], here=5, place=0)
    assert found["0.output"].flatten().tolist() == [0, 2]
    assert found["request"].tolist() == [4, 4] and found["position"].tolist() == [0, 2]


def test_each_rank_of_attention_tp_keeps_its_part() -> None:
    numbers = [7, 7, -1, 7, 7]
    first, second = kept(numbers, 3, 0), kept(numbers, 3, 1)
    assert first["0.output"].flatten().tolist() == first["position"].tolist() == [0, 1]
    assert second["0.output"].flatten().tolist() == second["position"].tolist() == [3, 4]
    assert kept([7], here=1, place=1) is None, "this rank has padding alone"


def test_long_prompts_are_cut() -> None:
    found = kept([1] * 4, here=4, place=0, first=MAX_POSITION - 2)
    assert found["position"].tolist() == [MAX_POSITION - 2, MAX_POSITION - 1]
    assert kept([1] * 4, here=4, place=0, first=MAX_POSITION) is None


class Doubling(torch.nn.Module):
    """Writes its output over its input, as experts may."""

    layer_id = 2

    def forward(self, hidden_states: torch.Tensor, topk_output: Any) -> torch.Tensor:
        return hidden_states.mul_(2)


def test_the_input_is_kept_although_experts_write_over_it() -> None:
    module = Doubling()
    module.register_forward_pre_hook(record._take_input, with_kwargs=True)
    module.register_forward_hook(record._take_output)
    chosen = SimpleNamespace(topk_ids=torch.tensor([[1]]))
    with record._taking() as taken:
        module(hidden_states=torch.ones(1, 3), topk_output=chosen)
    assert taken["2.input"].tolist() == [[1, 1, 1]] and taken["2.output"].tolist() == [[2, 2, 2]]
    assert taken["2.experts"].tolist() == [[1]]
    module(torch.ones(1, 3), chosen)  # outside of a recorded forward nothing is kept
    assert taken["2.output"].tolist() == [[2, 2, 2]]


def test_only_a_server_that_is_told_to_record_has_the_hooks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    from sglang_afd import plugin
    from sglang_afd.upstream import hooks

    installed: list[Any] = []
    monkeypatch.setattr(hooks, "install", installed.extend)
    for name in ("SGLANG_AFD_CPU", "SGLANG_AFD_CONFIG", RECORD_ENV):
        monkeypatch.delenv(name, raising=False)
    plugin._install()
    assert not installed
    monkeypatch.setenv(RECORD_ENV, str(tmp_path))
    plugin._install()
    assert [hook.target.rpartition(".")[2] for hook in installed] == ["load_model", "forward"]
