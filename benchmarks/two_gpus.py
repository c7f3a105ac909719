"""One attention GPU and one FFN GPU over deepep: right answers, memory per role, and a real load.

    python -m benchmarks.two_gpus --out benchmarks/results/DATE_two_gpus [--parts load]

Parts: `references` lets SGLang on one GPU continue prompts on a seeded checkpoint (hidden size
2048) whose experts matter, in BF16 and FP8; `bf16` and `fp8` compare AFD with it, `small` does so
on the embedded model (hidden size 256, which deepep cannot carry); `load` serves
Qwen3-30B-A3B's published shape with dummy weights under ``sglang.bench_serving`` (dummy weights
show that it serves and how much it holds, not its answers).
Each part writes its own JSON file, so one that fails leaves the others' records. A second call with
the same --out and --work does not repeat the references that are there already, nor compile again
the kernels that the first one compiled.

With --shared-gpu both ranks run on GPU 0, which takes turns between them: for the answers (parts
references, bf16, fp8) on a machine with one GPU. What a rank holds there, and how fast it is, says
nothing about two GPUs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch

from benchmarks.attempt import attempt
from benchmarks.fp8 import quantise_checkpoint
from benchmarks.models import write_tokenizer
from benchmarks.progress import say, starting
from benchmarks.serving import Load, bench, bench_command
from sglang_afd import embedded
from sglang_afd.running import Server, free_port, serve, start
from sglang_afd.validate import environment
from sglang_afd.validate.answers import Continuation, continue_greedily, random_prompts
from sglang_afd.validate.comparison import compare
from sglang_afd.validation.report import NO_LAYERS, figures_of
from tests.support.checkpoints import seeded_qwen3_moe
from tests.support.planting import Planting

SEED = 20261130
DTYPES = ("bf16", "fp8")
LENGTHS = (3, 9, 17, 33, 64, 130, 200, 300, 470, 600, 777, 900)
TOKENS = 64
LOAD = Load(input=512, output=64, requests=512, concurrency=256, seed=SEED, answer_seconds=240)
START = 280
"""Seconds for one start. DeepGEMM and Triton compile their kernels in the first forward."""
COMMON = [
    *("--attention-backend", "fa3", "--sampling-backend", "pytorch"),
    *("--skip-server-warmup", "--random-seed", "1"),
]
# Logits rounded to BF16 tie where they differ by less than 1/32: ties that no expert is behind.
# A KV pool of a fixed size, so that servers can start side by side on the same GPUs.
AGREEMENT = [
    *(*COMMON, "--enable-fp32-lm-head"),
    *("--mem-fraction-static", "0.6", "--max-total-tokens", "65536"),
]
SHAPE: dict[str, Any] = {
    "layers": 3,
    "hidden": 2048,
    "heads": 16,
    "kv_heads": 4,
    "head_dim": 128,
    "experts": 32,
    "top_k": 4,
    "moe_intermediate": 768,
    "vocab": 4096,
}
CALM: dict[str, Any] = {
    "router_spread": 1.0,
    "logit_spread": 1.0,
    "attention_scale": 0.3,
    "expert_scale": 0.4,
    "planting": Planting(),
}
"""Keeps rounding from deciding anything: see `tests.support.planting`."""


class Deployment(NamedTuple):
    """How the one attention and the one FFN rank are run."""

    transport: str
    shared_gpu: bool
    """Both ranks on GPU 0: two commands, and an NCCL that is told to allow it."""

    @contextmanager
    def serve(self, name: str, args: list[str], *, port: int, logs: Path) -> Iterator[Server]:
        """A server of AFD at 1A1F."""
        flags = [
            *("--afd-attention-ranks", "1", "--afd-ffn-ranks", "1"),
            *("--afd-transport", self.transport, *args),
        ]
        common: dict[str, Any] = {"logs": logs, "timeout": START}
        if not self.shared_gpu:
            with serve(name, flags, port=port, tick=starting(name), **common) as server:
                yield server
            return
        flags += ["--nnodes", "2", "--dist-init-addr", f"127.0.0.1:{free_port()}"]
        common["environment"] = {
            "CUDA_VISIBLE_DEVICES": "0",
            "NCCL_MULTI_RANK_GPU_ENABLE": "1",
            "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        }
        ffn = [*flags, "--afd-role", "ffn", "--node-rank", "1"]
        attention = [*flags, "--afd-role", "attention", "--node-rank", "0"]
        with (
            start(f"{name}-ffn", ffn, port=free_port(), **common),
            serve(name, attention, port=port, tick=starting(name), **common) as server,
        ):
            yield server


def main() -> None:
    """Run the parts that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("/tmp/two_gpus"),
        help="folder for checkpoints, logs and compiled kernels, used again (%(default)s)",
    )
    parser.add_argument(
        "--parts",
        nargs="+",
        default=list(PARTS),
        choices=list(PARTS),
        help="what to run; later parts need the references (default: all)",
    )
    parser.add_argument("--shared-gpu", action="store_true", help="both ranks on GPU 0")
    parser.add_argument("--transport", default="deepep", help="an --afd-transport (%(default)s)")
    args = parser.parse_args()
    afd = Deployment(args.transport, args.shared_gpu)
    args.out.mkdir(parents=True, exist_ok=True)
    args.work.mkdir(parents=True, exist_ok=True)
    share_kernels(args.work)
    failed = False
    for name in args.parts:
        say(f"part {name}")
        result = attempt(partial(PARTS[name], args.work, args.out, afd))
        failed |= "failed" in result
        head = {
            "identity": {"seed": SEED, **environment.describe()},
            "part": name,
            "deployment": afd._asdict(),
        }
        text = json.dumps({**head, **result}, indent=1)
        file = name if name == "references" else f"{name}-{afd.transport}"
        (args.out / f"{file}.json").write_text(text + "\n")
        say(f"part {name} took {result['seconds']:.0f} s\n{text[:2500]}")
    raise SystemExit(failed)


