"""What software and hardware a side of a comparison ran on, as JSON.

Also a program, run by path in a reference's own environment: it needs the standard library alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = (
    *("sglang_afd", "sglang", "sglang-kernel", "sgl-deep-ep", "sgl-deep-gemm", "torch", "triton"),
    *("transformers", "tokenizers", "safetensors", "flashinfer-python", "vllm", "accelerate"),
)
_COMPILED_IN = ("sglang_afd", "sglang", "sglang-kernel", "sgl-deep-ep", "sgl-deep-gemm", "vllm")
"""Packages whose compiled files are hashed; a version names the others'."""
_VARIABLES = ("SGLANG", "SGL_", "CUDA_", "NCCL_", "NVSHMEM_", "DEEPEP", "TORCH", "OMP_", "VLLM_")
_SECRET = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def describe() -> dict[str, Any]:
    """Facts of this interpreter and machine."""
    return {
        "python": f"{sys.version.split()[0]} ({sys.executable})",
        "host": platform.platform(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "all_packages_sha256": _all_packages(),
        "sources": {
            name: facts for name in ("sglang_afd", "sglang") if (facts := _source(name)) is not None
        },
        "extensions_sha256": _extensions(),
        "gpus": _gpus(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_VARIABLES) and not any(word in name for word in _SECRET)
        },
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _all_packages() -> str:
    """One hash of every installed package's name and version."""
    found = {f"{d.metadata['Name']}=={d.version}" for d in importlib.metadata.distributions()}
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()


def _source(package: str) -> dict[str, str] | None:
    """The hash of a package's Python files, and where they are in git, commit and changes."""
    folder = _folder(package)
    if folder is None:
        return None
    content = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        content.update(f"{file.relative_to(folder)}\n".encode() + file.read_bytes())
    facts = {"files_sha256": content.hexdigest()}
    commit, tracked = _git(folder, "rev-parse", "HEAD"), _git(folder, "ls-files", "--", ".")
    # A package in a virtual environment that lies in some checkout is not tracked there.
    if commit is not None and tracked:
        changes = hashlib.sha256((_git(folder, "diff", "--binary", "HEAD") or "").encode())
        top = Path((_git(folder, "rev-parse", "--show-toplevel") or "").strip())
        new = _git(top, "ls-files", "--others", "--exclude-standard") or ""
        for name in sorted(new.splitlines()):
            with contextlib.suppress(OSError):
                changes.update(name.encode() + (top / name).read_bytes())
        facts |= {"commit": commit.strip(), "diff_sha256": changes.hexdigest()}
    return facts


def _folder(package: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _git(folder: Path, *args: str) -> str | None:
    command = ["git", "-C", str(folder), *args]
    try:
        done = subprocess.run(command, capture_output=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace") if done.returncode == 0 else None


def _extensions() -> dict[str, str]:
    """The hash of each compiled file of the packages that have kernels."""
    found: dict[str, str] = {}
    for package in _COMPILED_IN:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for entry in files:
            path = Path(str(entry.locate()))
            if entry.name.endswith((".so", ".cubin")) and path.exists():
                found[str(entry)] = _file_hash(path)
    return found


def _file_hash(path: Path) -> str:
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _gpus() -> list[str]:
    """Name, UUID, driver version and memory of each GPU; empty where there is none."""
    query = "--query-gpu=name,uuid,driver_version,memory.total"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    return done.stdout.splitlines()


if __name__ == "__main__":
    print(json.dumps(describe()))
