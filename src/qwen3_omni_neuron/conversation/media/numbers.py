"""Numbers that an item of a message holds, of any kind that Python and numpy have."""

import math
from numbers import Integral, Real
from typing import Any


def real_number(value: Any) -> float | None:
    """Return a finite number as a float, and None for anything else: a bool, NaN, one too large."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        number = float(value)
    except (OverflowError, TypeError, ValueError):  # numpy calls a timedelta64 a number, too
        return None
    return number if math.isfinite(number) else None


def whole_number(value: Any) -> int | None:
    """Return an integer of any size, and None for anything else: a bool, 2.0."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    try:
        return int(value)
    except (OverflowError, TypeError, ValueError):  # a timedelta64
        return None
