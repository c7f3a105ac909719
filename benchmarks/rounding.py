"""How far BF16 rounding alone moves the embedded model's answers, emulated on the CPU.

    python -m benchmarks.rounding

The same BF16 weights, with experts' outputs weighted and added in two orders: SGLang's fused kernel
weights an expert's row before it rounds it to BF16; AFD's nvlink and gloo transports round the row
first, then weight and add in FP32 on the FFN rank.  Each is compared with the model in FP32, and
one with the other, on the prompts of ``benchmarks.two_gpus --parts small``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from benchmarks.two_gpus import LENGTHS, SEED, TOKENS
from sglang_afd import embedded
from sglang_afd.validate.answers import random_prompts

_Combine = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def weight_then_round(output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """SGLang's fused kernel: [m, H] float32 outputs, [m, 1] weights -> [m, H] float32."""
    return (output * weight).bfloat16().float()


def round_then_weight(output: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """AFD: the row is rounded as it leaves the expert, its weight applied in float32."""
    return output.bfloat16().float() * weight


def main() -> None:
    """Print the differences as JSON."""
    argparse.ArgumentParser(description=__doc__.split("\n\n")[0]).parse_args()
    path = str(embedded.path())
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
        for dtype in (torch.float32, torch.bfloat16)
    )
    prompts = random_prompts(LENGTHS[:8], vocab=exact.config.vocab_size, seed=SEED)
    scores: dict[str, list[torch.Tensor]] = {"exact": [], "sglang": [], "afd": []}
    chosen = []
    with torch.no_grad():
        for prompt in prompts:
            _use(rounded, weight_then_round)
            sequence = rounded.generate(
                torch.tensor([prompt]),
                max_new_tokens=TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
            chosen.append(sequence[0, len(prompt) :])
            scores["sglang"].append(_scores(rounded, sequence, len(prompt)))
            _use(rounded, round_then_weight)
            scores["afd"].append(_scores(rounded, sequence, len(prompt)))
            scores["exact"].append(_scores(exact, sequence, len(prompt)))
    tokens = torch.cat(chosen).unsqueeze(1)
    logprobs = {name: torch.cat(parts) for name, parts in scores.items()}
    for one, other in (("sglang", "exact"), ("afd", "exact"), ("afd", "sglang")):
        a, b = logprobs[one], logprobs[other]
        error = (a - b).gather(1, tokens).abs()
        result = {
            "compared": f"{one} with {other}",
            "positions": len(tokens),
            "top1_share": (a.argmax(1) == b.argmax(1)).float().mean().item(),
            "largest_margin": (a.max(1).values - a.gather(1, b.argmax(1, True))[:, 0]).max().item(),
            "largest_logprob_error": error.max().item(),
            "mean_logprob_error": error.mean().item(),
        }
        print(json.dumps(result))


def _scores(model: Any, sequence: torch.Tensor, start: int) -> torch.Tensor:
    """[TOKENS, V] logprobs of the positions that chose the continuation."""
    return torch.log_softmax(model(sequence).logits[0, start - 1 : -1].float(), dim=-1)


def _use(model: Any, combine: _Combine) -> None:
    for module in model.modules():
        if isinstance(module, Qwen3MoeExperts):
            module.forward = lambda *inputs, module=module: _experts(module, combine, *inputs)


def _experts(
    module: Any,
    combine: _Combine,
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    total = torch.zeros(*ids.shape, hidden.shape[1])
    for expert in ids.unique().tolist():
        token, place = (ids == expert).nonzero(as_tuple=True)
        w13, w2 = module.gate_up_proj[expert].float(), module.down_proj[expert].float()
        gate, up = (hidden[token].float() @ w13.T).bfloat16().float().chunk(2, dim=-1)
        activated = (torch.nn.functional.silu(gate) * up).bfloat16().float()
        weight = weights[token, place].float().unsqueeze(1)
        total[token, place] = combine(activated @ w2.T, weight)
    return total.sum(dim=1).bfloat16()


if __name__ == "__main__":
    main()