def share_kernels(work: Path) -> None:
    """Servers of this run, and of the next one, share what DeepGEMM, Triton and others compile."""
    # Plain SGLang, too, is to compile the kernels that it uses alone.
    os.environ.setdefault("SGLANG_JIT_DEEPGEMM_PRECOMPILE", "false")
    os.environ.setdefault("SGLANG_CACHE_DIR", str(work / "kernels"))


def _compared(server: Server, reference: list[Continuation]) -> dict[str, Any]:
    """Greedy tokens and teacher-forced ranks, prompt by prompt and in sum."""
    results = compare(server, reference, tokens=TOKENS)
    return {"figures": figures_of(results, NO_LAYERS), "prompts": msgspec.to_builtins(results)}


def references(work: Path, out: Path, afd: Deployment) -> dict[str, Any]:
    """SGLang on one GPU, BF16 and FP8; at the same time where there are two GPUs."""
    checkpoints(work)
    with ThreadPoolExecutor(max(1, min(2, torch.cuda.device_count()))) as pool:
        done = pool.map(lambda i: _reference(work, out, i), range(len(DTYPES)))
        return dict(zip(DTYPES, done, strict=True))


def _made_of() -> str:
    """A digest of everything that the checkpoints and the continuations are made of."""
    facts = {"calm": {**CALM, "planting": asdict(CALM["planting"])}, "shape": SHAPE, "seed": SEED,
             "lengths": LENGTHS, "tokens": TOKENS, "args": AGREEMENT}  # fmt: skip
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def checkpoints(work: Path) -> dict[str, Path]:
    """The checkpoint of every dtype, made if it is not there yet."""
    made = {name: work / f"{name}-{_made_of()}" for name in DTYPES}
    for name, target in made.items():
        if target.exists():
            continue
        say(f"writing the {name} checkpoint")
        draft = target.with_name(f"{target.name}.{os.getpid()}")
        if name == "bf16":
            seeded_qwen3_moe(draft, seed=SEED, dtype=torch.bfloat16, **SHAPE, **CALM)
        else:
            quantise_checkpoint(made["bf16"], draft)
        draft.rename(target)
    return made


def _reference(work: Path, out: Path, gpu: int) -> dict[str, Any]:
    name = DTYPES[gpu]
    file = out / f"{name}-continuations.json"
    if file.exists():
        found = json.loads(file.read_text())
        if found["made_of"] == _made_of():
            say(f"{file} is there already")
            return found["record"]
    prompts = random_prompts(LENGTHS, vocab=SHAPE["vocab"], seed=SEED)
    args = [
        *("--model-path", str(checkpoints(work)[name]), *AGREEMENT),
        *("--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"),
    ]
    server_name = f"{name}-one-gpu"
    with serve(
        server_name,
        args,
        port=free_port(),
        logs=out,
        module="sglang.launch_server",
        environment={"CUDA_VISIBLE_DEVICES": str(gpu % max(1, torch.cuda.device_count()))},
        timeout=START,
        tick=starting(server_name),
    ) as server:
        say(f"{server_name} started in {server.start_seconds:.0f} s; it continues the prompts")
        continuations = continue_greedily(server, prompts, tokens=TOKENS)
        itself = _compared(server, continuations)
    result = {"start_seconds": server.start_seconds, "against_itself": itself}
    entry = {
        "made_of": _made_of(),
        "record": result,
        "continuations": msgspec.to_builtins(continuations),
    }
    file.write_text(json.dumps(entry) + "\n")
    return result


