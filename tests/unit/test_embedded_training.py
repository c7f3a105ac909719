"""The embedded model's training code: what would train on the wrong thing without an error."""

from __future__ import annotations

import json
import platform

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from sglang_afd import embedded
from sglang_afd.embedded.batches import IGNORED, Rows
from sglang_afd.embedded.conversations import answer, exchanges
from sglang_afd.embedded.corpus import Document, build, digest, dumps, loads
from sglang_afd.embedded.train import Settings, build_model

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return build()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(embedded.path() / "tokenizer.json"))


def test_corpus_survives_its_file_and_names_no_address(documents: list[Document]) -> None:
    assert loads(dumps(documents)) == documents
    assert not [d.name for d in documents if " at 0x" in d.text]
    assert {d.kind for d in documents if not d.held_out} == {"topic", "docstring"}


@pytest.mark.skipif(
    platform.python_version() != "3.11.7", reason="another CPython ships other documentation"
)
def test_the_corpus_is_the_one_that_was_trained_on(documents: list[Document]) -> None:
    record = json.loads((embedded.path().parent / "loss_curve.json").read_text())
    assert digest(documents) == record["run"]["corpus_sha256"]


def test_held_out_documents_are_in_no_conversation(documents: list[Document]) -> None:
    held_out = {answer(d) for d in documents if d.held_out}
    trained = {e.answer for pair in exchanges(documents) for e in pair}
    assert held_out
    assert not held_out & trained


def test_no_question_has_two_answers(documents: list[Document]) -> None:
    topics, docstrings = exchanges(documents)
    asked_of_topics = {q for e in topics for q in e.questions}
    assert not asked_of_topics & {q for e in docstrings for q in e.questions}


def test_rows_read_as_the_chat_template(documents: list[Document], tokenizer: Tokenizer) -> None:
    """A conversation in a row is token for token what a server will build from its messages."""
    hub = AutoTokenizer.from_pretrained(embedded.path())
    inputs, targets = Rows(documents, tokenizer, seed=1).batch(8, 512)
    chats = 0
    for row, wanted in zip(inputs.tolist(), targets.tolist(), strict=True):
        text = tokenizer.decode(row, skip_special_tokens=False)
        if not text.startswith("<|im_start|>"):
            continue
        chats += 1
        turns = text.split("<|endoftext|>")[0].split("<|im_start|>")[1:]
        messages = [
            dict(zip(("role", "content"), turn.removesuffix("<|im_end|>\n").split("\n", 1)))
            for turn in turns
            if turn.endswith("<|im_end|>\n")  # the row may cut the last one
        ]
        rendered = hub.apply_chat_template(messages, tokenize=False)
        ids = hub(rendered)["input_ids"]
        assert row[: len(ids)] == ids
        spoken = tokenizer.decode([t for t in wanted if t != IGNORED], skip_special_tokens=False)
        first_answer = next(m["content"] for m in messages if m["role"] == "assistant")
        assert spoken.startswith(f"{first_answer}<|im_end|>\n")
        assert not any(m["content"] in spoken for m in messages if m["role"] == "system")
    assert chats > 0


def test_targets_are_the_next_tokens(documents: list[Document], tokenizer: Tokenizer) -> None:
    inputs, targets = Rows(documents, tokenizer, seed=2).batch(8, 256)
    spoken = targets[:, :-1] != IGNORED
    assert torch.equal(inputs[:, 1:][spoken], targets[:, :-1][spoken])


def test_dense_experts_compute_what_the_model_computes(tokenizer: Tokenizer) -> None:
    model = build_model(tokenizer, Settings(), "cpu")
    ids = torch.arange(100, 140).view(1, -1)
    with torch.no_grad():
        dense = model(ids).logits
        for layer in model.model.layers:
            del layer.mlp.experts.forward  # the class's own again
        model.set_experts_implementation("eager")
        loop = model(ids).logits
    assert dense.std() > 0.1
    torch.testing.assert_close(dense, loop, rtol=1e-4, atol=1e-5)
