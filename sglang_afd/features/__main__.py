"""``python -m sglang_afd.features``: write docs/features.md."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from sglang_afd.features import DOCUMENT, document


def main(argv: Sequence[str] | None = None) -> None:
    """Write the document; exits with argparse's message if `argv` asks for anything else."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_afd.features",
        description=f"Write docs/{DOCUMENT.name}: which of SGLang's features AFD serves.",
    )
    parser.parse_args(argv)
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(document())
    print(f"wrote {DOCUMENT}")


if __name__ == "__main__":
    main()
