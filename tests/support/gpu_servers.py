"""Servers of GPU tests, started all at once, for a start takes a minute or more."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from sglang_afd.running import Server, free_port, start
from tests.support.client import Answer, Client
from tests.support.workload import Prompt

START = 400.0  # seconds; Triton compiles, and servers start beside each other

COMMON = (
    *("--dtype", "bfloat16", "--attention-backend", "fa3", "--sampling-backend", "pytorch"),
    *("--skip-server-warmup", "--random-seed", "1", "--enable-fp32-lm-head", "--page-size", "1"),
    *("--mem-fraction-static", "0.85", "--chunked-prefill-size", "64", "--stream-interval", "1"),
)
"""Small chunks, and a lm_head whose logits do not tie."""
AFD = ("--afd-attention-ranks", "1", "--afd-ffn-ranks", "1", "--afd-transport", "nvlink")
EAGER = ("--cuda-graph-backend-decode=disabled",)
PLAIN = (*EAGER, "--cuda-graph-backend-prefill=disabled")


class Asked(NamedTuple):
    """A server to start: SGLang itself on one GPU, unless its flags are AFD's."""

    model: Path
    flags: Sequence[str]
    environment: Mapping[str, str] = {}

    @property
    def stock(self) -> bool:
        """Whether it is SGLang itself."""
        return not any(flag.startswith("--afd-") for flag in self.flags)


class Servers:
    """Servers by name; asking for one that did not start tells why."""

    def __init__(self, started: Mapping[str, Server | Exception]) -> None:
        self._started = started

    def server(self, name: str) -> Server:
        """The healthy server of that name."""
        server = self._started[name]
        if isinstance(server, Exception):
            raise AssertionError(f"{name}: {server}") from server
        return server

    def client(self, name: str) -> Client:
        """Talks to the server of that name."""
        return Client(self.server(name).port)

    def check_replayed(self, name: str) -> None:
        """Every decode step that the server's log tells of was replayed from a graph."""
        log = self.server(name).log.read_text()
        lines = [line for line in log.splitlines() if "Decode batch" in line]
        eager = [line for line in lines if "cuda graph: True" not in line]
        assert lines and not eager, eager[:3]


@contextmanager
def started(asked: Mapping[str, Asked], folder: Path) -> Iterator[Servers]:
    """All of `asked`; logs go to ``$OUT`` if that is set, else to `folder`."""
    logs = Path(os.environ.get("OUT", folder))
    waiting, stacks = {}, [ExitStack() for _ in asked]
    try:
        for (name, one), stack in zip(asked.items(), stacks, strict=True):
            environment = {"SGLANG_CACHE_DIR": str(folder / "kernels"), **one.environment}
            if one.stock:
                environment["CUDA_VISIBLE_DEVICES"] = "0"
            waiting[name] = stack.enter_context(
                start(
                    name.replace(" ", "-").replace(",", ""),
                    ["--model-path", str(one.model), *COMMON, *one.flags],
                    logs=logs,
                    port=free_port(),
                    module="sglang.launch_server" if one.stock else "sglang_afd.launch_server",
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
            found = dict(zip(waiting, pool.map(healthy, waiting), strict=True))
        yield Servers(found)
    finally:
        with ThreadPoolExecutor(len(stacks)) as pool:  # all at once, as they started
            list(pool.map(ExitStack.close, stacks))


def one_by_one(client: Client, asked: Sequence[Prompt], tokens: int) -> list[Answer]:
    """Each prompt's answer while nothing runs beside it."""
    return [client.generate(prompt, tokens, return_logprob=True) for prompt in asked]


def at_once(client: Client, asked: Sequence[Prompt], tokens: int) -> list[Answer]:
    """All prompts' answers, beside each other."""
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda prompt: client.generate(prompt, tokens), asked))


def differing(answers: Sequence[Answer], expected: Sequence[Answer]) -> list[tuple[int, int]]:
    """Which answers differ, and from which token on."""
    found = []
    for index, (answer, want) in enumerate(zip(answers, expected, strict=True)):
        if answer.tokens != want.tokens:
            pairs = list(zip(answer.tokens, want.tokens, strict=True))
            found.append((index, next(i for i, (a, b) in enumerate(pairs) if a != b)))
    return found


def agreeing(client: Client, reference: Sequence[Answer], asked: Sequence[Prompt]) -> float:
    """Share of the reference's tokens that the server, told all tokens before, finds likeliest."""
    hits = places = 0
    for prompt, answer in zip(asked, reference, strict=True):
        told = client.generate_raw(
            [*prompt, *answer.tokens],
            1,
            return_logprob=True,
            top_logprobs_num=1,
            logprob_start_len=len(prompt) - 1,
        )
        tops = told["meta_info"]["input_top_logprobs"][1 : len(answer.tokens) + 1]
        hits += sum(top[0][1] == token for top, token in zip(tops, answer.tokens, strict=True))
        places += len(answer.tokens)
    return hits / places