def agreement(work: Path, out: Path, afd: Deployment, name: str) -> dict[str, Any]:
    """Greedy tokens and teacher-forced ranks: AFD at 1A1F against SGLang on one GPU.

    Raises:
        RuntimeError: there are no continuations of this checkpoint.
    """
    file = out / f"{name}-continuations.json"
    found = json.loads(file.read_text()) if file.exists() else {"made_of": None}
    if found["made_of"] != _made_of():
        raise RuntimeError(f"{file} is missing or of another checkpoint; run the part references")
    reference = msgspec.convert(found["continuations"], list[Continuation])
    args = ["--model-path", str(checkpoints(work)[name]), *AGREEMENT]
    server_name = f"{name}-afd"
    with afd.serve(server_name, args, port=free_port(), logs=out) as server:
        say(f"{server_name} started in {server.start_seconds:.0f} s; it is compared")
        result = _compared(server, reference)
        holdings = server.call("/server_info")["internal_states"][0]["afd"]
    return {
        "shape": SHAPE,
        "afd_against_one_gpu": result,
        "start_seconds": server.start_seconds,
        "afd": holdings,
    }


def small(work: Path, out: Path, afd: Deployment) -> dict[str, Any]:
    """The embedded model, of hidden size 256, in BF16: AFD against SGLang on one GPU."""
    args = ["--model-path", str(embedded.path()), *AGREEMENT]
    vocab = json.loads((embedded.path() / "config.json").read_text())["vocab_size"]
    prompts = random_prompts(LENGTHS[:8], vocab=vocab, seed=SEED)
    alone = [*args, "--cuda-graph-backend-decode=disabled", "--cuda-graph-backend-prefill=disabled"]
    with serve(
        "small-one-gpu",
        alone,
        port=free_port(),
        logs=out,
        module="sglang.launch_server",
        environment={"CUDA_VISIBLE_DEVICES": "0"},
        timeout=START,
        tick=starting("small-one-gpu"),
    ) as server:
        reference = continue_greedily(server, prompts, tokens=TOKENS)
        itself = _compared(server, reference)
    with afd.serve("small-afd", args, port=free_port(), logs=out) as server:
        result = _compared(server, reference)
        holdings = server.call("/server_info")["internal_states"][0]["afd"]
    return {"against_itself": itself, "afd_against_one_gpu": result, "afd": holdings}


def load(work: Path, out: Path, afd: Deployment) -> dict[str, Any]:
    """256 concurrent requests on Qwen3-30B-A3B's shape with dummy weights."""
    model = work / "qwen3-30b-a3b"
    model.mkdir(exist_ok=True)
    published = Path(__file__).parent / "models" / "qwen3-30b-a3b" / "config.json"
    (model / "config.json").write_text(published.read_text())
    write_tokenizer(model, json.loads(published.read_text())["vocab_size"])
    args = [
        *("--model-path", str(model), "--load-format", "dummy", *COMMON),
        *("--afd-max-tokens-per-rank", "256", "--max-running-requests", "256"),
        *("--mem-fraction-static", "0.8", "--context-length", "8192"),
    ]
    with afd.serve("load-afd", args, port=free_port(), logs=out) as server:
        say(f"load-afd started in {server.start_seconds:.0f} s; bench_serving runs")
        holdings = server.call("/server_info")["internal_states"][0]["afd"]
        command = bench_command(server.port, LOAD, model, out / "load-afd-bench.jsonl")
        figures = {"command": command[1:], **bench(server, LOAD, model, out)}
    return {"start_seconds": server.start_seconds, "afd": holdings, "bench_serving": figures}


PARTS: dict[str, Callable[[Path, Path, Deployment], dict[str, Any]]] = {
    "references": references,
    "bf16": partial(agreement, name="bf16"),
    "fp8": partial(agreement, name="fp8"),
    "small": small,
    "load": load,
}


if __name__ == "__main__":
    main()
