"""Every gate but the transport's: what it refuses, with message and mend, and what it passes."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_afd.addresses import parse_address
from sglang_afd.checkpoint import Checkpoint, read_checkpoint
from sglang_afd.facts import Facts
from sglang_afd.families import MoeFacts, family_of
from sglang_afd.flags import parse
from sglang_afd.gate import GATES, findings
from sglang_afd.machine import Machine
from sglang_afd.topology import Topology, TopologyError
from tests.support.gate_facts import (
    FP8,
    GPUS,
    H200,
    MODEL,
    ONE_OF_EACH,
    free_port,
    make_facts,
    refused,
    whole_tensors,
    write_model,
    write_weights,
)


def test_all_gates_pass_in_order(tmp_path: Path) -> None:
    for machine in (None, GPUS):
        found = findings(make_facts(write_model(tmp_path), machine=machine))
        assert [f.gate for f in found] == [
            "model",
            "topology",
            "transport",
            "execution mode",
            "accuracy",
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


@pytest.mark.parametrize(
    ("flags", "environment", "expected"),
    [
        (("--enable-hicache",), {}, "--enable-hierarchical-cache asks for Hierarchical cache"),
        (("--speculative-algorithm", "NGRAM"), {}, "--speculative-algorithm NGRAM asks for Other"),
        (("--cuda-graph-backend-prefill=full",), {}, "--cuda-graph-backend-prefill full asks for"),
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


@pytest.mark.parametrize("flag", ["--disable-overlap-schedule", "--enable-mixed-chunk"])
def test_what_takes_one_lane_is_refused_with_more(tmp_path: Path, flag: str) -> None:
    model = write_model(tmp_path)
    texts = refused(make_facts(model, flag, "--afd-lanes", "2"), "execution mode")
    assert len(texts) == 1 and f"{flag} does not go with --afd-lanes 2" in texts[0]
    assert not refused(make_facts(model, flag), "execution mode")
    assert not refused(make_facts(model, "--afd-lanes", "2"), "execution mode")


def test_gpt_oss_is_refused_by_name(tmp_path: Path) -> None:
    """A published config.json of the family."""
    from transformers import GptOssConfig

    config = GptOssConfig(architectures=["GptOssForCausalLM"]).to_dict()
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(config))
    (model / "tokenizer.json").touch()
    [refusal] = refused(make_facts(model), "model")
    assert "does not serve GptOssForCausalLM" in refusal
    assert "start without --afd-* flags" in refusal
