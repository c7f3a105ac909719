"""Requests that AFD refuses, against SGLang's own HTTP application: a 400 with the reason.

The hooks change SGLang for good, so the application runs in a process of its own; no rank starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from sglang_afd.features import FEATURES, refused_request
from sglang_afd.platform.defaults import cpu_environment
from sglang_afd.upstream.ports import first_command_ports, one_command_ports

pytestmark = pytest.mark.upstream

BODIES: dict[str, dict] = {
    "/update_weights_from_tensor": {"serialized_named_tensors": ["eA=="]},
    "/update_weights_from_distributed": {"names": [], "dtypes": [], "shapes": []},
    "/update_weights_from_ipc": {"zmq_handles": {}},
    "/init_weights_update_group": {
        "master_address": "x",
        "master_port": 1,
        "rank_offset": 1,
        "world_size": 2,
    },
    "/destroy_weights_update_group": {},
    "/begin_weight_update": {},
    "/end_weight_update": {},
    "/init_weights_send_group_for_remote_instance": {
        "master_address": "x",
        "ports": "1",
        "group_rank": 0,
        "world_size": 2,
    },
    "/send_weights_to_remote_instance": {"master_address": "x", "ports": "1"},
    "/weights_checker": {"action": "checksum"},
    "/load_lora_adapter": {"lora_name": "x", "lora_path": "x"},
    "/load_lora_adapter_from_tensors": {
        "lora_name": "x",
        "config_dict": {},
        "serialized_named_tensors": ["eA=="],
    },
    "/get_weights_by_name": {"name": "x"},
    "/release_memory_occupation": {},
    "/resume_memory_occupation": {},
    "/start_expert_distribution_record": {},
    "/stop_expert_distribution_record": {},
    "/dump_expert_distribution_record": {},
}
FIELDS: dict[str, dict] = {
    "image_data": {"image_data": "x.png"},
    "video_data": {"video_data": "x.mp4"},
    "audio_data": {"audio_data": "x.wav"},
    "return_routed_experts": {"return_routed_experts": True},
    "return_hidden_states": {"return_hidden_states": True},
    "lora_path": {"lora_path": "x"},
    "sampling_params.beam_width": {"sampling_params": {"beam_width": 2}},
}
PROGRAM = """
import asyncio, json, sys
import httpx
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang_afd.upstream.hooks import install
from sglang_afd.upstream.refusals import HOOKS

install(HOOKS)
manager = object.__new__(TokenizerManager)  # every refused method must answer without its state
http_server.set_global_state(
    http_server._GlobalState(tokenizer_manager=manager, template_manager=None, scheduler_info={})
)


async def main(requests):
    transport = httpx.ASGITransport(app=http_server.app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for path, body in requests:
            answer = await client.post(path, json=body)
            print("ANSWER " + json.dumps([answer.status_code, answer.text]))


asyncio.run(main(json.loads(sys.argv[1])))
"""
PORTS = """
import json
from sglang.srt import server_args as module
print("PORTS " + json.dumps([module.ZMQ_TCP_PORT_DELTA, module.DP_ATTENTION_HANDSHAKE_PORT_DELTA]))
"""


def run(program: str, mark: str, *argv: str) -> list:
    """The JSON values that `program` prints after `mark`."""
    environment = {**os.environ, **cpu_environment(1), "SGLANG_AFD_CPU": "1"}
    command = [sys.executable, "-c", program, *argv]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    lines = [ln.removeprefix(mark) for ln in done.stdout.splitlines() if ln.startswith(mark)]
    assert done.returncode == 0 and lines, done.stderr
    return [json.loads(line) for line in lines]


EMBEDDINGS = ("/encode", "/classify")
"""``/v1/embeddings`` makes the same requests; its handler needs a running server."""


@pytest.fixture(scope="module")
def answers() -> dict[str, tuple[int, str]]:
    """Status and text of the answer to every refused request."""
    generate = {"text": "x", "sampling_params": {}}
    requests = [[path, body] for path, body in BODIES.items()]
    requests += [["/generate", {**generate, **fields}] for fields in FIELDS.values()]
    requests += [[path, {"text": "x"}] for path in EMBEDDINGS]
    printed = run(PROGRAM, "ANSWER ", json.dumps(requests))
    names = [*BODIES, *FIELDS, *EMBEDDINGS]
    return {name: tuple(answer) for name, answer in zip(names, printed, strict=True)}


@pytest.mark.parametrize("request_name", [*BODIES, *FIELDS])
def test_refused_request(answers: dict[str, tuple[int, str]], request_name: str) -> None:
    status, text = answers[request_name]
    feature = refused_request(request_name)
    assert status == 400, text
    mend = feature.mend
    if request_name.startswith("/"):
        mend = mend.replace("leave it out", "do not call it")
    assert f"AFD refuses {request_name}: {feature.reason}; {mend}" in text


@pytest.mark.parametrize("request_name", EMBEDDINGS)
def test_refused_embeddings(answers: dict[str, tuple[int, str]], request_name: str) -> None:
    status, text = answers[request_name]
    assert status == 400, text
    assert f"AFD refuses embeddings: {refused_request(request_name).reason}" in text


def test_every_row_with_requests_is_tried() -> None:
    listed = {name for f in FEATURES if not f.served for name in f.requests}
    assert listed - {"/v1/embeddings"} == {*BODIES, *FIELDS, *EMBEDDINGS}


def test_ports_are_those_sglang_derives() -> None:
    ((from_http, handshake),) = run(PORTS, "PORTS ")
    ports = [port.port for port in one_command_ports(30000)]
    assert ports == list(range(30000 + from_http, 30000 + from_http + 7))
    assert one_command_ports(65500)[0].port == 65500 - from_http
    assert [p.port for p in first_command_ports("h", 65530)] == [
        65530,
        *range(65523, 65529),
        65530 + handshake,
    ]
