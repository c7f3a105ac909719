"""docs/architecture.md names files and names of the code; its figure is text in shades of grey."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from functools import cache
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "architecture.md"
FIGURE = ROOT / "docs" / "architecture.svg"
FOREIGN = {"run_server", "init_model_config", "init_model_worker", "__init__", "run_event_loop"}
"""SGLang's, which upstream/ names in strings."""
QUOTED = sorted(set(re.findall(r"`([\w./*-]+)`", DOCUMENT.read_text())))
FILES = [name for name in QUOTED if name.endswith((".py", "/"))]
NAMES = [name for name in QUOTED if not name.startswith("-") and name not in {*FILES, *FOREIGN}]


@cache
def source() -> str:
    files = (path for d in ("sglang_afd", "kernels") for path in sorted((ROOT / d).rglob("*.py")))
    return "\n".join(path.read_text() for path in files)


@pytest.mark.parametrize("name", FILES)
def test_file_exists(name: str) -> None:
    places = (ROOT, ROOT / "sglang_afd", ROOT / "sglang_afd" / "dispatch", ROOT / "sglang_afd/ffn")
    assert any((place / name).exists() for place in (*places, ROOT / "sglang_afd/attention")), name


@pytest.mark.parametrize("name", NAMES)
def test_name_is_in_the_code(name: str) -> None:
    last = name.rpartition(".")[2]
    pattern = rf"(?:def|class) {last}\b|\b{last}(?:: .*)? = |[\"'.]{last}\b"
    assert re.search(pattern, source()), name


def test_foreign_names_are_hooked_or_called() -> None:
    assert set(QUOTED) >= FOREIGN
    for name in FOREIGN:
        assert re.search(rf"\.{name}\"|\b{name}\(", source()), name


def test_figure_is_text_in_grey() -> None:
    tree = ElementTree.parse(FIGURE)
    tags = [element.tag.rpartition("}")[2] for element in tree.iter()]
    assert {"title", "desc", "text"} <= set(tags) and "image" not in tags
    for element in tree.iter():
        for paint in ("fill", "stroke"):
            colour = element.get(paint, "none")
            grey = re.fullmatch(r"#([0-9a-f])\1\1", colour)
            assert colour == "none" or grey, f"{element.tag}: {colour}"
