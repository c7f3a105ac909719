"""``sglang.bench_serving`` with random ids against one server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.configuration import Serving
from benchmarks.models import prepare
from benchmarks.progress import say
from benchmarks.systems import command_line, holdings, served
from sglang_afd.running import Server

KEPT = (
    *("completed", "total_input_tokens", "total_output_tokens", "duration", "max_concurrency"),
    *("concurrency", "output_throughput", "mean_ttft_ms", "median_ttft_ms", "p99_ttft_ms"),
    *("median_tpot_ms", "p99_tpot_ms", "median_itl_ms", "p99_itl_ms"),
)


class BenchFailed(RuntimeError):
    """bench_serving did not end well; the message ends with its last lines."""


def measure(name: str, configuration: Serving, work: Path) -> dict[str, Any]:
    """Serve the system `name` of `configuration` and send it the load.

    Raises:
        ServerFailed: the server did not start.
        BenchFailed: the load did not run, or not every request was answered.
    """
    system = configuration.systems[name]
    model = prepare(configuration.model, {**configuration.overrides, **system.overrides}, work)
    requests = -(-configuration.concurrency // system.ranks)
    args = command_line(
        system,
        model,
        dtype=configuration.dtype,
        requests=requests,
        common=["--disable-radix-cache", *configuration.args],
    )
    with served(
        name, system, args, logs=work, timeout=configuration.start_seconds, environment={}
    ) as server:
        say(f"{name} started in {server.start_seconds:.0f} s; bench_serving runs")
        result = bench(server, configuration, model.folder, work)
        held = holdings(server)
    return {
        "start_seconds": server.start_seconds,
        "arguments": ["MODEL" if arg == str(model.folder) else arg for arg in args],
        "gpus": system.gpus,
        "holdings": held,
        **result,
    }


class Load(NamedTuple):
    """What is sent: `requests` of `input` + `output` tokens, `concurrency` at a time."""

    input: int
    output: int
    requests: int
    concurrency: int
    seed: int
    answer_seconds: float


def bench_command(port: int, load: Load | Serving, tokenizer: Path, out: Path) -> list[str]:
    """The command line that sends the load to the server at `port` and writes its figures."""
    return [
        *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang"),
        *("--host", "127.0.0.1", "--port", str(port), "--dataset-name", "random-ids"),
        *("--random-input-len", str(load.input), "--random-output-len", str(load.output)),
        *("--random-range-ratio", "1", "--num-prompts", str(load.requests), "--tokenize-prompt"),
        *("--max-concurrency", str(load.concurrency), "--seed", str(load.seed % 2**31)),
        *("--tokenizer", str(tokenizer), "--output-file", str(out)),
    ]


def bench(server: Server, load: Load | Serving, tokenizer: Path, work: Path) -> dict[str, Any]:
    """bench_serving's figures, those of `KEPT`.

    Raises:
        BenchFailed: it did not run, or not every request was answered.
    """
    file = work / f"{server.name}-bench.jsonl"
    file.unlink(missing_ok=True)
    command = bench_command(server.port, load, tokenizer, file)
    log = work / f"{server.name}-bench.log"
    with log.open("w") as out:
        try:
            status: int | str = subprocess.run(
                command, stdout=out, stderr=subprocess.STDOUT, timeout=load.answer_seconds
            ).returncode
        except subprocess.TimeoutExpired:
            status = f"no end within {load.answer_seconds:g} s"
    if status != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-10:])
        raise BenchFailed(f"bench_serving: {status}\n{tail}")
    result = json.loads(file.read_text().splitlines()[-1])
    if result["completed"] != load.requests:
        raise BenchFailed(f"{result['completed']} of {load.requests} requests were answered")
    return {key: result.get(key) for key in KEPT}
