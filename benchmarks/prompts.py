"""Long prompts of exact token counts, seeded, out of text that this Python ships.

The text is CPython's documentation (`sglang_afd.embedded.corpus`), its documents in an order drawn
anew for every prompt, each behind a number of the prompt's own, so that no two share a prefix.
A prompt is token ids, so that its length is exact whatever a server's tokenizer makes of the text.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sglang_afd.embedded import corpus

SIZES = (8192, 16384)
COUNT = 512


class NoTokenizer(ValueError):
    """There is no tokenizer where one is said to be."""


def tokenizer_of(place: Path) -> Callable[[str], list[int]]:
    """How a model's ``tokenizer.json`` (the file, or its folder) turns text into ids.

    Raises:
        NoTokenizer: there is none.
    """
    from tokenizers import Tokenizer

    file = place / "tokenizer.json" if place.is_dir() else place
    if not file.is_file():
        raise NoTokenizer(f"there is no {file}; give a tokenizer.json or a folder with one")
    loaded = Tokenizer.from_file(str(file))
    return lambda text: loaded.encode(text, add_special_tokens=False).ids


def prompts(
    encode: Callable[[str], list[int]], *, count: int, tokens: int, seed: int
) -> Iterator[list[int]]:
    """`count` prompts of exactly `tokens` ids, the same for the same seed, text and tokenizer."""
    documents = [encode(document.text) for document in corpus.build()]
    documents = [ids for ids in documents if ids]
    for number in range(count):
        draw = random.Random(f"{seed} {tokens} {number}")
        ids = encode(f"{draw.randrange(10**9)} {number}: ")
        order: list[list[int]] = []
        while len(ids) < tokens:
            order = order or draw.sample(documents, len(documents))
            ids += order.pop()
        yield ids[:tokens]


def write(file: Path, made: Iterator[list[int]]) -> dict[str, Any]:
    """One JSON object a line, ``{"ids": [...]}``; how many, and the hash of the file.

    Raises:
        FileExistsError: the file is there already.
    """
    digest, count = hashlib.sha256(), 0
    with file.open("xb") as out:
        for ids in made:
            line = json.dumps({"ids": ids}, separators=(",", ":")).encode() + b"\n"
            digest.update(line)
            out.write(line)
            count += 1
    return {"prompts": count, "sha256": digest.hexdigest()}
