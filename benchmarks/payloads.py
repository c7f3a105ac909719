"""What the scripts write (transport, prefill, deepep_memory, two_gpus), told apart and as tables.

A record of such a configuration holds the same content in its one turn's result, so that files from
before there were records show in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

GIB = 1 << 30


def script_of(content: Any) -> str | None:
    """The script that wrote `content`, if one did that is shown."""
    if not isinstance(content, dict):
        return None
    if isinstance(content.get("runs"), list):
        return "deepep_memory"
    if isinstance(content.get("bench_serving"), dict):
        return "two_gpus"
    results = content.get("results")
    if isinstance(results, dict):
        if "one_gpu" in content:
            return "transport"
        if "shape" in content:
            return "prefill"
    return None


def table_of(content: dict[str, Any]) -> list[str]:
    """`content` as lines of Markdown; what is no script's content gives none."""
    script = script_of(content)
    return list(_TABLES[script](content)) if script else []


def markdown(titles: list[str], rows: list[list[str]]) -> list[str]:
    """A Markdown table, its first column left, the others right."""
    line = ["---", *["---:"] * (len(titles) - 1)]
    return [f"| {' | '.join(cells)} |" for cells in (titles, line, *rows)]


def round_trips(content: dict[str, Any]) -> Iterator[tuple[str, int, list[tuple[int, float]]]]:
    """Transport, hidden size, and the best round trip in µs for each number of tokens."""
    for transport, sizes in content["results"].items():
        for hidden, entries in sizes.items():
            if not isinstance(entries, list):  # it failed
                continue
            best: dict[int, float] = {}
            for entry in entries:
                tokens, time = entry["tokens"], entry["round_trip_us"]
                best[tokens] = min(time, best.get(tokens, time))
            yield transport, int(hidden), sorted(best.items())


def _transport(content: dict[str, Any]) -> Iterator[str]:
    found = list(round_trips(content))
    tokens = sorted({count for *_, best in found for count, _ in best})
    titles = ["round trip in µs, best number of blocks", *(f"{count} tokens" for count in tokens)]
    rows = [
        [f"{name}, hidden size {hidden}"]
        + [f"{dict(best)[count]:.1f}" if count in dict(best) else "-" for count in tokens]
        for name, hidden, best in found
    ]
    yield from markdown(titles, rows)
    for name, sizes in content["results"].items():
        for hidden, entries in sizes.items():
            if not isinstance(entries, list):
                yield f"\n{name}, hidden size {hidden}: {_why(entries)}"


def _prefill(content: dict[str, Any]) -> Iterator[str]:
    results = content["results"]
    if "failed" in results:
        yield _why(results)
        return
    rows = [
        [
            name,
            f"{entry['ms']:.3f}",
            f"{entry['tokens_per_s']:,.0f}",
            f"{entry['of_colocated']:.2f}" if "of_colocated" in entry else "-",
        ]
        for name, entry in results.items()
    ]
    yield from markdown(["MoE layer", "ms", "tokens/s", "of colocated"], rows)


def _deepep_memory(content: dict[str, Any]) -> Iterator[str]:
    rows = []
    for run in content["runs"]:
        first = [f"T {run['cap']}, hidden size {run['hidden']}, {run['experts']} experts"]
        first.append("off" if run["NVSHMEM_DISABLE_NCCL"] == "1" else "on")
        if "failed" in run:
            rows.append([*first, _why(run), "", ""])
            continue
        for role, entry in zip(("attention", "FFN"), run["measured"], strict=False):
            figures = [f"{entry[key] / GIB:.2f}" for key in ("transport", "estimate")]
            rows.append([*first, role, *figures])
    titles = ["shape", "NVSHMEM's NCCL", "rank", "taken, GiB", "estimate then, GiB"]
    yield from markdown(titles, rows)


def _load(content: dict[str, Any]) -> Iterator[str]:
    bench = content["bench_serving"]
    rows = [
        ["requests answered", str(bench["completed"])],
        ["at a time", f"{bench['max_concurrency']}"],
        ["output tokens/s", f"{bench['output_throughput']:.0f}"],
    ]
    for rank in content.get("afd", {}).get("ranks", []):
        held = f"{rank['weight_bytes'] / GIB:.2f} + {rank['kv_bytes'] / GIB:.2f}"
        rows.append([f"{rank['rank']}: weights + KV cache, GiB", held])
    yield from markdown(["load", ""], rows)


def _why(entry: dict[str, Any]) -> str:
    return f"failed: {str(entry['failed']).splitlines()[0]}"


_TABLES: dict[str, Callable[[dict[str, Any]], Iterator[str]]] = {
    "transport": _transport,
    "prefill": _prefill,
    "deepep_memory": _deepep_memory,
    "two_gpus": _load,
}
