"""Speculation's flags and drafts: what is refused before anything starts, and what passes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sglang_afd.facts import Facts
from sglang_afd.flags import parse
from sglang_afd.gate import findings
from sglang_afd.observe.holdings import size
from sglang_afd.plan.advice import advise
from sglang_afd.spec import draft
from sglang_afd.speculation import Speculation, asked, rows_needed
from tests.support.checkpoints import seeded_qwen3_moe
from tests.support.drafts import AUX_LAYERS, TARGET, WORDS, seeded_draft
from tests.support.gate_facts import GPUS, make_facts, refused

pytestmark = pytest.mark.unit

EAGLE = ("--speculative-algorithm", "EAGLE3")
VOCABULARY, HIDDEN = 2048, TARGET["hidden"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a draft in its directory ``draft``."""
    path = seeded_qwen3_moe(tmp_path_factory.mktemp("target"), **TARGET)
    seeded_draft(path / "draft", path)
    return path


Change = Callable[[dict[str, Any], dict[str, np.ndarray]], None]


@pytest.fixture
def changed(target: Path, tmp_path: Path) -> Callable[[Change], Path]:
    """A copy of the draft, changed."""

    def make(change: Change) -> Path:
        config = json.loads((target / "draft" / "config.json").read_text())
        tensors = load_file(target / "draft" / "model.safetensors")
        change(config, tensors)
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return make


def facts(target: Path, *flags: str, path: Path | None = None, **more: Any) -> Facts:
    chosen = ("--speculative-draft-model-path", str(path or target / "draft"))
    return make_facts(target, *EAGLE, *chosen, *flags, **more)


def shape(steps: int, topk: int, tokens: int) -> tuple[str, ...]:
    return (
        *("--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(topk)),
        *("--speculative-num-draft-tokens", str(tokens)),
    )


def test_a_draft_of_the_target_passes(target: Path) -> None:
    for flags in ((), shape(3, 1, 4), shape(3, 2, 6)):
        found = findings(facts(target, *flags))
        assert all(f.passed for f in found), found
        words = f"a draft of {WORDS} words that reads layers 0, 1, 2, "
        assert (
            words + f"{(*flags, '4')[5 if flags else 0]} tokens a verify step" in found[0].message
        )


@pytest.mark.parametrize(
    ("kv_heads", "tp", "elements"), [(4, 1, 1024), (4, 2, 512), (1, 2, 256), (2, 1, 512)]
)
def test_a_tokens_kv_is_the_drafts_own(kv_heads: int, tp: int, elements: int) -> None:
    config = {"num_attention_heads": 8, "num_key_value_heads": kv_heads, "head_dim": 128}
    assert draft.kv_elements(config, tp) == elements


def test_the_gate_tells_what_a_draft_takes(target: Path) -> None:
    stored = (target / "draft" / "model.safetensors").stat().st_size
    for dtype, kv in (("float32", "1.0 KiB"), ("bfloat16", "512 B")):  # 2 heads of 64
        text = findings(facts(target, "--dtype", dtype))[0].message
        assert f"{kv} of KV a token and its share of {size(stored)} of weights" in text


def test_without_speculation_nothing_is_asked(target: Path) -> None:
    assert asked(()) is None and rows_needed((), 1, 1) == 0
    assert asked(("--speculative-algorithm", "NEXTN")) is None


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), (3, 1, 4)),
        (shape(5, 1, 4), (5, 1, 6)),  # a chain has a token a step, and one
        (shape(3, 2, 6), (3, 2, 6)),
    ],
)
def test_settings_are_as_sglang_resolves_them(
    flags: tuple[str, ...], expected: tuple[int, int, int]
) -> None:
    path = ("--speculative-draft-model", "/draft")
    for algorithm in ("EAGLE3", "eagle3"):
        found = asked(("--speculative-algorithm", algorithm, *path, *flags))
        assert found == Speculation("/draft", *expected)


@pytest.mark.parametrize(
    ("ranks", "tp", "flags", "rows"),
    [
        (1, 1, (), 48 * 4),
        (2, 1, (), 24 * 4),
        (1, 2, (), 24 * 4),
        (3, 1, ("--max-running-requests", "10"), 3 * 4),
        (1, 2, ("--max-running-requests", "3", *shape(4, 1, 5)), 8),
        (8, 1, ("--max-running-requests", "4"), 4),
    ],
)
def test_rows_of_a_verify_step(ranks: int, tp: int, flags: tuple[str, ...], rows: int) -> None:
    assert rows_needed((*EAGLE, *flags), ranks, tp) == rows


def test_an_exchange_takes_all_rows_of_a_verify_step(target: Path) -> None:
    assert facts(target).config.max_tokens_per_rank == 192
    assert facts(target, "--max-running-requests", "8").config.max_tokens_per_rank == 128
    few = ("--max-running-requests", "8", "--afd-max-tokens-per-rank")
    assert refused(facts(target, *few, "32"), "execution mode") == []
    [text] = refused(facts(target, *few, "31"), "execution mode")
    assert text.startswith("a verify step has up to 32 rows a rank (4 for each running request)")
    assert "raise it to 32" in text


