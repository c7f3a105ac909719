"""Prompt sets are a seed's, of exact lengths, and cut to the model's context."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_afd import embedded
from sglang_afd.validate.prompts import SETS, BadPrompts, PromptSet, prompt_set, text

pytestmark = pytest.mark.unit

VOCAB = 2048


def make(
    name: str = "short", longest: int = 4000, seed: int = 1, model: Path | None = None
) -> PromptSet:
    model = model or embedded.path()
    return prompt_set(name, model=model, vocab=VOCAB, longest=longest, seed=seed)


@pytest.mark.parametrize("name", SETS)
def test_lengths_are_exact_and_cut_to_the_context(name: str) -> None:
    lengths = [len(prompt) for prompt in make(name, longest=700).prompts]
    assert lengths == sorted({min(length, 700) for length in SETS[name]})


def test_the_long_set_reaches_16k() -> None:
    assert max(len(prompt) for prompt in make("long", longest=40000).prompts) == 16384


def test_a_set_is_its_seeds() -> None:
    assert make() == make()
    assert make().sha256 != make(seed=2).sha256
    assert make().of_text
    assert "\n" in text(200, 1) and text(200, 1) != text(200, 2)


def test_prompts_of_a_set_differ() -> None:
    prompts = make("mixed").prompts
    assert len({tuple(prompt[:60]) for prompt in prompts}) == len(prompts)


def test_a_model_without_a_tokenizer_gets_random_ids(tmp_path: Path) -> None:
    made = make(model=tmp_path)
    assert not made.of_text
    assert all(3 <= token < VOCAB for prompt in made.prompts for token in prompt)


def test_a_file_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"text": "The with statement"}\n\n{"ids": [5, 6, 7]}\n')
    first, second = make(str(file)).prompts
    assert len(first) > 2 and second == [5, 6, 7]
    assert make(str(file), longest=2).prompts[1] == [5, 6]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "holds no prompt"),
        ("hello", "line 1 is no JSON"),
        ('{"ids": []}', "at least one"),
        ('{"ids": [1, 4000]}', "from 0 to 2047"),
        ('{"ids": [1, "2"]}', "token ids"),
        ('{"prompt": "x"}', "must be"),
        ("[1, 2]", "must be"),
    ],
)
def test_a_bad_file_says_which_line(content: str, says: str, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    with pytest.raises(BadPrompts, match=says):
        make(str(file))


def test_text_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"text": "hello"}))
    with pytest.raises(BadPrompts, match="no tokenizer"):
        make(str(file), model=tmp_path)


def test_no_such_set() -> None:
    with pytest.raises(BadPrompts, match="no file and no set of prompts; sets are short"):
        make("shrot")
