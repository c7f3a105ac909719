"""``python -m sglang_afd.features``: write docs/features.md."""

from __future__ import annotations

from sglang_afd.features import DOCUMENT, document

if __name__ == "__main__":
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(document())
    print(f"wrote {DOCUMENT}")
