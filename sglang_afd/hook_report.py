"""``python -m sglang_afd.hook_report TREE``: which hooks would fit another SGLang?

TREE is SGLang's package, a folder with it (an unpacked wheel) or a checkout; nothing of it is
imported or installed.  What the hooks change, and what their code imports, is looked up there and
in the installed SGLang, and compared.  Exits with 1 if something is missing or takes other
arguments; where only a body differs, read it before the pinned version is raised.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from sglang_afd.patches.__main__ import installed
from sglang_afd.patches.series import PatchError, find_package

PROGRAM = "hook_report"
_OURS = ("upstream", "platform")
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_Found = list[tuple[ast.AST, str]]
"""What defines a name, a module itself maybe, each with the module that it stands in; several under
an if."""


class Fit(Enum):
    """How a name of another SGLang compares with the installed one's."""

    SAME = "same"
    BODY = "other body"
    ARGUMENTS = "other arguments"
    MISSING = "missing"


class Row(NamedTuple):
    """What was found about one name."""

    name: str
    fit: Fit
    why: str
    """What uses the name."""


class Sources:
    """The modules of one SGLang, read but never imported."""

    def __init__(self, package: Path) -> None:
        self._package = package
        self._modules: dict[str, ast.Module | None] = {}

    def find(self, name: str) -> _Found:
        """What defines a dotted name, a module's own included; nothing if it is not there."""
        parts = name.split(".")
        for length in range(len(parts), 0, -1):
            module = ".".join(parts[:length])
            if (tree := self._module(module)) is None:
                continue
            found: _Found = [(tree, module)]
            for member in parts[length:]:
                found = [hit for node, where in found for hit in self._in(node, where, member)]
            return found
        return []

    def _module(self, name: str) -> ast.Module | None:
        if name not in self._modules:
            path = self._package.parent.joinpath(*name.split("."))
            files = [path / "__init__.py", path.with_name(f"{path.name}.py")]
            file = next((file for file in files if file.is_file()), None)
            # a folder without __init__.py is a package, too
            empty = ast.Module([], []) if path.is_dir() else None
            self._modules[name] = ast.parse(file.read_bytes()) if file else empty
        return self._modules[name]

    def _in_module(self, module: str, name: str, seen: frozenset[str] = frozenset()) -> _Found:
        """What defines a name of a module; names imported there are followed."""
        tree = self._module(module)
        if tree is None or module in seen:
            return []
        found: _Found = []
        for statement in _statements(tree.body):
            if isinstance(statement, ast.ImportFrom):
                source = self._source(module, statement)
                for alias in statement.names:
                    if name == (alias.asname or alias.name):
                        found += self.find(f"{source}.{alias.name}") or [(statement, module)]
                    elif alias.name == "*":
                        found += self._in_module(source, name, seen | {module})
            elif isinstance(statement, ast.Import):
                names = [alias.asname or alias.name.split(".")[0] for alias in statement.names]
                found += [(statement, module)] if name in names else []
            elif name in _names(statement):
                found.append((statement, module))
        return found

    def _source(self, module: str, statement: ast.ImportFrom) -> str:
        """The module that a ``from`` import names."""
        if not statement.level:
            return statement.module or ""
        is_package = self._package.parent.joinpath(*module.split("."), "__init__.py").is_file()
        parts = module.split(".")
        parts = parts[: len(parts) - statement.level + is_package]
        return ".".join([*parts, *([statement.module] if statement.module else [])])

    def _in(self, node: ast.AST, module: str, name: str) -> _Found:
        """What defines a member of a module, or of a class or one that it is made from."""
        if isinstance(node, ast.Module):
            return self._in_module(module, name)
        if not isinstance(node, ast.ClassDef):
            return []
        own: _Found = [(s, module) for s in _statements(node.body) if name in _names(s)]
        if own:
            return own
        for base in node.bases:
            for parent, where in self._base(module, ast.unparse(base)):
                if parent is not node and (found := self._in(parent, where, name)):
                    return found
        return []

    def _base(self, module: str, base: str) -> _Found:
        first, *rest = base.split("[")[0].split(".")
        found = self._in_module(module, first)
        for member in rest:
            found = [hit for node, where in found for hit in self._in(node, where, member)]
        return found


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a body, and of its conditions, but not of definitions."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.With):
            for field in ("body", "orelse", "handlers", "finalbody"):
                for part in getattr(statement, field, []):
                    inner = part.body if isinstance(part, ast.ExceptHandler) else [part]
                    yield from _statements(inner)


