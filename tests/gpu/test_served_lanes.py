"""Lanes and CUDA graphs at 1A1F on two GPUs over `nvlink`: no request's tokens depend on them.

The checkpoint is one whose next token rounding can hardly turn (see `tests.support.planting`), in
BF16.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from benchmarks.two_gpus import CALM, SEED, SHAPE
from sglang_afd.trace import record
from tests.support import delays
from tests.support.checkpoints import seeded_qwen3_moe
from tests.support.client import Client
from tests.support.gpu_servers import (
    AFD,
    EAGER,
    PLAIN,
    Asked,
    Servers,
    agreeing,
    at_once,
    differing,
    one_by_one,
    started,
)
from tests.support.random_load import (
    LONGEST,
    MOST,
    Alone,
    arrivals,
    known_prompts,
    nothing_left,
    run,
)
from tests.support.reference import Expected
from tests.support.workload import prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

RUN_SEED = int(os.environ.get("SEED", random.randrange(2**31)))
MANY = int(os.environ.get("REQUESTS", 500))
POOL = 280  # tokens of the small pool
END = 2  # the checkpoint's end token

RANKS = (*AFD, "--afd-max-tokens-per-rank", "16", "--max-running-requests", "8")
ROOMY = ("--max-total-tokens", "16384")
SCARCE = ("--max-total-tokens", str(POOL), "--schedule-conservativeness", "0.3")
FLAGS = {
    "stock": (*ROOMY, *PLAIN),
    "one lane": (*RANKS, *ROOMY),
    "one lane, eager": (*RANKS, *ROOMY, *EAGER),
    "two lanes": (*RANKS, *ROOMY, "--afd-lanes", "2", "--enable-metrics"),
    "two lanes, eager": (*RANKS, *ROOMY, "--afd-lanes", "2", *EAGER),
    "three lanes": (*RANKS, *ROOMY, "--afd-lanes", "3"),
    "two lanes, held up": (*RANKS, *SCARCE, "--afd-lanes", "2"),
}
LANES = [name for name in FLAGS if "lanes" in name and "held up" not in name]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """One of each of `FLAGS`."""
    print(f"SEED={RUN_SEED}")
    folder = tmp_path_factory.mktemp("lanes")
    model = seeded_qwen3_moe(folder / "planted", seed=SEED, dtype=torch.bfloat16, **SHAPE, **CALM)
    held_up = delays.environment(folder / "plugin", RUN_SEED)
    asked = {
        name: Asked(model, flags, held_up if "held up" in name else {})
        for name, flags in FLAGS.items()
    }
    with started(asked, folder) as found:
        yield found


def steps(client: Client) -> list[int]:
    """Steps that each lane of the attention rank has run."""
    states = client.get("/server_info").json()["internal_states"]
    [shown] = [state["afd"]["lanes"] for state in states if "attention" in state["afd"]["rank"]]
    return [lane["steps"] for lane in shown]


def test_one_lane_answers_as_sglang(servers: Servers, record_property: Any) -> None:
    """Also eagerly; where the kernels differ, rounding may turn one token in a hundred."""
    asked = prompts((3, 9, 17, 33, 64, 130, 300, 600), seed=71)
    reference = one_by_one(servers.client("stock"), asked, 64)
    for name in ("one lane", "one lane, eager"):
        share = agreeing(servers.client(name), reference, asked)
        record_property(f"{name}: agreeing", f"{share:.4f}")
        assert share >= 0.99


@pytest.mark.parametrize("name", ["one lane, eager", *LANES])
def test_tokens_are_those_of_one_lane(servers: Servers, name: str) -> None:
    """Prompts in several chunks among them; one after the other, then all at once."""
    asked = prompts((3, 9, 17, 33, 64, 130, 300, 600), seed=71)
    expected = one_by_one(servers.client("one lane"), asked, 64)
    servers.check_replayed("one lane")
    client = servers.client(name)
    assert not differing(one_by_one(client, asked, 64), expected)
    assert not differing(at_once(client, asked, 64), expected)
    if "eager" not in name:
        servers.check_replayed(name)
    nothing_left(client)


@pytest.mark.parametrize("name", ["two lanes", "three lanes", "two lanes, held up"])
def test_random_requests_are_answered_as_alone(servers: Servers, name: str) -> None:
    """Random lengths, arrivals and aborts; where streams are held up, through a pool that holds two
    or three of them, so that its pages are used again at once."""
    client = servers.client(name)
    known = known_prompts(RUN_SEED, 10)
    alone = {
        prompt: Alone(Expected(answer.tokens, answer.logprobs), ends={END})
        for prompt, answer in zip(known, one_by_one(client, known, MOST), strict=True)
    }
    before = steps(client)
    wrong = run(client, arrivals(known, RUN_SEED, MANY), alone)
    assert not wrong, f"seed {RUN_SEED}: {len(wrong)} of {MANY} differ, first {wrong[0]}"
    ran = [after - was for was, after in zip(before, steps(client), strict=True)]
    assert min(ran) > max(ran) / 3, f"a lane starves: steps {ran}"
    nothing_left(client)


def test_a_trace_shows_both_roles(servers: Servers) -> None:
    """Steps of graphs have a beginning and an end on both ranks."""
    client = servers.client("two lanes")
    with ThreadPoolExecutor(4) as pool:
        for prompt in prompts([20] * 4, seed=73):
            pool.submit(client.generate, prompt, 400)
        trace = record(client.url, 40, 20.0)
    assert [len(rank.steps) for rank in trace.ranks] == [40, 40]
    text = client.get("/metrics").text
    assert 'role="attention"' in text and 'role="ffn"' in text


def test_two_of_the_longest_requests_do_not_fit_the_small_pool() -> None:
    assert 2 * (LONGEST + MOST) > POOL > LONGEST + MOST
