"""``python -m sglang_afd.patches list|check|apply|revert [--tree PATH]``: SGLang's patch series.

Without ``--tree`` it is for the installed SGLang.  Exits with 0 if the tree is (now) as asked, with
1 if ``check`` finds that it is not wholly patched or unpatched, or nothing could be changed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from sglang_afd.patches.series import (
    Patch,
    PatchError,
    State,
    apply,
    find_package,
    read_series,
    revert,
    state,
)

PROGRAM = "patches"


def installed() -> Path:
    """Where the installed SGLang lies.

    Raises:
        PatchError: none is installed here.
    """
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        raise PatchError("no SGLang is installed here; name a tree with --tree")
    return Path(spec.origin).parent


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says; return the exit status."""
    parser = argparse.ArgumentParser(
        prog=f"python -m sglang_afd.{PROGRAM}",
        description="Mend the SGLang that this package is for. AFD needs none of it.",
    )
    parser.add_argument("command", choices=("list", "check", "apply", "revert"))
    parser.add_argument(
        "--tree", type=Path, help="SGLang's package, or a checkout (default: the installed one)"
    )
    options = parser.parse_args(argv)
    try:
        series = read_series()
        package = find_package(options.tree) if options.tree else installed()
        if options.command == "list":
            return _list(series, package)
        if options.command == "check":
            return _check(series, package)
        turn = apply if options.command == "apply" else revert
        changed = turn(series, package)
    except PatchError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    for path in changed:
        print(f"changed {package / path}")
    print(f"{package}: {options.command}: {len(changed)} files changed")
    return 0


def _list(series: Sequence[Patch], package: Path) -> int:
    for patch in series:
        print(f"{patch.name}: {state(patch, package).value} in {package}")
        print(f"  {patch.subject}\n  reason: {patch.reason}\n  upstream: {patch.upstream}")
        for change in patch.changes:
            print(f"  changes {change.path}")
    return 0


def _check(series: Sequence[Patch], package: Path) -> int:
    """0 if the tree has the whole series, or nothing of it."""
    states = {patch.name: state(patch, package) for patch in series}
    for name, found in states.items():
        print(f"{name}: {found.value}")
    return 0 if set(states.values()) in ({State.ABSENT}, {State.APPLIED}) else 1


if __name__ == "__main__":
    raise SystemExit(main())
