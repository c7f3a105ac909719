"""tools/setup_env.py: what is built when, and that a broken build is never used."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "setup_env.py"


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module, with a cache and requirement files of the test's own and no pip."""
    spec = importlib.util.spec_from_file_location("setup_env", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("SGLANG_AFD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "REQUIREMENTS", tmp_path)
    for name in ("cpu.txt", "gpu.txt", "dev.txt"):
        (tmp_path / name).write_text("one==1\n")
    return module


class Builds:
    """Stands in for creating an environment and running pip; counts, and fails when told to."""

    def __init__(self, tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.broken = False
        self.arguments: list[str] = []
        monkeypatch.setattr(tool, "create_venv", self.create)
        monkeypatch.setattr(tool, "pip_install", self.install)

    def create(self, python: str, venv: Path, *, pip: bool) -> None:
        self.count += 1
        (venv / "bin").mkdir(parents=True, exist_ok=True)
        (venv / "bin" / "python").touch()

    def install(self, python: Path, arguments: list[str], log: Path, progress: object) -> None:
        self.arguments = arguments
        time.sleep(0.1)  # long enough for a concurrent set-up to reach the lock
        if self.broken:
            raise SystemExit("pip failed")


@pytest.fixture
def builds(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Builds:
    return Builds(tool, monkeypatch)


def test_built_once(tool: ModuleType, builds: Builds) -> None:
    first = tool.ensure_dependencies(sys.executable, "3.11", "cpu")
    assert tool.ensure_dependencies(sys.executable, "3.11", "cpu") == first
    assert builds.count == 1
    assert builds.arguments[0] == "--no-deps"


def test_broken_build_is_started_afresh(tool: ModuleType, builds: Builds) -> None:
    builds.broken = True
    with pytest.raises(SystemExit):
        tool.ensure_dependencies(sys.executable, "3.11", "cpu")
    builds.broken = False
    tool.ensure_dependencies(sys.executable, "3.11", "cpu")
    assert builds.count == 2


def test_concurrent_set_ups_build_once(tool: ModuleType, builds: Builds) -> None:
    threads = [
        threading.Thread(target=tool.ensure_dependencies, args=(sys.executable, "3.11", "cpu"))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert builds.count == 1


def test_requirements_version_and_profile_name_the_environment(
    tool: ModuleType, builds: Builds, tmp_path: Path
) -> None:
    folders = {tool.ensure_dependencies(sys.executable, v, "cpu") for v in ("3.11", "3.12")}
    folders.add(tool.ensure_dependencies(sys.executable, "3.11", "gpu"))
    assert "--no-deps" not in builds.arguments
    (tmp_path / "dev.txt").write_text("one==2\n")
    folders.add(tool.ensure_dependencies(sys.executable, "3.11", "cpu"))
    assert len(folders) == builds.count == 4


def test_unsupported_python_is_refused(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "PYTHONS", ("9.9",))
    with pytest.raises(SystemExit, match=r"needs Python 9\.9.*PYTHON="):
        tool.find_python()


def test_commands_get_this_environments_interpreter(tool: ModuleType, tmp_path: Path) -> None:
    source, target = tmp_path / "a" / "bin", tmp_path / "b" / "bin"
    for folder in (source, target):
        folder.mkdir(parents=True)
        (folder / "python").symlink_to(sys.executable)
    (source / "where").write_text(f"#!{source}/python\nimport sys; print(sys.executable)\n")
    (source / "where").chmod(0o755)
    (source / "binary").write_bytes(b"\x7fELF")
    tool.repeat_commands(source, target)
    printed = subprocess.run([target / "where"], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == str(target / "python")
    assert (target / "binary").resolve() == source / "binary"


def test_interrupt_ends_the_whole_command(tool: ModuleType, tmp_path: Path) -> None:
    """A process that the command has started is ended with it."""
    beat = tmp_path / "beat"
    script = f"(while true; do echo x >> {beat}; sleep 0.05; done) & wait"
    with pytest.raises(KeyboardInterrupt), tool.running(["bash", "-c", script]):
        deadline = time.monotonic() + 10
        while not beat.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        raise KeyboardInterrupt
    time.sleep(0.2)
    size = beat.stat().st_size
    time.sleep(0.3)
    assert beat.stat().st_size == size


def test_progress_tells_package_and_count(
    tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool.PROGRESS_SECONDS = 0.01
    progress = tool.Progress(tmp_path, 3)

    def next_line() -> str:
        stop = threading.Event()
        reporter = threading.Thread(target=progress.report, args=(stop,))
        reporter.start()
        lines: list[str] = []
        while not lines and reporter.is_alive():
            time.sleep(0.01)
            lines = capsys.readouterr().out.splitlines()
        stop.set()
        reporter.join()
        capsys.readouterr()  # what it has said since
        return lines[0]

    progress.read("Collecting alpha==1.0 (from -r cpu.txt (line 1))\n")
    progress.read("Processing /wheels/beta-2.0-py3-none-any.whl (from -r cpu.txt (line 2))\n")
    assert next_line().endswith("fetching package 2/3: beta")
    progress.read("Installing collected packages: gamma, beta, alpha\n")
    (tmp_path / "gamma-1.dist-info").mkdir()
    (tmp_path / "gamma-1.dist-info" / "INSTALLER").touch()
    (tmp_path / "beta-2.dist-info").mkdir()  # still being installed
    assert next_line().endswith("installing package 2/3: beta")
