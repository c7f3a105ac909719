"""What a server's log says of every decode step: SGLang's own measurement, rank by rank.

With ``--decode-log-interval 1`` each rank that takes requests writes a line a step, whose rate
(tokens of the step over the time since the rank's last decode line) gives the step's time.
`ENVIRONMENT` makes the lines carry the number of the forward pass, which all ranks of a world count
alike: so lines of different ranks are matched, and a prefill between two decodes shows as a gap.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

FLAGS = ("--decode-log-interval", "1")
ENVIRONMENT = {"SGLANG_LOG_FORWARD_ITERS": "1"}

_LINE = re.compile(
    r"^\[\S+ \S+?(?: DP(?P<rank>\d+))?(?: [A-Z]+\d+)*\] Decode batch \[(?P<iteration>\d+)\], "
    r"#running-req: (?P<requests>\d+), #(?:full )?token: (?P<tokens>\d+), .*?"
    r"graph: (?P<graph>True|False), gen throughput \(token/s\): (?P<rate>[0-9.]+), "
    r"#queue-req: (?P<queued>\d+)"
)


class DecodeLine(NamedTuple):
    """One decode step of one rank."""

    rank: int
    """The attention DP rank."""
    iteration: int
    """Number of the forward pass; a world's ranks count alike."""
    requests: int
    tokens: int
    """KV tokens that the rank's requests hold."""
    graph: bool
    """Whether the step was replayed from a graph."""
    ms: float
    """Milliseconds since the rank's last decode line, speculation aside."""
    queued: int


def decode_lines(lines: Iterable[str]) -> list[DecodeLine]:
    """The decode lines among `lines`, in their order.

    A line whose rate is 0 tells no time and is left out.
    """
    found = []
    for line in lines:
        match = _LINE.match(line)
        if match is None or not float(match["rate"]):
            continue
        requests = int(match["requests"])
        found.append(
            DecodeLine(
                rank=int(match["rank"] or 0),
                iteration=int(match["iteration"]),
                requests=requests,
                tokens=int(match["tokens"]),
                graph=match["graph"] == "True",
                ms=requests / float(match["rate"]) * 1000,
                queued=int(match["queued"]),
            )
        )
    return found
