"""Do nvlink and deepep give stock SGLang's answers on two GPUs? The validator, row by row.

    python -m benchmarks.validated --out benchmarks/results/DATE_validated --work DIR

Each row is a run of ``python -m sglang_afd.validate`` at 1A1F against SGLang on one GPU: a seeded
checkpoint of hidden size 2048 (`benchmarks.two_gpus`) in BF16 and in FP8, over nvlink with CUDA
graphs and one or two lanes, and over deepep, which takes neither. A row's report is its own file,
and ``summary.json`` has the verdicts and figures of all that are there. A second call with the same
--out runs the rows that have no passing report yet; a second one with the same --work finds the
checkpoints and the compiled kernels. Exits with 0 if every row asked for passes.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.progress import say
from benchmarks.two_gpus import DTYPES, checkpoints, share_kernels
from sglang_afd.running import end_with_parent
from sglang_afd.validation import report

ROWS_A_STEP = 16
"""T, and the most requests that run; the prompts are 12."""
BOTH_SIDES = (
    *("--max-running-requests", str(ROWS_A_STEP)),
    *("--attention-backend", "fa3", "--sampling-backend", "pytorch", "--enable-fp32-lm-head"),
    *("--skip-server-warmup", "--random-seed", "1", "--chunked-prefill-size", "512"),
    # A KV pool of a fixed size, so that rows can run side by side on the same GPUs.
    *("--mem-fraction-static", "0.8", "--max-total-tokens", "32768"),
)
REFERENCE = (*BOTH_SIDES, "--cuda-graph-max-bs-decode", str(ROWS_A_STEP))
NEW_TOKENS = 64


class Row(NamedTuple):
    """One validation."""

    dtype: str
    transport: str
    lanes: int

    @property
    def name(self) -> str:
        """Names its report."""
        return f"{self.dtype}-{self.transport}-{self.lanes}"

    def command(self, model: Path, out: Path, work: Path) -> list[str]:
        """The validator's command line.

        Args:
            model: the checkpoint.
            out: folder of the report.
            work: folder for logs and recordings.
        """
        return [
            *(sys.executable, "-m", "sglang_afd.validate", "--model-path", str(model)),
            *("--reference", "sglang", "--reference-args", shlex.join(REFERENCE)),
            *("--prompts", "mixed", "--new-tokens", str(NEW_TOKENS), "--dtype", "bfloat16"),
            *("--afd-attention-ranks", "1", "--afd-ffn-ranks", "1"),
            *("--afd-transport", self.transport, "--afd-lanes", str(self.lanes)),
            *("--afd-max-tokens-per-rank", str(ROWS_A_STEP), *BOTH_SIDES),
            *("--out", str(out / f"{self.name}.json"), "--work", str(work)),
        ]


# Later rows find the kernels that earlier ones compiled.
ROWS = tuple(
    Row(dtype, transport, lanes)
    for transport, lanes in (("nvlink", 2), ("deepep", 1), ("nvlink", 1))
    for dtype in DTYPES
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rows that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the reports")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("/tmp/validated"),
        help="folder for checkpoints, logs and compiled kernels, used again (%(default)s)",
    )
    names = {row.name: row for row in ROWS}
    parser.add_argument("--rows", nargs="+", choices=names, default=list(names), help="(all)")
    parser.add_argument(
        "--at-once", type=int, default=2, metavar="N", help="rows at a time (%(default)s)"
    )
    args = parser.parse_args(argv)
    for folder in (args.out, args.work):
        folder.mkdir(parents=True, exist_ok=True)
    share_kernels(args.work)
    models = checkpoints(args.work)
    asked = [names[name] for name in args.rows]
    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(lambda row: _run(row, models[row.dtype], args.out, args.work), asked))
    found = summary(args.out)
    (args.out / "summary.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps(found, indent=1))
    return int(any(found[row.name]["verdict"] != report.PASS for row in asked))


def _run(row: Row, model: Path, out: Path, work: Path) -> None:
    """Write the row's report, unless one that passes is there; what the run says goes to a log."""
    if _verdict(out / f"{row.name}.json")["verdict"] == report.PASS:
        say(f"{row.name}: has passed already")
        return
    began = time.monotonic()
    say(f"{row.name}: begins")
    with (out / f"{row.name}.log").open("w") as log:
        done = subprocess.run(
            row.command(model, out, work),
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "COLUMNS": "120"},
            preexec_fn=end_with_parent,
        )
    say(f"{row.name}: status {done.returncode} after {time.monotonic() - began:.0f} s")


def summary(out: Path) -> dict[str, dict[str, Any]]:
    """What every row's report says; of a row without one, that there is none."""
    return {row.name: _verdict(out / f"{row.name}.json") for row in ROWS}


def _verdict(file: Path) -> dict[str, Any]:
    try:
        found = report.read(file)
    except report.BadReport as error:
        return {"verdict": "none", "reasons": [str(error)]}
    if wrong := report.check(found):
        return {"verdict": "none", "reasons": wrong}
    afd = found.candidate.configuration.get("afd") or {}
    return {
        "verdict": found.verdict,
        "reasons": found.reasons,
        "layout": found.layout,
        "layers": found.layers.note,
        "figures": found.figures,
        "lanes": afd.get("lanes"),
        "seconds": found.seconds,
    }


if __name__ == "__main__":
    raise SystemExit(main())
