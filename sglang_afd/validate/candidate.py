"""The candidate's answers: a deployment is started, asked everything, and stopped."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from sglang_afd import running
from sglang_afd.observe.recording import RECORD_ENV, Recordings
from sglang_afd.progress import Waiting, log_tick
from sglang_afd.running import Server, ServerFailed
from sglang_afd.start import NAN_CHECK_ENV
from sglang_afd.validate import answers
from sglang_afd.validate.answers import Continuation, Forced, Unanswered, ask_all
from sglang_afd.validate.layers import rows_expected
from sglang_afd.validate.settings import Settings
from sglang_afd.validate.sides import SideFailed, greedy, redacted, server_facts, software_of
from sglang_afd.validation.report import Identity

_LAST_ROWS = 30.0  # seconds that a rank may take to write what an answer has overtaken


class CandidateAnswers(NamedTuple):
    """All that the deployment gave."""

    identity: Identity
    greedy: list[Continuation | Unanswered]
    forced: list[Forced | Unanswered]


def answer(
    settings: Settings,
    reference: Sequence[Continuation | Unanswered],
    waiting: Waiting,
    *,
    record: bool,
) -> CandidateAnswers:
    """Start the deployment and ask it what the reference was asked, then the reference's tokens.

    Raises:
        SideFailed: it did not start.
    """
    waiting.begin(f"Candidate: {settings.layout}")
    environment = {NAN_CHECK_ENV: "0"}  # a NaN is to be seen where it stands, not to end the ranks
    if record:
        environment[RECORD_ENV] = str(settings.recordings("candidate"))
    try:
        with running.serve(
            "candidate",
            settings.candidate_args,
            logs=settings.work,
            environment=environment,
            timeout=settings.start_timeout,
            tick=log_tick(waiting.update),
        ) as server:
            own = greedy(server, settings, waiting, "candidate", record=record)
            seen = _forced(server, reference, settings, waiting)
            info = server_facts(server)
            if record:
                _await_rows(settings)
    except ServerFailed as error:
        raise SideFailed("candidate", str(error)) from error
    identity = Identity(
        kind="afd",
        configuration={"command": redacted(settings.candidate_args), **info},
        checkpoint={},
        software=software_of(sys.executable),
    )
    return CandidateAnswers(identity, own, seen)


def _forced(
    server: Server,
    reference: Sequence[Continuation | Unanswered],
    settings: Settings,
    waiting: Waiting,
) -> list[Forced | Unanswered]:
    def one(entry: Continuation | Unanswered) -> Forced:
        if isinstance(entry, Unanswered):
            raise Unanswered("the reference gave no tokens to rank")
        return answers.forced(server, entry, timeout=settings.answer_timeout)

    tick = waiting.counting("candidate: prompts under teacher forcing", len(reference))
    return ask_all(one, reference, tick)


def _await_rows(settings: Settings) -> None:
    """Ranks beside the one that samples may still be writing; what never comes is found later."""
    prompts = settings.prompts.prompts
    made = settings.new_tokens - 1
    lengths = {i: settings.recorded_rows(len(prompts[i]), made) for i in settings.record}
    deadline = time.monotonic() + _LAST_ROWS
    while rows_expected(lengths) - Recordings(settings.recordings("candidate")).rows:
        if time.monotonic() > deadline:
            return
        time.sleep(0.2)
