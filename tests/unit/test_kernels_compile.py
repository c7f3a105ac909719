"""Kernels compile for a Hopper GPU, where there is none: what a GPU would meet first."""

from __future__ import annotations

from typing import Any

import pytest
from triton import JITFunction
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile

from sglang_afd.kernels import drawn, exchange, flags, splits, turns

pytestmark = pytest.mark.unit

HOPPER = GPUTarget("cuda", 90, 32)
I32, I64, BF16, F32 = "*i32", "*i64", "*bf16", "*fp32"
ROUTING = {"expert_ids": I32, "weights": F32}
COUNTS = dict.fromkeys(("rows", "cap", "first", "count", "rows_each", "sources"), "i32")
GIVEN: dict[str, Any] = {
    **COUNTS,
    **ROUTING,
    **{"hidden": BF16, "outputs": BF16, "drawn": I32, "ticket": I32, "lengths": I32, "plan": I32},
    **dict.fromkeys(("flags", "exchange", "exchanges", "failure", "stamps", "turns"), I64),
    **dict.fromkeys(("row_addresses", "flag_addresses", "id_addresses", "weight_addresses"), I64),
    **{"bound_ns": "i64", "requests": "i32", "rounded": "i32"},
    **{"HIDDEN": 4096, "TOP_K": 8, "K_BLOCK": 8, "H_BLOCK": 2048, "PER_RANK": 32, "DRAWS": 8},
    **{"FFN_RANKS": 2, "PEERS": 16, "INTERPRETED": False, "COUNTS_HERE": True},
    **{"KV_HEADS": 4, "PROCESSORS": 132, "MOST": 8, "TILE": 128, "BEGIN": 2, "CACHED": 128},
    "BLOCK": 64,
}


def compiled(kernel: JITFunction, warps: int, **given: Any) -> str:
    """The PTX of `kernel`, which has gone through ptxas."""
    signature, constants = {}, {}
    for place, name in enumerate(kernel.arg_names):
        value = {**GIVEN, **given}[name]
        if isinstance(value, str):
            signature[name] = value
        else:
            signature[name] = "constexpr"
            constants[(place,)] = value
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return str(compile(source, target=HOPPER, options={"num_warps": warps}).asm["ptx"])


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("stamps", [0, 63])
@pytest.mark.parametrize(
    ("kernel", "warps"),
    [
        (exchange._send_rows, exchange.WARPS),
        (flags._wait, 1),
        (exchange._return_rows, exchange.WARPS),
        (drawn._send_drawn, exchange.WARPS),
    ],
    ids=["send", "wait", "return", "drawn"],
)
def test_the_exchange_compiles(kernel: JITFunction, warps: int, stamps: int, at_once: bool) -> None:
    """And flags are released and acquired at the scope of the system."""
    ptx = compiled(kernel, warps, AT_ONCE=at_once, STAMPS=stamps)
    wanted = ".sys.acquire" if kernel is flags._wait else ".sys.release.exch.b64"
    assert wanted in ptx


@pytest.mark.parametrize("kernel", [turns._take_turn, turns._end_turn, splits._plan_splits])
def test_what_an_attention_rank_has_of_its_own_compiles(kernel: JITFunction) -> None:
    assert compiled(kernel, 4)
