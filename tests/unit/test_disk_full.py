"""Where the disk is full a record or report is missing, never cut short; and that is said."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import pair
from benchmarks import record as benchmark_record
from sglang_afd.observe import recording
from sglang_afd.plan import profile
from sglang_afd.validate import __main__ as validate
from sglang_afd.validation import report
from sglang_afd.whole_file import write_whole
from tests.support import benchmark_records, validation_reports

pytestmark = pytest.mark.unit

LIMIT = 100  # bytes that a file may have
LONG: Any = {"rows": ["x" * LIMIT]}
WRITERS: dict[str, Callable[[Path], Any]] = {
    "validation": lambda folder: report.write(validation_reports.make(), folder / "report.json"),
    "benchmark": lambda folder: benchmark_record.save(benchmark_records.record(), folder),
    "pair": lambda folder: pair.save(LONG, folder / "pair.json"),
    "profile": lambda folder: profile.write_profile(
        profile.read_profile("h200"), folder / "gpu.json"
    ),
    "layers": lambda folder: recording.write(folder, "rank0-0", {"0.output": torch.zeros(9, 99)}),
}


def on_a_full_disk(write: Callable[[], Any]) -> int:
    """Run `write` where no file can have more than `LIMIT` bytes; the errno it ends with, or 0."""
    pid = os.fork()
    if not pid:
        code = 255
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))
            write()
            code = 0
        except OSError as error:
            code = error.errno or 254
        except Exception as error:  # safetensors has errors of its own
            code = 1 if "large" in str(error) else 253
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("name", WRITERS)
def test_no_half_file(name: str, tmp_path: Path) -> None:
    """The error is raised, and nothing lies where a reader would look."""
    assert 0 < on_a_full_disk(lambda: WRITERS[name](tmp_path)) < 253
    assert not [file for file in tmp_path.rglob("*") if file.suffix in (".json", ".safetensors")]


def test_an_older_file_stays(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    write_whole(file, b"old")
    assert on_a_full_disk(lambda: write_whole(file, b"x" * 1000))
    assert file.read_bytes() == b"old" and list(tmp_path.iterdir()) == [file]
    with pytest.raises(FileExistsError):
        write_whole(file, b"new", new=True)
    assert file.read_bytes() == b"old" and list(tmp_path.iterdir()) == [file]


def test_validation_shows_what_it_cannot_write(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hours of work are not lost with the file: the verdict is shown, and the status is 1."""

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "report.json"))

    monkeypatch.setattr(validate, "resolve", lambda *_, **__: None)
    monkeypatch.setattr(validate, "run", lambda *_: validation_reports.make())
    monkeypatch.setattr(report, "write", full)
    assert validate.main(["--work", str(tmp_path), "--out", str(tmp_path / "report.json")]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "PASS" in shown and "No space left on device" in shown and "make room" in shown
