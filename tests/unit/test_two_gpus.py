"""The two-GPU benchmark takes up what an earlier call left, if it is of the same checkpoint."""

from __future__ import annotations

import json
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks import two_gpus
from sglang_afd.validate.answers import Continuation, Forced
from sglang_afd.validate.comparison import one_prompt

pytestmark = pytest.mark.unit

CONTINUED = Continuation(prompt=[3], tokens=[4], logprobs=[-0.5], gaps=[0.1])
SEEN = Forced(ranks=[1], margins=[0.0], logprobs=[-0.5])
COMPARED = one_prompt(0, CONTINUED, CONTINUED, SEEN)
AFD = two_gpus.Deployment("deepep", shared_gpu=False)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the servers that were started; none is, and no checkpoint is written."""
    names: list[str] = []

    class Fake:
        start_seconds = 1.0

    @contextmanager
    def serve(name: str, *_: Any, **__: Any) -> Any:
        names.append(name)
        yield Fake()

    monkeypatch.setattr(two_gpus, "serve", serve)
    monkeypatch.setattr(two_gpus, "checkpoints", lambda work: dict.fromkeys(two_gpus.DTYPES, work))
    monkeypatch.setattr(two_gpus, "continue_greedily", lambda *_, **__: [CONTINUED])
    monkeypatch.setattr(two_gpus, "compare", lambda *_, **__: [COMPARED])
    return names


def test_references_are_not_made_twice(started: list[str], tmp_path: Path) -> None:
    first = two_gpus.references(tmp_path, tmp_path, AFD)
    assert sorted(started) == ["bf16-one-gpu", "fp8-one-gpu"]
    assert two_gpus.references(tmp_path, tmp_path, AFD) == first
    assert len(started) == 2
    assert first["bf16"] == {
        "start_seconds": 1.0,
        "against_itself": two_gpus._compared(None, []),  # type: ignore[arg-type]
    }


def test_references_of_another_checkpoint_are_made_again(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus.references(tmp_path, tmp_path, AFD)
    monkeypatch.setattr(two_gpus, "SHAPE", {**two_gpus.SHAPE, "layers": 5})
    two_gpus.references(tmp_path, tmp_path, AFD)
    assert len(started) == 4


def test_one_lost_reference_is_made_alone(started: list[str], tmp_path: Path) -> None:
    two_gpus.references(tmp_path, tmp_path, AFD)
    (tmp_path / "fp8-continuations.json").unlink()
    two_gpus.references(tmp_path, tmp_path, AFD)
    assert started[2:] == ["fp8-one-gpu"]


def test_agreement_without_references_says_what_to_run(
    started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RuntimeError, match="run the part references"):
        two_gpus.agreement(tmp_path, tmp_path, AFD, "bf16")
    two_gpus.references(tmp_path, tmp_path, AFD)
    monkeypatch.setattr(two_gpus, "SEED", 1)
    with pytest.raises(RuntimeError, match="of another checkpoint"):
        two_gpus.agreement(tmp_path, tmp_path, AFD, "bf16")
    assert len(started) == 2


def test_continuations_are_kept_as_they_were(started: list[str], tmp_path: Path) -> None:
    two_gpus.references(tmp_path, tmp_path, AFD)
    kept = json.loads((tmp_path / "bf16-continuations.json").read_text())["continuations"]
    assert msgspec.convert(kept, list[Continuation]) == [CONTINUED]