def _names(statement: ast.stmt) -> list[str]:
    """The names that a statement defines, imports apart."""
    if isinstance(statement, _Definition):
        return [statement.name]
    if isinstance(statement, ast.Assign):
        return [node.id for target in statement.targets for node in _targets(target)]
    if isinstance(statement, ast.AnnAssign):
        return [node.id for node in _targets(statement.target)]
    return []


def _targets(target: ast.expr) -> list[ast.Name]:
    return [node for node in ast.walk(target) if isinstance(node, ast.Name)]


def fit(here: _Found, there: _Found) -> Fit:
    """How what defines a name in one SGLang compares with what does in another."""
    if not there:
        return Fit.MISSING
    if _arguments(here) != _arguments(there):
        return Fit.ARGUMENTS
    bodies = [
        [ast.dump(node) for node, _ in found if not isinstance(node, ast.Module)]
        for found in (here, there)
    ]
    return Fit.SAME if bodies[0] == bodies[1] else Fit.BODY


def _arguments(found: _Found) -> list[str]:
    """What is called with what; of functions alone."""
    functions = [
        node for node, _ in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return [ast.dump(node.args) for node in functions]


def used() -> dict[str, str]:
    """Every dotted name of SGLang's that a hook changes or our code imports -> what uses it."""
    found: dict[str, str] = {}
    for folder in _OURS:
        for path in sorted((Path(__file__).parent / folder).glob("*.py")):
            user = f"imported by {folder}/{path.name}"
            for node in ast.walk(ast.parse(path.read_text())):
                for name in _imported(node):
                    found.setdefault(name, user)
    for hook in _hooks():
        found[hook[0]] = f"hook: {hook[1]}"
    return found


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.startswith("sglang.")]
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _hooks() -> Iterator[tuple[str, str]]:
    """The target and the reason of every hook of any deployment."""
    from sglang_afd.config import AfdConfig
    from sglang_afd.platform.hooks import HOOKS
    from sglang_afd.topology import Role
    from sglang_afd.upstream import all_hooks, record

    roles = (None, *Role)
    configs = [
        AfdConfig(attention_ranks=1, ffn_ranks=1, lanes=lanes, command_role=role)
        for role in roles
        for lanes in (1, 2)
    ]
    for hooks in (HOOKS, record.hooks(Path()), *map(all_hooks, configs)):
        for hook in hooks:
            yield hook.target, hook.why


def report(package: Path, pinned: Path) -> list[Row]:
    """Compare every name that is used in the SGLang at `package` with the one at `pinned`."""
    here, there = Sources(pinned), Sources(package)
    return [
        Row(name, fit(here.find(name), there.find(name)), why)
        for name, why in sorted(used().items())
    ]


def markdown(rows: Sequence[Row]) -> str:
    """A count, and a table of what is not the same."""
    counts = Counter(row.fit.value for row in rows)
    lines = [f"{len(rows)} names: " + ", ".join(f"{n} {fit}" for fit, n in counts.most_common())]
    different = [row for row in rows if row.fit is not Fit.SAME]
    if different:
        lines += ["", "| name | finding | used as |", "|---|---|---|"]
    for row in sorted(different, key=lambda row: list(Fit).index(row.fit), reverse=True):
        lines.append(f"| `{row.name}` | {row.fit.value} | {row.why} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report of the tree on the command line; return the exit status."""
    parser = argparse.ArgumentParser(
        prog=f"python -m sglang_afd.{PROGRAM}", description="Which hooks fit another SGLang?"
    )
    parser.add_argument("tree", type=Path, help="SGLang's package, an unpacked wheel, a checkout")
    options = parser.parse_args(argv)
    try:
        package = find_package(options.tree)
        rows = report(package, installed())
    except PatchError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    print(markdown(rows))
    return 1 if any(row.fit in (Fit.MISSING, Fit.ARGUMENTS) for row in rows) else 0


if __name__ == "__main__":
    raise SystemExit(main())
