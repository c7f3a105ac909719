"""The manifests in docs/deploy: what they run are two commands that fit each other."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_afd import on_ray
from sglang_afd.config import AfdConfig
from sglang_afd.flags import parse

pytestmark = pytest.mark.unit

DOCS = Path(__file__).resolve().parents[2] / "docs"
MANIFEST = DOCS / "deploy" / "leader_worker_set.yaml"
SLURM = DOCS / "deploy" / "slurm.sh"


def config_of(args: list[str]) -> AfdConfig:
    config = parse(args, transport="nvlink").config
    assert config is not None
    return config


@pytest.fixture
def group() -> dict[str, Any]:
    first, service = yaml.safe_load_all(MANIFEST.read_text())
    assert (first["kind"], service["kind"]) == ("LeaderWorkerSet", "Service")
    labels = first["spec"]["leaderWorkerTemplate"]["leaderTemplate"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    template: dict[str, Any] = first["spec"]["leaderWorkerTemplate"]
    return template


def test_the_pods_of_a_group_are_one_deployment(group: dict[str, Any]) -> None:
    assert group["size"] == 2 and group["restartPolicy"] == "RecreateGroupOnPodRestart"
    pods = [group[name]["spec"]["containers"][0] for name in ("leaderTemplate", "workerTemplate")]
    configs = []
    for pod in pods:
        assert pod["command"] == ["python", "-m", "sglang_afd.launch_server"]
        config = config_of(pod["args"])
        gpus = int(pod["resources"]["limits"]["nvidia.com/gpu"])
        assert len(config.local_ranks()) == gpus
        configs.append(config)
    attention, ffn = configs
    assert attention.agreement() == ffn.agreement()
    same = [{a for a in pod["args"] if "dist-init" in a or "model-path" in a} for pod in pods]
    assert same[0] == same[1]
    leader = group["leaderTemplate"]["spec"]["containers"][0]
    named = {port["name"]: port["containerPort"] for port in leader["ports"]}
    assert f"--port={named['http']}" in leader["args"]
    assert any(arg.endswith(f":{named['meeting']}") for arg in leader["args"])


def test_volumes_that_are_mounted_exist(group: dict[str, Any]) -> None:
    for name in ("leaderTemplate", "workerTemplate"):
        spec = group[name]["spec"]
        mounted = {mount["name"] for mount in spec["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}


def test_slurm_runs_two_commands_that_fit(tmp_path: Path) -> None:
    """The script itself, with stand-ins for what Slurm gives it."""
    calls = tmp_path / "calls"
    for name, does in (
        ("srun", f'printf "%s\\n" "$*" >> {shlex.quote(str(calls))}'),
        ("scontrol", "echo node7"),
    ):
        tool = tmp_path / name
        tool.write_text(f"#!/bin/bash\n{does}\n")
        tool.chmod(0o755)
    ran = subprocess.run(
        ["bash", str(SLURM), "--model-path", "/m"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST_HET_GROUP_0": "node[7-8]"},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ran.returncode == 0, ran.stderr
    lines = sorted(calls.read_text().splitlines())
    gpus = [int(found) for found in re.findall(r"--gpus-per-node=(\d+)", SLURM.read_text())]
    configs = []
    for line, wanted in zip(lines, gpus, strict=True):
        words = line.split()
        assert "node7:25000" in words and "/m" in words
        config = config_of(words[words.index("sglang_afd.launch_server") + 1 :])
        assert len(config.local_ranks()) == wanted
        configs.append(config)
    assert configs[0].agreement() == configs[1].agreement()


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
def test_slurm_script_is_clean() -> None:
    subprocess.run(["shellcheck", str(SLURM)], check=True, timeout=60)


def test_what_ray_is_said_to_carry() -> None:
    said = (DOCS / "deploy.md").read_text()
    assert all(f"`{prefix}`" in said for prefix in on_ray._CARRIED)
