"""``python -m sglang_afd.plan``."""

from __future__ import annotations

from sglang_afd.plan.command import main

if __name__ == "__main__":
    raise SystemExit(main())
