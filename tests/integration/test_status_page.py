"""``/afd``: the status, and the page that shows it in a browser."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.layouts import SMALL, on
from tests.support.workload import prompts
from tests.support.world import World

pytestmark = pytest.mark.integration

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@on(SMALL)
def test_status(world: World) -> None:
    """What each rank is, holds and does; recent steps are counted from the first question on."""
    assert world.get("/afd/status").status_code == 200
    world.generate(prompts([10], seed=71)[0], 8, routed_dp_rank=1)
    told = world.get("/afd/status").json()
    first, second, ffn = told["ranks"]
    assert [rank["role"] for rank in told["ranks"]] == ["attention", "attention", "ffn"]
    assert ffn["load"] is None and first["load"]["running_requests"] == 0
    assert second["recent"]["steps"] >= 8 and ffn["recent"]["steps"] >= 8
    for rank in (second, ffn):
        assert 0 < rank["recent"]["working"] + rank["recent"]["exchanging"] <= 1
    assert told["config"]["attention_ranks"] == 2 and told["versions"]["sglang"] == "0.5.23"


@on(SMALL)
def test_the_servers_description_has_our_addresses(world: World) -> None:
    paths = world.get("/openapi.json").json()["paths"]
    assert set(paths["/afd/trace"]) == {"get", "post"} and "/afd/status" in paths


@on(SMALL)
@pytest.mark.parametrize("steps", ["0", "-1", "1001", "many"])
def test_a_trace_has_bounds(world: World, steps: str) -> None:
    assert world.post(f"/afd/trace?steps={steps}").status_code == 400


@on(SMALL)
def test_a_trace_begins_anew(world: World) -> None:
    """The last one asked for counts; what nobody asked for is no empty trace."""
    assert world.post("/afd/trace?steps=500").status_code == 200
    world.generate(prompts([10], seed=72)[0], 4, routed_dp_rank=0)
    assert any(rank["steps"] for rank in world.get("/afd/trace").json()["ranks"])
    assert world.post("/afd/trace?steps=2").status_code == 200
    ranks = world.get("/afd/trace").json()["ranks"]
    assert [(rank["asked"], len(rank["steps"])) for rank in ranks] == [(2, 0)] * 3
    assert "trace" not in world.get("/server_info").json()["internal_states"][0]["afd"]


@on(SMALL)
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on this machine")
def test_page_in_a_browser(world: World, tmp_path: Path) -> None:
    """The page fills itself in; a picture of it is kept among the test's files."""
    assert CHROMIUM is not None
    world.get("/afd/status")
    picture = tmp_path / "afd.png"
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=8000"]
    ran = subprocess.run(
        [CHROMIUM, *flags, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,600"]
        + [f"--screenshot={picture}", "--dump-dom", f"{world.url}/afd"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    shown = ran.stdout
    for told in ("attention rank 0 (world rank 0)", "FFN rank 0 (world rank 2)", "of 16,384"):
        assert told in shown, f"{told} is not in the page: {shown[-3000:]} {ran.stderr[-500:]}"
    assert 'role="alert" hidden=""' in shown, "the page says that something is wrong"
    assert picture.stat().st_size > 10_000
