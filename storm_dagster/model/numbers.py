"""Numbers of the three types that tuples have: ``int``, ``float`` and ``Decimal``."""

from decimal import Decimal


def is_nan(value: float | Decimal) -> bool:
    """True for NaN, which is not equal to itself; a signaling one of ``Decimal`` has no hash."""
    return value.is_nan() if isinstance(value, Decimal) else value != value


def exact_decimal(value: float | Decimal) -> Decimal:
    """All digits of a number; a float has those of its shortest text."""
    return Decimal(float.__repr__(value)) if isinstance(value, float) else Decimal(value)
