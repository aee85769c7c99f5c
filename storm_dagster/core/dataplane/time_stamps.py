"""Time stamps of tuples that cannot be: too far ahead of the worker's clock.

Pure. One such stamp would move the watermark so far that all honest tuples after it are late.
"""

from storm_dagster.model.amounts import utc_text
from storm_dagster.model.errors import StormDagsterError

_YEAR_MS = 366 * 86_400_000
_UNIT_MAX_OFFSET_MS = 30 * _YEAR_MS
"""Distance from now within which a stamp in another unit is taken for a time of that unit."""
_UNITS = (("microseconds", 1_000), ("nanoseconds", 1_000_000))
"""Unit, and its number in a millisecond."""
_MAX_DATE_MS = 253_402_300_799_000
"""Last time of the year 9999, which dates can show."""


class FutureStamp(StormDagsterError):
    """A time stamp too far ahead of the worker's clock."""


def is_too_far_ahead(stamp: int, now_ms: int, max_ahead_ms: int) -> bool:
    """True if a stamp is more than ``max_ahead_ms`` after ``now_ms``; never if that is 0."""
    return bool(max_ahead_ms) and stamp > now_ms + max_ahead_ms


def describe_stamp(stamp: int, now_ms: int) -> str:
    """Describe the unit that a stamp looks like, or the time that it is in milliseconds."""
    for unit, number in _UNITS:
        if abs(stamp // number - now_ms) < _UNIT_MAX_OFFSET_MS:
            return f"it looks like {unit}: {date_of(stamp // number)}"
    return f"as milliseconds it is {date_of(stamp)}, {_hours(stamp - now_ms)} ahead"


def future_stamp(
    stamp: int, now_ms: int, max_ahead_ms: int, *, field: str, source: str
) -> FutureStamp:
    """Return the error of a stamp that :func:`is_too_far_ahead`."""
    return FutureStamp(
        f"field {field!r} of a tuple of {source!r} is {stamp}, more than {max_ahead_ms // 1000} s "
        f"after this worker's clock ({date_of(now_ms)}); {describe_stamp(stamp, now_ms)}. The "
        "tuple is treated as a late one and does not move the watermark: send milliseconds since "
        "1970, correct the sender's clock, or raise topology.windows.max.ahead.secs (0: any time)"
    )


def date_of(stamp: int) -> str:
    """UTC date and time of milliseconds since 1970; the number, if no date can show it."""
    if not 0 <= stamp <= _MAX_DATE_MS:
        return f"{stamp} ms"
    return utc_text(stamp / 1000)


def _hours(span_ms: int) -> str:
    hours = span_ms / 3_600_000
    return f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:.0f} days"
