"""In a deployment SGLang must not run without our hooks, whatever keeps it from them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from sglang_afd.config import ENV
from sglang_afd.plugin import CPU_ENV
from tests.support.processes import wait_until

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


PARENT = """
import multiprocessing, sys, time
from tests.support.orphan import child
process = multiprocessing.get_context("spawn").Process(target=child, args=(sys.argv[1],))
process.start()
print(process.pid, flush=True)
time.sleep(120)
"""


def test_a_process_whose_parent_died_while_it_imported_ends(tmp_path: Path) -> None:
    """SGLang asks to be killed with its parent only then, when there is none left."""
    running = tmp_path / "running"
    command = [sys.executable, "-c", PARENT, str(running)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        try:
            assert wait_until(running.exists, 60)
            parent.kill()
            assert wait_until(lambda: not child.is_running(), 30), "it stays"
        finally:
            parent.kill()
            if child.is_running():
                child.kill()
