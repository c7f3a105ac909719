"""Train an EAGLE-3 draft for the embedded model, in plain PyTorch.

    python -m sglang_afd.embedded.train_draft --out DIR --minutes 2                  # on a GPU
    python -m sglang_afd.embedded.train_draft --out DIR --device cpu --minutes 18 \
        --tokens-per-step 2048
    python -m sglang_afd.embedded.train_draft --plot DIR               # draws draft_curve.json

The draft is trained as it is used ("training-time test"): unrolled over several steps, each reading
what the one before made, against the target's own distribution of the same text.  Half of the text
is the target's documents, half is what the target writes itself (`written`).  The documents that
are held out from the target are held out from the draft too.

Writes ``DIR/draft`` (the checkpoint, bf16), ``DIR/draft_curve.json`` (with what made the run and
the estimate of the acceptance length) and ``DIR/draft_prompts.json`` (the prompts of that
estimate).  Needs torch, numpy, safetensors and tokenizers alone, so it also runs where SGLang is
not installed:
``python -c 'from sglang_afd.embedded.train_draft import main; main()' --out DIR ...``
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

from sglang_afd import embedded
from sglang_afd.embedded import corpus
from sglang_afd.embedded.acceptance import Estimate, estimate, prompts_of, questions_of
from sglang_afd.embedded.batches import IGNORED, Rows, fixed_windows
from sglang_afd.embedded.curve import plot
from sglang_afd.embedded.draft_model import Draft
from sglang_afd.embedded.optimising import Optimising, optimizer_for
from sglang_afd.embedded.plain_target import AUX_LAYERS, Target
from sglang_afd.embedded.written import LENGTH, Writer

ROW = 512  # tokens of a training row
EVALUATIONS = 8
TIMED_STEPS = 20  # timed after as many warm-up steps, to turn --minutes into steps
CONTINUED = 64  # tokens that the target writes after each prompt of the acceptance estimate
LABELS = {"training": "training", "held_out": "held-out documents"}


@dataclass(frozen=True)
class Settings(Optimising):
    """What determines the result, besides the corpus, the target and the library versions."""

    seed: int = 1906
    tokens_per_step: int = 16384
    warmup_steps: int = 100
    unrolled: int = 3  # steps of the draft in a row
    decay: float = 0.8  # a step's weight in the loss, of the step's before it
    written: int = 32768  # rows that the target writes, in four parts
    words: int = 1792  # of the target's vocabulary, the most frequent ones
    intermediate_size: int = 2304


def draft_config(target: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """``config.json`` of the draft for the target with that config.json."""
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": target["hidden_size"],
        "intermediate_size": settings.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target["num_attention_heads"],
        "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": target["head_dim"],
        "max_position_embeddings": target["max_position_embeddings"],
        "rms_norm_eps": target["rms_norm_eps"],
        "rope_theta": target["rope_theta"],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": settings.words,
        "bos_token_id": None,
        "eos_token_id": target["eos_token_id"],
        "pad_token_id": target["pad_token_id"],
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
            "use_aux_hidden_state": True,
        },
    }


def frequent_words(
    documents: Sequence[corpus.Document], tokenizer: Tokenizer, count: int
) -> torch.Tensor:
    """The `count` most frequent tokens of what is trained on, ascending; special ones first."""
    uses = torch.zeros(tokenizer.get_vocab_size(), dtype=torch.int64)
    for document in documents:
        if not document.held_out:
            ids = torch.tensor(tokenizer.encode(document.text).ids)
            uses += torch.bincount(ids, minlength=len(uses))
    uses[:3] = uses.max() + 1  # the special tokens, of which texts have none
    return uses.sort(descending=True, stable=True).indices[:count].sort().values


def build_draft(target: Target, words: torch.Tensor, settings: Settings) -> Draft:
    """A draft with fresh fp32 weights, its ``lm_head`` the target's rows of its words."""
    torch.manual_seed(settings.seed)
    draft = Draft(draft_config(target.config, settings), words, target.embedding.clone())
    draft.to(target.embedding.device)
    with torch.no_grad():
        draft.lm_head.weight.copy_(target.lm_head[draft.words])
    return draft


