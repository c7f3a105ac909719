"""SGLang features under AFD, a short test each; `sglang_afd.features` refers to them by name."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.support.client import chat_body, request_body
from tests.support.layouts import (
    A2F1,
    CAD,
    CAD_FAMILIES,
    CAD_WIDER,
    CAP,
    CHUNK,
    RUNNING,
    SMALL,
    WIDER,
    Layout,
    families,
    on,
)
from tests.support.processes import wait_until
from tests.support.reference import Expect, assert_equal, check
from tests.support.workload import Prompt, prompts, send
from tests.support.world import World

pytestmark = pytest.mark.integration

NO_OVERLAP = replace(
    A2F1,
    flags=("--disable-overlap-schedule", "--load-balance-method", "total_requests"),
    note="no-overlap",
)
NO_RADIX = replace(
    A2F1,
    flags=("--disable-radix-cache", "--load-balance-method", "total_tokens"),
    note="no-radix",
)
MIXED_CHUNK = replace(
    A2F1, flags=("--enable-mixed-chunk", "--chunked-prefill-size", "64"), note="mixed-chunk"
)


def flush(world: World) -> None:
    """Empty the prefix cache; refused while a request holds KV."""
    response = world.post("/flush_cache", params={"timeout": 20})
    assert response.status_code == 200, response.text


@on(SMALL)
def test_openai_api(world: World) -> None:
    body = {"model": "default", "prompt": "The with statement", "max_tokens": 12, "temperature": 0}
    completion = world.post("/v1/completions", body).json()
    text = completion["choices"][0]["text"]
    assert text == world.generate("The with statement", 12).text
    assert completion["usage"]["completion_tokens"] == 12

    chat = world.chat("Explain the `with` statement.")
    answer = chat["choices"][0]["message"]["content"]
    assert "with" in answer.lower()
    pieces = [
        chunk["choices"][0]["delta"].get("content") or ""
        for chunk in world.chat_stream("Explain the `with` statement.")
        if chunk["choices"]
    ]
    assert "".join(pieces) == answer and len(pieces) > 4
    assert world.get("/v1/models").json()["data"]


@on(SMALL, full=WIDER)
def test_streaming(world: World, expect: Expect) -> None:
    """A stream grows token by token into the same answer."""
    [prompt] = prompts([12], seed=24)
    bodies = list(world.stream(prompt, 32))
    counts = [body["meta_info"]["completion_tokens"] for body in bodies]
    assert counts == sorted(counts) and len(set(counts)) > 16
    [whole] = expect([prompt], 32)
    assert all(tuple(b["output_ids"]) == whole.tokens[:n] for b, n in zip(bodies, counts))
    assert counts[-1] == len(whole.tokens)


@on(SMALL, CAD, *CAD_WIDER, *CAD_FAMILIES, full=(*WIDER, *families(SMALL, *WIDER)))
def test_abort(world: World, layout: Layout, expect: Expect) -> None:
    """A request ends by hanging up or by name; others are still right, and its KV is free."""
    flush(world)
    victim, named, bystander, later = prompts([40, 50, 60, 30], seed=25)
    stream = world.stream(victim, 2000, routed_dp_rank=0)
    for _ in range(5):
        next(stream)
    other = world.stream(bystander, 48, routed_dp_rank=0)
    next(other)
    doomed = world.stream(named, 2000, routed_dp_rank=layout.leading - 1, rid="doomed")
    next(doomed)
    stream.close()
    assert world.post("/abort_request", {"rid": "doomed"}).status_code == 200
    *_, last = doomed
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    *_, last = other
    assert tuple(last["output_ids"]) == expect([bystander], 48)[0].tokens
    check(world, expect, [later], 16, routed_dp_rank=0)
    # An idle rank whose requests are gone can drop every page; a leaked one would stay.
    flush(world)
    assert wait_until(lambda: not any(used_tokens(world)), 10), used_tokens(world)


def used_tokens(world: World) -> list[int]:
    """KV tokens in use on each DP rank."""
    return [load["num_used_tokens"] for load in world.get("/v1/loads").json()["loads"]]


@on(SMALL)
def test_overlap_scheduler(world: World, expect: Expect) -> None:
    """Requests join and leave while steps overlap, which is SGLang's default."""
    assert not world.get("/server_info").json()["disable_overlap_schedule"]
    asked = prompts([5, 70, 20, 9], seed=27)
    answers = send(world, asked, [30, 4, 11, 1])
    for answer, prompt, length in zip(answers, asked, [30, 4, 11, 1]):
        assert_equal([answer], expect([prompt], length))


