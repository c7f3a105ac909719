"""The CPU reference platform, as far as no server is needed."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_afd.platform import hooks, settings
from sglang_afd.platform.defaults import (
    BIND,
    cpu_environment,
    cpu_server_args,
    environment_problem,
    parse_cores,
    thread_binding,
)

pytestmark = pytest.mark.unit

ROWS, HIDDEN, WIDTH, EXPERTS, TOP_K = 7, 16, 8, 4, 3


# Environment and arguments


@pytest.mark.parametrize(
    ("cores", "ranks", "binding"),
    [
        ([0, 1], 1, "0,1"),
        ([0, 1], 2, "0|1"),
        ([0, 1], 3, "0,1|0,1|0,1"),  # more ranks than cores: all may use all
        ([0, 2, 4, 6, 8], 2, "0,2|4,6"),
    ],
)
def test_thread_binding(cores: list[int], ranks: int, binding: str) -> None:
    assert thread_binding(cores, ranks) == binding
    assert len(binding.split("|")) == ranks


@pytest.mark.parametrize("ranks", [1, 2, 64])
def test_environment_names_usable_cores(ranks: int) -> None:
    environment = cpu_environment(ranks)
    fields = environment["SGLANG_CPU_OMP_THREADS_BIND"].split("|")
    assert len(fields) == ranks
    for field in fields:
        assert set(parse_cores(field)) <= os.sched_getaffinity(0)
    assert int(environment["OMP_NUM_THREADS"]) >= 1
    assert all(isinstance(value, str) for value in environment.values())


def test_arguments_fill_what_is_left_open() -> None:
    assert cpu_server_args([])[:2] == ["--device", "cpu"]
    assert "--max-total-tokens" in cpu_server_args([])
    given = ["--device", "cpu", "--attention-backend=flex", "--max-total-tokens", "512"]
    added = cpu_server_args(given)
    assert not {"--device", "--attention-backend", "--max-total-tokens"} & set(added)
    assert "--max-total-tokens" not in cpu_server_args(["--mem-fraction-static", "0.5"])


def test_sglang_knows_the_arguments() -> None:
    import argparse

    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    args = parser.parse_args(["--model-path", "m", *cpu_server_args([])])
    assert (args.device, args.attention_backend) == ("cpu", "torch_native")


# Threads


@pytest.fixture
def own_threads() -> Iterator[None]:
    """Give the process its cores and threads back."""
    cores, threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(threads)


def test_parse_cores() -> None:
    assert parse_cores("0-2,5") == [0, 1, 2, 5]
    assert parse_cores("7") == [7]


@pytest.mark.usefixtures("own_threads")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("OMP_NUM_THREADS", value) for value in ("abc", "0", "-3", "1.5", "4,2")),
        ("MKL_NUM_THREADS", "abc"),
        *((BIND, value) for value in ("abc", "all", "0", "0|", "0|x", "1-0|1", "0,|1")),
    ],
)
def test_thread_settings_that_no_rank_can_start_with_are_named(name: str, value: str) -> None:
    problem = environment_problem({name: value}, 2)
    assert problem is not None and problem.startswith(f"{name} ") and "unset it" in problem


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_good_thread_settings_pass(ranks: int) -> None:
    assert environment_problem({}, ranks) is None
    assert environment_problem(cpu_environment(ranks), ranks) is None
    assert environment_problem({"OMP_NUM_THREADS": " 8", BIND: "0-1|2|3,4-5"}, ranks) is None
    assert (environment_problem({BIND: "all"}, ranks) is None) == (ranks == 1)


def test_a_rank_has_no_more_threads_than_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    core = min(os.sched_getaffinity(0))
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{core}|{core + 1}")
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    hooks.bind_threads(local_omp_cpuid=str(core), dist_init_method="tcp://127.0.0.1:1")
    assert os.sched_getaffinity(0) == {core}
    assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("own_threads")
def test_ranks_on_the_same_cores_share_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = sorted(os.sched_getaffinity(0))
    field = ",".join(map(str, cores))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", field)
    hooks.bind_threads(local_omp_cpuid=field)
    assert torch.get_num_threads() == len(cores)
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "|".join([field] * len(cores)))
    hooks.bind_threads(local_omp_cpuid=field)
    assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("own_threads")
def test_cores_that_are_not_there_leave_the_rank_unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "9000")
    before = os.sched_getaffinity(0)
    hooks.bind_threads(local_omp_cpuid="9000")
    assert os.sched_getaffinity(0) == before


# Dimensions


@pytest.mark.parametrize(
    ("attn_tp", "moe_tp", "complaint"),
    [(1, 1, None), (2, 1, None), (4, 3, "experts are 64 wide"), (3, 1, "4 attention heads")],
)
def test_dimensions_are_refused_not_padded(
    monkeypatch: pytest.MonkeyPatch, attn_tp: int, moe_tp: int, complaint: str | None
) -> None:
    import sglang.srt.runtime_context as context

    parallel = SimpleNamespace(attn_tp_size=attn_tp, moe_tp_size=moe_tp)
    monkeypatch.setattr(context, "get_parallel", lambda: parallel)
    config = SimpleNamespace(
        num_attention_heads=4, hf_text_config=SimpleNamespace(moe_intermediate_size=64)
    )
    if complaint is None:
        assert hooks.check_alignment(config, None, 6) is config
        assert config.hf_text_config.moe_intermediate_size == 64
    else:
        with pytest.raises(ValueError, match=complaint):
            hooks.check_alignment(config, None, 6)


# Experts


def experts_layer(dtype: torch.dtype = torch.float32) -> SimpleNamespace:
    """Weights in the shapes of SGLang's fused experts."""
    generator = torch.Generator().manual_seed(1)

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return SimpleNamespace(
        num_experts=EXPERTS,
        w13_weight=weight(EXPERTS, 2 * WIDTH, HIDDEN),
        w2_weight=weight(EXPERTS, HIDDEN, WIDTH),
    )


