"""Checks of what users give: refused by name where it is given, not where it is used.

Knows no torch; whole numbers of numpy and one-element tensors of torch count as such.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable


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


def decay(owner: str, name: str, value: object) -> float | None:
    """Return `value` as a float from 0 to 1; None stays None.

    Raises
    ------
    TypeError, ValueError
        If it is something else.
    """
    if value is None:
        return None
    share = number(owner, name, value)
    if not 0 <= share <= 1:
        raise ValueError(f"expected 0 <= {name} <= 1, got {value}")
    return share


def check_state(owner: str, state: object, version: int, keys: Iterable[str]) -> None:
    """Raise unless `state` is a state_dict of this version with all `keys`."""
    if not isinstance(state, dict):
        raise TypeError(f"{owner}: expected a state_dict, got {type(state).__name__}")
    if state.get("version") != version:
        raise ValueError(f"{owner}: state of version {state.get('version')}, not {version}")
    if missing := sorted(set(keys) - state.keys()):
        raise ValueError(
            f"{owner}: the state has no {missing}: it is damaged, or of something else"
        )
