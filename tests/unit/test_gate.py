"""Every gate: what it refuses, with its message and its mend, and what it lets pass."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sglang_afd.addresses import parse_address
from sglang_afd.checkpoint import Checkpoint, read_checkpoint
from sglang_afd.facts import Facts
from sglang_afd.families import MoeFacts, family_of
from sglang_afd.flags import parse
from sglang_afd.gate import GATES, findings
from sglang_afd.machine import Gpu, Machine
from sglang_afd.topology import Topology, TopologyError
from sglang_afd.transport_gate import choose, row_dtype
from sglang_afd.transports import estimate
from tests.support.gate_facts import (
    FP8,
    GPUS,
    H200,
    MODEL,
    ONE_OF_EACH,
    free_port,
    make_facts,
    whole_tensors,
    write_model,
    write_weights,
)


def refused(facts: Facts, gate: str) -> list[str]:
    """What `gate` refuses, each as ``message; mend``."""
    found = [f for f in findings(facts) if f.gate == gate]
    assert found
    return [f"{f.message}; {f.mend}" for f in found if not f.passed]


def test_all_gates_pass_in_order(tmp_path: Path) -> None:
    for machine in (None, GPUS):
        found = findings(make_facts(write_model(tmp_path), machine=machine))
        assert [f.gate for f in found] == [
            "model",
            "topology",
            "transport",
            "execution mode",
            "addresses",
            *(("performance",) if machine else ()),
        ]
        assert all(f.passed for f in found), found
        assert "2 MoE layers of 16 experts, top 4" in found[0].message
        assert "16 experts of a layer on each FFN rank" in found[1].message
        assert found[2].message.startswith("deepep" if machine else "gloo")


def test_fp8_passes_on_cuda(tmp_path: Path) -> None:
    facts = make_facts(write_model(tmp_path, quantization_config=FP8), machine=GPUS)
    assert all(f.passed for f in findings(facts))
    assert "block FP8" in findings(facts)[0].message


BAD_MODELS = [
    ({"architectures": ["LlamaForCausalLM"]}, (), "does not serve LlamaForCausalLM yet; it serves"),
    ({"architectures": None}, (), "names no architecture; give a complete checkpoint"),
    ({"num_experts": None}, (), "has no num_experts; save the checkpoint with transformers"),
    ({"mlp_only_layers": [0, 1]}, (), "has no MoE layer, so FFN ranks would hold nothing; serve"),
    ({"num_experts_per_tok": 17}, (), "17 experts a token; AFD carries 16 at most"),
    (
        {"max_position_embeddings": 512},
        ("--context-length", "513"),
        "--context-length 513 is over the 512 tokens that config.json gives the model; lower it",
    ),
    ({}, ("--load-format", "gguf"), "--load-format gguf reads whole checkpoints"),
    ({}, ("--load-format=pt",), "--load-format pt reads whole checkpoints"),
    (
        {},
        ("--model-loader-extra-config", '{"enable_multithread_load": true}'),
        "leave enable_multithread_load and num_threads out",
    ),
    ({}, ("--model-loader-extra-config", '{"num_threads": 4}'), "threads that each load whole"),
    ({}, ("--model-loader-extra-config", "fast"), "is no JSON object: fast; correct it"),
    ({}, ("--json-model-override-args", "[1]"), "--json-model-override-args is no JSON object"),
    ({}, ("--quantization", "fp8"), "--quantization fp8 would quantise the experts"),
    ({"quantization_config": {"quant_method": "awq"}}, (), "awq quantisation is not served; use"),
    ({"compression_config": {"quant_method": "x"}}, (), "x quantisation is not served"),
    ({"quantization_config": FP8}, ("--quantization", "w8a8_fp8"), "w8a8_fp8 quantisation is not"),
    ({"quantization_config": {"quant_method": "fp8"}}, (), "FP8 with no blocks is not served"),
    (
        {"quantization_config": {**FP8, "weight_block_size": [64, 128]}},
        (),
        "FP8 with 64x128 blocks is not served; use an unquantised checkpoint",
    ),
    (
        {"quantization_config": {**FP8, "activation_scheme": "static"}},
        (),
        "FP8 with static activation scales is not served",
    ),
    (
        {"quantization_config": FP8, "moe_intermediate_size": 192},
        (),
        "blocks of 128 do not divide the experts' sizes, 2048 and 192",
    ),
]


@pytest.mark.parametrize(("changes", "flags", "expected"), BAD_MODELS)
def test_model_gate_refuses(
    tmp_path: Path, changes: dict, flags: tuple[str, ...], expected: str
) -> None:
    texts = refused(make_facts(write_model(tmp_path, **changes), *flags, machine=GPUS), "model")
    assert len(texts) == 1 and expected in texts[0], texts


@pytest.mark.parametrize(
    ("flags", "changes", "environment"),
    [
        (("--context-length", "512"), {}, {}),
        (("--context-length", "8k"), {}, {}),
        (("--context-length", "1024"), {"rope_scaling": {"factor": 2.0}}, {}),
        (("--context-length", "9999"), {"max_position_embeddings": None}, {}),
        (("--context-length", "513"), {}, {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}),
    ],
)
def test_model_gate_passes_contexts_that_sglang_takes(
    tmp_path: Path, flags: tuple[str, ...], changes: dict, environment: dict[str, str]
) -> None:
    model = write_model(tmp_path, **{"max_position_embeddings": 512, **changes})
    assert refused(make_facts(model, *flags, **environment), "model") == []


def test_model_gate_refuses_fp8_on_a_cpu(tmp_path: Path) -> None:
    texts = refused(make_facts(write_model(tmp_path, quantization_config=FP8)), "model")
    assert texts == ["FP8 experts need CUDA devices; use an unquantised checkpoint on a CPU"]


def test_model_gate_refuses_modelopt_checkpoints(tmp_path: Path) -> None:
    (write_model(tmp_path) / "hf_quant_config.json").write_text("{}")
    assert "modelopt quantisation is not served" in refused(make_facts(tmp_path), "model")[0]


def test_model_gate_refuses_what_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    missing = tmp_path / "missing"
    empty = tmp_path / "empty"
    empty.mkdir()
    broken = write_model(tmp_path / "broken")
    (broken / "config.json").write_text("{")
    listed = write_model(tmp_path / "listed")
    (listed / "config.json").write_text("[]")
    expected = {
        missing: f"there is no directory '{missing}'; check --model-path",
        empty: f"there is no {empty}/config.json; give --model-path the directory of a complete",
        broken: f"{broken}/config.json cannot be read: Expecting",
        listed: f"{listed}/config.json holds no JSON object",
        broken / "config.json": "is a file; give --model-path the directory",
    }
    for path, text in expected.items():
        facts = make_facts(path)
        texts = refused(facts, "model")
        assert len(texts) == 1 and text in texts[0], texts
        (topology,) = [f for f in findings(facts) if f.gate == "topology"]
        assert topology.passed and "experts not checked" in topology.message
    assert "can be fetched from the Hugging Face Hub" in refused(make_facts("no/such"), "model")[0]


def test_model_gate_wants_the_weights(tmp_path: Path) -> None:
    bare = write_model(tmp_path / "bare", weights=False)
    (bare / "pytorch_model.bin").touch()
    assert "has no .safetensors file; convert the weights" in refused(make_facts(bare), "model")[0]
    assert not refused(make_facts(bare, "--load-format", "dummy"), "model")
    sharded = write_model(tmp_path / "sharded", weights=False)
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors", "c": "2.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    tensors = whole_tensors(MODEL)
    names = sorted(tensors)
    write_weights(sharded / "1.safetensors", {name: tensors[name] for name in names[::2]})
    text = f"{sharded} lacks 1 of the files its index names, first 2.safetensors"
    assert refused(make_facts(sharded), "model") == [f"{text}; complete the download"]
    write_weights(sharded / "2.safetensors", {name: tensors[name] for name in names[1::2]})
    assert not refused(make_facts(sharded), "model")


def test_overrides_count(tmp_path: Path) -> None:
    flags = ("--json-model-override-args", '{"num_experts": 12}', "--afd-ffn-ranks", "8")
    texts = refused(make_facts(write_model(tmp_path), *flags), "topology")
    assert "12 experts do not divide over 8 FFN ranks" in texts[0]


BAD_TOPOLOGIES = [
    (("--afd-ffn-ranks", "3"), "16 experts do not divide over 3 FFN ranks"),
    (("--afd-ffn-ranks", "5"), "choose a product out of 1, 2, 4, 8, 16"),
    (("--afd-attention-tp", "16"), "8 attention heads do not divide over --afd-attention-tp 16"),
    (("--afd-attention-ranks", "64"), "65 ranks would start on this machine's CPU, each a process"),
    (("--device", "npu"), "AFD does not run on --device npu; use cuda or cpu"),
]


@pytest.mark.parametrize(("flags", "expected"), BAD_TOPOLOGIES)
def test_topology_gate_refuses(tmp_path: Path, flags: tuple[str, ...], expected: str) -> None:
    texts = refused(make_facts(write_model(tmp_path), *flags), "topology")
    assert len(texts) == 1 and expected in texts[0], texts


def test_topology_gate_checks_key_value_heads(tmp_path: Path) -> None:
    model = write_model(tmp_path, num_attention_heads=12, num_key_value_heads=4, num_experts=18)
    texts = refused(make_facts(model, "--afd-attention-tp", "6"), "topology")
    assert texts == [
        "4 key-value heads neither divide over nor into --afd-attention-tp 6; "
        "choose a divisor or a multiple of 4"
    ]
    assert not refused(make_facts(model, "--afd-attention-tp", "2"), "topology")
    model = write_model(tmp_path, num_attention_heads=16, num_key_value_heads=2)
    assert not refused(make_facts(model, "--afd-attention-tp", "4"), "topology")


@pytest.mark.parametrize(
    ("flags", "gpus", "fits"),
    [
        (("--afd-attention-ranks", "7"), 8, True),
        (("--afd-attention-ranks", "8"), 8, False),
        (("--afd-attention-tp", "2"), 4, True),
        (("--afd-attention-tp", "2"), 3, False),
        (("--base-gpu-id", "1"), 2, False),
        (("--gpu-id-step", "3"), 4, True),
        (("--gpu-id-step", "3"), 3, False),
        (ONE_OF_EACH, 0, False),
    ],
)
def test_topology_gate_counts_gpus(
    tmp_path: Path, flags: tuple[str, ...], gpus: int, fits: bool
) -> None:
    texts = refused(
        make_facts(write_model(tmp_path), *flags, machine=Machine((H200,) * gpus)), "topology"
    )
    assert bool(texts) != fits
    assert fits or f"this machine has {gpus}; lower --afd-attention-ranks" in texts[0]


@pytest.mark.parametrize(("role", "rank", "gpus"), [("attention", "0", 2), ("ffn", "1", 1)])
def test_topology_gate_counts_this_commands_gpus(
    tmp_path: Path, role: str, rank: str, gpus: int
) -> None:
    flags = ("--afd-attention-ranks", "2", "--afd-role", role, "--nnodes", "2")
    flags += ("--node-rank", rank, "--dist-init-addr", f"127.0.0.1:{free_port()}")
    for present in (gpus, gpus - 1):
        machine = Machine((H200,) * present)
        texts = refused(make_facts(write_model(tmp_path), *flags, machine=machine), "topology")
        assert bool(texts) == (present < gpus), texts


def test_topology_gate_refuses_other_accelerators(tmp_path: Path) -> None:
    facts = make_facts(write_model(tmp_path), machine=Machine(other_accelerator=True))
    assert refused(facts, "topology") == ["AFD runs on CUDA devices and on CPUs; pass --device cpu"]


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
    ({}, ("--afd-max-tokens-per-rank", "127"), GPUS, "(2 x 127) to be a multiple of 4; choose"),
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
    ("flags", "environment", "expected"),
    [
        (("--enable-hicache",), {}, "--enable-hierarchical-cache asks for Hierarchical cache"),
        (("--speculative-algorithm", "EAGLE3"), {}, "--speculative-algorithm EAGLE3 asks for Spec"),
        (("--cuda-graph-backend-decode=full",), {}, "--cuda-graph-backend-decode full asks for"),
        (("--enable-two-batch",), {}, "--enable-two-batch-overlap asks for Two-batch"),
        (("--pp-size", "2"), {}, "--pp-size 2 asks for Pipeline parallelism"),
        ((), {"SGLANG_RUST_SERVER": "true"}, "SGLANG_RUST_SERVER=true asks for Rust server"),
    ],
)
def test_execution_gate_refuses_by_name(
    tmp_path: Path, flags: tuple[str, ...], environment: dict[str, str], expected: str
) -> None:
    texts = refused(make_facts(write_model(tmp_path), *flags, **environment), "execution mode")
    assert len(texts) == 1 and expected in texts[0], texts


def test_execution_gate_passes_what_leaves_features_off(tmp_path: Path) -> None:
    flags = ("--pp-size", "1", "--cuda-graph-backend-decode", "disabled", "--disable-cuda-graph")
    flags += ("--enable-metrics", "--load-balance-method", "total_tokens", "--max-total-tokens=9")
    facts = make_facts(write_model(tmp_path), *flags, SGLANG_RUST_SERVER="0")
    assert not refused(facts, "execution mode")


@contextmanager
def listening(offset: int = 0) -> Iterator[int]:
    """Yield a port such that of its `ports_of` only the one `offset` above it is taken."""
    port = free_port()
    with socket.socket() as server:
        server.bind(("127.0.0.1", port + offset))
        server.listen()
        yield port


@pytest.mark.parametrize(
    ("offset", "use"),
    [
        (0, "HTTP server"),
        (233, "the rendezvous of the ranks"),
        (234, "messages between the processes"),
        (239, "messages between the processes"),
    ],
)
def test_address_gate_finds_a_taken_port(tmp_path: Path, offset: int, use: str) -> None:
    with listening(offset) as port:
        texts = refused(make_facts(write_model(tmp_path), "--port", str(port)), "addresses")
    taken = f"{use}: port {port + offset} of 127.0.0.1 is taken by another process"
    assert texts == [f"{taken}; stop that process, or choose another --port"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--port", "70000"), "--port 70000 is no port; choose one of 1 to 65535"),
        (("--port", "http"), "--port is 'http'; it must be an integer"),
        (("--host", "203.0.113.7"), "--host: 203.0.113.7 is no address of this machine; give one"),
        (("--host", "no.such.invalid"), "--host: no.such.invalid cannot be resolved"),
    ],
)
def test_address_gate_refuses(tmp_path: Path, flags: tuple[str, ...], expected: str) -> None:
    texts = refused(make_facts(write_model(tmp_path), *flags), "addresses")
    assert len(texts) == 1 and expected in texts[0], texts


@pytest.mark.parametrize(
    ("role", "address", "expected"),
    [
        ("attention", "203.0.113.7:5000", "203.0.113.7 is no address of this machine, where"),
        ("attention", "no.such.invalid:5000", "no.such.invalid cannot be resolved"),
        ("ffn", "no.such.invalid:5000", "give the attention command's HOST:PORT"),
        ("ffn", "somewhere", "'somewhere' is not HOST:PORT"),
        ("ffn", "::1:5000", "put an IPv6 address in brackets"),
        ("ffn", "203.0.113.7:5000", None),
        ("attention", "127.0.0.1:65530", "would need port 65543, which is none; choose another"),
    ],
)
def test_address_gate_checks_the_peer_address(
    tmp_path: Path, role: str, address: str, expected: str | None
) -> None:
    rank = "0" if role == "attention" else "1"
    flags = ("--afd-role", role, "--nnodes", "2", "--node-rank", rank, "--dist-init-addr", address)
    texts = refused(make_facts(write_model(tmp_path), *flags), "addresses")
    assert (expected is None and not texts) or expected in texts[0], texts


@pytest.mark.parametrize("offset", [0, 1, 6, 13])
def test_rendezvous_ports_are_the_attention_commands(tmp_path: Path, offset: int) -> None:
    with listening(offset) as port:
        address = f"127.0.0.1:{port}"
        for role, rank in (("attention", "0"), ("ffn", "1")):
            flags = ("--afd-role", role, "--nnodes", "2", "--node-rank", rank)
            facts = make_facts(write_model(tmp_path), *flags, "--dist-init-addr", address)
            texts = refused(facts, "addresses")
            if role == "ffn":
                assert not texts
            else:
                assert f"port {port + offset} of 127.0.0.1 is taken" in texts[0]


@pytest.mark.parametrize("role", ["attention", "ffn"])
def test_http_port_among_the_rendezvous_ports_is_refused(tmp_path: Path, role: str) -> None:
    rank = "0" if role == "attention" else "1"
    flags = ("--afd-role", role, "--nnodes", "2", "--node-rank", rank)
    for offset, collides in ((0, True), (1, True), (6, True), (7, False), (13, True)):
        port = free_port()
        facts = make_facts(
            write_model(tmp_path),
            *flags,
            *("--dist-init-addr", f"127.0.0.1:{port}", "--port", str(port + offset)),
        )
        found = [text for text in refused(facts, "addresses") if "follow from" in text]
        assert bool(found) is collides, offset


def test_addresses_parse() -> None:
    assert parse_address("host:5000") == ("host", 5000)
    assert parse_address("[::1]:5000") == ("::1", 5000)
    for text in ("host", ":5000", "host:", "host:0", "host:65536", "host:http"):
        with pytest.raises(ValueError, match="is not HOST:PORT"):
            parse_address(text)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), st.integers(1, 256))
def test_experts_partition_exactly_or_are_refused(
    attention: int, ffn: int, tp: int, experts: int
) -> None:
    topology = Topology(attention, ffn, tp)
    if experts % (ffn * tp):
        with pytest.raises(TopologyError, match=f"{experts} experts do not divide"):
            topology.experts_per_rank(experts)
        return
    owned = [expert for rank in topology.ffn_world for expert in topology.experts_of(rank, experts)]
    assert owned == list(range(experts))
    for rank in topology.attention_world:
        with pytest.raises(TopologyError, match="owns no experts"):
            topology.experts_of(rank, experts)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4), st.integers(1, 64))
def test_topology_gate_agrees_with_the_topology(
    attention: int, ffn: int, tp: int, experts: int
) -> None:
    flags = ["--afd-attention-ranks", str(attention), "--afd-ffn-ranks", str(ffn)]
    command = parse([*flags, "--afd-attention-tp", str(tp)], transport="gloo")
    assert command.config is not None
    config = {**MODEL, "num_experts": experts, "num_attention_heads": 12, "num_key_value_heads": 12}
    facts = Facts(command.config, (), Checkpoint("x", config), Machine(), on_cpu=True)
    assert bool(list(GATES[1].refusals(facts))) == bool(experts % (ffn * tp))


def test_facts_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        num_hidden_layers=6,
        num_experts=24,
        num_experts_per_tok=3,
        hidden_size=64,
        moe_intermediate_size=32,
        decoder_sparse_step=2,
        mlp_only_layers=[3],
        architectures=["Qwen3MoeForCausalLM"],
    )
    config.save_pretrained(tmp_path)
    ours = read_checkpoint(["--model-path", str(tmp_path)]).moe_facts()
    assert ours == family_of("Qwen3MoeForCausalLM").facts(config)
    assert ours == MoeFacts((1, 5), 24, 3, 64, 32)


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


@pytest.mark.parametrize("flag", ["--disable-overlap-schedule", "--enable-mixed-chunk"])
def test_what_takes_one_lane_is_refused_with_more(tmp_path: Path, flag: str) -> None:
    model = write_model(tmp_path)
    texts = refused(make_facts(model, flag, "--afd-lanes", "2"), "execution mode")
    assert len(texts) == 1 and f"{flag} does not go with --afd-lanes 2" in texts[0]
    assert not refused(make_facts(model, flag), "execution mode")
    assert not refused(make_facts(model, "--afd-lanes", "2"), "execution mode")


def test_deepep_takes_one_lane(tmp_path: Path) -> None:
    facts = make_facts(write_model(tmp_path), "--afd-lanes", "2", machine=GPUS)
    [text] = refused(facts, "transport")
    assert text.startswith("deepep takes one lane, not --afd-lanes 2: its kernels fill the GPU")
    assert "use --afd-lanes 1, or use --afd-transport nvlink or gloo" in text


def test_buffers_of_all_lanes_count(tmp_path: Path) -> None:
    model, kept = write_model(tmp_path), []
    for lanes in ("1", "4"):
        facts = make_facts(model, "--afd-transport", "nvlink", "--afd-lanes", lanes, machine=GPUS)
        assert facts.moe is not None
        kept.append(estimate(facts.config, facts.moe, itemsize=2, fp8=False).ffn.kept)
    assert kept[1] > kept[0]
