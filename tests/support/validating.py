"""Run the validator as its command does, its servers being worlds forked from the zygote."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from sglang_afd import running
from sglang_afd.validate import __main__ as command
from sglang_afd.validate import references
from sglang_afd.validate.settings import Settings
from sglang_afd.validation import report
from tests.support.faults import FAULT
from tests.support.serving import serving
from tests.support.world import Worlds

SHORT = ("--prompts", "short", "--new-tokens", "8", "--dtype", "float32")


class Validated(NamedTuple):
    """How a validation ended."""

    status: int
    report: report.Report


def validator(
    worlds: Worlds, monkeypatch: pytest.MonkeyPatch, cache: Path, folder: Path
) -> Callable[..., Validated]:
    """``validate(*argv, fault=...)``: run it, the candidate having that fault."""
    fault: dict[str, str] = {}

    follow = references._follow

    def follow_once(worker: Sequence[str], settings: Settings, *rest: Any) -> None:
        """What the worker answers and records, out of the cache if it has done so before."""
        *_, program, asked, found = worker
        request = json.loads(Path(asked).read_text())
        recorded = Path(request.pop("folder"))
        digest = hashlib.sha256(json.dumps(request).encode() + Path(program).read_bytes())
        for file in sorted(Path(request["model"]).glob("*.safetensors")):
            digest.update(file.read_bytes())
        kept = cache / digest.hexdigest()[:32]
        if not kept.exists():
            follow(worker, settings, *rest)
            draft = kept.with_suffix(f".draft{os.getpid()}")
            shutil.rmtree(draft, ignore_errors=True)
            shutil.copytree(recorded, draft / "recorded")
            shutil.copy(found, draft / "answer.json")
            try:
                draft.rename(kept)
            except OSError:  # a test beside this one was first
                if not kept.is_dir():
                    raise
        shutil.copytree(kept / "recorded", recorded, dirs_exist_ok=True)
        shutil.copy(kept / "answer.json", found)

    serve = serving(worlds, lambda name: fault if name == "candidate" else {})
    monkeypatch.setattr(running, "serve", serve)
    monkeypatch.setattr(references, "_follow", follow_once)

    def validate(*argv: str, planted: Callable[[], None] | None = None) -> Validated:
        fault.clear()
        if planted is not None:
            fault[FAULT] = planted.__name__
        out = folder / "report.json"
        status = command.main([*argv, "--out", str(out), "--work", str(folder)])
        found = report.read(out)
        assert not report.check(found), "a report must be sound"
        assert command.main(["check", str(out)]) == status
        return Validated(status, found)

    return validate
