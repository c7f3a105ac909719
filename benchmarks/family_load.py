"""Every family at 1A1F on two GPUs over nvlink, in CUDA graphs, under 128 concurrent requests.

    python -m benchmarks.family_load --out benchmarks/results/DATE_families --work DIR

Dummy weights and layers cut to fit, both told in the record: it shows that a family is served, what
each role holds, and how long a decode step, attention (Ta) and experts (Te) take, not its answers.
Two lanes where the family may have them on GPUs. Each family writes its own JSON file, so one that
fails leaves the others' records. Exits with 0 if all that were asked for were measured.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from benchmarks.attempt import attempt
from benchmarks.models import SHAPES, write_tokenizer
from benchmarks.progress import say, starting
from benchmarks.serving import Load, bench
from benchmarks.systems import holdings
from benchmarks.two_gpus import share_kernels
from sglang_afd import trace
from sglang_afd.flags import GPU_LANE_MODELS
from sglang_afd.observe.timeline import overlap
from sglang_afd.observe.trace import Trace
from sglang_afd.running import Server, serve
from sglang_afd.validate import environment

REQUESTS = 128
LOAD = Load(
    input=512, output=512, requests=2 * REQUESTS, concurrency=REQUESTS, seed=1, answer_seconds=300
)
FULL = 0.95
"""Share of `REQUESTS` that a step must have to count."""
STEPS = 150
START = 500
COMMON = (
    *("--attention-backend", "fa3", "--sampling-backend", "pytorch", "--skip-server-warmup"),
    *("--random-seed", "1", "--mem-fraction-static", "0.85", "--context-length", "4096"),
    *("--load-format", "dummy", "--disable-radix-cache", "--max-running-requests", str(REQUESTS)),
)


class Shape(NamedTuple):
    """A family's shape, to be cut."""

    source: str
    config: Callable[[], dict[str, Any]]
    layers: int
    """Of the text model, as served."""


def _published(name: str) -> Shape:
    return Shape(f"sglang_afd/plan/models/{name}.json", lambda: _read(name), 0)


def _read(name: str) -> dict[str, Any]:
    return json.loads((SHAPES / f"{name}.json").read_text())


def _of_class(name: str, **changes: Any) -> dict[str, Any]:
    """The default configuration of a class of transformers', with `changes`."""
    import transformers

    made = getattr(transformers, name)(**changes).to_dict()
    return {**made, "dtype": "bfloat16"}


