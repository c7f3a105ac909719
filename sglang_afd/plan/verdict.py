"""What an answer means: the verdict in words, and the command that starts it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from sglang_afd.plan.ledger import step_travel, travel
from sglang_afd.plan.modes import missing
from sglang_afd.plan.search import Answer, Candidate
from sglang_afd.plan.simulate import Noise, Simulated, simulate_afd
from sglang_afd.plan.step import Split, ffn_hides

TIE = 0.03
"""Throughputs closer than this are called equal."""


@dataclass(frozen=True)
class Verdict:
    """The recommendation and its reasons, a sentence each."""

    choice: Candidate | None
    headline: str
    reasons: tuple[str, ...]
    missing: tuple[str, ...]
    """What the choice needs and this build does not serve."""


def verdict(answer: Answer) -> Verdict:
    """Colocated, AFD or CAD, and why."""
    best, base = answer.best(), answer.best("colocated")
    split = max(
        filter(None, (answer.best("afd"), answer.best("cad"))),
        key=lambda c: c.per_gpu,
        default=None,
    )
    if best is None:
        fastest = min(answer.candidates, key=lambda c: c.step.tpot)
        return Verdict(
            None,
            f"Nothing meets a TPOT of {_ms(answer.question.tpot or 0)}: the fastest, "
            f"{fastest.layout.name} with {fastest.step.batch:g} requests a GPU, takes "
            f"{_ms(fastest.step.tpot)}.",
            ("Raise --tpot-ms, shorten the context, or use faster GPUs.",),
            (),
        )
    if split is None:
        reasons = {f"{r.name}: {r.reason}" for r in answer.refused if "A" in r.name}
        # a rank that is too small says more than a count that does not divide
        reasons = {r for r in reasons if "divide" not in r} or reasons or {"none meets the target"}
        return Verdict(
            best,
            f"Stay colocated: {best.layout.name}, {best.per_gpu:.0f} tokens/s/GPU. "
            f"No split layout is possible.",
            tuple(sorted(reasons, reverse=True))[:3],
            (),
        )
    if base is None:
        return Verdict(
            split,
            f"{_kind(split)}: {split.layout.name}, {split.per_gpu:.0f} tokens/s/GPU. "
            f"Colocated does not fit.",
            _reasons(answer, split, None),
            _missing(answer, split),
        )
    gain = split.per_gpu / base.per_gpu - 1
    numbers = f"{split.per_gpu:.0f} against {base.per_gpu:.0f} tokens/s/GPU"
    if gain > TIE:
        return Verdict(
            split,
            f"{_kind(split)} pays: {split.layout.name} beats {base.layout.name} by {gain:.0%} "
            f"({numbers}).",
            _reasons(answer, split, base),
            _missing(answer, split),
        )
    losing = f"loses {-gain:.0%}" if gain < -TIE else f"differs by {gain:+.0%}, a tie"
    return Verdict(
        base,
        f"AFD does not pay here: stay with {base.layout.name}. The best split, "
        f"{split.layout.name}, {losing} ({numbers}).",
        _reasons(answer, split, base),
        (),
    )


def _kind(candidate: Candidate) -> str:
    return candidate.layout.kind.upper()


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _reasons(answer: Answer, split: Candidate, base: Candidate | None) -> tuple[str, ...]:
    question, step = answer.question, split.step
    reasons = []
    if base is not None:
        reasons.append(
            f"A GPU with requests holds {step.batch:g} in {split.layout.name} and "
            f"{base.step.batch:g} in {base.layout.name} ({step.batch / base.step.batch:.2f} times "
            f"as many), and {step.attention_ranks} of {step.gpus} GPUs hold requests; a step takes "
            f"{_ms(step.seconds)} against {_ms(base.step.seconds)}."
        )
    bound = {step.ta: "attention", step.te: "experts"}[max(step.ta, step.te)]
    reasons.append(
        f"All lanes' attention takes {_ms(step.ta)} and all lanes' experts {_ms(step.te)}: "
        f"{bound} bound{_exposed(split)}."
    )
    if split.layout.kind == "afd":
        reasons.append(
            f"Simulated with drawn routing, a step takes {_ms(simulated(answer, split).seconds)}."
        )
        own = question.shape.routed_weight_bytes / step.ffn_ranks
        rate = question.gpu.bandwidth * question.gpu.grouped_efficiency
        holds = ffn_hides(step.lanes, own, rate, step.ta)
        reasons.append(
            f"Rule of thumb: {step.lanes} lane(s) x {own / 1e9:.0f} GB of experts a rank take "
            f"{_ms(step.lanes * own / rate)} to read, which attention's {_ms(step.ta)} "
            f"{'hide' if holds else 'do not hide'}."
        )
        cost = step_travel(
            question.shape,
            travel(question.shape, question.transport, question.routing, step.ffn_ranks),
            step.batch * question.load.width,
        )
        reasons.append(
            f"An attention rank sends {cost.out / 1e6:.0f} MB and gets {cost.back / 1e6:.0f} MB a "
            f"step over {question.transport}."
        )
    return tuple(reasons)


def simulated(answer: Answer, split: Candidate, *, draws: bool = True) -> Simulated:
    """The AFD candidate's step as the simulator has it, with drawn or expected routing."""
    question = answer.question
    return simulate_afd(
        question.shape,
        question.gpu,
        question.routing,
        question.load,
        Split(
            split.layout.attention_ranks,
            split.layout.ffn_ranks,
            split.step.lanes,
            split.step.batch,
            question.transport,
            question.graphs,
        ),
        noise=Noise(draws=draws, seed=question.routing.seed),
    )


def _exposed(split: Candidate) -> str:
    exposed = split.step.exposed
    return f", {_ms(exposed)} of it exposed exchange and waiting" if exposed > 1e-4 else ""


def _missing(answer: Answer, split: Candidate) -> tuple[str, ...]:
    return tuple(
        missing(
            answer.question.shape,
            lanes=split.step.lanes,
            width=answer.question.load.width,
            kind=split.layout.kind,
            transport=answer.question.transport,
        )
    )


def launch_command(answer: Answer, chosen: Candidate, model: str) -> str:
    """The launch_server command of one group of the chosen layout.

    For what this build does not serve (`missing`) there is no flag, so none is printed.
    """
    question, layout, step = answer.question, chosen.layout, chosen.step
    args = ["python", "-m", "sglang_afd.launch_server", "--model-path", model]
    load = question.load
    args += ["--context-length", str(load.context + load.output + load.width - 1)]
    if layout.kind == "colocated":
        ranks = layout.attention_ranks
        if ranks > 1:
            args += ["--tp-size", str(ranks), "--dp-size", str(ranks), "--enable-dp-attention"]
            args += ["--ep-size", str(ranks)]
            if question.shape.fp8:
                args += ["--moe-a2a-backend", "megamoe"]  # the fastest that was measured
        # SGLang's counts are of all DP ranks together
        args += ["--max-running-requests", str(int(step.batch) * ranks)]
        return shlex.join(args)
    args += ["--afd-attention-ranks", str(layout.attention_ranks)]
    args += ["--afd-ffn-ranks", str(layout.ffn_ranks)]
    rows = -(-int(step.batch) * load.width // step.lanes)
    if question.transport in ("nvlink", "deepep", "gloo"):
        args += ["--afd-transport", question.transport]
    args += ["--afd-max-tokens-per-rank", str(rows)]
    if step.lanes > 1:
        args += ["--afd-lanes", str(step.lanes)]
    args += ["--max-running-requests", str(int(step.batch) * layout.attention_ranks)]
    return shlex.join(args)
