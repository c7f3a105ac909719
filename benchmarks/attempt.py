"""One part of a script's measurements, which may fail without those that follow."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any


def attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `measure` found, or why it failed (`failed`), and how long that took (`seconds`)."""
    began = time.monotonic()
    try:
        result = measure()
    except Exception as error:
        traceback.print_exc()
        result = {"failed": f"{type(error).__name__}: {error}"}
    return {**result, "seconds": time.monotonic() - began}
