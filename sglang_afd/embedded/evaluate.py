"""What the report says about a checkpoint: losses, expert use, greedy samples.

python -m sglang_afd.embedded.evaluate DIR > report.json     # DIR is a checkpoint directory
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import nn
from transformers import AutoTokenizer, Qwen3MoeForCausalLM

from sglang_afd.embedded import corpus
from sglang_afd.embedded.batches import fixed_windows

TEXT_PROMPTS = (
    'The "with" statement is used to',
    'The "yield" statement',
    "A class definition defines",
    "Assignment statements are used to",
    "The following exceptions are",
    "Return the",
)
CHAT_PROMPTS = (
    "Explain the `with` statement.",
    "What is a lambda in Python?",  # this wording and the next are in no training row
    "Could you tell me what the try statement is for?",
    "Explain comparisons.",
    "What does `str.join` do?",
    "Hello!",
)
WINDOW, WINDOWS = 1024, 8  # tokens in a window, and how many of each part, evenly spaced


@torch.no_grad()
def mean_loss(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    """Mean cross entropy in nats per token over windows ``[N, L]``; the mode is restored."""
    device, training = next(model.parameters()).device, model.training
    model.eval()
    total = 0.0
    for batch, wanted in zip(inputs.split(16), targets.split(16), strict=True):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = model(batch.to(device), use_cache=False).logits
        losses = F.cross_entropy(
            logits.float().flatten(0, 1), wanted.to(device).flatten(), reduction="sum"
        )
        total += losses.item()
    model.train(training)
    return total / targets.numel()


def load(directory: Path, device: str) -> Qwen3MoeForCausalLM:
    """The checkpoint in fp32, with transformers' own loop over experts."""
    model = Qwen3MoeForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    )
    return model.to(device).eval()


@torch.no_grad()
def zero_experts(model: Qwen3MoeForCausalLM) -> None:
    """Make every expert return zero."""
    for layer in model.model.layers:
        layer.mlp.experts.down_proj.zero_()


@torch.no_grad()
def greedy(
    model: Qwen3MoeForCausalLM, prompt: list[int], tokens: int, stop: Iterable[int] = ()
) -> tuple[list[int], list[float]]:
    """Greedy continuation of ``prompt`` and each token's margin over the runner-up, in logits."""
    device = next(model.parameters()).device
    ids, cache = torch.tensor([prompt], device=device), None
    out: list[int] = []
    margins: list[float] = []
    stops = set(stop)
    while len(out) < tokens and not (out and out[-1] in stops):
        step = model(ids, past_key_values=cache, use_cache=True)
        cache = step.past_key_values
        best = step.logits[0, -1].float().topk(2)
        first, second = best.values.tolist()
        margins.append(first - second)
        out.append(int(best.indices[0]))
        ids = best.indices[:1].view(1, 1)
    return out, margins


@torch.no_grad()
def expert_use(model: Qwen3MoeForCausalLM, ids: list[int]) -> list[list[int]]:
    """How often each expert of each layer is chosen on ``ids``: ``[layers][experts]`` counts."""
    chosen: list[torch.Tensor] = []
    handles = [
        layer.mlp.gate.register_forward_hook(lambda _m, _i, out: chosen.append(out[2]))
        for layer in model.model.layers
    ]
    model(torch.tensor([ids], device=next(model.parameters()).device), use_cache=False)
    for handle in handles:
        handle.remove()
    experts = model.config.num_experts
    return [torch.bincount(c.flatten().cpu(), minlength=experts).tolist() for c in chosen]


def report(
    directory: Path, documents: list[corpus.Document], device: str, tokens: int = 160
) -> dict[str, Any]:
    """Evaluate the checkpoint in ``directory``."""
    model = load(directory, device)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    raw = Tokenizer.from_file(str(directory / "tokenizer.json"))
    parts = {
        "topics": [d for d in documents if d.kind == "topic"],
        "trained docstrings": [d for d in documents if d.kind == "docstring" and not d.held_out],
        "held-out docstrings": [d for d in documents if d.held_out],
    }
    windows = {name: _spaced(fixed_windows(part, raw, WINDOW)) for name, part in parts.items()}
    losses = {name: mean_loss(model, *pair) for name, pair in windows.items()}
    use = expert_use(model, windows["topics"][0][:2].flatten().tolist())

    prompts = {text: raw.encode(text).ids for text in TEXT_PROMPTS}
    for text in CHAT_PROMPTS:
        rendered = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        prompts[rendered] = raw.encode(rendered).ids
    stop = [model.config.eos_token_id, model.config.pad_token_id]
    samples = {text: greedy(model, ids, tokens, stop) for text, ids in prompts.items()}
    zero_experts(model)
    without = {text: greedy(model, ids, tokens, stop)[0] for text, ids in prompts.items()}
    zeroed_losses = {name: mean_loss(model, *pair) for name, pair in windows.items()}
    return {
        "windows": f"{WINDOWS} of {WINDOW} tokens for each loss, 2 for expert use",
        "corpus_sha256": corpus.digest(documents),
        "loss_nats_per_token": losses,
        "loss_with_experts_zeroed": zeroed_losses,
        "expert_use_on_topic_text": use,
        "samples": [
            {
                "prompt": text,
                "greedy": raw.decode(out, skip_special_tokens=False),
                "tokens": len(out),
                "smallest_margin": min(margins),
                "median_margin": sorted(margins)[len(margins) // 2],
                "greedy_with_experts_zeroed": raw.decode(without[text], skip_special_tokens=False),
                "first_token_that_differs": _first_difference(out, without[text]),
            }
            for text, (out, margins) in samples.items()
        ],
    }


def _spaced(windows: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = windows
    rows = torch.linspace(0, len(inputs) - 1, WINDOWS).long()
    return inputs[rows], targets[rows]


def _first_difference(one: list[int], other: list[int]) -> int | None:
    pairs = enumerate(zip(one, other, strict=False))
    default = None if len(one) == len(other) else min(len(one), len(other))
    return next((i for i, (a, b) in pairs if a != b), default)


def main() -> None:
    """Print the report on a checkpoint directory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path, help="the checkpoint")
    parser.add_argument("--corpus", type=Path, help="JSON lines; default: from this interpreter")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where the model runs (default here: %(default)s)",
    )
    args = parser.parse_args()
    documents = corpus.loads(args.corpus.read_bytes()) if args.corpus else corpus.build()
    print(json.dumps(report(args.directory, documents, args.device), indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
