"""Amounts and times as people read them: ``2.14k``, ``38 %``, ``2 min``."""

from datetime import datetime, timezone


def compact(number: float | None) -> str:
    """Three digits and a unit (k, M, G); ``-`` for ``None``."""
    if number is None:
        return "-"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        # Three digits of a number above that are rounded up to the unit.
        if abs(number) >= size * 0.9995:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}" if abs(number) >= 0.001 else "0"


def percent(share: float) -> str:
    """A share in whole percents, one digit more below one percent."""
    if 0.0005 <= share < 0.01:
        return f"{share * 100:.1f} %"
    return f"{share * 100:.0f} %"


def latency(millis: float | None) -> str:
    """A latency in ms or s, such as ``0.5 ms`` or ``4.97 s``.

    ``-`` for ``None``.
    """
    if millis is None:
        return "-"
    # From there on three digits are rounded up to 1000 ms.
    if millis < 999.5:
        return f"{compact(millis)} ms"
    return f"{compact(millis / 1000)} s"


def duration(seconds: float) -> str:
    """A time in the largest unit that it has at least two of: ``90 s``, ``7 min``, ``3 h``."""
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def utc_text(secs: float) -> str:
    """Date and time of epoch seconds, such as ``2026-11-30 11:03:00 UTC``.

    The number of seconds for a time beyond the calendar: clients and workers write some of them.
    """
    try:
        return f"{datetime.fromtimestamp(secs, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, ValueError, OSError):
        return f"{secs:.0f} s of the epoch"
