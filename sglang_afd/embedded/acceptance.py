"""How many tokens a verify step would give with a draft, computed on whole texts at once."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from sglang_afd.embedded.conversations import answer
from sglang_afd.embedded.corpus import Document
from sglang_afd.embedded.draft_model import Draft
from sglang_afd.embedded.plain_target import Target

PROMPT = 48  # tokens of each prompt
PROMPTS = 64
STEPS = 3  # the standard setting: 3 steps, topk 1, 4 tokens to verify
_WORDINGS = (
    "Could you tell me what {s} is for?",
    "I would like to know more about {s}.",
    "Give me an explanation of {s}, please.",
)
_STOPS = (0, 2)  # end of text, end of turn


@dataclass(frozen=True)
class Estimate:
    """Verify steps, the tokens that they gave, and how many accepted 0, 1, ... drafted tokens."""

    verified: int
    tokens: int
    accepted: list[int]

    @property
    def length(self) -> float:
        """Tokens of a verify step, the one that the target adds included."""
        return self.tokens / max(1, self.verified)


def prompts_of(documents: Sequence[Document], tokenizer: Tokenizer, seed: int) -> torch.Tensor:
    """Windows of the documents, :data:`PROMPTS` of :data:`PROMPT` tokens, drawn by `seed`.

    Each is of a document that goes on for as long again; some begin where it begins.
    """
    draw = random.Random(seed)
    encoded = [ids for d in documents if len(ids := tokenizer.encode(d.text).ids) >= 2 * PROMPT]
    found = []
    for _ in range(PROMPTS):
        ids = draw.choice(encoded)
        start = draw.randint(0, len(ids) - 2 * PROMPT)
        found.append(ids[start : start + PROMPT])
    return torch.tensor(found)


def questions_of(documents: Sequence[Document], tokenizer: Tokenizer, seed: int) -> torch.Tensor:
    """Questions about documents in wordings that nothing was trained on, up to where the assistant
    begins to answer: :data:`PROMPTS` of :data:`PROMPT` tokens, which begin in the answer before."""
    draw = random.Random(seed)
    found: list[list[int]] = []
    while len(found) < PROMPTS:
        before, about = draw.sample(documents, 2)
        asked = draw.choice(_WORDINGS).format(s=about.name)
        text = (
            f"{answer(before)}<|im_end|>\n<|im_start|>user\n{asked}<|im_end|>\n"
            f"<|im_start|>assistant\n"
        )
        ids = tokenizer.encode(text).ids
        if len(ids) >= PROMPT:
            found.append(ids[-PROMPT:])
    return torch.tensor(found)


@torch.no_grad()
def estimate(draft: Draft, target: Target, texts: torch.Tensor, steps: int = STEPS) -> Estimate:
    """Let `draft` draft along `texts` ``[B, T]``: prompts with the target's greedy continuation.

    A text is followed up to its first token that ends it.  The first token after the prompt is the
    prefill's, as in serving.
    """
    _, features = target(texts)
    drafted = draft.chains(features[:, :-1], texts, steps, alone=True)
    tokens = torch.stack([draft.words[logits.argmax(-1)] for logits in drafted], dim=-1).tolist()
    verified = given = 0
    accepted = [0] * (steps + 1)
    for row, drafts in zip(texts.tolist(), tokens, strict=True):
        ends = [i for i in range(PROMPT, len(row)) if row[i] in _STOPS]
        last = ends[0] if ends else len(row) - 1
        have = PROMPT  # index of the last token that is known
        while have < last:
            wanted = row[have + 1 : have + 1 + steps]
            pairs = zip(drafts[have - 1], wanted, strict=False)
            right = next((i for i, (one, other) in enumerate(pairs) if one != other), len(wanted))
            accepted[right] += 1
            verified += 1
            gained = min(right + 1, last - have)
            given += gained
            have += gained
    return Estimate(verified, given, accepted)
