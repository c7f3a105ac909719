"""``--afd-ray`` on a Ray cluster of three nodes, all on this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tests.support.processes import wait_until
from tests.support.reference import Expect, assert_equal
from tests.support.workload import prompts, send
from tests.support.world import World

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(900)]

START = 500.0  # seconds: Ray's processes and two commands that import SGLang
END_WITHIN = 60.0  # seconds from a node's death to the last process's end


@pytest.fixture
def cluster() -> Iterator[Any]:
    """A head and two more nodes."""
    pytest.importorskip("ray", reason="Ray is not installed (pip install 'sglang_afd[ray]')")
    from ray.cluster_utils import Cluster

    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": False},
    )
    for _ in range(2):
        made.add_node(num_cpus=1)
    yield made
    made.shutdown()


@pytest.fixture
def served(cluster: Any, start: Callable[..., World]) -> World:
    """Two attention ranks and one FFN rank on the cluster."""
    ranks = ["--afd-attention-ranks", "2", "--afd-ffn-ranks", "1", "--dtype", "float32"]
    world = start(["--afd-ray", cluster.address, "--device", "cpu", *ranks])
    return world.wait_healthy(START)


def commands() -> list[psutil.Process]:
    """Role commands that Ray has started, with their ranks."""
    found = []
    for process in psutil.process_iter():
        try:
            line = " ".join(process.cmdline())
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
        if "sglang_afd.launch_server" in line and "--afd-role" in line:
            found += [process, *process.children(recursive=True)]
    return found


def test_tokens_equal_transformers(served: World, expect: Expect) -> None:
    asked = prompts()
    assert_equal(send(served, asked), expect(asked, 64))
    log = served.log
    assert "attention ranks on" in log and "ffn ranks on" in log
    assert "fired up and ready" in log, "what the commands print is shown here"
    os.kill(served.pid, signal.SIGTERM)
    assert served.wait_ended(END_WITHIN) == 0
    assert not commands()


def test_a_killed_node_ends_the_deployment(served: World, cluster: Any) -> None:
    ffn = next(line for line in served.log.splitlines() if "ffn ranks on" in line)
    node_id = ffn.rpartition("(")[2].rstrip(")")
    [node] = [node for node in cluster.list_all_nodes() if node.node_id.startswith(node_id)]
    cluster.remove_node(node, allow_graceful=False)
    assert served.wait_ended(END_WITHIN) == 1
    assert "ffn" in served.log.splitlines()[-1] or "ffn ranks is lost" in served.log
    assert wait_until(lambda: not commands(), END_WITHIN)
