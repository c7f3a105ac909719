"""Kernels in Triton's interpreter: in a process of its own, since Triton must know of it when it is
first imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_in_interpreter(file: Path, **environment: str) -> None:
    """Run the tests in `file`, which pytest does not collect by itself.

    Raises:
        AssertionError: one failed.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(file), "-v"]
        + ["-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=ROOT,
        env={**own, **environment, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    print(done.stdout, done.stderr, sep="\n")
    assert done.returncode == 0
