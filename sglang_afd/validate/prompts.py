"""Prompt sets: token ids, made from a seed by a small grammar, so that no licence is on them.

`SETS` names their lengths in tokens.  A set is cut to the model's context, and text is cut to the
exact length in tokens; a model without ``tokenizer.json`` gets random ids.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from sglang_afd.validate.answers import random_prompts

SETS: dict[str, tuple[int, ...]] = {
    "short": (1, 3, 5, 8, 12, 17, 24, 32, 40, 52, 64, 80, 96, 112, 128, 128),
    "mixed": (1, 7, 16, 33, 64, 100, 128, 200, 256, 300, 480, 1100),
    "long": (1024, 2048, 4096, 8192, 12288, 16384),
}
_SUBJECTS = (
    *("The river", "A quiet engineer", "Her brother", "The old library", "Every morning train"),
    *("The committee", "A small robot", "The last winter", "My neighbour", "The open window"),
)
_VERBS = (
    *("carries", "remembers", "repairs", "follows", "measures", "forgets", "explains", "paints"),
    *("counts", "avoids", "collects", "answers"),
)
_OBJECTS = (
    *("the stones of the harbour", "a list of numbers", "three letters", "the broken clock"),
    *("an unfinished song", "the way home", "two kinds of bread", "the rules of the game"),
    *("a map without names", "the weight of the snow"),
)
_ENDS = (".", ", because nobody else does.", " and then stops.", "?", "; so it was agreed.")
_NAMES = ("total", "row", "cache", "index", "width", "queue", "left", "right")


class BadPrompts(ValueError):
    """A prompt file that cannot be used; the message says what to do."""


class PromptSet(NamedTuple):
    """Prompts as they are asked, and where they come from."""

    name: str
    prompts: list[list[int]]
    of_text: bool
    """False: random token ids, because the model has no tokenizer.json."""

    @property
    def sha256(self) -> str:
        """Of the token ids: equal for equal prompts."""
        return hashlib.sha256(json.dumps(self.prompts).encode()).hexdigest()


def prompt_set(name: str, *, model: Path, vocab: int, longest: int, seed: int) -> PromptSet:
    """The set `name` of `SETS`, or the prompts in the file `name`.

    A file holds one JSON object a line: ``{"text": "..."}`` or ``{"ids": [1, 2]}``.

    Args:
        model: the checkpoint's directory.
        longest: tokens that a prompt may have; longer ones are cut.

    Raises:
        BadPrompts: there is no such set and no such file, or a line of it is no prompt.
    """
    file = model / "tokenizer.json"
    encode = _encoder(file) if file.exists() else None
    if name in SETS:
        lengths = list(dict.fromkeys(min(length, longest) for length in SETS[name]))
        if encode is None:
            return PromptSet(name, random_prompts(lengths, vocab=vocab, seed=seed), False)
        return PromptSet(name, [_of_length(encode, n, seed + n) for n in lengths], True)
    path = Path(name)
    if not path.is_file():
        raise BadPrompts(
            f"--prompts {name} is no file and no set of prompts; sets are {', '.join(SETS)}"
        )
    lines = [line for line in path.read_text().splitlines() if line.strip()]
    prompts = [_read(f"{name}, line {i}", line, encode, vocab) for i, line in enumerate(lines, 1)]
    if not prompts:
        raise BadPrompts(f"{name} holds no prompt")
    return PromptSet(name, [prompt[:longest] for prompt in prompts], encode is not None)


def text(words: int, seed: int) -> str:
    """Sentences, lines of code and numbers: at least `words` words, the same for the same seed."""
    draw = random.Random(seed)
    parts: list[str] = []
    count = 0
    while count < words:
        kind = draw.random()
        if kind < 0.7:
            part = f"{draw.choice(_SUBJECTS)} {draw.choice(_VERBS)} {draw.choice(_OBJECTS)}"
            part += draw.choice(_ENDS)
        elif kind < 0.9:
            name, other = draw.sample(_NAMES, 2)
            part = f"\nfor {name} in range({draw.randrange(100)}):\n    {other} += {name}\n"
        else:
            part = ", ".join(str(draw.randrange(10**6)) for _ in range(5)) + "."
        parts.append(part)
        count += len(part.split())
    return " ".join(parts)


def _of_length(encode: Callable[[str], list[int]], length: int, seed: int) -> list[int]:
    """Exactly `length` tokens of text; a word is at least one token."""
    return encode(text(length + 1, seed))[:length]


def _encoder(file: Path) -> Callable[[str], list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda words: tokenizer.encode(words, add_special_tokens=False).ids


def _read(
    where: str, line: str, encode: Callable[[str], list[int]] | None, vocab: int
) -> list[int]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise BadPrompts(f"{where} is no JSON: {error}") from error
    if isinstance(entry, dict) and isinstance(entry.get("text"), str):
        if encode is None:
            raise BadPrompts(f"{where} is text, but the model has no tokenizer.json; give ids")
        ids: Iterable[object] = encode(entry["text"])
    elif isinstance(entry, dict) and isinstance(entry.get("ids"), list):
        ids = entry["ids"]
    else:
        raise BadPrompts(f'{where} must be {{"text": "..."}} or {{"ids": [1, 2]}}')
    prompt = [token for token in ids if isinstance(token, int) and 0 <= token < vocab]
    if not prompt or prompt != list(ids):
        raise BadPrompts(f"{where}: token ids must be at least one, from 0 to {vocab - 1}")
    return prompt
