"""Numbers with units, as far as short answers have them: enough to spare a judge the easy cases, and no further.

What is not read with certainty is not read at all: ``None`` is always an answer here, and leaves the matter to others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final

import msgspec

__all__ = ["Quantity", "read_quantity", "same_quantity"]

TEXT_CHARS: Final = 200
EXPONENT_MAX: Final = 300

Dimension = tuple[int, ...]

_NUMBER = re.compile(
    r"(?P<sign>[-+\u2212]?)\s*(?P<whole>\d{1,3}(?:,\d{3})+|\d{1,40})?(?P<part>\.\d{1,40})?"
    r"(?:\s*(?:/|over)\s*(?P<below>\d{1,40}))?"
    r"(?:\s*(?:[eE]|(?:\u00d7|x|\*|·|times)\s*10\s*(?:\^|\*\*))\s*\{?\(?(?P<power>[-+\u2212]?\d{1,4})\)?\}?)?"
)
_POWER_ALONE = re.compile(r"(?P<sign>[-+\u2212]?)\s*10\s*(?:\^|\*\*)\s*\{?\(?(?P<power>[-+\u2212]?\d{1,4})\)?\}?")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{(\d{1,40})\}\s*\{(\d{1,40})\}")
_FACTOR = re.compile(
    r"(?P<joint>[*/·⋅ ]*)(?P<name>[A-Za-zµμΩ°%ÅÅ]+)(?:\s*(?:\^|\*\*)?\s*\{?\(?(?P<power>[-+\u2212]?\d{1,2})\)?\}?)?"
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_COMMANDS = re.compile(r"\\(?:mathrm|text|textrm|operatorname|mbox|rm)\b|\\[,;:! ]|~|\$|\\left|\\right")

# Metre, kilogram, second, ampere, kelvin, mole, candela; degrees Celsius and of arc, and percent, are their own.
_AXES: Final = ("m", "kg", "s", "A", "K", "mol", "cd", "degC", "deg", "%")


def _dimension(**powers: int) -> Dimension:
    return tuple(powers.get(axis, 0) for axis in _AXES)


_FORCE = {"m": 1, "kg": 1, "s": -2}
_ENERGY = {"m": 2, "kg": 1, "s": -2}
_PRESSURE = {"m": -1, "kg": 1, "s": -2}
_UNITS: Final[Mapping[str, tuple[float, Dimension]]] = {
    "m": (1, _dimension(m=1)),
    "g": (1e-3, _dimension(kg=1)),
    "s": (1, _dimension(s=1)),
    "A": (1, _dimension(A=1)),
    "K": (1, _dimension(K=1)),
    "mol": (1, _dimension(mol=1)),
    "cd": (1, _dimension(cd=1)),
    "N": (1, _dimension(**_FORCE)),
    "J": (1, _dimension(**_ENERGY)),
    "eV": (1.602176634e-19, _dimension(**_ENERGY)),
    "cal": (4.184, _dimension(**_ENERGY)),
    "W": (1, _dimension(m=2, kg=1, s=-3)),
    "Pa": (1, _dimension(**_PRESSURE)),
    "bar": (1e5, _dimension(**_PRESSURE)),
    "atm": (101325, _dimension(**_PRESSURE)),
    "Hz": (1, _dimension(s=-1)),
    "C": (1, _dimension(s=1, A=1)),
    "V": (1, _dimension(m=2, kg=1, s=-3, A=-1)),
    "ohm": (1, _dimension(m=2, kg=1, s=-3, A=-2)),
    "F": (1, _dimension(m=-2, kg=-1, s=4, A=2)),
    "T": (1, _dimension(kg=1, s=-2, A=-1)),
    "H": (1, _dimension(m=2, kg=1, s=-2, A=-2)),
    "Wb": (1, _dimension(m=2, kg=1, s=-2, A=-1)),
    "L": (1e-3, _dimension(m=3)),
    "l": (1e-3, _dimension(m=3)),
    "M": (1e3, _dimension(m=-3, mol=1)),
    "min": (60, _dimension(s=1)),
    "h": (3600, _dimension(s=1)),
    "Å": (1e-10, _dimension(m=1)),
    "°C": (1, _dimension(degC=1)),
    "°": (1, _dimension(deg=1)),
    "rad": (180 / math.pi, _dimension(deg=1)),
    "%": (1, _dimension(**{"%": 1})),
}
_PLAIN: Final = frozenset({"min", "h", "Å", "°C", "°", "rad", "%", "atm"})
_PREFIXES: Final = {
    "f": 1e-15, "p": 1e-12, "n": 1e-9, "u": 1e-6, "m": 1e-3, "c": 1e-2, "d": 1e-1,
    "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12,
}  # fmt: skip
_NAMES: Final = {
    "metre": "m", "metres": "m", "meter": "m", "meters": "m", "second": "s", "seconds": "s", "sec": "s",
    "gram": "g", "grams": "g", "kilogram": "kg", "kilograms": "kg", "newton": "N", "newtons": "N",
    "joule": "J", "joules": "J", "watt": "W", "watts": "W", "volt": "V", "volts": "V", "ohms": "ohm", "Ohm": "ohm",
    "hour": "h", "hours": "h", "hr": "h", "minute": "min", "minutes": "min", "liter": "L", "liters": "L",
    "litre": "L", "litres": "L", "kelvin": "K", "degrees": "°", "degree": "°", "deg": "°", "radians": "rad",
    "percent": "%", "moles": "mol", "mole": "mol", "hertz": "Hz", "km": "km", "Ω": "ohm", "kΩ": "kohm", "MΩ": "Mohm",
    "mΩ": "mohm", "amperes": "A", "ampere": "A", "amps": "A", "pascal": "Pa", "pascals": "Pa",
}  # fmt: skip


class Quantity(msgspec.Struct, frozen=True, kw_only=True):
    """A number in base units; ``whole`` says that it was written as an integer."""

    value: float
    dimension: Dimension
    whole: bool


def read_quantity(text: str) -> Quantity | None:
    """The quantity that a text is, all of it; ``None`` where it is anything else."""
    if len(text) > TEXT_CHARS:
        return None
    bare = _simplified(text)
    found = _POWER_ALONE.match(bare) or _NUMBER.match(bare)
    if found is None:
        return None
    value = _number(found.groupdict())
    if value is None:
        return None
    unit = _unit(bare[found.end() :].strip())
    if unit is None:
        return None
    factor, dimension = unit
    given = found.groupdict()
    whole = given.get("whole") is not None and not any(given.get(key) for key in ("part", "below", "power"))
    return Quantity(value=value * factor, dimension=dimension, whole=whole and factor == 1)


def same_quantity(given: Quantity, gold: Quantity, tolerance: float) -> bool | None:
    """Whether two are the same; ``None`` where their units can't be compared.

    A whole number without a unit is a count and has to be met exactly.
    """
    if given.dimension != gold.dimension:
        return None
    exact = gold.whole and not any(gold.dimension)
    return math.isclose(given.value, gold.value, rel_tol=1e-9 if exact else tolerance, abs_tol=0.0)


def _simplified(text: str) -> str:
    text = text.strip().translate(_SUPERSCRIPTS)
    text = _FRACTION.sub(r" \1/\2 ", text)
    text = text.replace("^\\circ", "°").replace("^{\\circ}", "°").replace("\\degree", "°").replace("° C", "°C")
    text = text.replace("\\times", "\u00d7").replace("\\cdot", "·").replace("\\%", "%").replace("\\mu", "u")
    text = text.replace("\\Omega", "Ω").replace("µ", "u").replace("μ", "u").replace("Ω", "Ω").replace("\u2212", "-")
    text = text.replace("{,}", ",")
    text = _COMMANDS.sub(" ", text)
    # Braces around a unit only group it.
    return re.sub(r"(?<!\^)\{([^{}]*)\}", r" \1 ", text).strip().rstrip(".").strip()


def _number(given: Mapping[str, str | None]) -> float | None:
    power = int(given.get("power") or 0)
    if abs(power) > EXPONENT_MAX:
        return None
    if "whole" not in given:
        digits = 1.0
    else:
        if given["whole"] is None and given["part"] is None:
            return None
        digits = float((given["whole"] or "0").replace(",", "") + (given["part"] or ""))
        if given["below"] is not None:
            if float(given["below"]) == 0:
                return None
            digits /= float(given["below"])
    value = digits * 10.0**power
    return -value if given["sign"] == "-" else value


def _unit(text: str) -> tuple[float, Dimension] | None:
    factor, dimension = 1.0, _dimension()
    position = 0
    while position < len(text):
        found = _FACTOR.match(text, position)
        if found is None or found.end() == position:
            return None
        one = _named(found["name"])
        joint = found["joint"].strip()
        if one is None or len(joint) > 1:
            return None
        power = int(found["power"] or 1) * (-1 if joint == "/" else 1)
        factor *= one[0] ** power
        dimension = tuple(have + power * more for have, more in zip(dimension, one[1], strict=True))
        position = found.end()
    return (factor, dimension) if math.isfinite(factor) and factor > 0 else None


def _named(name: str) -> tuple[float, Dimension] | None:
    name = _NAMES.get(name, name)
    if name in _UNITS:
        return _UNITS[name]
    prefix, rest = _PREFIXES.get(name[:1]), name[1:]
    if prefix is None or rest not in _UNITS or rest in _PLAIN:
        return None
    factor, dimension = _UNITS[rest]
    return prefix * factor, dimension
