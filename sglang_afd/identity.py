"""What tells one checkpoint from another of the same shapes, read in moments.

Two commands of a deployment may find the checkpoint at different paths; what they serve must be the
same.  Reading all weights would take minutes, so each file counts with its name, its size, its
header and some bytes out of it: enough for another training run, not for a changed bit.
"""

from __future__ import annotations

import hashlib
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

_SAMPLES = 16  # places in a file, evenly spread
_SAMPLE_BYTES = 64
_LENGTH_BYTES = 8  # a safetensors file begins with the length of its header
_LONGEST_HEADER = 100 << 20  # safetensors' own limit
_SHOWN = 12  # digits of a digest
_READERS = 4  # files that are hashed at the same time
_SHA256 = re.compile("[0-9a-f]{64}")


def checkpoint_identity(path: str, commit: str | None = None) -> dict[str, object]:
    """Facts that are equal for equal checkpoints, at whatever path they lie.

    Args:
        path: a directory, or the name of a repository on the Hugging Face Hub.
        commit: the repository's commit, where it is known.
    """
    directory = Path(path)
    if not directory.is_dir():
        return {"checkpoint": f"{path} {commit}" if commit else path}
    facts: dict[str, object] = {}
    for name in ("config.json", "model.safetensors.index.json"):
        file = directory / name
        facts[name] = _digest(file.read_bytes()) if file.exists() else "none"
    files = sorted(directory.glob("*.safetensors"))
    content = hashlib.sha256()
    for file in files:
        content.update(f"{file.name} {file.stat().st_size}\n".encode())
        content.update(_excerpt(file))
    total = sum(file.stat().st_size for file in files)
    facts["weights"] = (
        f"{len(files)} safetensors files of {total} bytes ({content.hexdigest()[:_SHOWN]})"
    )
    return facts


def checkpoint_content(directory: Path) -> dict[str, str]:
    """The sha256 of every file of a checkpoint that decides its answers, by the file's name.

    Reads all weights, at the disk's pace; a file in the Hub's cache is named by its hash already.
    """
    names = ("config.json", "model.safetensors.index.json", "hf_quant_config.json")
    files = [directory / name for name in names if (directory / name).exists()]
    files += sorted(directory.glob("*.safetensors"))
    with ThreadPoolExecutor(_READERS) as pool:
        return dict(zip([file.name for file in files], pool.map(_content, files), strict=True))


def _content(file: Path) -> str:
    target = file.resolve()
    if target.parent.name == "blobs" and _SHA256.fullmatch(target.name):
        return target.name
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_SHOWN]


def _excerpt(file: Path) -> bytes:
    """The header of a safetensors file and samples of its data."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        if length > min(size, _LONGEST_HEADER):  # no such file; its loader will say so
            return b""
        parts = [opened.read(length)]
        data = _LENGTH_BYTES + length
        for index in range(_SAMPLES):
            opened.seek(data + (size - data) * index // _SAMPLES)
            parts.append(opened.read(_SAMPLE_BYTES))
    return b"".join(parts)
