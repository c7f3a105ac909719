"""`PlanError`: an input that cannot be right, named by its field."""

from __future__ import annotations

import math
from typing import Any


class PlanError(ValueError):
    """An input the planner refuses; the message begins with the field's name."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


def whole(field: str, value: Any, *, least: int = 1, most: int = 10**12) -> int:
    """`value` as an integer in ``least .. most``.

    Raises:
        PlanError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlanError(field, f"{value!r} is no whole number")
    if not least <= value <= most:
        raise PlanError(field, f"{value} is not between {least} and {most}")
    return value


def real(field: str, value: Any, *, above: float | None = None, most: float = 1e24) -> float:
    """`value` as a finite number above `above` (None: at least 0), at most `most`.

    Raises:
        PlanError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise PlanError(field, f"{value!r} is no finite number")
    if (value < 0 if above is None else value <= above) or value > most:
        low = "at least 0" if above is None else f"above {above:g}"
        raise PlanError(field, f"{value:g} must be {low} and at most {most:g}")
    return float(value)
