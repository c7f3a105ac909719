"""An EAGLE-3 draft in plain PyTorch, as SGLang's ``LlamaForCausalLMEagle3`` computes it.

A draft reads, of each token, the target's hidden states and the embedding of the token that
follows, and tells the one after that.  Then it goes on alone: its own output takes the place of
the hidden states, its own token that of the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from sglang_afd.embedded.plain_target import rms_norm, rotary, rotate


class Norm(nn.Module):
    """Root-mean-square norm with a weight."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self._eps)


class Midlayer(nn.Module):
    """The draft's one layer; its parameters have the names of the checkpoint."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        hidden, head = config["hidden_size"], config["head_dim"]
        query = config["num_attention_heads"] * head
        key = config["num_key_value_heads"] * head
        inner, eps = config["intermediate_size"], config["rms_norm_eps"]

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False)

        self.hidden_norm = Norm(hidden, eps)
        self.input_layernorm = Norm(hidden, eps)
        self.post_attention_layernorm = Norm(hidden, eps)
        self.self_attn = nn.ModuleDict(
            {
                "q_proj": linear(2 * hidden, query),
                "k_proj": linear(2 * hidden, key),
                "v_proj": linear(2 * hidden, key),
                "o_proj": linear(query, hidden),
            }
        )
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": linear(hidden, inner),
                "up_proj": linear(hidden, inner),
                "down_proj": linear(inner, hidden),
            }
        )
        self._head = head

    def projected(
        self, embedded: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value, each ``[B, heads, T, head_dim]``."""
        both = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], dim=-1)
        query, key, value = (
            self.self_attn[f"{part}_proj"](both).unflatten(-1, (-1, self._head)).transpose(1, 2)
            for part in "qkv"
        )
        return query, key, value

    def rest(self, hidden: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The layer's output, of its input and of what its attention found."""
        hidden = hidden + self.self_attn["o_proj"](attended.transpose(1, 2).flatten(2))
        normed = self.post_attention_layernorm(hidden)
        inner = F.silu(self.mlp["gate_proj"](normed)) * self.mlp["up_proj"](normed)
        return hidden + self.mlp["down_proj"](inner)


class Draft(nn.Module):
    """A draft with fresh weights; `words` are the target's tokens that it knows, ascending."""

    def __init__(
        self, config: Mapping[str, Any], words: torch.Tensor, embedding: torch.Tensor
    ) -> None:
        super().__init__()
        hidden = config["hidden_size"]
        aux = len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
        self.fc = nn.Linear(aux * hidden, hidden, bias=False)
        self.midlayer = Midlayer(config)
        self.norm = Norm(hidden, config["rms_norm_eps"])
        self.lm_head = nn.Linear(hidden, config["draft_vocab_size"], bias=False)
        self.register_buffer("words", words, persistent=False)
        self.register_buffer("embedding", embedding, persistent=False)
        self._config = config

    def chains(
        self, features: torch.Tensor, ids: torch.Tensor, steps: int, *, alone: bool
    ) -> list[torch.Tensor]:
        """Draft `steps` tokens after every token of the rows `ids`, all at once.

        features: of the target, ``[B, T, aux * hidden]``; ids: ``[B, T + 1]``, one token further.
        Step k reads token t + k + 1 and tells the one after it; with `alone` it goes on with its
        own tokens, as in serving, else with those of `ids` (as far as they go; those behind the end
        are token 0).  A step attends to what the draft made of the target's hidden states up to t,
        and to the steps before it of the same t, as it does in serving.

        Returns:
            For each step, logits over the draft's words, ``[B, T, words]``.
        """
        length = features.shape[1]
        padded = F.pad(ids, (0, steps))
        hidden, fed = self.fc(features), padded[:, 1 : length + 1]
        causal = torch.ones(length, length, dtype=torch.bool, device=ids.device).tril()
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        found: list[torch.Tensor] = []
        for step in range(steps):
            positions = torch.arange(length, device=ids.device) + step
            turn = rotary(positions, self._config["head_dim"], self._config["rope_theta"])
            query, key, value = self.midlayer.projected(F.embedding(fed, self.embedding), hidden)
            share = query.shape[1] // key.shape[1]
            query = rotate(query, *turn)
            keys.append(rotate(key, *turn).repeat_interleave(share, dim=1))
            values.append(value.repeat_interleave(share, dim=1))
            hidden = self.midlayer.rest(hidden, _attended(query, keys, values, causal))
            logits = self.lm_head(self.norm(hidden)).float()
            found.append(logits)
            if alone:
                fed = self.words[logits.argmax(-1)]
            else:
                fed = padded[:, step + 2 : step + 2 + length]
        return found


def _attended(
    query: torch.Tensor,
    keys: list[torch.Tensor],
    values: list[torch.Tensor],
    causal: torch.Tensor,
) -> torch.Tensor:
    """Attention of one step, ``[B, heads, T, head_dim]``: to the first keys of tokens up to its
    own, and of each later step's keys to the one of the same place."""
    scale = query.shape[-1] ** -0.5
    first = (query @ keys[0].transpose(-1, -2)).masked_fill(~causal, float("-inf"))
    own = [(query * key).sum(-1, keepdim=True) for key in keys[1:]]
    shares = (torch.cat([first, *own], dim=-1).float() * scale).softmax(-1).to(values[0].dtype)
    length = causal.shape[0]
    out = shares[..., :length] @ values[0]
    for i, value in enumerate(values[1:]):
        out = out + shares[..., length + i : length + i + 1] * value
    return out