@on(NO_OVERLAP)
def test_overlap_scheduler_off(world: World, expect: Expect) -> None:
    assert world.get("/server_info").json()["disable_overlap_schedule"]
    check(world, expect, prompts(), 24)


@on(SMALL, CAD, *CAD_WIDER, CAD_FAMILIES[0], full=(*WIDER, *families(SMALL, *WIDER)))
def test_radix_cache(world: World, expect: Expect) -> None:
    """Prompts that share a prefix with an earlier one reuse its KV."""
    [stem] = prompts([150], seed=22)
    tails = prompts([5, 9, 1, 30], seed=23)
    check(world, expect, [stem], 8, routed_dp_rank=0)
    answers = check(world, expect, [stem + tail for tail in tails], 16, routed_dp_rank=0)
    assert all(answer.cached_tokens >= len(stem) for answer in answers)
    [again] = check(world, expect, [stem + tails[0]], 16, routed_dp_rank=0)
    assert again.cached_tokens == len(stem) + len(tails[0]) - 1


@on(NO_RADIX)
def test_radix_cache_off(world: World, expect: Expect) -> None:
    [prompt] = prompts([100], seed=22)
    for _ in range(2):
        [answer] = check(world, expect, [prompt], 8, routed_dp_rank=0)
        assert answer.cached_tokens == 0


@on(SMALL, CAD, *CAD_WIDER, *CAD_FAMILIES, full=(*WIDER, *families(SMALL, *WIDER)))
def test_chunked_prefill(world: World, expect: Expect) -> None:
    """A long prompt takes a batch for each chunk, and each exchange of one several slices."""
    length = 300
    assert CHUNK > CAP, "a chunk must not fit into one slice"
    before = world.log.count("Prefill batch")
    check(world, expect, prompts([length], seed=21), 8)
    batches = world.log.count("Prefill batch") - before
    assert batches >= -(-length // CHUNK), f"{length} tokens took {batches} prefill batches"


@on(MIXED_CHUNK)
def test_mixed_chunk(world: World, expect: Expect) -> None:
    """Chunks of a long prompt run in one batch with the decoding of others."""
    decoding, long = prompts([10, 300], seed=28)
    answers = send(world, [decoding, long], [96, 8], fields=lambda _: {"routed_dp_rank": 0})
    assert_equal(answers[:1], expect([decoding], 96))
    assert_equal(answers[1:], expect([long], 8))
    assert re.search(r"Prefill batch.*#running-req: [1-9]", world.log), "no chunk joined a decode"


@on(SMALL, CAD_WIDER[1])
@pytest.mark.parametrize("kind", ["json_schema", "regex", "ebnf"])
def test_structured_output(world: World, kind: str) -> None:
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["module", "class"]}, "public": {"type": "boolean"}},
        "required": ["kind", "public"],
        "additionalProperties": False,
    }
    constraint = {
        "json_schema": json.dumps(schema),
        "regex": r"[0-9]{3}-(yes|no)",
        "ebnf": 'root ::= ("left" | "right") " " [0-9] [0-9]',
    }[kind]
    params = {kind: constraint, "ignore_eos": False}
    with ThreadPoolExecutor(4) as pool:
        ask = lambda i: world.generate(f"Example {i}:", 64, sampling_params=params)  # noqa: E731
        answers = list(pool.map(ask, range(4)))
    for answer in answers:
        assert answer.finish == "stop", answer
        if kind == "json_schema":
            value = json.loads(answer.text)
            assert value.keys() == {"kind", "public"} and value["kind"] in ("module", "class")
        else:
            pattern = constraint if kind == "regex" else r"(left|right) [0-9][0-9]"
            assert re.fullmatch(pattern, answer.text), answer.text
    assert {answer.dp_rank for answer in answers} == {0, 1}


