"""Servers at 1A1F on two GPUs over `nvlink`: lanes, CUDA graphs and speculation keep the tokens.

The checkpoint is one whose next token rounding cannot turn (see `tests.support.planting`), in BF16.
All servers start at once, for a start takes a minute or more, and are asked one after the other.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.two_gpus import CALM, SEED, SHAPE
from sglang_afd.running import Server, free_port, start
from sglang_afd.trace import record
from tests.support import delays
from tests.support.checkpoints import seeded_qwen3_moe
from tests.support.client import Answer, Client
from tests.support.drafts import seeded_draft
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
from tests.support.workload import Prompt, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

RUN_SEED = int(os.environ.get("SEED", random.randrange(2**31)))
MANY = int(os.environ.get("REQUESTS", 500))
START = 400.0  # seconds; Triton compiles, and servers start beside each other
CAP, RUNNING, POOL = 16, 8, 280
"""Rows of an exchange, requests at once, tokens of the small pool."""
END = 2  # the checkpoint's end token

COMMON = [
    *("--dtype", "bfloat16", "--attention-backend", "fa3", "--sampling-backend", "pytorch"),
    *("--skip-server-warmup", "--random-seed", "1", "--enable-fp32-lm-head", "--page-size", "1"),
    *("--mem-fraction-static", "0.5", "--chunked-prefill-size", "64", "--stream-interval", "1"),
    *("--max-running-requests", str(RUNNING)),
]
AFD = [
    *("--afd-attention-ranks", "1", "--afd-ffn-ranks", "1", "--afd-transport", "nvlink"),
]
T = ["--afd-max-tokens-per-rank", str(CAP)]
ROOMY = ["--max-total-tokens", "16384"]
SCARCE = ["--max-total-tokens", str(POOL), "--schedule-conservativeness", "0.3"]
EAGER = ["--cuda-graph-backend-decode=disabled"]
PLAIN = [*EAGER, "--cuda-graph-backend-prefill=disabled"]


def _lanes(count: int) -> list[str]:
    return ["--afd-lanes", str(count)]


SERVERS = {
    "stock": [*ROOMY, *PLAIN],
    "one lane": [*AFD, *T, *ROOMY],
    "one lane, eager": [*AFD, *T, *ROOMY, *EAGER],
    "two lanes": [*AFD, *T, *ROOMY, *_lanes(2), "--enable-metrics"],
    "two lanes, eager": [*AFD, *T, *ROOMY, *_lanes(2), *EAGER],
    "three lanes": [*AFD, *T, *ROOMY, *_lanes(3)],
    "two lanes, held up": [*AFD, *T, *SCARCE, *_lanes(2)],
    "speculation": [*AFD, *ROOMY, "--afd-max-tokens-per-rank", str(4 * RUNNING)],
    "speculation, stock": [*ROOMY, *PLAIN],
}
ALIKE = [name for name in SERVERS if "lane" in name and "held up" not in name]
_SPECULATE = [
    *("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
]
DEEP = {**SHAPE, "layers": 4, "kv_heads": 16}
"""What `tests.support.drafts` can make a draft for."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Server | Exception]]:
    """All servers by name; one that did not start is the reason why."""
    print(f"SEED={RUN_SEED}")
    folder = tmp_path_factory.mktemp("served")
    logs = Path(os.environ.get("OUT", folder))
    model = seeded_qwen3_moe(folder / "planted", seed=SEED, dtype=torch.bfloat16, **SHAPE, **CALM)
    deep = seeded_qwen3_moe(folder / "deep", seed=SEED, dtype=torch.bfloat16, **DEEP, **CALM)
    draft = seeded_draft(folder / "draft", deep)
    with ExitStack() as stack:
        waiting = {}
        for name, flags in SERVERS.items():
            speculates = name == "speculation"
            args = [
                *("--model-path", str(deep if "speculation" in name else model)),
                *COMMON, *flags,
                *(_SPECULATE if speculates else ()),
                *(("--speculative-draft-model-path", str(draft)) if speculates else ()),
            ]  # fmt: skip
            environment = {"SGLANG_CACHE_DIR": str(folder / "kernels")}
            if "stock" in name:
                environment["CUDA_VISIBLE_DEVICES"] = "0"
            if "held up" in name:
                environment |= delays.environment(folder / "plugin", RUN_SEED)
            module = "sglang.launch_server" if "stock" in name else "sglang_afd.launch_server"
            waiting[name] = stack.enter_context(
                start(
                    name.replace(" ", "-").replace(",", ""),
                    args,
                    logs=logs,
                    port=free_port(),
                    module=module,
                    environment=environment,
                    timeout=START,
                )
            )

        def healthy(name: str) -> Server | Exception:
            try:
                return waiting[name]()
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(waiting)) as pool:
            yield dict(zip(waiting, pool.map(healthy, waiting), strict=True))


