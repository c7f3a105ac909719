"""Each rank reads the tensors of its role out of a checkpoint's files, and asks for no other."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors

from sglang_afd import context as module
from sglang_afd.config import AfdConfig
from sglang_afd.context import RankContext
from sglang_afd.families import FAMILIES, MoeFacts
from sglang_afd.upstream.loading import HOOKS
from tests.support.checkpoints import seeded_qwen3_moe

pytestmark = pytest.mark.unit

EXPERTS, FFN = 6, 3
CONFIG = AfdConfig(attention_ranks=1, ffn_ranks=FFN)
FACTS = MoeFacts((0, 1), EXPERTS, top_k=2, hidden_size=32, intermediate_size=16)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that were asked for."""
    names: list[str] = []
    opened = safetensors.safe_open

    class Spy:
        def __init__(self, *args: object, **kwargs: object) -> None:
            self._open = opened(*args, **kwargs)

        def __enter__(self) -> Spy:
            self._file = self._open.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self._open.__exit__(*error)

        def keys(self) -> list[str]:
            return self._file.keys()

        def get_tensor(self, name: str) -> object:
            names.append(name)
            return self._file.get_tensor(name)

    monkeypatch.setattr(safetensors, "safe_open", Spy)
    return names


@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.target.rpartition(".")[2])
def test_a_rank_reads_no_tensor_of_another(
    hook, asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeded_qwen3_moe(
        tmp_path, seed=1, hidden=32, heads=1, kv_heads=1, head_dim=32, vocab=64,
        experts=EXPERTS, moe_intermediate=16, shards=3,
    )  # fmt: skip
    files = sorted(map(str, tmp_path.glob("*.safetensors")))
    read: list[list[str]] = []
    for rank in range(1 + FFN):
        context = RankContext(CONFIG, rank, FAMILIES["Qwen3MoeForCausalLM"], FACTS, {})
        monkeypatch.setattr(module, "_current", context)
        asked.clear()
        yielded = [name for name, _ in hook.fn(None, files, disable_mmap=False)]
        assert asked == yielded, "no more than what the model gets"
        read.append(yielded)
    attention, *ffn = read
    assert not [name for name in attention if ".experts." in name]
    assert (
        "model.embed_tokens.weight" in attention and "model.layers.1.mlp.gate.weight" in attention
    )
    for rank, names in enumerate(ffn):
        owned = (2 * rank, 2 * rank + 1)
        assert sorted(names) == sorted(
            f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
            for layer in (0, 1)
            for expert in owned
            for projection in ("gate", "up", "down")
        )


@pytest.mark.parametrize("length", [0, 4, 100, 20_000])
def test_a_file_that_breaks_off_is_named_with_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    seeded_qwen3_moe(
        tmp_path, seed=1, hidden=32, heads=1, kv_heads=1, head_dim=32, vocab=64,
        experts=EXPERTS, moe_intermediate=16,
    )  # fmt: skip
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as opened:
        opened.truncate(length)
    context = RankContext(CONFIG, 1, FAMILIES["Qwen3MoeForCausalLM"], FACTS, {})
    monkeypatch.setattr(module, "_current", context)
    for hook in HOOKS:
        with pytest.raises(RuntimeError) as error:
            list(hook.fn(None, [str(file)]))
        assert str(error.value).startswith(f"FFN rank 0 (world rank 1) cannot read {file}: ")
        assert str(error.value).endswith("; download the checkpoint again, whole")