@on(SMALL)
def test_structured_chat(world: World) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    body = world.chat("A number, please.", response_format=form, max_tokens=48)
    assert json.loads(body["choices"][0]["message"]["content"])["n"] in (1, 2)


@on(SMALL)
def test_logprobs(world: World, expect: Expect) -> None:
    """Of the prompt, of the answer, and of the best alternatives."""
    [prompt] = prompts([20], seed=29)
    [answer] = check(
        world, expect, [prompt], 12, logprob_start_len=0, top_logprobs_num=3, routed_dp_rank=1
    )
    given = answer.meta["input_token_logprobs"]
    assert [token for _, token, _ in given] == list(prompt)
    assert given[0][0] is None and all(logprob < 0 for logprob, _, _ in given[1:])
    for own, logprob, best in zip(
        answer.tokens, answer.logprobs, answer.meta["output_top_logprobs"], strict=True
    ):
        assert len(best) == 3 and best == sorted(best, reverse=True, key=lambda row: row[0])
        assert best[0][1] == own and best[0][0] == pytest.approx(logprob, abs=1e-6)
    # The same tokens, now as a prompt: what was predicted is what is scored.
    scored = world.generate(
        prompt + answer.tokens, 1, return_logprob=True, logprob_start_len=len(prompt) - 1
    ).meta["input_token_logprobs"]
    for (again, token, _), logprob, own in zip(scored[1:], answer.logprobs, answer.tokens):
        assert token == own and again == pytest.approx(logprob, abs=1e-4)


@on(SMALL)
def test_parallel_sampling(world: World, expect: Expect) -> None:
    [prompt] = prompts([15], seed=30)
    [whole] = expect([prompt], 10)
    greedy = world.generate_raw(prompt, 10, sampling_params={"n": 2})
    assert [tuple(body["output_ids"]) for body in greedy] == [whole.tokens] * 2
    drawn = world.generate_raw(prompt, 24, sampling_params={"n": 3, "temperature": 1.5})
    assert len({tuple(body["output_ids"]) for body in drawn}) == 3


@on(SMALL)
def test_sampling(world: World, expect: Expect) -> None:
    """Sampling from the single best token is greedy; from more it is not."""
    [prompt] = prompts([25], seed=31)
    [whole] = expect([prompt], 20)
    best = {"temperature": 0.8, "top_k": 1}
    assert world.generate(prompt, 20, sampling_params=best).tokens == whole.tokens
    free = {"temperature": 2.0, "top_p": 0.99, "min_p": 0.0, "repetition_penalty": 1.1}
    assert world.generate(prompt, 20, sampling_params=free).tokens != whole.tokens


@on(SMALL)
def test_stop_strings(world: World) -> None:
    text = world.generate("The with statement", 40).text
    stop = text.split()[3]
    answer = world.generate("The with statement", 40, sampling_params={"stop": [stop]})
    assert answer.finish == "stop"
    assert answer.text == text[: text.index(stop)]


