"""What of ours listens or is read off the network: one socket, at the given host, and no pickle."""

from __future__ import annotations

import ast
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import zmq

from sglang_afd.running import free_port
from sglang_afd.upstream import handshake

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
LISTENING = {
    "sglang_afd/addresses.py": "tries whether a port is free, and closes it",
    "sglang_afd/upstream/handshake.py": "the two commands' meeting",
}
UNPICKLING = ("pickle", "cloudpickle", "dill", "marshal", "shelve")
CALLS = ("recv_pyobj", "send_pyobj")
OBJECT_CALLS = {
    f"{name}{end}"
    for name in ("all_gather", "gather", "broadcast", "scatter", "send", "recv")
    for end in ("_object", "_object_list")
}


def found(source: str) -> Iterator[str]:
    """What a module does of which there is a rule."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
            yield from (name for name in names if name.split(".")[0] in UNPICKLING)
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            last = name.split(".")[-1]
            if name in ("eval", "exec", "torch.load") or last in CALLS:
                yield name
            elif last in ("bind", "listen", "get_zmq_socket", "start_server", "create_server"):
                yield "listens"
            elif last in OBJECT_CALLS:
                yield last


def test_the_rule_sees_what_it_must() -> None:
    lines = {
        "import pickle": "pickle",
        "from cloudpickle import loads": "cloudpickle",
        "s.recv_pyobj()": "s.recv_pyobj",
        "eval(x)": "eval",
        "torch.load(f)": "torch.load",
        "s.bind(('', 1))": "listens",
        "dist.broadcast_object_list(x)": "broadcast_object_list",
    }
    for line, expected in lines.items():
        assert list(found(line)) == [expected]
    assert list(found("model.eval()\nx.load(y)\nsocket.recv()")) == []


def test_what_listens_is_named_here_and_nothing_reads_objects() -> None:
    seen: dict[str, set[str]] = {}
    for folder in ("sglang_afd", "kernels", "spec", "patches"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if hits := set(found(path.read_text())):
                seen[path.relative_to(ROOT).as_posix()] = hits
    assert seen == {path: {"listens"} for path in LISTENING}


def test_the_meeting_listens_at_the_given_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt import runtime_context
    from sglang.srt.managers.data_parallel_controller import DP_ATTENTION_HANDSHAKE_PORT_DELTA

    port = free_port()
    address = f"127.0.0.1:{port - DP_ATTENTION_HANDSHAKE_PORT_DELTA}"
    parallel = SimpleNamespace(dist_init_addr=address)
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: parallel)
    context = zmq.Context()
    try:
        kept, _ = handshake._socket(SimpleNamespace(context=context), True)
        listening = [
            connection.laddr
            for connection in psutil.Process().net_connections("inet")
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        ]
        assert not kept.closed
        assert [(laddr.ip, laddr.port) for laddr in listening] == [("127.0.0.1", port)]
        with pytest.raises(OSError):
            socket.create_connection(("127.0.0.2", port), timeout=2).close()
    finally:
        context.destroy(linger=0)
