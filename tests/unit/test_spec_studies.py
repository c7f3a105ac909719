"""Which layers a draft reads, by a flag; and simulated acceptance, which nobody has by accident."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_afd.config import AfdConfig, ConfigError
from sglang_afd.facts import Facts
from sglang_afd.flags import NOT_THE_MODEL, parse
from sglang_afd.gate import findings
from sglang_afd.upstream import simulated, speculation
from tests.support.checkpoints import seeded_qwen3_moe
from tests.support.drafts import TARGET, seeded_draft
from tests.support.gate_facts import GPUS, make_facts, refused

pytestmark = pytest.mark.unit
EAGLE = ("--speculative-algorithm", "EAGLE3")
AUX, ACCEPT, SEED = "--afd-spec-aux-layers", "--afd-spec-sim-accept", "--afd-spec-sim-seed"


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Facts]:
    """A target of 6 layers with a draft that names layers 0, 1, 2, or (nameless=True) none."""
    path = seeded_qwen3_moe(tmp_path_factory.mktemp("target"), **{**TARGET, "layers": 6})
    seeded_draft(path / "draft", path)
    nameless = seeded_draft(path / "nameless", path)
    config = json.loads((nameless / "config.json").read_text())
    del config["eagle_config"]
    (nameless / "config.json").write_text(json.dumps(config))

    def make(*flags: str, nameless: bool = False, **more: Any) -> Facts:
        chosen = str(path / ("nameless" if nameless else "draft"))
        return make_facts(path, *EAGLE, "--speculative-draft-model-path", chosen, *flags, **more)

    return make


def told(facts: Facts) -> str:
    found = findings(facts)
    assert all(f.passed for f in found), found
    return found[0].message


def test_the_flag_names_what_the_draft_does_not(facts: Callable[..., Facts]) -> None:
    assert "reads layers 0, 1, 2," in told(facts(AUX, "0,1,2"))
    assert "reads layers 1, 3, 4," in told(facts(AUX, "1,3,4", nameless=True))


@pytest.mark.parametrize("shifted", ["1,2,3", "0,1,3", "0,1", "2,1,0"])
def test_other_layers_than_the_drafts_are_refused(
    facts: Callable[..., Facts], shifted: str
) -> None:
    """A set that is off by one would leave a draft that is right by chance alone."""
    [text] = refused(facts(AUX, shifted), "model")
    assert f"{AUX} {shifted} are not the layers that the draft was trained on" in text
    assert "which its config.json names: 0,1,2" in text and f"leave {AUX} out" in text


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ("3,4,5", f"which {AUX} names, are 3, 4, 5 of the target's 6; they must be of 0 to 4"),
        ("-1,0,1", "they must be of 0 to 4"),
        ("1,1,2", "they must be of 0 to 4, ascending"),
        ("1,2", "num_aux_hidden_states is 3, but it reads 2 layers"),
    ],
)
def test_layers_that_no_draft_can_read_are_refused(
    facts: Callable[..., Facts], layers: str, expected: str
) -> None:
    texts = refused(facts(f"{AUX}={layers}", nameless=True), "model")
    assert any(expected in text for text in texts), texts


@pytest.mark.parametrize("text", ["", "one,two", "1;2;3", "1,,2"])
def test_layers_are_numbers(text: str) -> None:
    flags = ("--afd-attention-ranks", "1", "--afd-ffn-ranks", "1")
    with pytest.raises(ConfigError, match="must be layers' numbers with commas between"):
        parse([*flags, f"{AUX}={text}"], transport="gloo")


def test_sglang_captures_the_layers_of_the_flag() -> None:
    plain = AfdConfig(attention_ranks=1, ffn_ranks=1)
    assert speculation.hooks(plain) == speculation.HOOKS
    config = AfdConfig(attention_ranks=1, ffn_ranks=1, spec_aux_layers=(1, 3, 4))
    [*_, hook] = speculation.hooks(config)
    for reads, expected in ((True, [1, 3, 4]), (False, None)):  # of a draft's own runner: none
        found = SimpleNamespace(
            eagle_use_aux_hidden_state=reads, eagle_aux_hidden_state_layer_ids=None
        )
        assert hook.fn(found, server_args=None) is None  # SGLang's object is kept
        assert found.eagle_aux_hidden_state_layer_ids == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((ACCEPT, "2.4"), f"say that this is wanted with {NOT_THE_MODEL}"),
        ((SEED, "1"), f"{SEED} does nothing without {ACCEPT}"),
        ((SEED, "1", NOT_THE_MODEL), f"{SEED} does nothing without {ACCEPT}"),
        ((NOT_THE_MODEL,), "nothing is emulated"),
    ],
)
def test_acceptance_is_not_simulated_by_accident(flags: tuple[str, ...], expected: str) -> None:
    deployment = ("--afd-attention-ranks", "1", "--afd-ffn-ranks", "1")
    with pytest.raises(ConfigError, match=expected):
        parse([*deployment, *flags], transport="gloo")


@pytest.mark.parametrize(
    ("mean", "passes"), [("1", True), ("4", True), ("4.1", False), ("0.9", False)]
)
def test_a_mean_that_no_draft_can_have_is_refused(
    facts: Callable[..., Facts], mean: str, passes: bool
) -> None:
    texts = refused(facts(ACCEPT, mean, NOT_THE_MODEL), "execution mode")
    assert bool(texts) is not passes
    if not passes:
        assert f"{ACCEPT} is {mean}; a verify step of 3 draft steps gives 1 to 4 tokens" in texts[0]


def test_what_is_simulated_is_said(facts: Callable[..., Facts]) -> None:
    assert "2.4 tokens a step SIMULATED" in told(facts(ACCEPT, "2.4", NOT_THE_MODEL))


def test_flags_without_speculation_do_nothing(facts: Callable[..., Facts]) -> None:
    path = facts().checkpoint.path
    for flags in ((AUX, "0,1,2"), (ACCEPT, "2.4", NOT_THE_MODEL)):
        [text] = refused(make_facts(Path(path), *flags), "execution mode")
        assert f"{flags[0]} does nothing without --speculative-algorithm EAGLE3" in text


def test_draws_give_the_mean_and_are_the_seeds() -> None:
    def lengths(seed: int, mean: float) -> list[int]:
        draw = simulated._drawn(seed)
        return [draw(mean, "match-expected", 4) for _ in range(4000)]

    found = lengths(5, 2.4)
    assert set(found) == {2, 3}
    assert sum(found) / len(found) == pytest.approx(2.4, abs=0.03)
    assert found == lengths(5, 2.4) != lengths(6, 2.4)
    assert set(lengths(5, 4.0)) == {4} and set(lengths(5, 1.0)) == {1}


@pytest.mark.parametrize(("topk", "mode"), [(1, "real-draft-token"), (2, "fixed")])
def test_sglangs_own_simulation_is_switched_on(
    monkeypatch: pytest.MonkeyPatch, topk: int, mode: str
) -> None:
    from sglang.srt.speculative import spec_utils

    assert simulated.hooks(AfdConfig(attention_ranks=1, ffn_ranks=1)) == ()
    monkeypatch.setattr(spec_utils, "SIMULATE_ACC_LEN", -1)
    monkeypatch.setattr(spec_utils, "SIMULATE_ACC_TOKEN_MODE", "fixed")
    config = AfdConfig(attention_ranks=1, ffn_ranks=1, spec_sim_accept=2.4)
    [_, hook] = simulated.hooks(config)
    seen = hook.fn(
        lambda *args, **kwargs: (
            spec_utils.SIMULATE_ACC_LEN,
            spec_utils.SIMULATE_ACC_TOKEN_MODE,
            args,
            kwargs,
        ),
        worker := SimpleNamespace(topk=topk),
        "batch",
        watermark_state=None,
    )
    assert seen == (2.4, mode, (worker, "batch"), {"watermark_state": None})


def test_lanes_with_a_draft_are_for_cpus_as_yet(facts: Callable[..., Facts]) -> None:
    assert refused(facts("--afd-lanes", "2"), "execution mode") == []
    [text] = refused(facts("--afd-lanes", "2", machine=GPUS), "execution mode")
    assert "speculation on GPUs takes one lane, not --afd-lanes 2" in text