def dense(layer: Any, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Each row through each of its experts, in float64."""
    result = torch.zeros(x.shape, dtype=torch.float64)
    for row in range(x.shape[0]):
        for expert, weight in zip(ids[row].tolist(), weights[row].tolist()):
            if expert >= 0:
                gate, up = (layer.w13_weight[expert].double() @ x[row].double()).chunk(2)
                hidden = torch.nn.functional.silu(gate) * up
                result[row] += weight * (layer.w2_weight[expert].double() @ hidden)
    return result


def native_experts(layer: Any, x: torch.Tensor, topk: Any, config: Any) -> torch.Tensor:
    """SGLang's code for the same weights, reduced to what its contract says."""
    cells = topk.topk_ids.tolist()
    assert min(map(min, cells)) >= 0, "the native experts take no absent id"
    assert all(len(set(row)) == len(row) for row in cells), "nor one id twice in a row"
    return dense(layer, x, topk.topk_ids, topk.topk_weights).to(x.dtype)


class TopK(tuple):
    """The shape of SGLang's ``StandardTopKOutput``."""

    topk_ids = property(lambda self: self[1])
    topk_weights = property(lambda self: self[0])

    def _replace(self, **fields: torch.Tensor) -> TopK:
        return TopK((fields["topk_weights"], fields["topk_ids"]))


def routing(absent: Callable[[torch.Tensor], torch.Tensor]) -> TopK:
    """Distinct experts a row, some of them replaced by -1."""
    generator = torch.Generator().manual_seed(2)
    scores = torch.rand(ROWS, EXPERTS, generator=generator)
    ids = scores.topk(TOP_K, dim=1).indices.to(torch.int32)
    weights = torch.rand(ROWS, TOP_K, generator=generator)
    return TopK((weights, ids.masked_fill(absent(ids), -1)))


@pytest.mark.parametrize(
    "absent",
    [
        lambda ids: ids < 0,
        lambda ids: ids >= 2,  # another rank's
        lambda ids: torch.arange(ROWS)[:, None].expand_as(ids) >= 4,  # padding rows
        lambda ids: ids >= 0,
    ],
    ids=["none", "other-ranks", "padding", "all"],
)
def test_absent_experts_add_nothing(absent: Callable[[torch.Tensor], torch.Tensor]) -> None:
    layer, topk = experts_layer(), routing(absent)
    x = torch.randn(ROWS, HIDDEN, generator=torch.Generator().manual_seed(3))
    got = hooks.experts_with_absent_ids(native_experts, layer, x, topk, None)
    want = dense(layer, x, topk.topk_ids, topk.topk_weights)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    assert (want.abs().sum(dim=1) == 0).equal((topk.topk_ids < 0).all(dim=1))


def test_no_rows() -> None:
    layer = experts_layer(torch.bfloat16)
    topk = TopK((torch.zeros(0, TOP_K), torch.zeros(0, TOP_K, dtype=torch.int32)))
    got = hooks.experts_with_absent_ids(
        native_experts, layer, torch.zeros(0, HIDDEN, dtype=torch.bfloat16), topk, None
    )
    assert got.shape == (0, HIDDEN) and got.dtype is torch.bfloat16


# Settings and platform class


def test_settings_name_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = SimpleNamespace(flag=False)
    monkeypatch.setattr(settings, "resolve_name", lambda path: owner)

    def apply(target: str, adds: bool) -> None:
        setting = settings.Setting(f"m.{target}", lambda: True, "reason", adds)
        monkeypatch.setattr(settings, "SETTINGS", (setting,))
        settings.apply_settings()

    apply("flag", adds=False)
    assert owner.flag is True
    apply("fresh", adds=True)
    assert owner.fresh is True
    with pytest.raises(RuntimeError, match=r"has no m\.gone \(reason\)"):
        apply("gone", adds=False)
    with pytest.raises(RuntimeError, match=r"already has m\.flag"):
        apply("flag", adds=True)


def test_platform_is_one_that_sglang_accepts() -> None:
    from sglang.srt.platforms import _load_platform_class

    platform = _load_platform_class("sglang_afd.platform.cpu.CpuReferencePlatform")()
    assert platform.is_out_of_tree() and not platform.capabilities.supports_triton
    assert platform.get_default_attention_backend() == "torch_native"
    assert platform.get_dispatch_key_name() == "native"
    assert platform.get_torch_profiler_activity() is torch.profiler.ProfilerActivity.CPU


# Norm over heads


@pytest.mark.parametrize("ranks", [1, 2])
def test_norm_over_heads_is_transformers(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With attention TP every rank has a share of the heads and norms by all of them."""
    from sglang.srt.layers import dp_attention
    from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2RMSNorm

    eps, widths = 1e-2, (2 * HIDDEN, HIDDEN)
    torch.manual_seed(0)
    inputs = [torch.randn(ROWS, width) for width in widths]
    norms = [MiniMaxM2RMSNorm(width, eps) for width in widths]
    for norm in norms:
        norm.weight.data.normal_()
    expected = [norm(x) for norm, x in zip(norms, inputs)]

    def share(x: torch.Tensor, rank: int) -> torch.Tensor:
        return x.chunk(ranks, dim=-1)[rank]

    squares = torch.stack(
        [sum(share(x, rank).square().mean(-1) for rank in range(ranks)) for x in inputs]
    )
    monkeypatch.setattr(dp_attention, "attn_tp_all_reduce", lambda mine: squares)
    for rank in range(ranks):
        q_norm, k_norm = (SimpleNamespace(weight=share(norm.weight, rank)) for norm in norms)
        ours = SimpleNamespace(_q_norm=q_norm, _k_norm=k_norm, _world_size=ranks, _eps=eps)
        found = hooks.norm_over_heads(ours, *(share(x, rank) for x in inputs))
        for x, want in zip(found, expected):
            torch.testing.assert_close(x, share(want, rank))


# Latent attention


def test_latent_attention_keeps_to_the_latent_keys() -> None:
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )

    original = AttentionBackendRegistry.get_handler
    assert hooks.latent_attention(original, "torch_native")(None, None).name == "MLA"
    for other in ("triton", "fa3"):
        assert hooks.latent_attention(original, other) is original(other)


def test_unscaled_rotation_is_that_of_other_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the arguments of SGLang's call; the tests of equality show that it rotates right."""
    from sglang.srt.layers.rotary_embedding import factory

    theirs = factory.get_rope
    monkeypatch.setattr(factory, "get_rope", lambda *args: args)
    for neox in (True, False):
        given = (16, 8, 64, 10000, neox)
        rope = hooks.unscaled_rotation(
            factory.get_rope_cpu, *given, None, torch.float32, 1.0, "cpu"
        )
        assert rope == given
    for function in (factory.get_rope_cpu, theirs):
        names = list(inspect.signature(function).parameters)
        assert names[4:6] == ["is_neox_style", "rope_scaling"]


def test_scaled_rotation_is_left_alone() -> None:
    calls = []
    scaling = {"rope_type": "deepseek_yarn"}
    hooks.unscaled_rotation(lambda *a: calls.append(a), 1, 2, 3, 4, True, scaling, None, 1.0, "cpu")
    assert calls == [(1, 2, 3, 4, True, scaling, None, 1.0, "cpu")]
