"""Text that the target writes itself, for a draft to learn what it says where no document leads.

The prompts are fragments of different documents, joined: after them the target invents, in the
voice of what it knows.  A draft that has seen documents alone knows those by heart and little else.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer

from sglang_afd.embedded.corpus import Document
from sglang_afd.embedded.plain_target import Target

LENGTH = 256  # tokens of a row, its prompt included
_FRAGMENTS, _FRAGMENT = 3, 12
_COLDEST, _HOTTEST = 0.3, 1.0


class Writer:
    """Draws prompts and lets the target go on; a seed fixes all (on one kind of device)."""

    def __init__(
        self, target: Target, documents: list[Document], tokenizer: Tokenizer, seed: int
    ) -> None:
        """`documents`: those that fragments are of."""
        self._target, self._device = target, target.embedding.device
        ids = [i for d in documents for i in tokenizer.encode(d.text).ids]
        self._text = torch.tensor(ids, device=self._device)
        self._random = torch.Generator(self._device).manual_seed(seed)
        torch.manual_seed(seed)

    def rows(self, count: int) -> torch.Tensor:
        """New rows of token ids, ``[count, LENGTH]``."""
        shape = (count, _FRAGMENTS, 1)
        last = len(self._text) - _FRAGMENT
        starts = torch.randint(last, shape, generator=self._random, device=self._device)
        places = starts + torch.arange(_FRAGMENT, device=self._device)
        prompts = self._text[places].flatten(1)
        heat = torch.rand(count, 1, generator=self._random, device=self._device)
        temperatures = _COLDEST + (_HOTTEST - _COLDEST) * heat
        return self._target.write(prompts, LENGTH - prompts.shape[1], temperatures)
