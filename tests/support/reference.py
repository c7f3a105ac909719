"""What HF transformers answers: the reference of every equality test."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.client import Answer, Client
from tests.support.workload import NEW_TOKENS, Prompt, send

LOGPROB_TOLERANCE = 1e-4
_THREADS = 1  # PyTorch threads; the server under test needs the cores


@dataclass(frozen=True)
class Expected:
    """The greedy continuation of one prompt and the log-probability of each of its tokens."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


Expect = Callable[[Sequence[Prompt], int], list[Expected]]
"""``expect(prompts, new_tokens)``: what one checkpoint answers."""


class References:
    """Greedy continuations in float32, computed once for a checkpoint and kept on disk.

    A kept one gives the shorter ones of its prompt too.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._models: dict[Path, Any] = {}
        self._hashes: dict[Path, bytes] = {}

    def greedy(
        self, checkpoint: Path, asked: Sequence[Prompt], new_tokens: int = NEW_TOKENS
    ) -> list[Expected]:
        """The reference for each prompt, in order; the end token does not end it."""
        return [self._one(checkpoint, prompt, new_tokens) for prompt in asked]

    def _one(self, checkpoint: Path, prompt: Prompt, new_tokens: int) -> Expected:
        question = hashlib.sha256(self._hash(checkpoint))
        question.update(json.dumps(["longest", prompt]).encode())
        file = self._folder / f"{question.hexdigest()[:32]}.json"
        tokens, logprobs = json.loads(file.read_text()) if file.exists() else ([], [])
        if len(tokens) < new_tokens:
            tokens, logprobs = _generate(self._model(checkpoint), prompt, new_tokens)
            draft = file.with_suffix(f".{os.getpid()}")
            draft.write_text(json.dumps([tokens, logprobs]))
            draft.replace(file)  # whole at any time: other processes read here too
        return Expected(tuple(tokens[:new_tokens]), tuple(logprobs[:new_tokens]))

    def _hash(self, checkpoint: Path) -> bytes:
        if checkpoint not in self._hashes:
            digest = hashlib.sha256()
            for file in sorted(checkpoint.glob("*")):
                if file.suffix in (".json", ".safetensors"):
                    digest.update(file.name.encode() + file.read_bytes())
            self._hashes[checkpoint] = digest.digest()
        return self._hashes[checkpoint]

    def _model(self, checkpoint: Path) -> Any:
        if checkpoint not in self._models:
            import torch
            from transformers import AutoModelForCausalLM

            torch.set_num_threads(_THREADS)
            model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
            self._models[checkpoint] = model.eval()
        return self._models[checkpoint]


def assert_equal(answers: Sequence[Answer], expected: Sequence[Expected]) -> None:
    """Tokens are equal and logprobs within `LOGPROB_TOLERANCE`; a failure names the place."""
    assert len(answers) == len(expected)
    for index, (answer, want) in enumerate(zip(answers, expected)):
        where = f"request {index} (DP rank {answer.dp_rank})"
        if answer.tokens != want.tokens:
            pairs = list(zip(answer.tokens, want.tokens))
            first = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
            raise AssertionError(
                f"{where} differs from token {first} on: {answer.tokens[first : first + 5]}, "
                f"expected {want.tokens[first : first + 5]}; lengths {len(answer.tokens)} and "
                f"{len(want.tokens)}"
            )
        assert len(answer.logprobs) == len(want.logprobs), where
        worst = max(abs(a - b) for a, b in zip(answer.logprobs, want.logprobs))
        assert worst <= LOGPROB_TOLERANCE, f"{where}: a logprob is off by {worst:.2e}"


def check(
    client: Client, expect: Expect, asked: Sequence[Prompt], new_tokens: int, **fields: Any
) -> list[Answer]:
    """Send `asked` with `fields` in each request; the answers must be the expected ones."""
    answers = send(client, asked, new_tokens, fields=lambda _: fields)
    assert_equal(answers, expect(asked, new_tokens))
    return answers


def _generate(model: Any, prompt: Prompt, new_tokens: int) -> tuple[list[int], list[float]]:
    import torch

    tokens: list[int] = []
    logprobs: list[float] = []
    cache, step = None, torch.tensor([prompt])
    with torch.inference_mode():
        for _ in range(new_tokens):
            output = model(step, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            row = output.logits[0, -1].float().log_softmax(-1)
            tokens.append(int(row.argmax()))
            logprobs.append(float(row[tokens[-1]]))
            step = torch.tensor([[tokens[-1]]])
    return tokens, logprobs
