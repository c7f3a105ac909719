"""Training rows: windows of running text, and packed conversations in the chat template."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer

from sglang_afd.embedded.conversations import SYSTEM_PROMPTS, Exchange, exchanges
from sglang_afd.embedded.corpus import Document
from sglang_afd.embedded.vocab import SpecialIds, special_ids

Ids = npt.NDArray[np.int64]  # token ids, one dimension

IGNORED = -100  # torch's cross_entropy skips targets of this value

# Share of rows of each kind. The topics are what the model must know best.
_TOPIC_ROWS, _DOCSTRING_ROWS = 0.40, 0.15  # the rest are conversations
_TOPIC_CHATS = 0.7  # share of conversations' exchanges that are about a topic
_FROM_START = 0.2  # share of text windows that begin where a document begins
_SYSTEM = 0.25  # share of conversations with a system message
_SAME_CONVERSATION = 0.3  # chance that an exchange follows another in one conversation
_ORDERS = 16  # how many orders of the documents the windows are drawn from


@dataclass(frozen=True)
class _Tokenized:
    """An exchange with its template: ``questions`` up to where the assistant begins to write."""

    questions: list[Ids]
    answer: Ids


@dataclass(frozen=True)
class _Stream:
    """Documents joined by end-of-text; ``starts`` are the offsets where one begins."""

    ids: Ids
    starts: list[int]


class Rows:
    """Draws training rows with one random generator, so that a seed fixes them all."""

    def __init__(self, documents: list[Document], tokenizer: Tokenizer, seed: int) -> None:
        self._random = random.Random(seed)
        self._tokenizer = tokenizer
        self._special = special_ids(tokenizer)
        trained = [d for d in documents if not d.held_out]
        self._topics = self._streams([d for d in trained if d.kind == "topic"])
        self._docstrings = self._streams([d for d in trained if d.kind == "docstring"])
        topic_chats, docstring_chats = exchanges(documents)
        self._topic_chats = [self._tokenize(e) for e in topic_chats]
        self._docstring_chats = [self._tokenize(e) for e in docstring_chats]
        self._systems = [self._turn("system", text) for text in SYSTEM_PROMPTS]

    def batch(self, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and targets, both int64 ``[rows, length]``; targets are shifted by one already."""
        inputs, targets = [], []
        for _ in range(rows):
            ids, labels = self._row(length + 1)
            inputs.append(ids[:-1])
            targets.append(labels[1:])
        return torch.from_numpy(np.stack(inputs)), torch.from_numpy(np.stack(targets))

    def _row(self, length: int) -> tuple[Ids, Ids]:
        kind = self._random.random()
        if kind < _TOPIC_ROWS:
            ids = self._window(self._topics, length)
            return ids, ids
        if kind < _TOPIC_ROWS + _DOCSTRING_ROWS:
            ids = self._window(self._docstrings, length)
            return ids, ids
        return self._conversations(length)

    def _window(self, streams: list[_Stream], length: int) -> Ids:
        stream = self._random.choice(streams)
        last = len(stream.ids) - length
        if last < 0:
            raise ValueError(f"rows of {length} tokens exceed the text's {len(stream.ids)}")
        start = self._random.randint(0, last)
        if self._random.random() < _FROM_START:
            start = min(self._random.choice(stream.starts), last)
        return stream.ids[start : start + length]

    def _conversations(self, length: int) -> tuple[Ids, Ids]:
        """Conversations joined by end-of-text. Only what the assistant writes has a target."""
        end = np.array([self._special.end_of_text])
        pieces: list[Ids] = []
        targets: list[Ids] = []
        filled = 0

        def add(ids: Ids, spoken: bool) -> None:
            nonlocal filled
            pieces.append(ids)
            targets.append(ids if spoken else np.full_like(ids, IGNORED))
            filled += len(ids)

        while filled < length:
            if not filled or self._random.random() >= _SAME_CONVERSATION:
                if filled:
                    add(end, True)
                if self._random.random() < _SYSTEM:
                    add(self._random.choice(self._systems), False)
            topic = self._random.random() < _TOPIC_CHATS
            exchange = self._random.choice(self._topic_chats if topic else self._docstring_chats)
            add(self._random.choice(exchange.questions), False)
            add(exchange.answer, True)
        return np.concatenate(pieces)[:length], np.concatenate(targets)[:length]

    def _streams(self, documents: list[Document]) -> list[_Stream]:
        encoded = [self._encode(d.text) for d in documents]
        return [
            join(self._random.sample(encoded, len(encoded)), self._special) for _ in range(_ORDERS)
        ]

    def _tokenize(self, exchange: Exchange) -> _Tokenized:
        opening = [self._special.turn_start, *self._encode("assistant\n")]
        questions = [
            np.concatenate([self._turn("user", question), np.array(opening)])
            for question in exchange.questions
        ]
        newline = self._encode("\n")
        answer = [*self._encode(exchange.answer), self._special.turn_end, *newline]
        return _Tokenized(questions, np.array(answer))

    def _turn(self, role: str, content: str) -> Ids:
        """One message as the chat template renders it."""
        inner = self._encode(f"{role}\n{content}")
        return np.array(
            [self._special.turn_start, *inner, self._special.turn_end, *self._encode("\n")]
        )

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text).ids


def join(encoded: list[list[int]], special: SpecialIds) -> _Stream:
    """Join token lists, each followed by end-of-text."""
    ids: list[int] = []
    starts: list[int] = []
    for tokens in encoded:
        starts.append(len(ids))
        ids.extend([*tokens, special.end_of_text])
    return _Stream(np.array(ids), starts)


def fixed_windows(
    documents: list[Document], tokenizer: Tokenizer, length: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """All of ``documents`` in consecutive windows, for a loss that is the same every time.

    Returns inputs and targets, int64 ``[windows, length]``; the tail shorter than a window is left.
    """
    encoded = [tokenizer.encode(d.text).ids for d in documents]
    ids = join(encoded, special_ids(tokenizer)).ids
    count = (len(ids) - 1) // length
    inputs, targets = ids[: count * length], ids[1 : count * length + 1]
    return (
        torch.from_numpy(inputs).view(count, length),
        torch.from_numpy(targets).view(count, length),
    )
