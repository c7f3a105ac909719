"""When a running deployment takes another checkpoint's weights, and what its ranks compare."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_afd.checkpoint import read_checkpoint
from sglang_afd.config import AfdConfig
from sglang_afd.identity import checkpoint_identity
from sglang_afd.topology import Topology
from sglang_afd.upstream import weight_update as upstream
from sglang_afd.weight_update import refusals
from tests.support.gate_facts import FP8, write_model, write_weights

pytestmark = pytest.mark.unit


def said(served: Path, new: Path, load_format: str = "auto") -> list[str]:
    checkpoints = [read_checkpoint(["--model-path", str(path)]) for path in (served, new)]
    return [f"{r.message}; {r.mend}" for r in refusals(*checkpoints, load_format)]


def test_another_training_step_of_the_same_model_is_taken(tmp_path: Path) -> None:
    served = write_model(tmp_path / "served")
    later = {"transformers_version": "9.9", "dtype": "float32", "sliding_window": 4}
    assert said(served, write_model(tmp_path / "new", **later)) == []


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"rope_theta": 2.0}, "differs in rope_theta;"),
        ({"num_experts": 8, "hidden_size": 64}, "differs in hidden_size, num_experts;"),
        ({"quantization_config": {**FP8, "quant_method": "awq"}}, "in quantization_config.quant"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    served = write_model(tmp_path / "served", rope_theta=1.0, quantization_config=FP8)
    kept = {"rope_theta": 1.0, "quantization_config": FP8}
    [text] = said(served, write_model(tmp_path / "new", **{**kept, **changes}))
    assert why in text and "restart the deployment with it" in text


def test_files_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    served, new = write_model(tmp_path / "served"), write_model(tmp_path / "new")
    write_weights(new / "model.safetensors", {"lm_head.weight": ("BF16", (1024, 2048))})
    [text] = said(served, new)
    assert "lacks" in text
    [text] = said(served, tmp_path / "nowhere")
    assert "there is no directory" in text
    [text] = said(served, served, "dummy")
    assert "load format dummy" in text


@pytest.mark.parametrize(
    ("read", "wrong"),
    [
        ([7, 7, 7], ""),
        ([7, 7, None], "FFN rank 0 (world rank 2) could not take the weights of /new"),
        ([None, 7, 8], "attention rank 0 (world rank 0) could not take the weights of /new"),
        ([7, 7, 8], "FFN rank 0 (world rank 2) found another checkpoint at /new than rank 0"),
    ],
)
def test_ranks_agree_on_what_they_read(
    read: list[int | None], wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = read[2]

    def gather(into: list[torch.Tensor], own: torch.Tensor, group: str) -> None:
        assert own.item() == (-1 if mine is None else mine)
        for tensor, value in zip(into, read, strict=True):
            tensor[0] = -1 if value is None else value

    monkeypatch.setattr(torch.distributed, "all_gather", gather)
    monkeypatch.setattr(upstream, "_group", lambda: "group")
    context = SimpleNamespace(topology=Topology(2, 1))
    monkeypatch.setattr(upstream, "current", lambda: context)
    assert upstream._disagreement(mine, "/new") == wrong


def test_no_step_on_a_gpu_reads_weights_while_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was launched before ends first; what is launched afterwards finds all of the new."""
    calls: list[str] = []
    group = SimpleNamespace(
        _get_backend=lambda device: SimpleNamespace(_set_default_timeout=lambda bound: None)
    )
    context = SimpleNamespace(placed="old", next_placement="new", agreement={})
    for name, value in {
        "current": lambda: context,
        "_group": lambda: group,
        "_disagreement": lambda identity, path: "",
        "checkpoint_identity": lambda path: {},
        "choose_anew": lambda model: calls.append("slots"),
    }.items():
        monkeypatch.setattr(upstream, name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("ended"))

    def read(*args: Any, **kwargs: Any) -> tuple[bool, str]:
        calls.append("read")
        return True, ""

    *_, everywhere = upstream.hooks(AfdConfig(attention_ranks=1, ffn_ranks=1))
    updater = SimpleNamespace(
        model_config=SimpleNamespace(model_path="before"), get_model=lambda: None
    )
    assert everywhere.fn(read, updater, "before", "auto") == (True, "")
    assert calls == ["ended", "read", "slots", "ended"] and context.placed == "new"


def test_a_checkpoint_that_was_overwritten_is_not_read_for_a_placement(tmp_path: Path) -> None:
    """Its weights are not those that run; at another path they may be."""
    served = write_model(tmp_path / "served")
    write_weights(served / "model.safetensors", {"a": ("F32", [64])})
    known = checkpoint_identity(str(tmp_path / "served"))
    assert not upstream._changed(str(tmp_path / "served"), known)
    shutil.copytree(tmp_path / "served", tmp_path / "moved")
    assert not upstream._changed(str(tmp_path / "moved"), known)
    [file] = (tmp_path / "moved").glob("*.safetensors")
    with file.open("r+b") as weights:
        weights.truncate(file.stat().st_size - 8)
    assert upstream._changed(str(tmp_path / "moved"), known)
    assert not upstream._changed("organisation/model", {"checkpoint": "organisation/model 1ab"})


def test_an_update_without_a_way_back_is_refused(tmp_path: Path) -> None:
    """Nor is there anything then to tell another model by."""
    [text] = said(tmp_path / "gone", write_model(tmp_path / "new", rope_theta=2.0))
    assert text.startswith("the weights that run cannot be read again (")
    assert text.endswith("so that no rank could go back to them; restart the deployment")
