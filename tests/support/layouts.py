"""The deployments that tests run, named; equal layouts share one running world."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests.support.families import ROWS, WRAPPED

CHECKPOINTS = ("embedded", "seeded", "zeroed", "large", "drafted", *ROWS)


@dataclass(frozen=True)
class Layout:
    """One server's command line, in the terms that tests vary."""

    attention: int = 0
    ffn: int = 0
    """0 attention and 0 FFN ranks: SGLang without AFD.  In CAD mode the model ranks."""
    tp: int = 1
    checkpoint: str = "embedded"
    """One of `CHECKPOINTS`."""
    flags: tuple[str, ...] = ()
    speculation: tuple[int, int, int] | None = None
    """Steps, topk and draft tokens of the checkpoint's own draft, or none."""
    cad: bool = False
    """In CAD mode."""
    note: str = ""
    """Distinguishes layouts in test names where the flags matter."""

    def argv(self, model: str) -> tuple[str, ...]:
        """Arguments of ``launch_server``, serving the checkpoint at `model` in float32."""
        other = ("--afd-mode", "cad", "--afd-model-ranks") if self.cad else ("--afd-ffn-ranks",)
        ranks = ("--afd-attention-ranks", str(self.attention), *other, str(self.ffn))
        width = ("--afd-attention-tp", str(self.tp))
        return (
            *("--model-path", model, "--dtype", "float32"),
            *(ranks if self.attention else ()),
            *(width if self.tp > 1 else ()),
            *self.flags,
            *(self._speculate(model) if self.speculation else ()),
        )

    def _speculate(self, model: str) -> tuple[str, ...]:
        assert self.speculation is not None
        steps, topk, tokens = map(str, self.speculation)
        return (
            *("--speculative-algorithm", "EAGLE3"),
            *("--speculative-draft-model-path", f"{model}/draft"),
            *("--speculative-num-steps", steps, "--speculative-eagle-topk", topk),
            *("--speculative-num-draft-tokens", tokens),
        )

    @property
    def leading(self) -> int:
        """DP ranks that take requests."""
        return self.ffn if self.cad else self.attention

    def of(self, checkpoint: str) -> Layout:
        """This layout, serving another checkpoint."""
        return replace(self, checkpoint=checkpoint)

    def __str__(self) -> str:
        other = "M" if self.cad else "F"
        name = f"{self.attention}A{self.ffn}{other}" if self.attention else "stock"
        parts = [name, f"tp{self.tp}" * (self.tp > 1), self.note, self.checkpoint]
        return "-".join(part for part in parts if part)


STOCK = Layout(flags=("--sleep-on-idle",))
"""One rank, which would spin while it is idle and take a core from what the test waits for."""
A1F1 = Layout(1, 1)
A2F1 = Layout(2, 1)
A2F2 = Layout(2, 2)
A3F1 = Layout(3, 1)
A1T2F1 = Layout(1, 1, tp=2)

CHUNK, CAP, RUNNING = 64, 16, 8  # tokens a chunk, rows a slice, requests at once on a rank


def small(layout: Layout) -> Layout:
    """`layout` with small caps: a long prompt takes several chunks, and one exchange of a chunk
    several slices."""
    return replace(
        layout,
        flags=(
            # SGLang divides these two over the attention ranks
            *("--chunked-prefill-size", str(layout.leading * CHUNK)),
            *("--max-running-requests", str(layout.leading * RUNNING)),
            *(() if layout.cad else ("--afd-max-tokens-per-rank", str(CAP))),
            "--constrained-json-disable-any-whitespace",  # or a model may write spaces for ever
            "--enable-metrics",
            "--enable-priority-scheduling",
            *("--stream-interval", "1"),
        ),
        note="small",
    )


def without_afd(layout: Layout) -> Layout:
    """SGLang itself with the other flags of `layout`, whose AFD flags have one value each."""
    ours = {i for i, flag in enumerate(layout.flags) if flag.startswith("--afd-")}
    kept = [f for i, f in enumerate(layout.flags) if i not in ours and i - 1 not in ours]
    return replace(layout, attention=0, ffn=0, tp=1, cad=False, flags=(*STOCK.flags, *kept))


SMALL = small(A2F1)
"""The world that most tests share: small caps, so that every request crosses them."""
CAD = small(Layout(1, 1, cad=True))
CAD_FAMILIES = (CAD.of("minimax"), CAD.of("qwen3.5"))
CAD_WIDER = (small(Layout(2, 1, checkpoint="seeded", cad=True)), small(Layout(1, 2, cad=True)))
"""Core-attention disaggregation: heads on two attention ranks, requests on two model ranks."""
WIDER = (small(A2F2), small(A1T2F1))
"""The same with more than one FFN rank, and with attention TP."""


def lanes(layout: Layout, count: int, *flags: str) -> Layout:
    """`layout` with that many decode batches in flight, and further flags."""
    note = f"{layout.note}-{count}lanes".strip("-")
    return replace(layout, flags=(*layout.flags, "--afd-lanes", str(count), *flags), note=note)


def emulating(layout: Layout, *, attention: int = 0, ffn: int = 0) -> Layout:
    """`layout`, measured as so many attention and FFN ranks; 0: as many as there are."""
    flags = [
        *(("--afd-emulate-attention-ranks", str(attention)) if attention else ()),
        *(("--afd-emulate-ffn-ranks", str(ffn)) if ffn else ()),
    ]
    whole = f"as{attention or layout.attention}A{ffn or layout.ffn}F"
    note = f"{layout.note}-{whole}".strip("-")
    marked = (*layout.flags, *flags, "--afd-emulation-is-not-the-model")
    return replace(layout, flags=marked, note=note)


def speculating(layout: Layout, steps: int, topk: int, tokens: int) -> Layout:
    """`layout`, small, where the checkpoint's draft speculates; an exchange takes as many rows as
    the requests at once have tokens to verify, and no more."""
    rows = -(-RUNNING * tokens // layout.tp)
    chosen = small(layout.of("drafted"))
    flags = list(chosen.flags)
    flags[flags.index("--afd-max-tokens-per-rank") + 1] = str(rows)
    return replace(
        chosen,
        flags=tuple(flags),
        speculation=(steps, topk, tokens),
        note=f"{steps}.{topk}.{tokens}",
    )


def families(*layouts: Layout, wrapped: bool | None = None) -> tuple[Layout, ...]:
    """`layouts`, serving the checkpoint of each row of `tests.support.families`.

    Args:
        wrapped: only rows whose checkpoint is one of `WRAPPED`, or only others; None: both.
    """
    return tuple(
        layout.of(name)
        for name in ROWS
        for layout in layouts
        if (layout.attention or name not in WRAPPED) and wrapped in (None, name in WRAPPED)
    )


def on(*layouts: Layout, full: tuple[Layout, ...] = ()) -> pytest.MarkDecorator:
    """Run the test once for each layout, the `full` ones in ``make test-full`` only."""
    marked: list[Any] = [pytest.param(layout, marks=pytest.mark.full) for layout in full]
    return pytest.mark.parametrize("world", [*layouts, *marked], indirect=True, ids=str)
