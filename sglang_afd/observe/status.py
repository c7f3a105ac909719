"""The deployment as ``/afd/status`` tells it and ``/afd`` shows it, from the ranks' own states."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

_LOAD = {
    "running_requests": "num_running_reqs",
    "waiting_requests": "num_waiting_reqs",
    "kv_tokens_used": "num_used_tokens",
    "tokens_per_second": "gen_throughput",
}


def page() -> str:
    """The HTML page, which asks for the status by itself."""
    return resources.files(__package__).joinpath("status.html").read_text(encoding="utf-8")


def of(
    states: Sequence[Mapping[str, Any]], loads: Mapping[int, Mapping[str, Any]], started: float
) -> dict[str, Any]:
    """The status: what every rank is, holds and does.

    Args:
        states: internal states, of the first world rank of each DP rank (with attention TP the
            others do the same work).
        loads: SGLang's load snapshots, by the DP rank that takes requests.
        started: when the server started, in seconds since the epoch.
    """
    told = {state["afd"]["rank"]: state["afd"] for state in states}
    config = states[0]["afd"]["config"]
    ranks = []
    for rank, holdings in enumerate(states[0]["afd"]["ranks"]):
        own = told.get(holdings["rank"], {})
        dp_rank, place = divmod(rank, config["attention_tp"])
        load = loads.get(dp_rank) if holdings["role"] != "ffn" and not place else None
        ranks.append(
            {
                **holdings,
                "world_rank": rank,
                "load": load and {name: load[theirs] for name, theirs in _LOAD.items()},
                "recent": own.get("recent"),
                "lanes": own.get("lanes"),
            }
        )
    return {
        "versions": versions(),
        "up_seconds": time.time() - started,
        "model": states[0]["model_path"],
        "config": config,
        "emulated": states[0]["afd"].get("emulated"),
        "ranks": ranks,
    }


def trace_of(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The `sglang_afd.observe.trace.Trace` of what the ranks have recorded, as plain values."""
    traces = [state["afd"]["trace"] for state in states if "trace" in state["afd"]]
    return {
        "versions": versions(),
        "ranks": sorted(traces, key=lambda trace: int(trace["rank"])),
    }


def versions() -> dict[str, str]:
    """Of the packages that a figure depends on."""
    return {name: importlib.metadata.version(name) for name in ("sglang", "sglang_afd", "torch")}