def test_graphs_are_of_as_many_requests_as_an_exchange_takes(target: Path) -> None:
    argv = ["--afd-attention-ranks", "1", "--afd-ffn-ranks", "1", *EAGLE]
    args = parse(argv, transport="nvlink").sglang_args
    assert args[args.index("--cuda-graph-max-bs-decode") + 1] == "48"
    for largest, fits in (("48", True), ("49", False)):
        flags = ("--afd-transport", "nvlink", "--cuda-graph-max-bs-decode", largest)
        texts = refused(facts(target, *flags, machine=GPUS), "transport")
        assert any("a graph of 196 rows" in text for text in texts) is not fits, texts


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (shape(0, 1, 4), "0 steps of 1 tokens that give 1 tokens to verify are no draft"),
        (shape(3, 0, 4), "3 steps of 0 tokens"),
        (shape(3, 2, 1), "3 steps of 2 tokens that give 1 tokens to verify"),
        (shape(2, 2, 8), "2 steps of 2 tokens draft 6 at most, not the 7"),
        (shape(99, 1, 100), "100 tokens of a request in one verify step are over 64"),
        (shape(3, 1, 4)[:2], "--speculative-num-steps alone do not say how"),
        (("--speculative-adaptive",), "--speculative-adaptive asks for Other ways to speculate"),
        (("--speculative-draft-window-size", "8"), "asks for Other ways to speculate"),
    ],
)
def test_flags_that_do_not_go_together(target: Path, flags: tuple[str, ...], expected: str) -> None:
    [text] = refused(facts(target, *flags), "execution mode")
    assert expected in text


def test_a_draft_without_an_algorithm_is_no_mistake_to_pass_over(target: Path) -> None:
    flags = ("--speculative-draft-model-path", str(target / "draft"))
    [text] = refused(make_facts(target, *flags), "execution mode")
    assert "do nothing without --speculative-algorithm EAGLE3" in text


@pytest.mark.parametrize("algorithm", ["NEXTN", "EAGLE", "NGRAM", "DFLASH"])
def test_other_algorithms_are_refused_by_name(target: Path, algorithm: str) -> None:
    [text] = refused(make_facts(target, "--speculative-algorithm", algorithm), "execution mode")
    assert f"--speculative-algorithm {algorithm} asks for Other ways to speculate" in text


def test_simulated_acceptance_is_refused(target: Path) -> None:
    [text] = refused(facts(target, SGLANG_SIMULATE_ACC_LEN="2.4"), "execution mode")
    assert "its answers are not the model's" in text


def test_a_target_that_was_not_tried_is_refused(tmp_path: Path) -> None:
    from tests.support.family_checkpoints import seeded_family

    path = seeded_family(tmp_path / "m", "minimax", seed=1, shards=1)
    texts = refused(make_facts(path, *EAGLE), "model")
    assert any("not shown to work with MiniMaxM2ForCausalLM" in text for text in texts), texts


def test_a_draft_must_be_there(target: Path, tmp_path: Path) -> None:
    [text] = refused(make_facts(target, *EAGLE), "model")
    assert "EAGLE3 needs a draft; give --speculative-draft-model-path" in text
    [text] = refused(facts(target, path=tmp_path / "none"), "model")
    assert "there is no directory" in text and "must be downloaded first" in text
    [text] = refused(facts(target, path=tmp_path), "model")
    assert "config.json" in text and "cannot be read" in text


def edit(**fields: Any) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        eagle = fields.get("eagle_config")
        config.update(fields)
        if isinstance(eagle, list):
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": eagle}
        for name in [name for name, value in config.items() if value is None]:
            del config[name]

    return change


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (edit(architectures=["LlamaForCausalLM"]), "architecture is LlamaForCausalLM; served is"),
        (edit(vocab_size=4096), "the draft's vocab_size is 4096; the target's is 2048"),
        (edit(hidden_size=256), "the draft's hidden_size is 256; the target's is 128"),
        (edit(num_hidden_layers=2), "the draft's num_hidden_layers is 2; one layer is served"),
        (edit(draft_vocab_size=None), "config.json has no draft_vocab_size"),
        (edit(num_attention_heads=None), "config.json has no num_attention_heads"),
        (edit(draft_vocab_size="many"), 'draft_vocab_size is "many"; it must be'),
        (edit(fc_norm=True), "sets fc_norm, which is not shown"),
        (edit(tie_word_embeddings=True), "no lm_head of its own"),
        (edit(num_aux_hidden_states=2), "num_aux_hidden_states is 2, but it reads 3 layers"),
        (edit(eagle_config=[0, 1, 3]), "0, 1, 3 of the target's 4; they must be of 0 to 2"),
        (edit(eagle_config=[-1, 0, 1]), "-1, 0, 1 of the target's 4"),
        (edit(eagle_config=[0, 2, 1]), "0, 2, 1 of the target's 4"),
        (edit(eagle_config=[0, 0, 1]), "0, 0, 1 of the target's 4"),
        (edit(eagle_config=[]), "of the target's 4"),
        (edit(eagle_config=None), "leaves to SGLang's choice, are 1, 1, 0 of the target's 4"),
        (edit(eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state is off"),
        (edit(eagle_config=["one"]), "it must be a list of whole numbers"),
    ],
)
def test_a_config_of_another_target_is_refused(
    target: Path, changed: Callable[[Change], Path], change: Change, expected: str
) -> None:
    texts = refused(facts(target, path=changed(change)), "model")
    assert any(expected in text for text in texts), texts


