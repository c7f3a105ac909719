"""The reference's answers: HF transformers, SGLang without AFD, or a running server."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import Any

from sglang_afd import running
from sglang_afd.command_line import int_value
from sglang_afd.observe.recording import MAX_POSITION, RECORD_ENV
from sglang_afd.progress import Waiting, log_tick
from sglang_afd.running import ServerFailed
from sglang_afd.validate import answers, url
from sglang_afd.validate.answers import Continuation, Unanswered
from sglang_afd.validate.settings import Settings
from sglang_afd.validate.sides import (
    HERE,
    SideAnswers,
    SideFailed,
    greedy,
    redacted,
    server_facts,
    software_of,
)
from sglang_afd.validation.report import Identity


def answer(settings: Settings, waiting: Waiting) -> SideAnswers:
    """Let the reference continue every prompt.

    Raises:
        SideFailed: it did not start, or broke off.
    """
    if settings.by_url:
        return url.answer(settings, waiting)
    return {"hf": _hf, "sglang": _sglang}[settings.reference](settings, waiting)


def _hf(settings: Settings, waiting: Waiting) -> SideAnswers:
    prompts, dtype = settings.prompts.prompts, settings.dtype
    request = {
        "model": str(settings.reference_model),
        "dtype": dtype,
        "device": "cpu" if settings.on_cpu else "cuda",
        "prompts": prompts,
        "new_tokens": settings.new_tokens,
        "record": settings.record,
        "folder": str(settings.recordings("reference")),
        "max_position": MAX_POSITION,
    }
    asked, found = settings.work / "hf-request.json", settings.work / "hf-answer.json"
    asked.write_text(json.dumps(request))
    waiting.begin(f"Reference: HF transformers in {dtype}, {len(prompts)} prompts")
    software = software_of(settings.reference_python)
    command = [settings.reference_python, "-I", str(HERE / "hf_worker.py"), str(asked), str(found)]
    _follow(command, settings, len(prompts), waiting)
    answer = json.loads(found.read_text())
    results = [_continuation(prompt, result) for prompt, result in zip(prompts, answer["results"])]
    identity = Identity(
        kind="hf",
        configuration={"dtype": dtype, "device": request["device"], "model": request["model"]},
        checkpoint={},
        software=software,
    )
    no_layers = "" if answer["layers"] else "this transformers has no experts module to record"
    return SideAnswers(identity, results, no_layers)


def _follow(command: Sequence[str], settings: Settings, total: int, waiting: Waiting) -> None:
    """Run the worker to its end, showing each prompt that is done."""
    log = settings.work / "reference.log"
    with log.open("w") as errors:
        worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    # Each line moves the deadline: a load, or one prompt, may take that long.
    deadline = time.monotonic() + settings.start_timeout

    def watch() -> None:
        while worker.poll() is None:
            if time.monotonic() > deadline:
                worker.kill()
            time.sleep(0.5)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    assert worker.stdout
    try:
        for line in worker.stdout:
            deadline = time.monotonic() + settings.answer_timeout
            if line.startswith('{"done"'):  # libraries may print lines of their own
                waiting.update(f"reference: {json.loads(line)['done']} of {total} prompts")
        code = worker.wait()
    finally:
        worker.kill()
        worker.wait()
    if code:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        late = time.monotonic() > deadline
        why = "took too long" if late else f"ended with {code}"
        raise SideFailed("reference", f"the reference hf {why}; its log {log} ends:\n{tail}")


def _continuation(prompt: list[int], result: dict[str, Any]) -> Continuation | Unanswered:
    try:
        return Continuation(
            prompt=prompt,
            tokens=result["tokens"],
            logprobs=answers.finite(result["logprobs"]),
            gaps=answers.finite(result["gaps"]),
        )
    except Unanswered as problem:
        return problem


def _sglang(settings: Settings, waiting: Waiting) -> SideAnswers:
    args = ["--model-path", str(settings.reference_model), "--dtype", settings.dtype]
    if not settings.on_cpu:
        args += ["--cuda-graph-backend-prefill=disabled"]  # no graph runs what records the layers
        if not settings.replayed:
            args += ["--cuda-graph-backend-decode=disabled"]
    args += settings.reference_args
    software = software_of(settings.reference_python)
    own = "sglang_afd" in software.get("packages", {})
    ranks = int_value(args, "--tp-size", "--tensor-parallel-size", default=1)
    if settings.on_cpu and not own:
        raise SideFailed(
            "reference",
            f"SGLang on a CPU needs this package's CPU platform, which "
            f"{settings.reference_python} does not have; install sglang_afd there, or leave "
            f"--reference-python out",
        )
    no_layers = ""
    if not own:
        no_layers = "the reference's environment has no sglang_afd, which records them"
    elif ranks > 1:
        no_layers = f"the reference runs on {ranks} ranks, each with a part of every sum"
    waiting.begin(f"Reference: SGLang without AFD, {len(settings.prompts.prompts)} prompts")
    record = {} if no_layers else {RECORD_ENV: str(settings.recordings("reference"))}
    try:
        with running.serve(
            "reference",
            args,
            logs=settings.work,
            module="sglang_afd.launch_server" if own else "sglang.launch_server",
            python=settings.reference_python,
            environment=record,
            timeout=settings.start_timeout,
            tick=log_tick(waiting.update),
        ) as server:
            results = greedy(server, settings, waiting, "reference", record=not no_layers)
            info = server_facts(server)
    except ServerFailed as error:
        raise SideFailed("reference", str(error)) from error
    identity = Identity(
        kind="sglang",
        configuration={"command": redacted(args), **info},
        checkpoint={},
        software=software,
    )
    return SideAnswers(identity, results, no_layers)
