"""``python -m tools.family_table``: write the table of model families into README.md."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from sglang_afd.cad import gate as cad_gate
from sglang_afd.families import FAMILIES, Family
from sglang_afd.flags import GPU_LANE_MODELS
from sglang_afd.spec import gate as spec_gate

README = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- families: python -m tools.family_table -->", "<!-- end of families -->"


def table() -> str:
    """A row for each family."""
    rows = [
        f"| {f.name} | {f.models} | {f.dtypes} | {f.transports} | {_lanes(f)} | {_drafts(f)} | "
        f"{_cad(f)} | {f.cpu} | {f.gpu} |"
        for f in sorted(set(FAMILIES.values()), key=lambda family: family.name)
    ]
    columns = (
        *("family", "published models", "data types", "transports", "lanes", "speculation", "CAD"),
        *("greedy tokens shown equal on CPU (gloo)", "run on GPUs"),
    )
    return "\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows])


def _lanes(family: Family) -> str:
    """Where several of them run."""
    on_gpus = set(family.architectures) <= set(GPU_LANE_MODELS)
    return "CPU; GPUs over nvlink" if on_gpus else "CPU"


def _drafts(family: Family) -> str:
    """The algorithms that a deployment of the family may have a draft for."""
    return "EAGLE-3" if set(family.architectures) <= set(spec_gate.ARCHITECTURES) else "no"


def _cad(family: Family) -> str:
    """Whether `--afd-mode cad` serves it."""
    return "CPU" if family.name in cad_gate.FAMILIES else "no"


def with_table(text: str) -> str:
    """`text` with the table between its two marks.

    Raises:
        ValueError: the marks are not there.
    """
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"the text has no {BEGIN} followed by {END}")
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


def main(argv: Sequence[str] | None = None) -> None:
    """Write the table; exits with argparse's message if `argv` asks for anything else."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.family_table",
        description=f"Write the table of model families into {README.name}.",
    )
    parser.parse_args(argv)
    README.write_text(with_table(README.read_text()))
    print(f"wrote {README}")


if __name__ == "__main__":
    main()