def without(*names: str) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        for name in names:
            del tensors[name]

    return change


def put(name: str, tensor: np.ndarray) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = tensor

    return change


def alter(name: str, how: Callable[[np.ndarray], np.ndarray]) -> Change:
    def change(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
        tensors[name] = how(tensors[name])

    return change


def swapped(has: np.ndarray) -> np.ndarray:
    """The target's words that the draft has, but one in place of another."""
    changed = has.copy()
    changed[has.argmax()], changed[(~has).argmax()] = False, True
    return changed


ALL = [
    name
    for name, _ in draft._tensors(
        draft.Fields(  # every tensor of a draft
            {
                "hidden_size": 8,
                "draft_vocab_size": 4,
                "num_attention_heads": 1,
                "num_key_value_heads": 1,
                "head_dim": 8,
                "intermediate_size": 8,
            }
        ),
        draft.Target(8, 8, 4),
        3,
    )
]


@pytest.mark.parametrize("name", ALL)
def test_every_tensor_must_be_there_in_its_shape(
    target: Path, changed: Callable[[Change], Path], name: str
) -> None:
    [text] = refused(facts(target, path=changed(without(name))), "model")
    assert text.startswith(f"the draft lacks {name}; ")
    [text] = refused(facts(target, path=changed(alter(name, lambda t: t[:-1]))), "model")
    assert text.startswith(f"the draft's {name} is ")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (without("d2t", "t2d"), "the draft lacks d2t, t2d"),
        (put("midlayer.mlp.bias", np.zeros(2)), "does not read: midlayer.mlp.bias"),
        (put("layers.1.mlp.gate_proj.weight", np.zeros(2)), "does not read: layers.1.mlp.gate"),
        (alter("d2t", lambda t: t.astype(np.int32)), "the draft's d2t is I32; served is I64"),
        (alter("fc.weight", lambda t: t.astype(np.int8)), "the draft's fc.weight is I8"),
        (alter("d2t", lambda t: t + 1), "d2t"),
        (alter("d2t", lambda t: t + VOCABULARY), "d2t leads outside of the target's 2048 words"),
        (alter("d2t", lambda t: np.zeros_like(t)), "d2t and t2d name different words"),
        (alter("t2d", swapped), "d2t and t2d name different words"),
    ],
)
def test_tensors_of_another_draft_are_refused(
    target: Path, changed: Callable[[Change], Path], change: Change, expected: str
) -> None:
    [text] = refused(facts(target, path=changed(change)), "model")
    assert expected in text


def respell(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)


def embed(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    tensors["embed_tokens.weight"] = np.zeros((VOCABULARY, HIDDEN), np.float32)


@pytest.mark.parametrize("change", [respell, embed])
def test_other_exports_of_the_same_draft_pass(
    target: Path, changed: Callable[[Change], Path], change: Change
) -> None:
    assert refused(facts(target, path=changed(change)), "model") == []


def test_files_that_are_no_weights_are_refused(target: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((target / "draft" / "config.json").read_text())
    [text] = refused(facts(target, path=tmp_path), "model")
    assert "has no .safetensors file" in text
    (tmp_path / "model.safetensors").write_bytes(b"short")
    [text] = refused(facts(target, path=tmp_path), "model")
    assert "is cut short" in text


def test_the_drafts_heads_divide_over_attention_tp(
    target: Path, changed: Callable[[Change], Path]
) -> None:
    path = changed(edit(num_attention_heads=3))
    texts = refused(facts(target, "--afd-attention-tp", "2", path=path), "model")
    assert any("the draft's 3 attention heads" in text for text in texts)


def test_a_gain_that_depends_on_the_draft_is_not_predicted(target: Path) -> None:
    advice = advise(facts(target, machine=GPUS))
    assert advice is not None and "how many of the draft's tokens are right" in advice.message


def test_sglangs_choice_of_layers_is_by_their_inputs() -> None:
    assert draft.aux_layers({}, 94) == (1, 46, 90)
    assert draft.aux_layers({"eagle_config": {}}, 48) == (1, 23, 44)
    named = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS)}}
    assert draft.aux_layers(named, 94) == AUX_LAYERS
