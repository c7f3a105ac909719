"""The offline engine answers as the server does, and leaves nothing behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.client import Answer
from tests.support.processes import end_session, session_members, wait_until
from tests.support.reference import Expect, assert_equal
from tests.support.workload import prompts
from tests.support.world import Worlds, Zygote

pytestmark = pytest.mark.integration

WITHIN = 500.0  # seconds, start and end included; 50 of spawned ranks on a quiet machine

SCRIPT = """
import json, sys
import psutil
import sglang_afd

PARAMS = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}

async def stream(engine, prompt):
    chunks = await engine.async_generate(
        input_ids=prompt, sampling_params=PARAMS, return_logprob=True, stream=True
    )
    return [chunk async for chunk in chunks]

if __name__ == "__main__":
    prompts = json.loads(sys.argv[1])
    engine = sglang_afd.Engine(
        afd_attention_ranks=1, afd_ffn_ranks=1, dtype="float32", disable_radix_cache=False
    )
    ask = dict(sampling_params=PARAMS, return_logprob=True)
    run = engine.loop.run_until_complete
    answers = {
        "batch": engine.generate(input_ids=prompts, **ask),
        "stream": list(engine.generate(input_ids=prompts[0], stream=True, **ask)),
        "async": run(engine.async_generate(input_ids=prompts, **ask)),
        "async stream": run(stream(engine, prompts[0])),
        "ranks": engine.get_server_info()["internal_states"][0]["afd"]["ranks"],
    }
    engine.shutdown()
    answers["left"] = [p.cmdline() for p in psutil.Process().children(recursive=True)
                       if p.status() != psutil.STATUS_ZOMBIE and "tracker" not in str(p.cmdline())]
    with open(__file__.replace(".py", ".json"), "w") as file:
        json.dump(answers, file, default=str)
"""


def run_as_users_do(script: Path, prompts: str, log: Path) -> int:
    """A fresh interpreter that spawns its ranks; the pid of what has ended."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, str(script), prompts],
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        assert process.wait(WITHIN) == 0, log.read_text()[-3000:]
    finally:
        process.kill()
    return process.pid


def run_forked(script: Path, prompts: str, log: Path, zygote: Zygote) -> int:
    """A fork of a process that has imported SGLang; the pid of what has ended."""
    pid = zygote.run(script, [prompts], log)
    wait_until(lambda: zygote.exit_code(pid) is not None, WITHIN, step=0.2)
    code = zygote.exit_code(pid)
    if code is None:
        end_session(pid)
    assert code == 0, log.read_text()[-3000:]
    return pid


@pytest.mark.parametrize("way", ["forked", pytest.param("spawned", marks=pytest.mark.full)])
def test_engine(tmp_path: Path, expect: Expect, worlds: Worlds, way: str) -> None:
    """A batch and a stream, plain and async: tokens and logprobs of the reference."""
    asked = prompts([9, 40, 1], seed=51)
    script, log = tmp_path / "offline.py", tmp_path / "engine.log"
    script.write_text(SCRIPT)
    if way == "forked":
        pid = run_forked(script, json.dumps(asked), log, worlds.zygote)
    else:
        pid = run_as_users_do(script, json.dumps(asked), log)
    assert not session_members(pid), "processes are left after the program's end"
    answers = json.loads(script.with_suffix(".json").read_text())
    assert answers["left"] == [], "processes are left after shutdown"
    assert [rank["experts"] for rank in answers["ranks"]] == [0, 12]
    expected = expect(asked, 16)
    for kind in ("batch", "async"):
        assert_equal([Answer.of(body) for body in answers[kind]], expected)
    for kind in ("stream", "async stream"):
        lengths = [body["meta_info"]["completion_tokens"] for body in answers[kind]]
        assert len(lengths) > 8 and lengths == sorted(lengths)
        assert_equal([Answer.of(answers[kind][-1])], expected[:1])
