"""Range of a number, found by trying values, so that the page shows what the code accepts."""

import math
from collections.abc import Callable

Accepts = Callable[[float], bool]

_ENDS = (-20.0, -1.0, 0.0, 1e-6, 0.5, 1.0, 2.0, 10.0, 20.0)
"""Known bounds of real numbers; a range with another bound raises an error, so that no page is wrong."""
_STARTS = (1, 2, 0.5, 0.1, 4, 16, 64, 1024)
_FAR = 10**12


def whole_range(accepts: Accepts, default: object) -> str:
    """Describe the accepted integers, such as "at least 1" or "from 1 to 10,000"; empty if all are accepted."""
    inside = _inside(accepts, default, whole=True)
    low = None if accepts(-_FAR) else _last(accepts, inside, -_FAR)
    high = None if accepts(_FAR) else _last(accepts, inside, _FAR)
    zero = ""
    if low == 0 and not accepts(1):
        zero, low = "0, or ", _last(accepts, inside, 1)
    if low is not None and high is not None:
        return f"{zero}from {low:,} to {high:,}"
    return f"{zero}at least {low:,}" if low is not None else f"at most {high:,}" if high is not None else ""


def real_range(accepts: Accepts, default: object) -> str:
    """Describe the accepted real numbers, such as "above 0" or "in (0, 1]"; empty if all are accepted."""
    inside = _inside(accepts, default, whole=False)
    low, high = (None if accepts(far) else _end(accepts, inside, far) for far in (-1e12, 1e12))
    if low is None or high is None:
        words = ("above", "at least") if high is None else ("below", "at most")
        end = high if low is None else low
        return "" if end is None else f"{words[accepts(end)]} {end:g}"
    return f"in {'(['[accepts(low)]}{low:g}, {high:g}{')]'[accepts(high)]}"


def _inside(accepts: Accepts, default: object, *, whole: bool) -> float:
    """Return an accepted number."""
    given = [default] if isinstance(default, int | float) and not isinstance(default, bool) else []
    for start in (*given, *_STARTS):
        if (not whole or start == int(start)) and accepts(int(start) if whole else float(start)):
            return int(start) if whole else float(start)
    raise ValueError("no number was accepted, so none can be tried from")


def _last(accepts: Accepts, inside: float, outside: int) -> int:
    """Return the last accepted integer between an accepted and a rejected one."""
    good, bad = int(inside), outside
    while abs(bad - good) > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if accepts(middle) else (good, middle)
    return good


def _end(accepts: Accepts, inside: float, outside: float) -> float:
    """Return the bound of the accepted numbers in one direction; the bound itself may be rejected."""
    for end in _ENDS:
        before, after = (math.nextafter(end, side * math.inf) for side in (-1, 1))
        within, beyond = (before, after) if outside > inside else (after, before)
        if accepts(within) and not accepts(beyond):
            return end
    raise ValueError("the range of a number ends at none of the known ends: add its end to them")