def loss_of(
    draft: Draft, target: Target, ids: torch.Tensor, counted: torch.Tensor, settings: Settings
) -> torch.Tensor:
    """Cross entropy with the target's distribution, in nats a token, one for each unrolled step.

    ids: rows of tokens ``[B, T]``; counted: bool of the same shape, whether the token that follows
    is one that the target writes.
    """
    device = ids.device
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits, features = target(ids)
        drafted = draft.chains(features[:, :-1], ids, settings.unrolled, alone=False)
    wanted = logits.softmax(-1)[..., draft.words]
    losses = []
    for step, found in enumerate(drafted):
        there = found.shape[1] - step
        aim, count = wanted[:, step + 1 :], counted[:, step + 1 :]
        each = -(aim * found[:, :there].log_softmax(-1)).sum(-1)
        losses.append((each * count).sum() / count.sum().clamp(min=1))
    return torch.stack(losses)


def weighted(losses: torch.Tensor, settings: Settings) -> torch.Tensor:
    """The losses of the unrolled steps as one, later ones counting less."""
    shares = settings.decay ** torch.arange(len(losses), device=losses.device)
    return (losses * shares).sum() / shares.sum()


class Training:
    """One run: the optimiser, the rows, and the curve so far."""

    def __init__(
        self,
        draft: Draft,
        target: Target,
        documents: list[corpus.Document],
        tokenizer: Tokenizer,
        settings: Settings,
    ) -> None:
        self.draft, self.target, self.settings = draft, target, settings
        self.curve: list[dict[str, float]] = []
        self._rows = Rows(documents, tokenizer, settings.seed)
        known = [d for d in documents if not d.held_out]
        self._writer = Writer(target, known, tokenizer, settings.seed)
        self._written: list[torch.Tensor] = []
        self._taken = 0
        held_out, _ = fixed_windows([d for d in documents if d.held_out], tokenizer, ROW)
        self._held_out = held_out[:8].to(target.embedding.device)
        self._optimizer = optimizer_for(draft, settings)

    def write(self, parts: int) -> None:
        """Let the target write this many quarters of its rows."""
        for _ in range(parts):
            self._written += self._writer.rows(self.settings.written // 4).split(
                max(1, self.settings.tokens_per_step // LENGTH)
            )

    def step(self, rate: float, *, written: bool) -> torch.Tensor:
        """One optimiser step, on what the target writes or on documents; returns its loss, on the
        device."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        device = self.target.embedding.device
        if written:
            ids = self._written[self._taken % len(self._written)]
            counted = torch.ones_like(ids, dtype=torch.bool)
            self._taken += 1
        else:
            length = min(ROW, self.settings.tokens_per_step)
            inputs, targets = self._rows.batch(self.settings.tokens_per_step // length, length)
            ids, counted = inputs.to(device), (targets != IGNORED).to(device)
        losses = loss_of(self.draft, self.target, ids, counted, self.settings)
        loss = weighted(losses, self.settings)
        loss.backward()
        nn.utils.clip_grad_norm_(self.draft.parameters(), self.settings.clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def run(self, steps: int, prompts: dict[str, torch.Tensor]) -> None:
        """Train, adding to the curve; `prompts` are greedy texts for the acceptance estimate."""
        began = time.monotonic()
        every, evaluate = max(1, steps // 200), max(1, steps // EVALUATIONS)
        recent: list[torch.Tensor] = []
        settings = self.settings
        for step in range(1, steps + 1):
            rate = settings.learning_rate(step - 1, steps)
            recent.append(self.step(rate, written=step % 2 == 0))
            if step % every and step < steps:
                continue
            point = {"step": step, "training": torch.stack(recent).mean().item()}
            recent.clear()
            if step // evaluate > (step - every) // evaluate or step == steps:
                with torch.no_grad():
                    counted = torch.ones_like(self._held_out, dtype=torch.bool)
                    losses = loss_of(self.draft, self.target, self._held_out, counted, settings)
                point["held_out"] = weighted(losses, settings).item()
                for name, texts in prompts.items():
                    found = estimate(self.draft, self.target, texts)
                    point[f"acceptance, {name}"] = found.length
            point["seconds"] = time.monotonic() - began
            self.curve.append(point)
            if "held_out" in point:
                print(", ".join(f"{k} {v:.4g}" for k, v in point.items()), flush=True)


def steps_within(minutes: float, training: Training) -> int:
    """How many steps fit in `minutes`, by timing a training that is thrown away."""
    training.write(1)
    for i in range(TIMED_STEPS):
        training.step(1e-4, written=i % 2 == 0).item()
    began = time.monotonic()
    for i in range(TIMED_STEPS):
        training.step(1e-4, written=i % 2 == 0).item()
    return max(1, int(60 * minutes * TIMED_STEPS / (time.monotonic() - began)))


def write(directory: Path, config: dict[str, Any], draft: Draft) -> None:
    """Write the draft's checkpoint in bf16."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {k: v.to("cpu", torch.bfloat16).contiguous() for k, v in draft.state_dict().items()}
    words = draft.words.cpu()
    has = torch.zeros(config["vocab_size"], dtype=torch.bool)
    has[words] = True
    tensors |= {"d2t": words - torch.arange(len(words)), "t2d": has}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    text = json.dumps(config, indent=2, sort_keys=True)
    (directory / "config.json").write_text(text + "\n")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="directory to write")
    what.add_argument("--plot", type=Path, help="directory written before; draw its loss curve")
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument("--steps", type=int, help="optimiser steps (repeats an earlier run)")
    budget.add_argument(
        "--minutes", type=float, default=2.0, help="choose the steps that fit (%(default)s)"
    )
    parser.add_argument("--corpus", type=Path, help="JSON lines; default: from this interpreter")
    parser.add_argument(
        "--device",
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="where it runs (default here: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=Settings.seed, help="default: %(default)s")
    parser.add_argument(
        "--tokens-per-step",
        type=int,
        default=Settings.tokens_per_step,
        help="tokens of one optimiser step (default: %(default)s)",
    )
    parser.add_argument(
        "--written",
        type=int,
        default=Settings.written,
        help=f"rows of {LENGTH} tokens that the target writes (default: %(default)s)",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Train a draft, or draw the curve of one."""
    args = parse_args(argv)
    if args.plot is not None:
        record = json.loads((args.plot / "draft_curve.json").read_text())
        plot(record["curve"], args.plot / "draft_curve.png", LABELS)
        return
    settings = Settings(seed=args.seed, tokens_per_step=args.tokens_per_step, written=args.written)
    documents = corpus.loads(args.corpus.read_bytes()) if args.corpus else corpus.build()
    target = Target(embedded.path(), args.device)
    tokenizer = Tokenizer.from_file(str(embedded.path() / "tokenizer.json"))
    words = frequent_words(documents, tokenizer, settings.words).to(args.device)
    known = [d for d in documents if not d.held_out]
    unknown = [d for d in documents if d.held_out]
    prompts = {
        "held-out documents": prompts_of(unknown, tokenizer, settings.seed),
        "held-out wordings": questions_of(known, tokenizer, settings.seed),
        "documents": prompts_of(known, tokenizer, settings.seed),
    }
    greedy = {name: target.write(ids.to(args.device), CONTINUED) for name, ids in prompts.items()}

    def training() -> Training:
        return Training(
            build_draft(target, words, settings), target, documents, tokenizer, settings
        )

    steps = args.steps or steps_within(args.minutes, training())
    run = training()
    run.write(4)
    parameters = sum(p.numel() for p in run.draft.parameters())
    print(f"{parameters} parameters, {steps} steps on {args.device}", flush=True)
    began = time.monotonic()
    run.run(steps, greedy)
    seconds = time.monotonic() - began

    write(args.out / "draft", draft_config(target.config, settings), run.draft)
    estimates: dict[str, Estimate] = {
        name: estimate(run.draft, target, ids) for name, ids in greedy.items()
    }
    for name, found in estimates.items():
        print(f"acceptance length, {name}: {found.length:.3f} ({found})", flush=True)
    record = {
        "run": {
            "settings": asdict(settings),
            "steps": steps,
            "parameters": parameters,
            "corpus_sha256": corpus.digest(documents),
            "training_seconds": round(seconds, 1),
            "device": torch.cuda.get_device_name() if args.device == "cuda" else args.device,
            "versions": {"python": platform.python_version(), **_versions()},
        },
        "acceptance": {
            name: {"length": found.length, **asdict(found)} for name, found in estimates.items()
        },
        "curve": run.curve,
    }
    (args.out / "draft_curve.json").write_text(json.dumps(record, indent=1) + "\n")
    held_out = {name: ids.tolist() for name, ids in prompts.items() if name.startswith("held-out")}
    (args.out / "draft_prompts.json").write_text(json.dumps(held_out) + "\n")


def _versions() -> dict[str, str]:
    found = {"torch": torch.__version__}
    for package in ("tokenizers", "safetensors"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # its files were copied, without what describes them
            continue
    return found


if __name__ == "__main__":
    main()
