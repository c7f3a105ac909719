"""Installed but not asked for, the package changes nothing: SGLang is itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.layouts import STOCK, on
from tests.support.reference import Expect, check
from tests.support.workload import prompts
from tests.support.world import World

pytestmark = pytest.mark.integration

PROBE = """
import importlib.metadata, json, os, sys
points = importlib.metadata.entry_points(group="sglang.srt.plugins")
assert "sglang_afd" in points.names, "the package is not installed"
if os.environ.get("SGLANG_AFD_CPU") == "1":
    from sglang_afd.platform.defaults import cpu_environment
    os.environ.update(cpu_environment(1))
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
load_plugins()
print(json.dumps({
    "patched": sorted(HookRegistry._patched),
    "loaded": sorted(name for name in sys.modules if name.startswith("sglang_afd.")),
}))
"""


def probe(**environment: str) -> dict[str, list[str]]:
    """Load SGLang's plugins in a fresh process: what is hooked, which of our modules are there."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SGLANG", "SGL_"))}
    result = subprocess.run(
        [sys.executable, "-c", PROBE],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def probes() -> dict[str, dict[str, list[str]]]:
    """What `probe` finds without and on the CPU platform; side by side, for imports take long."""
    with ThreadPoolExecutor(2) as pool:
        plain, cpu = pool.submit(probe), pool.submit(probe, SGLANG_AFD_CPU="1")
        return {"plain": plain.result(), "cpu": cpu.result()}


def test_no_hook_without_a_deployment(probes: dict[str, dict[str, list[str]]]) -> None:
    found = probes["plain"]
    assert found["patched"] == []
    upstream = [name for name in found["loaded"] if name.startswith("sglang_afd.upstream.")]
    assert set(upstream) <= {"sglang_afd.upstream.hooks"}, "AFD's hooks are not even imported"


def test_only_platform_hooks_on_the_cpu(probes: dict[str, dict[str, list[str]]]) -> None:
    """On a CPU the reference platform mends what SGLang lacks there, and AFD adds nothing."""
    from sglang_afd.platform.hooks import HOOKS

    assert probes["cpu"]["patched"] == sorted({hook.target for hook in HOOKS})


@on(STOCK)
def test_stock_server(world: World, expect: Expect) -> None:
    """The launcher without ``--afd-*`` serves plain SGLang: one rank that holds everything."""
    info = world.get("/server_info").json()
    assert info["tp_size"] == 1 and info["moe_a2a_backend"] == "none"
    assert "afd" not in info["internal_states"][0]
    check(world, expect, prompts(), 24)
