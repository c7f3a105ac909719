"""The command line of one role, where a deployment is two commands."""

from __future__ import annotations


def command(
    role: str, port: int, attention: int, ffn: int, *flags: str, address: str = "127.0.0.1"
) -> list[str]:
    """One role's flags; both commands meet at `port` of the attention command's `address`."""
    return [
        *("--afd-attention-ranks", str(attention), "--afd-ffn-ranks", str(ffn)),
        *("--afd-role", role, "--nnodes", "2", "--node-rank", "01"[role == "ffn"]),
        *("--dist-init-addr", f"{address}:{port}", "--dtype", "float32"),
        *flags,
    ]
