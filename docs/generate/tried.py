"""The range of a number, found by trying: what the code accepts is what the page says, whatever it is checked by."""

import math
from collections.abc import Callable

Accepts = Callable[[float], bool]

_ENDS = (-20.0, -1.0, 0.0, 1e-6, 0.5, 1.0, 2.0, 10.0, 20.0)
"""Where ranges of real numbers are known to end; one that ends elsewhere is an error here, not a wrong page."""
_STARTS = (1, 2, 0.5, 0.1, 4, 16, 64, 1024)
_FAR = 10**12


def whole_range(accepts: Accepts, default: object) -> str:
    """Say which whole numbers are accepted, such as "at least 1" or "from 1 to 10,000"; nothing if all are."""
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
    """Say which real numbers are accepted, such as "above 0" or "in (0, 1]"; nothing if all are."""
    inside = _inside(accepts, default, whole=False)
    low, high = (None if accepts(far) else _end(accepts, inside, far) for far in (-1e12, 1e12))
    if low is None or high is None:
        words = ("above", "at least") if high is None else ("below", "at most")
        end = high if low is None else low
        return "" if end is None else f"{words[accepts(end)]} {end:g}"
    return f"in {'(['[accepts(low)]}{low:g}, {high:g}{')]'[accepts(high)]}"


def _inside(accepts: Accepts, default: object, *, whole: bool) -> float:
    """Return a number that is accepted."""
    given = [default] if isinstance(default, int | float) and not isinstance(default, bool) else []
    for start in (*given, *_STARTS):
        if (not whole or start == int(start)) and accepts(int(start) if whole else float(start)):
            return int(start) if whole else float(start)
    raise ValueError("no number was accepted, so none can be tried from")


def _last(accepts: Accepts, inside: float, outside: int) -> int:
    """Return the last whole number that is accepted on the way from one that is to one that is not."""
    good, bad = int(inside), outside
    while abs(bad - good) > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if accepts(middle) else (good, middle)
    return good


def _end(accepts: Accepts, inside: float, outside: float) -> float:
    """Return where the accepted numbers end in a direction, whether or not the end is accepted itself."""
    for end in _ENDS:
        before, after = (math.nextafter(end, side * math.inf) for side in (-1, 1))
        within, beyond = (before, after) if outside > inside else (after, before)
        if accepts(within) and not accepts(beyond):
            return end
    raise ValueError("the range of a number ends at none of the known ends: add its end to them")
