"""The reference hf: HF transformers continues prompts greedily and records its MoE layers.

A program, run by path in the reference's own environment, which need not have this package: it
imports PyTorch, transformers and safetensors alone.  Reads a JSON request, writes a JSON answer,
and prints a line for every prompt that is done.  Recordings have the format of
`sglang_afd.observe.recording`, request numbers being those of the prompts.
"""

from __future__ import annotations

import argparse
import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_EXPERTS = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:.*\.)?experts")


def main() -> None:
    """Answer the request that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("request", type=Path, help="the JSON request")
    parser.add_argument("answer", type=Path, help="where the JSON answer goes")
    args = parser.parse_args()
    request = json.loads(args.request.read_text())
    model = load(request["model"], request["dtype"], request["device"])
    print(json.dumps({"loaded": True}), flush=True)
    recorder = Recorder(model)
    results = []
    for number, prompt in enumerate(request["prompts"]):
        recorder.begin(number in request["record"])
        results.append(continued(model, prompt, request["new_tokens"]))
        if recorder.on:
            recorder.write(Path(request["folder"]), number, request["max_position"])
        print(json.dumps({"done": number + 1}), flush=True)
    args.answer.write_text(json.dumps({"results": results, "layers": recorder.layers}))


def load(model: str, dtype: str, device: str) -> Any:
    """The model, over all GPUs where accelerate is there to place it."""
    from transformers import AutoModelForCausalLM

    if device == "cpu":
        return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    if find_spec("accelerate") is not None:
        return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, device_map="auto").eval()
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).to(device).eval()


def continued(model: Any, prompt: list[int], new_tokens: int) -> dict[str, Any]:
    """The greedy continuation; NaN stands as null, which the reader takes for a failure."""
    import torch

    tokens, logprobs, gaps = [], [], []
    cache, step = None, torch.tensor([prompt], device=model.device)
    with torch.inference_mode():
        for _ in range(new_tokens):
            output = model(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            row = output.logits[0, -1].float().log_softmax(-1)
            best = row.topk(2)
            tokens.append(int(best.indices[0]))
            logprobs.append(_number(best.values[0]))
            gaps.append(_number(best.values[0] - best.values[1]))
            step = torch.tensor([[tokens[-1]]], device=model.device)
    return {"tokens": tokens, "logprobs": logprobs, "gaps": gaps}


def _number(value: Any) -> float | None:
    return float(value) if value.isfinite() else None


class Recorder:
    """Takes the experts' inputs, outputs and choices off a model, while it is `on`."""

    def __init__(self, model: Any) -> None:
        self.on = False
        self.layers: list[int] = []
        self._taken: dict[str, list[Any]] = {}
        for name, module in model.named_modules():
            if match := _EXPERTS.fullmatch(name):
                layer = int(match[1])
                self.layers.append(layer)
                module.register_forward_pre_hook(self._input(layer), with_kwargs=True)
                module.register_forward_hook(self._output(layer))

    def begin(self, on: bool) -> None:
        """Forget what was taken; take the next forwards if `on`."""
        self.on, self._taken = on, {}

    def _input(self, layer: int) -> Any:
        def take(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self.on:
                hidden, experts, *_ = (*args, *kwargs.values())
                self._keep(f"{layer}.input", hidden)
                self._keep(f"{layer}.experts", experts)

        return take

    def _output(self, layer: int) -> Any:
        def take(module: Any, args: Any, output: Any) -> None:
            if self.on:
                self._keep(f"{layer}.output", output)

        return take

    def _keep(self, name: str, value: Any) -> None:
        self._taken.setdefault(name, []).append(value.reshape(-1, value.shape[-1]).cpu().clone())

    def write(self, folder: Path, number: int, max_position: int) -> None:
        """Write the rows of prompt `number`: one for every token that was read."""
        import torch
        from safetensors.torch import save_file

        tensors = {n: torch.cat(parts)[:max_position] for n, parts in self._taken.items()}
        if not tensors:
            return
        rows = len(next(iter(tensors.values())))
        tensors["request"] = torch.full((rows,), number, dtype=torch.int32)
        tensors["position"] = torch.arange(rows, dtype=torch.int32)
        save_file(tensors, folder / f"reference{number}.safetensors")


if __name__ == "__main__":
    main()
