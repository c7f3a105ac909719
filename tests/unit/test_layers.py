"""House rule: what is farther in never imports what is farther out."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
LAYERS: tuple[tuple[str, ...], ...] = (
    # from the inside out; members of a layer do not know each other
    (
        *("topology", "kernels", "families", "addresses", "machine", "embedded", "placement"),
        *("causes", "identity", "lanes", "patches", "progress", "rollcall", "whole_file"),
    ),
    ("emulation", "model_fields", "validation"),
    ("config",),
    ("dispatch",),
    ("observe",),
    ("command_line", "context", "ffn"),
    ("speculation",),
    ("attention", "checkpoint", "flags", "transports"),
    ("facts", "features"),
    ("accuracy_gate", "cad", "transport_gate", "weights"),
    ("spec",),
    ("model_gate", "plan"),
    ("weight_update",),
    ("upstream",),
    ("platform", "running"),
    ("gate", "on_ray"),
    ("plugin",),
    ("start",),
    ("on_nsys",),
    ("front",),
    ("check", "engine", "hook_report", "launch_server", "trace", "validate"),
    ("demo",),
    ("__init__",),
)
LAYER = {name: layer for layer, names in enumerate(LAYERS) for name in names}


def parts() -> Iterator[tuple[str, Path]]:
    """Every file with the module or package of `sglang_afd` that it belongs to."""
    for path in sorted((ROOT / "sglang_afd").rglob("*.py")):
        yield path.relative_to(ROOT / "sglang_afd").parts[0].removesuffix(".py"), path
    for folder in ("kernels", "spec", "patches"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield folder, path


def imported(source: str) -> set[str]:
    """The modules and packages of `sglang_afd` that a file imports, anywhere in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "sglang_afd":
            names |= {f"sglang_afd.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, "imports are absolute"
            names.add(node.module or "")
    return {name.split(".")[1] for name in names if name.startswith("sglang_afd.")}


def test_every_part_has_a_layer() -> None:
    assert {part for part, _ in parts()} == set(LAYER)


def test_nothing_imports_what_is_farther_out() -> None:
    wrong = [
        f"{path.relative_to(ROOT)} imports {other}"
        for part, path in parts()
        for other in sorted(imported(path.read_text()) - {part})
        if LAYER[other] >= LAYER[part]
    ]
    assert not wrong


def test_imports_are_seen_wherever_they_stand() -> None:
    source = (
        "import sglang_afd.config\n"
        "from sglang_afd import topology, embedded\n"
        "import sglang\n"
        "def f():\n"
        "    from sglang_afd.upstream.hooks import Hook\n"
    )
    assert imported(source) == {"config", "topology", "embedded", "upstream"}