@on(SMALL)
def test_session(world: World, expect: Expect) -> None:
    """A turn continues what the session holds; its earlier turns are not sent again."""
    session = world.post("/open_session", {"capacity_of_str_len": 4000}).json()
    first, second = prompts([30, 12], seed=32)
    pin = {"routed_dp_rank": 1, "return_logprob": True}
    one = world.generate(first, 10, session_params={"id": session}, **pin)
    assert_equal([one], expect([first], 10))
    follow = {"id": session, "rid": one.meta["id"]}
    two = world.generate(second, 10, session_params=follow, **pin)
    assert_equal([two], expect([first + one.tokens + second], 10))
    assert two.cached_tokens >= len(first)
    assert world.post("/close_session", {"session_id": session}).status_code == 200

    def refused() -> bool:
        late = world.post("/generate", request_body(second, 1, session_params=follow, **pin))
        return late.status_code == 400 and "session" in late.text.lower()

    # The end of a session reaches its rank by way of rank 0, and may be overtaken by a turn.
    assert wait_until(refused, 10)


@on(SMALL, CAD)
def test_priority_scheduling(world: World) -> None:
    """With all places taken, an urgent request that came last is served before an earlier one."""

    def ask(prompt: Prompt, priority: int) -> Generator[dict[str, Any], None, None]:
        return world.stream(prompt, 1500, routed_dp_rank=0, priority=priority)

    def at_work() -> tuple[int, int]:
        """Requests that run and that wait on rank 0."""
        load = world.get("/v1/loads").json()["loads"][0]
        return load["num_running_reqs"], load["num_waiting_reqs"]

    fillers = [ask(prompt, 5) for prompt in prompts([4] * RUNNING, seed=33)]
    for filler in fillers:
        next(filler)
    early, late = prompts([5, 6], seed=34)
    low, high = ask(early, 0), ask(late, 9)
    with ThreadPoolExecutor(2) as pool:
        later = pool.submit(next, low)
        assert wait_until(lambda: at_work() == (RUNNING, 1), 30), at_work()
        sooner = pool.submit(next, high)
        assert wait_until(lambda: at_work() == (RUNNING, 2), 30), at_work()
        fillers[0].close()
        sooner.result(60)
        assert not later.done(), "the earlier request was served first, or fillers had ended"
        assert world.post("/abort_request", {"abort_all": True}).status_code == 200


@on(SMALL, NO_OVERLAP, NO_RADIX)
def test_load_balancing(world: World, layout: Layout, expect: Expect) -> None:
    """Round robin, by requests, by tokens: requests go to all attention ranks and to no other."""
    chosen = "--load-balance-method" in layout.flags
    method = layout.flags[-1] if chosen else "round_robin"
    assert world.get("/server_info").json()["load_balance_method"] == method
    asked = prompts([12, 60, 5, 30] * 3, seed=35)
    answers = check(world, expect, asked, 12)
    shares = [sum(answer.dp_rank == rank for answer in answers) for rank in range(3)]
    assert shares[0] >= 2 and shares[1] >= 2 and shares[2] == 0, shares


@on(SMALL)
def test_routed_dp_rank(world: World, expect: Expect) -> None:
    [prompt] = prompts([8], seed=36)
    for rank in (0, 1):
        [answer] = check(world, expect, [prompt], 4, routed_dp_rank=rank)
        assert answer.dp_rank == rank
    completion = {"model": "default", "prompt": ["One.", "Two."], "max_tokens": 4}
    for rank in (2, 7, -1):
        for path, body in (
            ("/generate", request_body(prompt, 4)),
            ("/generate", {**request_body(prompt, 4), "input_ids": [prompt, prompt]}),
            ("/v1/completions", completion),
            ("/v1/chat/completions", chat_body("Hello.")),
        ):
            openai = path.startswith("/v1")
            for fields, headers in (
                ({"routed_dp_rank": rank}, {}),
                ({"data_parallel_rank": rank}, {}),
                *([({}, {"x-data-parallel-rank": str(rank)})] * openai),
            ):
                refused = world.post(path, {**body, **fields}, headers=headers)
                assert refused.status_code == 400, (path, fields, headers, refused.text)
                assert f"DP rank {rank} takes no requests" in refused.text
    for spelling in ("routed_dp_rank", "data_parallel_rank"):
        [answer] = check(world, expect, [prompt], 4, **{spelling: 1})
        assert answer.dp_rank == 1
    check(world, expect, [prompt], 4)