def _deepseek() -> dict[str, Any]:
    return _of_class(
        "DeepseekV3Config",
        architectures=["DeepseekV3ForCausalLM"],
        # of the published config.json, for SGLang; transformers' class takes them as given
        **{"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
    )


def _glm() -> dict[str, Any]:
    return _of_class("Glm4MoeConfig", architectures=["Glm4MoeForCausalLM"], attention_bias=True)


def _qwen3_5() -> dict[str, Any]:
    made = _of_class(
        "Qwen3_5MoeTextConfig",
        architectures=["Qwen3_5MoeForCausalLM"],
        # of the published config.json
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
    )
    return {**made, "full_attention_interval": 4}  # SGLang's name for the list of layer types


FAMILIES = {
    "qwen3-30b-a3b": _published("qwen3-30b-a3b")._replace(layers=48),
    "qwen3-235b-a22b-fp8": _published("qwen3-235b-a22b-fp8")._replace(layers=24),
    "minimax-m2.5": _published("minimax-m2.5")._replace(layers=16),
    "qwen3.5": Shape("transformers' Qwen3_5MoeTextConfig, its defaults", _qwen3_5, 40),
    "deepseek-v3": Shape("transformers' DeepseekV3Config, its defaults", _deepseek, 6),
    "glm-4.5": Shape("transformers' Glm4MoeConfig, its defaults", _glm, 16),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the families that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("/tmp/family_load"),
        help="folder for models, logs and compiled kernels, used again (%(default)s)",
    )
    parser.add_argument(
        "--families", nargs="+", choices=FAMILIES, default=[*FAMILIES], help="(all)"
    )
    args = parser.parse_args(argv)
    for folder in (args.out, args.work):
        folder.mkdir(parents=True, exist_ok=True)
    share_kernels(args.work)
    failed = False
    for name in args.families:
        say(f"{name} begins")
        result = attempt(partial(measure, name, args.work, args.out))
        failed |= "failed" in result
        text = json.dumps({"family": name, "identity": environment.describe(), **result}, indent=1)
        (args.out / f"{name}.json").write_text(text + "\n")
        say(f"{name}: {json.dumps(result.get('step', result.get('failed')))}")
    return int(failed)


def model_of(name: str, work: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of the family's cut model, and what was done to it."""
    shape = FAMILIES[name]
    config = shape.config()
    text = config.get("text_config") or config
    whole, text["num_hidden_layers"] = text["num_hidden_layers"], shape.layers
    if text.get("layer_types"):
        text["layer_types"] = text["layer_types"][: shape.layers]
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if not (folder / "tokenizer.json").exists():
        write_tokenizer(folder, int(text["vocab_size"]))
    return folder, {"source": shape.source, "layers": f"{shape.layers} of {whole}"}


def command_line(name: str, folder: Path) -> list[str]:
    """Arguments of the family's server."""
    config = json.loads((folder / "config.json").read_text())
    lanes = 2 if config["architectures"][0] in GPU_LANE_MODELS else 1
    return [
        *("--model-path", str(folder), "--dtype", "bfloat16", *COMMON),
        *("--afd-attention-ranks", "1", "--afd-ffn-ranks", "1", "--afd-transport", "nvlink"),
        *("--afd-lanes", str(lanes), "--afd-max-tokens-per-rank", str(REQUESTS // lanes)),
    ]


def measure(name: str, work: Path, out: Path) -> dict[str, Any]:
    """Serve the family under the load, and record steps while all requests run.

    Raises:
        ServerFailed: the server did not start.
        BenchFailed: not every request was answered.
        BadTrace: no two full decode steps were recorded.
    """
    folder, cut = model_of(name, work)
    args = command_line(name, folder)
    with (
        serve(name, args, logs=out, timeout=START, tick=starting(name)) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        say(f"{name} started in {server.start_seconds:.0f} s; bench_serving runs")
        answered = pool.submit(bench, server, LOAD, folder, out)
        _await_all(server, answered.done)
        found = trace.record(server.url, STEPS, 60.0)
        held = holdings(server)
        figures = answered.result()
    return {
        **cut,
        "arguments": ["MODEL" if arg == str(folder) else arg for arg in args],
        "start_seconds": server.start_seconds,
        "step": step_of(found, REQUESTS),
        "holdings": held,
        "bench_serving": figures,
    }


def _await_all(server: Server, ended: Callable[[], bool], within: float = 200.0) -> None:
    """Return when nearly all requests of the load run at the same time, or it has ended."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline and not ended():
        loads = server.call("/v1/loads")["loads"]
        if sum(load["num_running_reqs"] for load in loads) >= FULL * REQUESTS:
            return
        time.sleep(0.2)


def step_of(found: Trace, requests: int) -> dict[str, float | int]:
    """A decode step with all requests in flight, in milliseconds: mean of those in the trace.

    Raises:
        BadTrace: there are no two in a row.
    """
    lanes = len({step.lane for rank in found.ranks for step in rank.steps if step.path == "decode"})
    least = FULL * requests / max(1, lanes)
    full = [
        msgspec.structs.replace(rank, steps=[step for step in rank.steps if step.rows >= least])
        for rank in found.ranks
    ]
    mean = overlap(Trace(found.versions, full))
    return {
        "steps": mean.steps,
        "lanes": lanes,
        "step_ms": mean.step * 1e3,
        "Ta_ms": mean.attention * 1e3,
        "Te_ms": mean.experts * 1e3,
        "exposed_ms": mean.exposed * 1e3,
        "efficiency": mean.efficiency,
    }


if __name__ == "__main__":
    raise SystemExit(main())
