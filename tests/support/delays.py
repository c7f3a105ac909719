"""An SGLang plugin that holds up CUDA streams at random, so that races of lanes come to light.

A rank whose environment names it (see `environment`) puts a kernel that sleeps before some of its
graph replays and eager forwards, on the stream that these run on.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

CYCLES = 4_000_000
"""The longest delay: about 2 ms, as long as a whole decode step of the models that tests serve."""
_SEED = "SGLANG_AFD_TEST_DELAYS"


def environment(folder: Path, seed: int) -> dict[str, str]:
    """Environment of a server whose ranks are held up; Python finds the plugin in `folder`."""
    package = folder / "sglang_afd_test_delays-1.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: sglang_afd_test_delays\nVersion: 1\n"
    )
    (package / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\nsglang_afd_test_delays = tests.support.delays:register\n"
    )
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {_SEED: str(seed), "PYTHONPATH": path}


def register() -> None:
    """Entry point of ``sglang.srt.plugins``."""
    seed = os.environ.get(_SEED)
    if seed is None:
        return
    import torch
    from sglang.srt.model_executor.model_runner import ModelRunner

    draw = random.Random(f"{seed} {os.getpid()}")
    replay, forward = torch.cuda.CUDAGraph.replay, ModelRunner.forward

    def delay() -> None:
        if draw.random() < 0.3:
            torch.cuda._sleep(draw.randrange(CYCLES))

    def delayed_replay(graph: torch.cuda.CUDAGraph) -> None:
        delay()
        replay(graph)

    def delayed_forward(runner: Any, *args: Any, **kwargs: Any) -> Any:
        delay()
        result = forward(runner, *args, **kwargs)
        delay()
        return result

    torch.cuda.CUDAGraph.replay = delayed_replay  # type: ignore[method-assign]
    ModelRunner.forward = delayed_forward  # type: ignore[method-assign]
