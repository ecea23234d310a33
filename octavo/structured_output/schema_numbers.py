"""Bounds of numbers in JSON schemas, as ranges that llguidance gets right. `schema_lowering` writes them."""

import math
from decimal import Decimal
from typing import Any

_MAX_INTEGER = 2**53  # llguidance reads numbers as floats
_MAX_DIVISOR = 250  # llguidance takes 20 µs for each unit of a divisor
_MAX_DIGITS = 6  # most digits of a bound behind the point
Bounds = list[tuple[Any, bool]]  # (number, whether it is excluded)


def integer_ranges(low: Bounds, high: Bounds, unheld: set[str]) -> list[dict[str, Any]]:
    """Return one range of integers, or an empty list if no integer is in range. Bounds that llguidance has no
    expression for go into `unheld`."""
    least = max((math.floor(bound) + 1 if is_out else math.ceil(bound) for bound, is_out in low), default=None)
    most = min((math.ceil(bound) - 1 if is_out else math.floor(bound) for bound, is_out in high), default=None)
    if least is not None and most is not None and least > most:
        return []
    found = {}
    for name, bound in (("minimum", least), ("maximum", most)):
        if bound is None:
            continue
        if abs(bound) >= _MAX_INTEGER:
            unheld.add(name)
        else:
            found[name] = bound
    return [found]


def number_ranges(low: Bounds, high: Bounds, unheld: set[str]) -> list[dict[str, Any]]:
    """Return ranges that llguidance handles correctly, which together are the schema's range. For -0.25 to 1.75 its
    expression lacks -0.2 and 1.7 (a bound's own digits, cut short), and for 0 to 0.5 with 0 excluded it includes 0.
    """
    # The tightest bound; of equal bounds the exclusive one.
    least = max(((Decimal(repr(bound)), is_out) for bound, is_out in low), default=None)
    most = min(((Decimal(repr(bound)), not is_out) for bound, is_out in high), default=None)
    if most is not None:
        most = (most[0], not most[1])
    if (
        least is not None
        and most is not None
        and (least[0] > most[0] or (least[0] == most[0] and (least[1] or most[1])))
    ):
        return []
    if least is not None and not _is_plain(least[0]):
        unheld.add("minimum")
        least = None
    if most is not None and not _is_plain(most[0]):
        unheld.add("maximum")
        most = None
    least, most = _beyond(least, 1), _beyond(most, -1)
    lows = [least, *(((cut, False)) for cut in _cuts(least, negative=True))]
    highs = [most, *(((cut, False)) for cut in _cuts(most, negative=False))]
    found = []
    for one in lows:
        for other in highs:
            if one is not None and other is not None and one[0] > other[0]:
                continue
            if one is not None and other is not None and one[0] == other[0] and (one[1] or other[1]):
                continue
            whole: dict[str, Any] = {}
            if one is not None:
                whole["exclusiveMinimum" if one[1] else "minimum"] = _number(one[0])
            if other is not None:
                whole["exclusiveMaximum" if other[1] else "maximum"] = _number(other[0])
            found.append(whole)
    return found


def is_exact(value: Any) -> bool:
    """Return whether all numbers in a JSON value are those that llguidance reads, which are floats."""
    if isinstance(value, dict):
        return all(map(is_exact, value.values()))
    if isinstance(value, list):
        return all(map(is_exact, value))
    if isinstance(value, float):
        return math.isfinite(value)
    return not isinstance(value, int) or abs(value) <= _MAX_INTEGER


def divisors(divisor: float) -> list[int | float]:
    """Return divisors that llguidance handles correctly, whose multiples together are those of a `multipleOf`: for 0.25
    it knows the multiple 0.50 but not 0.5. Return an empty list if this takes too long, or if llguidance reads another
    number."""
    written = Decimal(repr(divisor)).normalize()
    if int("".join(map(str, written.as_tuple().digits))) > _MAX_DIVISOR or abs(written.adjusted()) > 8:
        return []
    digits, found = max(0, -_exponent(written)), [divisor]
    coefficient = int(written.scaleb(digits))
    if coefficient > 10:
        found += [_number(Decimal(math.lcm(coefficient, 10**num)).scaleb(-digits)) for num in range(1, digits)]
    return found if all(map(_is_exact_divisor, found)) else []


def _is_exact_divisor(divisor: float) -> bool:
    """Return whether llguidance reads a divisor as it is written: it multiplies a float by ten until it is whole, which
    never ends in the digits of 0.07."""
    value, exponent = float(divisor), 0
    while value % 1:
        value, exponent = value * 10, exponent + 1
    return Decimal(int(value)).scaleb(-exponent) == Decimal(repr(divisor))


def _beyond(bound: tuple[Decimal, bool] | None, sign: int) -> tuple[Decimal, bool] | None:
    """Return an inclusive bound 1e-12 inside an exclusive whole bound. llguidance treats the exclusive bound as
    inclusive if another bound, perhaps in another part of an `allOf`, has the same whole part."""
    if bound is None or not bound[1] or bound[0] != int(bound[0]) or bound[0] * sign < 0:
        return bound
    places = min(12, 15 - len(str(abs(int(bound[0])))))  # a float has no more
    return bound if places < 1 else (bound[0] + Decimal((int(sign < 0), (1,), -places)), False)


def _exponent(value: Decimal) -> int:
    exponent = value.normalize().as_tuple().exponent
    return exponent if isinstance(exponent, int) else 0


def _is_plain(value: Decimal) -> bool:
    return abs(value) < _MAX_INTEGER and -_exponent(value) <= _MAX_DIGITS


def _cuts(bound: tuple[Decimal, bool] | None, *, negative: bool) -> list[Decimal]:
    """Return a bound cut to each smaller number of digits behind the point, if llguidance does not know these
    numbers."""
    if bound is None or (bound[0] < 0) != negative:
        return []
    digits = -_exponent(bound[0])
    return [
        cut
        for num in range(1, digits)
        if (cut := Decimal(int(bound[0].scaleb(num))).scaleb(-num)) != 0 or bound[0] == 0
    ]


def _number(value: Decimal) -> int | float:
    return int(value) if value == int(value) else float(value)
