"""The dashboard and the alert rules: well formed, and of series that a server has."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from sglang_afd.observe.metrics import LABELS, SERIES

pytestmark = pytest.mark.unit

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "monitoring"
SUFFIXES = {"counter": ("_total",), "histogram": ("_sum", "_count", "_bucket")}
OURS = {f"sglang_afd_{s.name}{end}": s for s in SERIES for end in SUFFIXES[s.kind]}


def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    return [p for p in json.loads((FOLDER / "dashboard.json").read_text())["panels"] if "type" in p]


def queries() -> Iterator[str]:
    yield from (rule["expr"] for rule in rules())
    for panel in panels():
        yield from (target["expr"] for target in panel.get("targets", ()))
    document = (FOLDER.parent / "monitoring.md").read_text()
    yield from re.findall(r"^\| [^|]+ \| `([^`]*rate\([^`]*)` \|$", document, re.MULTILINE)


def test_every_rule_and_panel_says_what_it_is() -> None:
    assert len(rules()) >= 4 and len(panels()) >= 8
    for rule in rules():
        assert rule["alert"].startswith("Afd") and rule["for"] and rule["labels"]["severity"]
        assert rule["annotations"]["summary"] and rule["annotations"]["description"]
    for panel in panels():
        assert panel["title"] and panel["gridPos"]
        assert all(target["expr"] for target in panel.get("targets", ()))
    assert len({panel["id"] for panel in panels()}) == len(panels())


@pytest.mark.parametrize("query", sorted(set(queries())))
def test_queries_are_of_series_that_there_are(query: str) -> None:
    assert query.count("(") == query.count(")") and query.count("[") == query.count("]")
    named = re.findall(r"sglang_afd_\w+", query)
    theirs = re.findall(r"sglang:\w+", query)
    assert named or theirs
    for name in named:
        assert name in OURS, f"no series {name}"
    spec = find_spec("sglang")
    assert spec is not None and spec.origin is not None
    collector = Path(spec.origin).parent / "srt" / "observability"
    source = "".join(file.read_text() for file in sorted(collector.glob("*.py")))
    for name in theirs:
        assert f'"{name.removesuffix("_total")}' in source, f"SGLang has no series {name}"


@pytest.mark.parametrize("query", sorted(set(queries())))
def test_queries_group_by_labels_that_the_series_have(query: str) -> None:
    if "sglang:" in query and "sglang_afd_" not in query:
        return
    labels = {label for s in SERIES for label in s.labels} | {*LABELS, "le"}
    wanted = {
        label.strip()
        for group in re.findall(r"by \(([^)]*)\)", query)
        for label in group.split(",")
    }
    wanted |= set(re.findall(r"(\w+)=~?\"", query))
    assert wanted <= labels, wanted - labels