def client_of(servers: dict[str, Server | Exception], name: str) -> Client:
    """Talks to the server of that name."""
    server = servers[name]
    if isinstance(server, Exception):
        raise AssertionError(f"{name}: {server}")
    return Client(server.port)


def one_by_one(client: Client, asked: Sequence[Prompt], tokens: int) -> list[Answer]:
    """Each prompt's answer while nothing runs beside it."""
    return [client.generate(prompt, tokens, return_logprob=True) for prompt in asked]


def differing(answers: Sequence[Answer], expected: Sequence[Answer]) -> list[tuple[int, int]]:
    """Which answers differ, and from which token on."""
    found = []
    for index, (answer, want) in enumerate(zip(answers, expected, strict=True)):
        pairs = list(zip(answer.tokens, want.tokens, strict=True))
        if answer.tokens != want.tokens:
            found.append((index, next(i for i, (a, b) in enumerate(pairs) if a != b)))
    return found


def nobody_decodes_eagerly(servers: dict[str, Server | Exception], name: str) -> None:
    """The server's log tells of every batch whether it was replayed."""
    server = servers[name]
    assert isinstance(server, Server)
    lines = [line for line in server.log.read_text().splitlines() if "Decode batch" in line]
    eager = [line for line in lines if "cuda graph: True" not in line]
    assert lines and not eager, eager[:3]


@pytest.mark.parametrize("name", ALIKE)
def test_tokens_are_those_of_sglang(
    servers: dict[str, Server | Exception], name: str, record_property: Any
) -> None:
    """Prompts in several chunks among them; one after the other, then all at once."""
    asked = prompts((3, 9, 17, 33, 64, 130, 300, 600), seed=71)
    expected = one_by_one(client_of(servers, "stock"), asked, 64)
    client = client_of(servers, name)
    assert not differing(one_by_one(client, asked, 64), expected)
    with ThreadPoolExecutor(len(asked)) as pool:
        beside = list(pool.map(lambda prompt: client.generate(prompt, 64), asked))
    record_property("differing at once", str(differing(beside, expected)))
    assert not differing(beside, expected)
    if "eager" not in name:
        nobody_decodes_eagerly(servers, name)
    nothing_left(client)


@pytest.mark.parametrize("name", ["two lanes", "three lanes", "two lanes, held up"])
def test_random_requests_are_answered_as_alone(
    servers: dict[str, Server | Exception], name: str
) -> None:
    """Random lengths, arrivals and aborts; where streams are held up, through a pool that holds two
    or three of them, so that its pages are used again at once."""
    client = client_of(servers, name)
    known = known_prompts(RUN_SEED, 10)
    alone = {
        prompt: Alone(Expected(answer.tokens, answer.logprobs), ends={END})
        for prompt, answer in zip(known, one_by_one(client, known, MOST), strict=True)
    }
    wrong = run(client, arrivals(known, RUN_SEED, MANY), alone)
    assert not wrong, f"seed {RUN_SEED}: {len(wrong)} of {MANY} differ, first {wrong[0]}"
    lanes = client.get("/server_info").json()["internal_states"][0]["afd"]["lanes"]
    steps = [lane["steps"] for lane in lanes]
    assert min(steps) > max(steps) / 3, f"a lane starves: steps {steps}"
    nothing_left(client)


def test_speculation_keeps_the_tokens(
    servers: dict[str, Server | Exception], record_property: Any
) -> None:
    """Overlap scheduler and graphs on; some drafted tokens are accepted and some are not."""
    asked = prompts([5 + 3 * i for i in range(64)], seed=72)
    expected = one_by_one(client_of(servers, "speculation, stock"), asked[:16], 64)
    client = client_of(servers, "speculation")
    alone = one_by_one(client, asked[:16], 64)
    accepted = [answer.meta["spec_accept_length"] for answer in alone]
    record_property("acceptance length", f"{sum(accepted) / len(accepted):.3f}")
    assert not differing(alone, expected)
    assert 1.05 < sum(accepted) / len(accepted) < 3.9, accepted
    nobody_decodes_eagerly(servers, "speculation")
    nothing_left(client)


def test_a_trace_shows_both_roles(servers: dict[str, Server | Exception]) -> None:
    """Steps of graphs have a beginning and an end on both ranks; lanes are beside one another."""
    client = client_of(servers, "two lanes")
    with ThreadPoolExecutor(4) as pool:
        for prompt in prompts([20] * 4, seed=73):
            pool.submit(client.generate, prompt, 400)
        trace = record(client.url, 40, 20.0)
    assert [len(rank.steps) for rank in trace.ranks] == [40, 40]
    text = client.get("/metrics").text
    assert 'role="attention"' in text and 'role="ffn"' in text


def test_longest_prompt_fits_the_small_pool() -> None:
    """Else the random requests would never run beside one another."""
    assert 2 * (LONGEST + MOST) > POOL > LONGEST + MOST
