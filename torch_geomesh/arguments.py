"""Checks of numbers that users give: refused by name where they are given, not where they are used.

Knows no torch; whole numbers of numpy and one-element tensors of torch count as such.
"""

from __future__ import annotations

import math
import operator


def whole_number(owner: str, name: str, value: object) -> int:
    """Return `value` as an int.

    Raises
    ------
    TypeError
        If it is not a whole number's type: floats (also 4.0), text, truth values and None are not.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # type: ignore[arg-type]  # that is what is found out
    except TypeError:
        raise TypeError(f"{owner}: expected a whole number for {name}, got {value!r}") from None


def number(owner: str, name: str, value: object) -> float:
    """Return `value` as a float that may be NaN or infinite: bounds are the caller's.

    Raises
    ------
    TypeError
        If it is not a number: text, truth values and None are not.
    """
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError
        return float(value)  # type: ignore[arg-type]  # that is what is found out
    except TypeError:
        raise TypeError(f"{owner}: expected a number for {name}, got {value!r}") from None
    except OverflowError:  # an int beyond floats
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]
