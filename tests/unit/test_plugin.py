"""In a deployment SGLang must not run without our hooks, whatever keeps it from them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sglang_afd.config import ENV
from sglang_afd.plugin import CPU_ENV

pytestmark = pytest.mark.unit

DEPLOYMENT = {ENV: '{"attention_ranks":1,"ffn_ranks":1}'}
CODE = """
import sys
from sglang_afd import launch_server, start
from sglang_afd.upstream import server
start.prepare = lambda argv, program: start.Command(None, [])
server.parse = lambda args: sys.exit("installed" if args == [] else "?")
launch_server.main([])
"""


def launch(**environment: str) -> str:
    """The last line of a launcher that goes no further than SGLang's plugins."""
    left = {n: v for n, v in os.environ.items() if not n.startswith(("SGLANG_", "CUDA_"))}
    run = subprocess.run(
        [sys.executable, "-c", CODE],
        env={**left, **environment},
        capture_output=True,
        text=True,
        timeout=180,
    )
    return run.stderr.splitlines()[-1]


@pytest.mark.parametrize("asks", [{CPU_ENV: "1", **DEPLOYMENT}, {CPU_ENV: "1"}], ids=["afd", "cpu"])
def test_a_list_of_plugins_without_ours_is_named(asks: dict[str, str]) -> None:
    cpu = {"SGLANG_PLATFORM": "sglang_afd_cpu", **asks}
    assert launch(**cpu, SGLANG_PLUGINS="other") == (
        "launch_server: error: SGLang has not loaded its plugin sglang_afd: SGLANG_PLUGINS=other "
        "leaves it out; add sglang_afd to it, or unset it"
    )


def test_with_ours_or_with_nothing_to_install_it_goes_on() -> None:
    cpu = {"SGLANG_PLATFORM": "sglang_afd_cpu", CPU_ENV: "1"}
    assert launch(**cpu, **DEPLOYMENT, SGLANG_PLUGINS="other, sglang_afd") == "installed"
    assert launch(SGLANG_PLUGINS="other", SGLANG_USE_CPU_ENGINE="0") == "installed"
