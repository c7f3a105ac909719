"""The embedded draft's training: what would train or measure the wrong thing without an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from sglang_afd import embedded
from sglang_afd.embedded import train_draft
from sglang_afd.embedded.acceptance import PROMPT, Estimate, estimate, questions_of
from sglang_afd.embedded.conversations import exchanges
from sglang_afd.embedded.corpus import build
from sglang_afd.embedded.draft_model import Draft
from sglang_afd.embedded.plain_target import AUX_LAYERS, Target
from sglang_afd.embedded.train_draft import Settings, build_draft
from sglang_afd.embedded.written import LENGTH, Writer
from tests.support.gate_facts import make_facts, refused

pytestmark = pytest.mark.unit
SETTINGS = Settings(tokens_per_step=256, intermediate_size=64)
TEXT = 'The "with" statement is used to wrap the execution of a block with methods defined by'


@pytest.fixture(scope="module")
def target() -> Target:
    return Target(embedded.path(), "cpu")


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    tokenizer = Tokenizer.from_file(str(embedded.path() / "tokenizer.json"))
    return torch.tensor([tokenizer.encode(TEXT).ids])


@pytest.fixture
def draft(target: Target) -> Draft:
    return build_draft(target, torch.arange(0, 2 * SETTINGS.words, 2) % 2048, SETTINGS)


def test_the_plain_target_computes_what_transformers_does(
    target: Target, ids: torch.Tensor
) -> None:
    model = AutoModelForCausalLM.from_pretrained(embedded.path(), dtype=torch.float32).eval()
    with torch.no_grad():
        wanted = model(ids, output_hidden_states=True)
    logits, features = target(ids)
    torch.testing.assert_close(logits, wanted.logits, rtol=1e-4, atol=1e-4)
    outputs = [wanted.hidden_states[layer + 1] for layer in AUX_LAYERS]  # 0 is the embedding
    torch.testing.assert_close(features, torch.cat(outputs, dim=-1), rtol=1e-4, atol=1e-4)


def test_a_chain_is_what_one_draft_after_another_computes(
    target: Target, draft: Draft, ids: torch.Tensor
) -> None:
    """All chains at once, against one that starts at a token and sees its text alone."""
    features = target(ids)[1][:, :-1]
    together = draft.chains(features, ids, 3, alone=True)
    for start in (0, 5, 11):
        text = ids[:, : start + 2]
        alone = draft.chains(features[:, : start + 1], text, 3, alone=True)
        for one, all_of in zip(alone, together):
            torch.testing.assert_close(one[:, -1], all_of[:, start], rtol=1e-4, atol=1e-4)


def test_later_steps_read_their_own_tokens_or_the_texts(
    target: Target, draft: Draft, ids: torch.Tensor
) -> None:
    features = target(ids)[1][:, :-1]
    (_, own), (_, texts) = (draft.chains(features, ids, 2, alone=alone) for alone in (True, False))
    assert not torch.allclose(own, texts)
    other = ids.clone()
    other[:, 7] = 3  # read by the chain of token 5 in its second step, by that of 6 in its first
    (first, second), (other_first, other_second) = (
        draft.chains(features, text, 2, alone=False) for text in (ids, other)
    )
    assert torch.equal(first[:, 5], other_first[:, 5])
    assert not torch.equal(second[:, 5], other_second[:, 5])
    assert not torch.equal(first[:, 6], other_first[:, 6])


class Answers(Draft):
    """Drafts the text itself, but the last step's token is always wrong."""

    def chains(
        self, features: torch.Tensor, ids: torch.Tensor, steps: int, *, alone: bool
    ) -> list[torch.Tensor]:
        padded = torch.nn.functional.pad(ids, (0, steps))
        length = features.shape[1]
        right = [padded[:, step + 2 : step + 2 + length] for step in range(steps - 1)]
        wrong = (padded[:, steps + 1 : steps + 1 + length] + 1) % len(self.words)
        return [torch.nn.functional.one_hot(t, len(self.words)) for t in (*right, wrong)]


