"""EAGLE-3 speculation at 1A1F on two GPUs over `nvlink`: CUDA graphs and overlap scheduler on.

SGLang's overlap scheduler is off for speculation on CPUs, so that CPUs do not test what ships.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks.two_gpus import CALM, SEED, SHAPE
from tests.support.checkpoints import seeded_qwen3_moe
from tests.support.drafts import seeded_draft
from tests.support.gpu_servers import (
    AFD,
    PLAIN,
    Asked,
    Servers,
    at_once,
    differing,
    one_by_one,
    started,
)
from tests.support.random_load import nothing_left
from tests.support.workload import prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

DEEP = {**SHAPE, "layers": 4, "kv_heads": 16}
"""What `tests.support.drafts` can make a draft for."""
RUNNING, TOKENS = 16, 4  # requests at once, tokens that each has verified in a step
COMMON = ("--max-total-tokens", "32768", "--max-running-requests", str(RUNNING))
SPECULATE = (
    *("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", str(TOKENS)),
)
ROWS = ("--afd-max-tokens-per-rank", str(RUNNING * TOKENS))


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """AFD with the draft and without it, and SGLang itself with it."""
    folder = tmp_path_factory.mktemp("speculation")
    model = seeded_qwen3_moe(folder / "deep", seed=SEED, dtype=torch.bfloat16, **DEEP, **CALM)
    draft = seeded_draft(folder / "draft", model)
    speculate = (*SPECULATE, "--speculative-draft-model-path", str(draft))
    asked = {
        "without draft": Asked(model, (*COMMON, *AFD, *ROWS)),
        "with draft": Asked(model, (*COMMON, *AFD, *ROWS, *speculate)),
        "stock with draft": Asked(model, (*COMMON, *PLAIN, *speculate)),
    }
    with started(asked, folder) as found:
        yield found


def test_speculation_keeps_the_tokens(servers: Servers, record_property: Any) -> None:
    """64 prompts; some drafted tokens are accepted and some are not."""
    asked = prompts([5 + 3 * i for i in range(64)], seed=72)
    expected = at_once(servers.client("without draft"), asked, 64)
    client = servers.client("with draft")
    answers = at_once(client, asked, 64)
    found = differing(answers, expected)
    lengths = [answer.meta["spec_accept_length"] for answer in answers]
    mean = sum(lengths) / len(lengths)
    record_property("differing", str(found))
    record_property("acceptance length", f"{mean:.3f}")
    assert not found
    assert 1.05 < mean < 3.9, lengths
    servers.check_replayed("with draft")
    nothing_left(client)


def test_acceptance_is_sglangs(servers: Servers, record_property: Any) -> None:
    asked = prompts([9 + 5 * i for i in range(16)], seed=74)
    means = []
    for name in ("with draft", "stock with draft"):
        answers = one_by_one(servers.client(name), asked, 64)
        means.append(sum(a.meta["spec_accept_length"] for a in answers) / len(answers))
    record_property("acceptance length of AFD and of SGLang", str(means))
    assert means[0] == pytest.approx(means[1], rel=0.02)
