"""``python -m sglang_afd.families``: write the table of model families into README.md."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from sglang_afd.families import FAMILIES

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN, END = "<!-- families: python -m sglang_afd.families -->", "<!-- end of families -->"


def table() -> str:
    """A row for each family."""
    rows = [
        f"| {f.name} | {f.models} | {f.dtypes} | {f.transports} | {f.cpu} | {f.gpu} |"
        for f in sorted(set(FAMILIES.values()), key=lambda family: family.name)
    ]
    columns = (
        *("family", "published models", "data types", "transports"),
        *("greedy tokens shown equal on CPU (gloo)", "run on GPUs"),
    )
    return "\n".join([f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *rows])


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
        prog="python -m sglang_afd.families",
        description=f"Write the table of model families into {README.name}.",
    )
    parser.parse_args(argv)
    README.write_text(with_table(README.read_text()))
    print(f"wrote {README}")


if __name__ == "__main__":
    main()
