"""The transport gate: what each transport refuses, and what ``auto`` stands for."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sglang_afd.checkpoint import Checkpoint
from sglang_afd.facts import Facts
from sglang_afd.families import FAMILIES
from sglang_afd.flags import GPU_LANE_MODELS, parse
from sglang_afd.gate import GATES
from sglang_afd.machine import Gpu, Machine
from sglang_afd.transport_gate import choose, row_dtype
from sglang_afd.transports import estimate
from tests.support.gate_facts import GPUS, MODEL, make_facts, refused, write_model

BAD_DEEPEP: list[tuple[dict, tuple[str, ...], Machine, str]] = [
    ({}, (), Machine(GPUS.gpus, frozenset({"deep_gemm"})), "needs the package deep_ep, which is"),
    ({}, (), Machine(GPUS.gpus, frozenset({"deep_ep"})), "pip install sgl-deep-gemm, or use"),
    ({}, (), Machine((Gpu("A100", (8, 0)),) * 8, GPUS.packages), "A100 has 8.0; use --afd-tr"),
    ({"hidden_size": 3584}, (), GPUS, "no kernel for hidden size 3584, only for 2048, 2560"),
    ({"num_experts_per_tok": 12}, (), GPUS, "carries 11 experts a token, the router picks 12"),
    ({"dtype": "float32"}, (), GPUS, "carries BF16 rows, the model's are float16; pass --dtype"),
    ({}, ("--dtype", "half"), GPUS, "carries BF16 rows, the model's are float16"),
    ({}, ("--moe-runner-backend", "triton"), GPUS, "--moe-runner-backend triton does not take"),
    ({}, ("--afd-max-tokens-per-rank", "1028"), GPUS, "1028 is over deepep's 1024; lower it"),
    ({"num_experts": 1000}, (), GPUS, "1000 experts on each of 2 ranks make 2000 slots"),
]


@pytest.mark.parametrize(("changes", "flags", "machine", "expected"), BAD_DEEPEP)
def test_transport_gate_refuses_deepep(
    tmp_path: Path, changes: dict, flags: tuple[str, ...], machine: Machine, expected: str
) -> None:
    facts = make_facts(write_model(tmp_path, **changes), *flags, machine=machine)
    texts = refused(facts, "transport")
    assert len(texts) == 1 and expected in texts[0], texts
    gloo = make_facts(tmp_path, *flags, "--afd-transport", "gloo", machine=machine)
    assert not refused(gloo, "transport")


def test_transport_gate_refuses_deepep_on_a_cpu(tmp_path: Path) -> None:
    texts = refused(make_facts(write_model(tmp_path), "--afd-transport", "deepep"), "transport")
    assert texts == [
        "deepep moves rows between GPUs, but the ranks run on the CPU; use --afd-transport gloo"
    ]


def unreachable(*pairs: tuple[int, int]) -> Machine:
    """Eight H200s, of which the first of each pair cannot write to the second."""
    out = [frozenset(f"GPU-{b}" for a, b in pairs if a == index) for index in range(8)]
    gpus = [Gpu("H200", (9, 0), f"GPU-{i}", unreachable=peers) for i, peers in enumerate(out)]
    return Machine(tuple(gpus), GPUS.packages)


SMALL = Machine((Gpu("H200", (9, 0), memory=2**29),) * 8, GPUS.packages)
NVLINK = ("--afd-transport", "nvlink")
BAD_NVLINK: list[tuple[dict, tuple[str, ...], Machine, str]] = [
    ({"hidden_size": 2056}, (), GPUS, "do not divide hidden size 2056; use --afd-transport gloo"),
    ({"num_experts_per_tok": 17, "num_experts": 32}, (), GPUS, "carries 16 experts a token, the"),
    ({}, ("--moe-runner-backend", "deep_gemm"), GPUS, "--moe-runner-backend deep_gemm does not"),
    ({}, (), unreachable((0, 1)), "which H200 GPU-0 cannot for GPU-1; use --afd-transport deepep"),
    ({}, (), SMALL, "of an FFN rank's 512.0 MiB, over 25%; lower --afd-max-tokens-per-rank or"),
]


@pytest.mark.parametrize(("changes", "flags", "machine", "expected"), BAD_NVLINK)
def test_transport_gate_refuses_nvlink(
    tmp_path: Path, changes: dict, flags: tuple[str, ...], machine: Machine, expected: str
) -> None:
    block = ("--afd-prefill-block", "8192")
    facts = make_facts(write_model(tmp_path, **changes), *flags, *NVLINK, *block, machine=machine)
    texts = refused(facts, "transport")
    assert len(texts) == 1 and expected in texts[0], texts


@pytest.mark.parametrize("transport", ["gloo", "deepep"])
@pytest.mark.parametrize(
    "flags",
    [("--cuda-graph-backend-decode", "full"), ("--cuda-graph-max-bs-decode", "8"),
     ("--cuda-graph-bs-decode", "1", "2")],
)  # fmt: skip
def test_graphs_are_refused_where_the_transport_has_none(
    tmp_path: Path, transport: str, flags: tuple[str, ...]
) -> None:
    model = write_model(tmp_path, hidden_size=2048)
    facts = make_facts(model, "--afd-transport", transport, *flags, machine=GPUS)
    [text] = refused(facts, "transport")
    assert f"steps over {transport} are not recorded in CUDA graphs" in text


def test_a_graph_must_fit_one_exchange(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    for sizes, tp, bad in (
        (("--cuda-graph-max-bs-decode", "64"), "1", ""),
        (("--cuda-graph-max-bs-decode", "65"), "1", "max-bs-decode 65 makes a graph of 65 rows"),
        (("--cuda-graph-bs-decode", "64", "8"), "1", ""),
        (("--cuda-graph-bs-decode", "8", "65", "1"), "1", "-bs-decode 65 makes a graph of 65 rows"),
        (("--cuda-graph-bs-decode=65",), "1", "-bs-decode 65 makes a graph of 65 rows"),
        (("--cuda-graph-max-bs-decode", "128"), "2", ""),  # 64 rows for each rank of attention TP
        (("--cuda-graph-max-bs-decode", "129"), "2", "max-bs-decode 129 makes a graph of 65 rows"),
    ):
        flags = ("--afd-max-tokens-per-rank", "64", "--afd-attention-tp", tp, *sizes)
        texts = refused(make_facts(model, *NVLINK, *flags, machine=GPUS), "transport")
        assert bool(texts) is bool(bad), (sizes, texts)
        assert not bad or (bad in texts[0] and "over the 64 of one exchange" in texts[0])


def test_transport_gate_refuses_nvlink_on_a_cpu_and_across_hosts(tmp_path: Path) -> None:
    model = write_model(tmp_path)
    assert "the ranks run on the CPU" in refused(make_facts(model, *NVLINK), "transport")[0]
    apart = ("--afd-role", "ffn", "--nnodes", "2", "--node-rank", "1")
    for host, bad in (("127.0.0.1", False), ("192.0.2.7", True)):
        flags = (*NVLINK, *apart, "--dist-init-addr", f"{host}:5000")
        texts = refused(make_facts(model, *flags, machine=GPUS), "transport")
        assert bool(texts) == bad, texts
        assert not bad or texts[0].startswith("nvlink stays within one host, 192.0.2.7 is another")


def test_devices_that_are_not_used_need_not_be_reachable(tmp_path: Path) -> None:
    facts = make_facts(write_model(tmp_path), *NVLINK, machine=unreachable((0, 7)))
    assert not refused(facts, "transport"), "the deployment takes two of eight GPUs"


@pytest.mark.parametrize(
    ("changes", "flags", "machine", "transport", "why"),
    [
        ({}, (), GPUS, "nvlink", "the deployment fits it"),
        ({"hidden_size": 256}, (), GPUS, "nvlink", "the deployment fits it"),
        ({}, (), unreachable((0, 1)), "deepep", "no nvlink: nvlink writes into peers' memory"),
        ({}, (), Machine(unreachable((0, 1)).gpus), "gloo", "no deepep: deepep needs the package"),
        ({}, ("--moe-runner-backend", "deep_gemm"), GPUS, "deepep", "no nvlink: nvlink gives the"),
        ({"hidden_size": 2056}, (), GPUS, "gloo", "no deepep: deepep has no kernel for hidden"),
        ({}, (), None, "gloo", "the ranks run on the CPU"),
    ],
)
def test_auto_is_the_first_transport_that_fits(
    tmp_path: Path,
    changes: dict,
    flags: tuple[str, ...],
    machine: Machine | None,
    transport: str,
    why: str,
) -> None:
    model = write_model(tmp_path, **changes)

    def asked(name: str) -> Facts:
        return make_facts(model, *flags, "--afd-transport", name, machine=machine)

    chosen, reason = choose(asked, on_cpu=machine is None, two_commands=False)
    assert chosen == transport and why in reason, reason


def test_auto_of_two_commands_stays_off_nvlink(tmp_path: Path) -> None:
    """Neither command knows where the other is, and both must choose alike."""
    model = write_model(tmp_path)
    chosen, _ = choose(
        lambda name: make_facts(model, "--afd-transport", name, machine=GPUS),
        on_cpu=False,
        two_commands=True,
    )
    assert chosen == "deepep"


@given(
    attention=st.integers(1, 40),
    ffn=st.integers(1, 40),
    tp=st.sampled_from([1, 2, 4]),
    experts=st.integers(1, 600),
)
@example(attention=7, ffn=1, tp=1, experts=231)  # 1848 slots: the most that pass
@example(attention=42, ffn=1, tp=1, experts=43)  # 1849
def test_deepep_slots_are_bounded_exactly(attention: int, ffn: int, tp: int, experts: int) -> None:
    flags = ("--afd-attention-ranks", str(attention), "--afd-ffn-ranks", str(ffn))
    argv = [*flags, "--afd-attention-tp", str(tp), "--afd-max-tokens-per-rank", "128"]
    command = parse(argv, transport="deepep")
    assert command.config is not None
    config = {**MODEL, "num_experts": experts}
    facts = Facts(command.config, tuple(argv), Checkpoint("x", config), GPUS, on_cpu=False)
    slots = (attention + ffn) * tp * -(-experts // (ffn * tp))
    refusals = list(GATES[2].refusals(facts))
    assert bool(refusals) == (slots > 1848)


@pytest.mark.parametrize(
    ("declared", "flags", "expected"),
    [
        ({"dtype": "bfloat16"}, (), "bfloat16"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, (), "bfloat16"),
        ({"dtype": None}, (), "float16"),
        ({"dtype": "float32"}, ("--dtype", "float"), "float32"),
    ],
)
def test_row_dtype(tmp_path: Path, declared: dict, flags: tuple[str, ...], expected: str) -> None:
    assert row_dtype(make_facts(write_model(tmp_path, **declared), *flags)) == expected


def test_deepep_takes_one_lane(tmp_path: Path) -> None:
    facts = make_facts(write_model(tmp_path), "--afd-lanes", "2", machine=GPUS)
    [text] = refused(facts, "transport")
    assert text.startswith("deepep takes one lane, not --afd-lanes 2: its kernels fill the GPU")
    assert text.endswith("use --afd-lanes 1")


def test_lanes_of_gpus(tmp_path: Path) -> None:
    """Over nvlink several, where lanes share no communicator; gloo's overlap on CPUs alone."""
    model, two = write_model(tmp_path), ("--afd-lanes", "2")
    assert not refused(
        make_facts(model, "--afd-transport", "nvlink", *two, machine=GPUS), "transport"
    )
    wide = ("--afd-transport", "nvlink", "--afd-attention-tp", "2")
    [text] = refused(make_facts(model, *wide, *two, machine=GPUS), "transport")
    assert text.startswith("--afd-lanes 2 does not go with --afd-attention-tp 2 on GPUs")
    assert not refused(make_facts(model, *wide, machine=GPUS), "transport")
    gloo = ("--afd-transport", "gloo", *two)
    [text] = refused(make_facts(model, *gloo, machine=GPUS), "transport")
    assert text.startswith("gloo takes one lane on GPUs, not --afd-lanes 2")
    assert not refused(make_facts(model, *gloo), "transport")


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_lanes_of_gpus_by_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """Those whose steps share a stream, or states that no quarantine holds, take one."""
    moe = make_facts(write_model(tmp_path)).moe
    monkeypatch.setattr(Facts, "moe", moe)  # its fields are not what this is about
    model = write_model(tmp_path, architectures=[architecture])
    facts = make_facts(model, "--afd-transport", "nvlink", "--afd-lanes", "2", machine=GPUS)
    texts = [text for text in refused(facts, "transport") if "--afd-lanes 2" in text]
    assert bool(texts) is (architecture not in GPU_LANE_MODELS), texts


def test_buffers_of_all_lanes_count(tmp_path: Path) -> None:
    model, kept = write_model(tmp_path), []
    for lanes in ("1", "4"):
        facts = make_facts(model, "--afd-transport", "nvlink", "--afd-lanes", lanes, machine=GPUS)
        assert facts.moe is not None
        kept.append(estimate(facts.config, facts.moe, itemsize=2, fp8=False).ffn.kept)
    assert kept[1] > kept[0]
