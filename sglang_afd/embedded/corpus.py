"""The text that the embedded model is trained on: documentation that CPython ships.

Two sources, both under the PSF licence: every topic of ``pydoc_data.topics`` (the language
reference that ``help("with")`` prints), and the docstrings of the public functions, classes and
methods of :data:`MODULES`. The docstrings of :data:`HELD_OUT_MODULES` are never trained on; they
measure the held-out loss.

    python -IS sglang_afd/embedded/corpus.py > FILE     # JSON lines; their SHA-256 names the corpus
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

# Modules whose docstrings do not depend on the operating system or on site configuration.
MODULES = (
    "argparse", "bisect", "builtins", "calendar", "collections", "contextlib", "copy", "csv",
    "dataclasses", "datetime", "decimal", "functools", "glob", "inspect", "io", "itertools",
    "json", "logging", "math", "operator", "queue", "random", "re", "shutil", "statistics",
    "string", "struct", "subprocess", "tempfile", "threading", "typing", "unittest",
)  # fmt: skip
HELD_OUT_MODULES = ("difflib", "enum", "fractions", "heapq", "pathlib", "textwrap")

Kind = Literal["topic", "docstring"]


@dataclass(frozen=True)
class Document:
    """One topic or one docstring. ``group`` is the topic's key or the docstring's module."""

    kind: Kind
    group: str
    name: str
    text: str
    held_out: bool


def build() -> list[Document]:
    """Collect every document that this Python ships, in a fixed order.

    A fresh interpreter without site-packages does it: torch and others add methods to standard
    classes, and their docstrings are not Python's.
    """
    command = [sys.executable, "-IS", __file__]
    return loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def _collect() -> list[Document]:
    return [*_topics(), *_docstrings(MODULES, False), *_docstrings(HELD_OUT_MODULES, True)]


def dumps(documents: list[Document]) -> bytes:
    """The corpus as JSON lines; its SHA-256 names it."""
    lines = (json.dumps(asdict(d), ensure_ascii=False, sort_keys=True) for d in documents)
    return "".join(f"{line}\n" for line in lines).encode()


def loads(data: bytes) -> list[Document]:
    """The inverse of :func:`dumps`."""
    return [Document(**json.loads(line)) for line in data.decode().splitlines()]


def digest(documents: list[Document]) -> str:
    """SHA-256 of :func:`dumps`, in hex."""
    return hashlib.sha256(dumps(documents)).hexdigest()


def _topics() -> Iterator[Document]:
    from pydoc_data.topics import topics

    for key in sorted(topics):
        text = topics[key].strip() + "\n"
        yield Document("topic", key, text.split("\n", 1)[0], text, False)


def _docstrings(modules: tuple[str, ...], held_out: bool) -> Iterator[Document]:
    for module_name in modules:
        module = importlib.import_module(module_name)
        if module.__doc__:
            text = f"{module_name}\n\n{inspect.cleandoc(module.__doc__)}\n"
            yield Document("docstring", module_name, module_name, text, held_out)
        prefix = "" if module_name == "builtins" else f"{module_name}."
        for name, member in _public_members(module):
            yield from _member(module_name, f"{prefix}{name}", member, held_out)
            if not inspect.isclass(member) or issubclass(member, BaseException):
                continue
            for attribute, value in sorted(vars(member).items()):
                if not attribute.startswith("_") and inspect.isroutine(value):
                    qualified = f"{prefix}{name}.{attribute}"
                    yield from _member(module_name, qualified, value, held_out)


def _public_members(module: object) -> Iterator[tuple[str, object]]:
    names = getattr(module, "__all__", None) or [n for n in dir(module) if not n.startswith("_")]
    for name in sorted(names):
        member = getattr(module, name, None)
        # ``site`` adds callables such as ``exit`` to builtins; they are neither class nor routine.
        if inspect.isclass(member) or inspect.isroutine(member):
            yield name, member


def _member(group: str, name: str, member: object, held_out: bool) -> Iterator[Document]:
    doc = inspect.getdoc(member)
    if not doc or " at 0x" in doc:
        return
    text = f"{name}{_signature(member)}\n\n{doc.strip()}\n"
    yield Document("docstring", group, name, text, held_out)


def _signature(member: object) -> str:
    try:
        signature = str(inspect.signature(member))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    # A default that prints its address would make two runs differ.
    return "" if " at 0x" in signature else signature


if __name__ == "__main__":
    sys.stdout.buffer.write(dumps(_collect()))
