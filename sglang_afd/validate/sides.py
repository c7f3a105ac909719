"""What both sides of a comparison have in common: how they are asked, and how they are named."""

from __future__ import annotations

import http.client
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sglang_afd.progress import Waiting
from sglang_afd.running import Server
from sglang_afd.validate import answers
from sglang_afd.validate.answers import Continuation, Unanswered, ask_all
from sglang_afd.validate.settings import Settings
from sglang_afd.validation.report import Identity, Side

HERE = Path(__file__).parent
_SECRET = ("key", "password", "secret", "api_token")


class SideAnswers(NamedTuple):
    """All that a reference gave."""

    identity: Identity
    results: list[Continuation | Unanswered]
    no_layers: str
    """Why its MoE layers are not recorded; empty: they are."""


class SideFailed(RuntimeError):
    """A side did not start or broke off; the message says why."""

    def __init__(self, side: Side, why: str) -> None:
        super().__init__(why)
        self.side = side


def greedy(
    server: Server, settings: Settings, waiting: Waiting, side: str, *, record: bool
) -> list[Continuation | Unanswered]:
    """The continuations of all prompts by an SGLang server, those to be recorded marked."""

    def one(number: int) -> Continuation:
        recorded = record and number in settings.record
        return answers.continued(
            server,
            settings.prompts.prompts[number],
            settings.new_tokens,
            record_as=number if recorded else None,
            timeout=settings.answer_timeout,
        )

    numbers = range(len(settings.prompts.prompts))
    return ask_all(one, numbers, waiting.counting(f"{side}: greedy prompts", len(numbers)))


def server_facts(server: Server) -> dict[str, Any]:
    """What an SGLang server says of itself: its version, its arguments, and AFD's layout."""
    try:
        info = server.call("/server_info")
    except (OSError, ValueError, http.client.HTTPException) as error:
        return {"server_info": f"not given: {error}"}
    states = info.get("internal_states") or [{}]
    arguments = {
        name: value
        for name, value in sorted(info.items())
        if isinstance(value, str | int | float | bool) and not any(s in name for s in _SECRET)
    }
    # Ranks answer in any order, and only attention ranks' lanes have requests.
    told = [state["afd"] for state in states if "attention" in state.get("afd", {}).get("rank", "")]
    return {"arguments": arguments, **({"afd": told[0]} if told else {})}


def software_of(python: str) -> dict[str, Any]:
    """`environment.describe` of another interpreter.

    Raises:
        SideFailed: it does not run.
    """
    command = [python, "-I", str(HERE / "environment.py")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SideFailed(
            "reference", f"--reference-python {python} does not run: {error}"
        ) from error
    if done.returncode:
        raise SideFailed(
            "reference", f"--reference-python {python} does not run: {done.stderr[-1000:]}"
        )
    return json.loads(done.stdout)


def redacted(args: Sequence[str]) -> list[str]:
    """`args` without the values of flags that hold secrets."""
    result: list[str] = []
    hide = False
    for arg in args:
        name, equals, _ = arg.partition("=")
        secret = arg.startswith("--") and any(s in name.replace("-", "_") for s in _SECRET)
        result.append("***" if hide else f"{name}=***" if secret and equals else arg)
        hide = secret and not equals
    return result