def test_the_estimate_counts_tokens_of_verify_steps(target: Target) -> None:
    config = train_draft.draft_config(target.config, SETTINGS)
    config["draft_vocab_size"] = 2048
    draft = Answers(config, torch.arange(2048), target.embedding)
    texts = torch.full((2, PROMPT + 19), 100)
    found = estimate(draft, target, texts, steps=3)
    # 18 tokens of each text after the prefill's: 2 right ones and the target's own in each step
    assert found == Estimate(verified=12, tokens=36, accepted=[0, 0, 12, 0])
    assert found.length == 3.0
    texts[1, PROMPT + 4] = 0  # its fifth token ends the text
    found = estimate(draft, target, texts, steps=3)
    assert (found.verified, found.tokens) == (6 + 2, 18 + 4)


def test_the_target_goes_on_as_it_would_from_the_whole_text(
    target: Target, ids: torch.Tensor
) -> None:
    """One token after another, each from the keys and values of those before."""
    found = target.write(ids, 12)
    assert torch.equal(found[:, : ids.shape[1]], ids)
    for length in range(ids.shape[1], found.shape[1]):
        assert int(found[0, length]) == int(target(found[:, :length])[0][0, -1].argmax())


def test_questions_are_in_wordings_of_their_own() -> None:
    tokenizer = Tokenizer.from_file(str(embedded.path() / "tokenizer.json"))
    known = [d for d in build() if not d.held_out]
    trained = {question for pair in exchanges(known) for e in pair for question in e.questions}
    for row in questions_of(known, tokenizer, 1).tolist():
        text = tokenizer.decode(row, skip_special_tokens=False)
        assert text.endswith("<|im_end|>\n<|im_start|>assistant\n") and len(row) == PROMPT
        _, cut, question = text.removesuffix("<|im_end|>\n<|im_start|>assistant\n").rpartition(
            "<|im_start|>user\n"
        )
        assert question not in trained or not cut


def test_what_the_target_writes_is_the_seeds(target: Target) -> None:
    tokenizer = Tokenizer.from_file(str(embedded.path() / "tokenizer.json"))
    known = [d for d in build() if not d.held_out][:20]
    one, again, other = (Writer(target, known, tokenizer, seed).rows(2) for seed in (1, 1, 2))
    assert one.shape == (2, LENGTH) and torch.equal(one, again) and not torch.equal(one, other)


def test_a_few_steps_write_a_draft_that_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The strict check of drafts takes what is written, and the loss goes down."""
    for draws in ("prompts_of", "questions_of"):
        monkeypatch.setattr(train_draft, draws, lambda *_: torch.full((1, PROMPT), 100))
    monkeypatch.setattr(train_draft, "EVALUATIONS", 1)
    options = ("--device", "cpu", "--steps", "8", "--tokens-per-step", "256", "--written", "8")
    train_draft.main(["--out", str(tmp_path), *options])
    flags = ("--speculative-algorithm", "EAGLE3")
    path = ("--speculative-draft-model-path", str(tmp_path / "draft"))
    assert refused(make_facts(embedded.path(), *flags, *path), "model") == []
    assert (tmp_path / "draft" / "model.safetensors").stat().st_size < 6_000_000
    record = json.loads((tmp_path / "draft_curve.json").read_text())
    losses = [point["training"] for point in record["curve"]]
    assert losses[-1] < losses[0] - 0.5, losses
    kept = json.loads((tmp_path / "draft_prompts.json").read_text())
    assert kept == {f"held-out {of}": [[100] * PROMPT] for of in ("documents", "wordings")}
    assert all(record["acceptance"][name]["length"] >= 1 for name in (*kept, "documents"))
    train_draft.main(["--plot", str(tmp_path)])
    assert (tmp_path / "draft_curve.png").stat().st_size > 1000
