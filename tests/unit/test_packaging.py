"""What is installed is what the repository says: pins, entry points, packages; and a house rule."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata as metadata
import importlib.util
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
SGLANG = "0.5.23"
FOLDERS = ("sglang_afd", "kernels", "spec", "patches")
# The CPU profile's pins describe the installed set only where that profile is installed.
cpu_profile = pytest.mark.skipif(
    importlib.util.find_spec("sgl_kernel") is not None, reason="the GPU profile is installed"
)


def pins(*names: str) -> dict[str, str]:
    """Canonical package name -> version, of files in requirements/; raises if a line is no pin."""
    found: dict[str, str] = {}
    for name in names:
        for line in (ROOT / "requirements" / name).read_text().splitlines():
            if line and not line.startswith("#"):
                package, version = line.split("==")
                key = canonicalize_name(package)
                assert key not in found, f"{package} is pinned twice"
                found[key] = version
    return found


def requirements(package: str) -> list[Requirement]:
    """What an installed package asks for on this platform, without extras."""
    parsed = [Requirement(line) for line in metadata.requires(package) or []]
    return [r for r in parsed if r.marker is None or r.marker.evaluate({"extra": ""})]


def test_one_sglang_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"sglang=={SGLANG}" in project["dependencies"]
    assert pins("cpu.txt")["sglang"] == SGLANG
    assert pins("gpu.txt")["sglang"] == SGLANG
    assert metadata.version("sglang") == SGLANG


def declared() -> list[Requirement]:
    """All that pyproject.toml says the package needs, its extras included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    return [Requirement(line) for line in (*project["dependencies"], *extras)]


def third_party(tree: ast.Module) -> set[str]:
    """Distributions of the top-level modules that a file imports, anywhere in it."""
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            modules.add((node.module or "").partition(".")[0])
    named = {"yaml": "pyyaml", "zmq": "pyzmq", "deep_ep": "sgl-deep-ep"}
    others = modules - set(sys.stdlib_module_names) - {"sglang_afd"}
    return {canonicalize_name(named.get(module, module)) for module in others}


def test_every_import_is_a_declared_dependency() -> None:
    """And every declared dependency is imported."""
    imported: set[str] = set()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            imported |= third_party(ast.parse(path.read_text()))
    assert imported == {canonicalize_name(requirement.name) for requirement in declared()}


def test_imports_are_seen_wherever_they_stand() -> None:
    source = "import os, yaml.parser\ndef f():\n    from zmq.x import y\nfrom sglang_afd import z\n"
    assert third_party(ast.parse(source)) == {"pyyaml", "pyzmq"}


def test_declared_versions_are_the_pinned_ones() -> None:
    pinned = pins("cpu.txt", "dev.txt")
    for requirement in declared():
        version = pinned.get(canonicalize_name(requirement.name))
        if version is not None:
            assert {spec.version for spec in requirement.specifier} == {version}, requirement
    assert len(declared()) > 10


def test_pins_obey_sglang() -> None:
    pinned = pins("cpu.txt")
    shared = [r for r in requirements("sglang") if canonicalize_name(r.name) in pinned]
    assert len(shared) > 40
    wrong = [
        f"{r} but {pinned[canonicalize_name(r.name)]} is pinned"
        for r in shared
        if not r.specifier.contains(pinned[canonicalize_name(r.name)], prereleases=True)
    ]
    assert not wrong


@cpu_profile
def test_installed_versions_are_the_pinned_ones() -> None:
    pinned = pins("cpu.txt", "dev.txt")
    assert {name: metadata.version(name) for name in pinned} == pinned


@cpu_profile
def test_pins_are_closed() -> None:
    """Every package but SGLang (whose CUDA packages are left out) finds all that it asks for."""
    pinned = pins("cpu.txt", "dev.txt")
    unmet = [
        f"{package} needs {r}"
        for package in pinned
        if package != "sglang"
        for r in requirements(package)
        if not r.specifier.contains(pinned.get(canonicalize_name(r.name), "0"), prereleases=True)
        or canonicalize_name(r.name) not in pinned
    ]
    assert not unmet


@pytest.mark.parametrize(
    ("group", "name"),
    [("sglang.srt.plugins", "sglang_afd"), ("sglang.srt.platforms", "sglang_afd_cpu")],
)
def test_entry_points_resolve(group: str, name: str) -> None:
    points = metadata.entry_points(group=group, name=name)
    assert len(points) == 1
    assert callable(next(iter(points)).load())


@pytest.mark.parametrize("name", ["kernels", "spec", "patches"])
def test_mapped_packages_import(name: str) -> None:
    module = importlib.import_module(f"sglang_afd.{name}")
    assert module.__file__ is not None
    assert Path(module.__file__).parent == ROOT / name


def test_wheel_holds_every_package_and_the_model(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for folder in FOLDERS:
        shutil.copytree(
            ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    for file in ("pyproject.toml", "setup.py", "LICENSE"):
        shutil.copy(ROOT / file, source)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(tmp_path), str(source)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    expected = {
        f"{'' if folder == 'sglang_afd' else 'sglang_afd/'}{path.relative_to(source).as_posix()}"
        for folder in FOLDERS
        for path in (source / folder).rglob("*")
        if path.suffix == ".py"
        or path.parent in [source / "sglang_afd" / "embedded" / d for d in ("model", "draft")]
        or (path.is_relative_to(source / "sglang_afd" / "validate") and path.is_file())
        or path.suffix == ".patch"
    }
    assert "sglang_afd/kernels/__init__.py" in expected
    assert expected <= held, f"missing: {sorted(expected - held)}"


def sglang_names(path: Path) -> list[str]:
    """`file:line` of each import from inside SGLang, and each string (docstrings apart) that names
    its internals for an import by name."""
    tree = ast.parse(path.read_text())
    prose = {
        id(statement.value)
        for statement in ast.walk(tree)
        if isinstance(statement, ast.Expr)  # a string that stands alone is documentation
    }
    hits = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = any(alias.name.startswith("sglang.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found = node.module is not None and node.module.split(".")[0] == "sglang"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found = "sglang.srt" in node.value and id(node) not in prose
        else:
            continue
        if found:
            hits.append(f"{path.name}:{node.lineno}")
    return hits


def test_house_rule_check_sees_what_it_must(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""About sglang.srt."""\n'
        "import sglang\n"  # the version may be asked for
        "import sglang_afd.config\n"
        "import sglang.srt.utils\n"
        "def f():\n"
        "    from sglang import launch_server\n"
        "    g('sglang.srt.server_args')\n"
    )
    assert sglang_names(path) == ["module.py:4", "module.py:6", "module.py:7"]


def test_only_upstream_and_platform_name_sglang() -> None:
    """House rule: only sglang_afd/upstream and sglang_afd/platform name SGLang's internals."""
    exempt = [ROOT / "sglang_afd" / "upstream", ROOT / "sglang_afd" / "platform"]
    files = [
        path
        for folder in (*FOLDERS, "benchmarks", "tools")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not any(path.is_relative_to(allowed) for allowed in exempt)
    ]
    assert len(files) > 10
    hits = [
        f"{path.relative_to(ROOT).parent}/{hit}" for path in files for hit in sglang_names(path)
    ]
    assert not hits, "move into sglang_afd/upstream"
