"""The embedded model in plain PyTorch: what a draft is trained on, without transformers or SGLang.

All experts run on all tokens, unchosen ones weighted by zero: at 12 small experts that is fast.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

AUX_LAYERS = (0, 1, 2)
"""Layers whose outputs a draft reads: all but the last, which SGLang captures of no target."""


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square norm over the last dimension, computed in fp32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotary(positions: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, ...]:
    """Cosines and sines, fp32 ``[T, head_dim]``, of positions ``[T]``."""
    inverse = theta ** (-torch.arange(0, head_dim, 2, device=positions.device) / head_dim)
    angles = torch.outer(positions.float(), inverse).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of ``x [B, heads, T, head_dim]``, halves against each other (NeoX)."""
    one, two = x.chunk(2, dim=-1)
    return (x * cosines + torch.cat([-two, one], dim=-1) * sines).to(x.dtype)


_Cache = dict[str, tuple[torch.Tensor, torch.Tensor]]  # layer -> keys and values so far


class Target:
    """The checkpoint in `directory`, fp32, never trained."""

    def __init__(self, directory: Path, device: str) -> None:
        self.config: dict[str, Any] = json.loads((directory / "config.json").read_text())
        stored = load_file(directory / "model.safetensors")
        self._tensors = {name: tensor.float().to(device) for name, tensor in stored.items()}
        self._experts = [self._joined(layer) for layer in range(self.config["num_hidden_layers"])]

    @property
    def embedding(self) -> torch.Tensor:
        """``[vocabulary, hidden]``; a draft uses it too."""
        return self._tensors["model.embed_tokens.weight"]

    @property
    def lm_head(self) -> torch.Tensor:
        """``[vocabulary, hidden]``."""
        return self._tensors["lm_head.weight"]

    @torch.no_grad()
    def __call__(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits ``[B, T, vocabulary]`` and, side by side, the outputs of :data:`AUX_LAYERS`,
        ``[B, T, 3 * hidden]``, of the rows of token ids ``[B, T]``."""
        x, outputs = self._layers(ids, {})
        features = torch.cat([outputs[layer] for layer in AUX_LAYERS], dim=-1)
        return F.linear(x, self.lm_head).float(), features.float()

    @torch.no_grad()
    def write(
        self, prompts: torch.Tensor, tokens: int, temperatures: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Go on from `prompts`, ``[B, P]``: returns ``[B, P + tokens]``.

        temperatures: ``[B, 1]``, that each row's tokens are drawn at; None: the most probable ones.
        """
        cache: _Cache = {}
        ids = new = prompts
        for _ in range(tokens):
            x, _ = self._layers(new, cache, before=ids.shape[1] - new.shape[1])
            logits = F.linear(x[:, -1], self.lm_head).float()
            if temperatures is None:
                new = logits.argmax(-1, keepdim=True)
            else:
                new = (logits / temperatures).softmax(-1).multinomial(1)
            ids = torch.cat([ids, new], dim=1)
        return ids

    def _layers(
        self, ids: torch.Tensor, cache: _Cache, before: int = 0
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The last hidden states, normed, and every layer's output, of tokens that come after the
        `before` ones whose keys and values `cache` holds; theirs are put there."""
        config = self.config
        x = F.embedding(ids, self.embedding)
        positions = torch.arange(before, before + ids.shape[1], device=ids.device)
        turn = rotary(positions, config["head_dim"], config["rope_theta"])
        outputs = []
        for layer in range(config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            normed = self._norm(f"{name}.input_layernorm", x)
            x = x + self._attention(f"{name}.self_attn", normed, turn, cache)
            normed = self._norm(f"{name}.post_attention_layernorm", x)
            x = x + self._mixture(layer, normed.flatten(0, 1)).view_as(x)
            outputs.append(x)
        return self._norm("model.norm", x), outputs

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self._tensors[f"{name}.weight"], self.config["rms_norm_eps"])

    def _attention(
        self, name: str, x: torch.Tensor, turn: tuple[torch.Tensor, ...], cache: _Cache
    ) -> torch.Tensor:
        head = self.config["head_dim"]

        def heads(part: str) -> torch.Tensor:
            wide = F.linear(x, self._tensors[f"{name}.{part}_proj.weight"])
            return wide.unflatten(-1, (-1, head)).transpose(1, 2)

        query = rotate(self._norm(f"{name}.q_norm", heads("q")), *turn)
        key = rotate(self._norm(f"{name}.k_norm", heads("k")), *turn)
        value = heads("v").to(key.dtype)
        if name in cache:
            key, value = (torch.cat(pair, dim=2) for pair in zip(cache[name], (key, value)))
        first = name not in cache
        cache[name] = key, value
        out = F.scaled_dot_product_attention(  # tokens come one by one after the first ones
            query, key.to(query.dtype), value.to(query.dtype), is_causal=first, enable_gqa=True
        )
        joined = out.transpose(1, 2).flatten(2)
        return F.linear(joined, self._tensors[f"{name}.o_proj.weight"])

    def _joined(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gate and up ``[experts * I, hidden]`` and down ``[hidden, experts * I]`` of a layer."""
        name = f"model.layers.{layer}.mlp.experts"
        experts = range(self.config["num_experts"])
        gate, up, down = (
            [self._tensors.pop(f"{name}.{expert}.{part}_proj.weight") for expert in experts]
            for part in ("gate", "up", "down")
        )
        return torch.cat(gate), torch.cat(up), torch.cat(down, dim=1)

    def _mixture(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        router = self._tensors[f"model.layers.{layer}.mlp.gate.weight"]
        shares = F.linear(x, router).float().softmax(-1)
        best = shares.topk(self.config["num_experts_per_tok"], dim=-1)
        weights = best.values / best.values.sum(-1, keepdim=True)
        all_weights = torch.zeros_like(shares).scatter(1, best.indices, weights)
        gate, up, down = self._experts[layer]
        inner = F.silu(F.linear(x, gate)) * F.linear(x, up)
        weighted = inner.unflatten(-1, (len(all_weights[0]), -1)) * all_weights.unsqueeze(-1)
        return F.linear(weighted.flatten(1).to(inner.dtype), down)
