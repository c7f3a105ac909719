"""What each rank holds: weights, experts, KV cache, transport buffers.

Sizes are bytes of one rank, measured; the buffers' estimate stands beside them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Holdings(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's memory after its start."""

    rank: str
    role: str
    experts: int
    """Routed experts per MoE layer on this rank."""
    parameters: int
    """Elements that come from the checkpoint."""
    weight_bytes: int
    """Of the parameters, and of what the model derives for itself (rotary tables)."""
    load_peak_bytes: int | None
    """Largest amount that loading the weights held at once, the weights included; None where the
    machine does not let it be measured."""
    kv_tokens: int
    kv_bytes: int
    draft_bytes: int
    """Weights of the draft model that are not the target's too; 0 without speculation."""
    draft_kv_bytes: int
    communicator_bytes: int
    """What the group's communicator (NCCL) took; the transport runs over that group."""
    buffer_bytes: int
    """What the transport allocated, the communicator not included."""
    buffer_estimate_bytes: int
    """What the transport was expected to keep."""
    passing_estimate_bytes: int
    """What a round is expected to take on top while it lasts."""
    graph_bytes: int
    """What the CUDA graphs took."""


def table(holdings: Sequence[Holdings]) -> str:
    """A plain-text table, one line a rank."""
    titles = (
        *("rank", "experts/layer", "parameters", "weights", "load peak", "KV tokens", "KV"),
        *("draft", "draft's KV"),
        *("communicator", "buffers (estimate)", "a round (estimate)", "graphs"),
    )
    rows = [
        (
            h.rank,
            str(h.experts),
            f"{h.parameters:,}",
            size(h.weight_bytes),
            "not measured" if h.load_peak_bytes is None else size(h.load_peak_bytes),
            f"{h.kv_tokens:,}",
            size(h.kv_bytes),
            size(h.draft_bytes),
            size(h.draft_kv_bytes),
            size(h.communicator_bytes),
            f"{size(h.buffer_bytes)} ({size(h.buffer_estimate_bytes)})",
            size(h.passing_estimate_bytes),
            size(h.graph_bytes),
        )
        for h in holdings
    ]
    rows.insert(0, titles)
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(lines)


def size(count: int) -> str:
    """A byte count for people, in binary units."""
    value = float(count)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
