"""Train the embedded model from CPython's own documentation.

    python -m sglang_afd.embedded.train --out DIR --minutes 3            # on a GPU
    python -m sglang_afd.embedded.train --out DIR --device cpu --steps 20 --tokens-per-step 2048

Writes ``DIR/model`` (the checkpoint), ``DIR/loss_curve.json`` (with what made the run) and
``DIR/loss_curve.png`` (matplotlib draws it). Weights are kept in fp32 and trained under bf16
autocast; the checkpoint is bf16. ``sglang_afd.embedded.evaluate`` then says what it can do.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import types
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import nn
from tqdm import tqdm
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from sglang_afd.embedded import checkpoint, corpus, vocab
from sglang_afd.embedded.batches import IGNORED, Rows, fixed_windows
from sglang_afd.embedded.curve import plot
from sglang_afd.embedded.evaluate import mean_loss
from sglang_afd.embedded.optimising import Optimising, optimizer_for

ROW_LENGTHS = (512, 1024, 2048)  # taken in turn, so that long positions are trained as well
EVALUATIONS = 20
TIMED_STEPS = 60  # timed after as many warm-up steps, to turn --minutes into steps


@dataclass(frozen=True)
class Settings(Optimising):
    """What determines the result, besides the corpus and the library versions."""

    seed: int = 1905
    tokens_per_step: int = 32768
    balance: float = 0.02  # weight of the load-balancing loss


def dense_experts(
    self: nn.Module, hidden: torch.Tensor, top_ids: torch.Tensor, top_weights: torch.Tensor
) -> torch.Tensor:
    """All experts on all tokens as two matrix products, unchosen ones weighted by zero.

    The same function as the model's own loop over experts; at 12 small experts it is faster, and it
    needs no data-dependent shapes. ``hidden`` is ``[T, H]``; ``top_ids`` and ``top_weights`` are
    ``[T, k]``.
    """
    experts, twice_inter, width = self.gate_up_proj.shape
    weights = hidden.new_zeros(hidden.shape[0], experts)
    weights = weights.scatter(1, top_ids, top_weights.to(weights.dtype))
    gate_up = F.linear(hidden, self.gate_up_proj.reshape(-1, width))
    gate, up = gate_up.view(-1, experts, twice_inter).chunk(2, dim=-1)
    inner = self.act_fn(gate) * up * weights.to(gate.dtype).unsqueeze(-1)
    down = self.down_proj.transpose(1, 2).reshape(-1, width)
    return (inner.flatten(1) @ down).to(hidden.dtype)


class RouterTap:
    """Collects what every router returned in the last forward pass."""

    def __init__(self, model: Qwen3MoeForCausalLM) -> None:
        self._calls: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._handles = [
            layer.mlp.gate.register_forward_hook(self._keep) for layer in model.model.layers
        ]

    def _keep(self, module: nn.Module, _inputs: object, outputs: tuple[torch.Tensor, ...]) -> None:
        if module.training:  # the held-out loss is taken in between
            self._calls.append((outputs[0], outputs[2]))

    def balance_loss(self) -> torch.Tensor:
        """Switch-style balancing loss, averaged over layers (1 when perfectly even)."""
        losses = []
        for logits, top_ids in self._calls:
            probabilities = logits.float().softmax(-1)
            experts = probabilities.shape[-1]
            chosen = torch.zeros_like(probabilities).scatter(1, top_ids, 1.0).mean(0)
            losses.append(experts * (chosen / top_ids.shape[-1] * probabilities.mean(0)).sum())
        self._calls.clear()
        return torch.stack(losses).mean()

    def remove(self) -> None:
        """Take the hooks off."""
        for handle in self._handles:
            handle.remove()


def build_model(tokenizer: Tokenizer, settings: Settings, device: str) -> Qwen3MoeForCausalLM:
    """The model with fresh fp32 weights and :func:`dense_experts`."""
    special = vocab.special_ids(tokenizer)
    config = checkpoint.embedded_config(
        special.turn_end, special.end_of_text, tokenizer.get_vocab_size()
    )
    torch.manual_seed(settings.seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**config, "torch_dtype": "float32"})).to(device)
    for layer in model.model.layers:
        # transformers leaves the router at zero in some versions: then every token would choose
        # the same experts until noise separates them.
        nn.init.normal_(layer.mlp.gate.weight, std=0.02)
        layer.mlp.experts.forward = types.MethodType(dense_experts, layer.mlp.experts)
    return model


def train(
    model: Qwen3MoeForCausalLM,
    rows: Rows,
    steps: int,
    settings: Settings,
    observe: Callable[[int, float, float], None],
) -> None:
    """Run ``steps`` optimiser steps.

    About 200 times, ``observe`` is given the step, and the training and balancing loss averaged
    since the last time.
    """
    device = next(model.parameters()).device
    optimizer, tap = optimizer_for(model, settings), RouterTap(model)
    recent: list[torch.Tensor] = []
    every = max(1, steps // 200)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate(step, steps)
        length = min(ROW_LENGTHS[step % len(ROW_LENGTHS)], settings.tokens_per_step)
        inputs, targets = rows.batch(settings.tokens_per_step // length, length)
        with torch.autocast(device.type, torch.bfloat16):
            logits = model(inputs.to(device, non_blocking=True), use_cache=False).logits
        loss = F.cross_entropy(
            logits.float().flatten(0, 1),
            targets.to(device, non_blocking=True).flatten(),
            ignore_index=IGNORED,
        )
        balance = tap.balance_loss()
        (loss + settings.balance * balance).backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent.append(torch.stack([loss.detach(), balance.detach()]))
        if (step + 1) % every == 0 or step + 1 == steps:
            mean_training, mean_balance = torch.stack(recent).mean(0).tolist()
            recent.clear()
            observe(step + 1, mean_training, mean_balance)
    tap.remove()


class Progress:
    """The loss curve so far, shown as a progress bar on a terminal and as lines elsewhere."""

    def __init__(self, steps: int, held_out_loss: Callable[[], float]) -> None:
        self.curve: list[dict[str, float]] = []
        self._held_out_loss = held_out_loss
        self._started = time.monotonic()
        self._bar = tqdm(total=steps, unit="step") if sys.stderr.isatty() else None
        self._steps = steps
        self._next_evaluation = 0.0

    def observe(self, step: int, training: float, balance: float) -> None:
        """Record a point; the held-out loss is taken at about :data:`EVALUATIONS` of them."""
        seconds = time.monotonic() - self._started
        point = {"step": step, "training": training, "balance": balance, "seconds": seconds}
        if step >= self._next_evaluation or step == self._steps:
            point["held_out"] = self._held_out_loss()
            self._next_evaluation += self._steps / EVALUATIONS
        self.curve.append(point)
        text = ", ".join(f"{k} {v:.4g}" for k, v in point.items() if k != "step")
        if self._bar is not None:
            self._bar.update(step - self._bar.n)
            self._bar.set_postfix_str(text)
        elif "held_out" in point:
            print(f"step {step}/{self._steps}: {text}", flush=True)


def steps_within(
    minutes: float,
    tokenizer: Tokenizer,
    documents: list[corpus.Document],
    settings: Settings,
    device: str,
) -> int:
    """How many steps fit in ``minutes``, by timing a throw-away model."""
    model = build_model(tokenizer, settings, device)
    rows = Rows(documents, tokenizer, settings.seed)
    ends: list[float] = []
    train(model, rows, 2 * TIMED_STEPS, settings, lambda *_: ends.append(time.monotonic()))
    seconds = (ends[-1] - ends[TIMED_STEPS - 1]) / TIMED_STEPS
    return max(1, int(60 * minutes / seconds))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="directory to write")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--steps", type=int, help="optimiser steps (repeats an earlier run)")
    budget.add_argument("--minutes", type=float, help="choose the steps that fit in this time")
    parser.add_argument("--corpus", type=Path, help="JSON lines; default: from this interpreter")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where the model runs (default here: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=Settings.seed, help="default: %(default)s")
    parser.add_argument(
        "--tokens-per-step",
        type=int,
        default=Settings.tokens_per_step,
        help="tokens of one optimiser step (default: %(default)s)",
    )
    return parser.parse_args(argv)


def main() -> None:
    """Train and write the checkpoint and the loss curve."""
    args = parse_args()
    settings = Settings(seed=args.seed, tokens_per_step=args.tokens_per_step)
    documents = corpus.loads(args.corpus.read_bytes()) if args.corpus else corpus.build()
    tokenizer = vocab.train(d.text for d in documents if not d.held_out)
    steps = args.steps
    if steps is None:
        steps = steps_within(args.minutes, tokenizer, documents, settings, args.device)
    model = build_model(tokenizer, settings, args.device)
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{parameters} parameters, {steps} steps on {args.device}, corpus sha256 "
        f"{corpus.digest(documents)}",
        flush=True,
    )

    held_out = fixed_windows([d for d in documents if d.held_out], tokenizer, 1024)
    progress = Progress(steps, lambda: mean_loss(model, *held_out))
    started = time.monotonic()
    train(model, Rows(documents, tokenizer, settings.seed), steps, settings, progress.observe)
    seconds = time.monotonic() - started

    directory = args.out / "model"
    config = checkpoint.embedded_config(
        model.config.eos_token_id, model.config.pad_token_id, model.config.vocab_size
    )
    checkpoint.write(directory, config, checkpoint.unpack_experts(model.state_dict()))
    vocab.save(tokenizer, directory, config["max_position_embeddings"])
    run = {
        "settings": asdict(settings),
        "steps": steps,
        "parameters": parameters,
        "corpus_sha256": corpus.digest(documents),
        "training_seconds": round(seconds, 1),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
        "versions": {
            "python": platform.python_version(),
            **{p: version(p) for p in ("torch", "transformers", "tokenizers", "safetensors")},
        },
    }
    record = json.dumps({"run": run, "curve": progress.curve}, indent=1)
    (args.out / "loss_curve.json").write_text(record + "\n")
    labels = {"training": "training", "held_out": "held-out docstrings"}
    plot(progress.curve, args.out / "loss_curve.png", labels)


if __name__ == "__main__":
    main()
