"""Numbers in words: the formats of the report, in one place."""

from __future__ import annotations

import math

LARGE = 1e6


def count(value: float) -> str:
    """A whole number, with a real minus sign: ``−1,234``; an absurdly large one by its powers of ten."""
    if abs(value) >= 1e12:
        return _minus(f"{value:.2e}")
    return _minus(f"{round(value):,}")


def number(value: float, digits: int = 3) -> str:
    """A number to so many significant digits."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "−∞"
    if abs(value) >= LARGE or 0 < abs(value) < 1e-4:
        return _minus(f"{value:.{digits - 1}e}")
    return _minus(f"{value:,.{digits}g}" if abs(value) < 10**digits else f"{value:,.0f}")


def share(value: float) -> str:
    """A share of 1 in percent: one decimal, and of what is smaller than that one digit."""
    tiny = 0 < abs(value) < 0.0005
    return _minus(f"{value * 100:.1g}\u00a0%" if tiny else f"{value * 100:.1f}\u00a0%")


def size(octets: float) -> str:
    """Bytes, kB or MB."""
    for unit, limit in (("bytes", 1e3), ("kB", 1e6), ("MB", 1e9)):
        if octets < limit:
            scaled = octets / (limit / 1e3)
            return f"{scaled:.0f} {unit}" if unit == "bytes" or scaled >= 100 else f"{scaled:.1f} {unit}"
    return f"{octets / 1e9:.1f} GB"


def several(number_of: int, one: str, more: str = "") -> str:
    """``1 site``, ``2 sites``."""
    return f"{count(number_of)} {one if number_of == 1 else more or one + 's'}"


def listed(items: list[str], most: int = 4) -> str:
    """``a, b and c``; of many the first and how many more."""
    if len(items) > most:
        return f"{', '.join(items[: most - 1])} and {len(items) - most + 1} more"
    return items[0] if len(items) == 1 else f"{', '.join(items[:-1])} and {items[-1]}" if items else "none"


def _minus(text: str) -> str:
    return text.replace("-", "−")
