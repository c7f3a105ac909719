"""Seeds of random tests: fresh in every run, printed, and repeatable."""

from __future__ import annotations

import os
import random

ENV = "SGLANG_AFD_TEST_SEED"


def fresh_seed() -> int:
    """A seed; printed, so that the report of a failed test says how to repeat it."""
    seed = int(os.environ.get(ENV) or random.randrange(2**31))
    print(f"seed {seed} (repeat with {ENV}={seed})")
    return seed
