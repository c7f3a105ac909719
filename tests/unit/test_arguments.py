"""F ranks count as DP ranks in SGLang's arguments, but take no share of what A ranks divide."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sglang.srt.arg_groups.overrides as overrides
import sglang.srt.arg_groups.validation_hook as validation_hook
from hypothesis import given
from hypothesis import strategies as st

from sglang_afd.config import AfdConfig
from sglang_afd.topology import COMMANDS, Role
from sglang_afd.upstream import arguments

pytestmark = pytest.mark.unit

AS_DP_ATTENTION = 0.3  # SGLang's factor on the conservativeness with attention DP


def hooked(name: str, original: Any, given_args: Any, **config: Any) -> None:
    """Run `original` as SGLang's function `name`, with its hook."""
    counts = {"attention_ranks": 1, "ffn_ranks": 1, **config}
    [hook] = [h for h in arguments.hooks(AfdConfig(**counts)) if h.target.endswith("." + name)]
    hook.fn(original, given_args)


def divided(attention: int, ffn: int, chunk: int | None, conservativeness: float) -> Any:
    """The arguments after SGLang divided them over all DP ranks."""
    given_args = SimpleNamespace(
        chunked_prefill_size=chunk, schedule_conservativeness=conservativeness
    )

    def divide_as_sglang_does(args: Any) -> None:
        args.schedule_conservativeness *= AS_DP_ATTENTION
        if args.chunked_prefill_size is not None and args.chunked_prefill_size > 0:
            args.chunked_prefill_size //= attention + ffn

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overrides, "resolving_view", lambda args: args)
        patch.setattr(
            overrides, "declare_resolution", lambda args, by, **values: vars(args).update(values)
        )
        hooked(
            "handle_data_parallelism",
            divide_as_sglang_does,
            given_args,
            attention_ranks=attention,
            ffn_ranks=ffn,
        )
    return given_args


@given(st.integers(1, 16), st.integers(1, 16), st.integers(1, 65536))
def test_the_prefill_chunk_is_divided_over_attention_ranks(
    attention: int, ffn: int, chunk: int
) -> None:
    assert divided(attention, ffn, chunk, 1.0).chunked_prefill_size == chunk // attention


@pytest.mark.parametrize("chunk", [None, -1])
def test_prefill_in_one_chunk_stays_so(chunk: int | None) -> None:
    assert divided(2, 1, chunk, 1.0).chunked_prefill_size == chunk


@pytest.mark.parametrize(("attention", "factor"), [(1, 1.0), (2, 0.3), (8, 0.3)])
def test_scheduling_is_as_conservative_as_with_so_many_attention_ranks(
    attention: int, factor: float
) -> None:
    """One attention rank beside FFN ranks is no attention DP."""
    left = divided(attention, 3, 4096, 1.7).schedule_conservativeness
    assert left == pytest.approx(1.7 * factor)


@pytest.fixture
def three_ranks_on_two_nodes(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    monkeypatch.setattr(validation_hook, "resolving_view", lambda args: args)
    return SimpleNamespace(nnodes=2, tp_size=3, nothing_else="kept")


def nodes_divide_the_world(args: Any) -> None:
    """What SGLang checks; the rest of its check sees the arguments as they are."""
    view = validation_hook.resolving_view(args)
    assert view.nothing_else == "kept"
    assert view.tp_size % view.nnodes == 0, "tp_size must be divisible by number of nodes"


@pytest.mark.parametrize("role", COMMANDS)
def test_commands_of_unequal_size_pass(
    three_ranks_on_two_nodes: SimpleNamespace, role: Role
) -> None:
    view = validation_hook.resolving_view
    hooked("check_server_args", nodes_divide_the_world, three_ranks_on_two_nodes, command_role=role)
    assert three_ranks_on_two_nodes.nnodes == 2
    assert validation_hook.resolving_view is view


def test_one_command_is_checked_as_it_is(three_ranks_on_two_nodes: SimpleNamespace) -> None:
    with pytest.raises(AssertionError, match="divisible by number of nodes"):
        hooked("check_server_args", nodes_divide_the_world, three_ranks_on_two_nodes)


def test_a_failed_check_leaves_sglangs_view_in_place(
    three_ranks_on_two_nodes: SimpleNamespace,
) -> None:
    view = validation_hook.resolving_view
    with pytest.raises(ZeroDivisionError):
        hooked(
            "check_server_args",
            lambda args: 1 // 0,
            three_ranks_on_two_nodes,
            command_role=Role.FFN,
        )
    assert validation_hook.resolving_view is view
