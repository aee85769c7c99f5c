"""Texts of times for columns of PostgreSQL: the parts of a text that a column would drop.

The server reads many notations, and ignores in silence what a type cannot hold: the offset of a
``timestamp``, the time of a ``date``, digits of a second. Pure; the text itself is not converted.
"""

import re

from storm_dagster.connectors.postgres_columns import Column

_CLOCK_WORDS = frozenset(("now", "today", "tomorrow", "yesterday"))
"""Words that the server reads as a time of its own clock."""
_DATE_WORD = re.compile(
    "jan(uary)?|feb(ruary)?|mar(ch)?|apr(il)?|may|june?|july?|aug(ust)?|sept?(ember)?|oct(ober)?|"
    "nov(ember)?|dec(ember)?|mon(day)?|tue(s|sday)?|wed(s|nesday)?|thu(r|rs|rsday)?|fri(day)?|"
    "sat(urday)?|sun(day)?"
)
"""Name of a month or of a day of the week."""
_TIME_WORDS = frozenset(("am", "pm", "allballs"))
_OTHER_WORDS = frozenset(("t", "j", "jd", "julian", "at", "on", "ad", "bc", "epoch", "infinity"))
"""Words of a date or a time that are neither a zone nor a time of the day."""
_UTC_WORDS = frozenset(("z", "utc", "zulu", "gmt"))
_WORD = re.compile(r"[a-z]+(?:[/_][a-z/_]+)*")
_CLOCK = re.compile(r"\d:\d|t\d{2,6}(?!\d)")
_CLOCK_DIGITS = re.compile(r"\d{1,2}(?::\d\d){1,2}(?:\.\d+)?|t\d{2,6}(?:\.\d+)?")
_FRACTION = re.compile(r"(?::\d\d|t\d{6})\.(\d+)")
_OFFSET = re.compile(r"(?:\d|t\d{2,6}(?:\.\d+)?)\s*[+-]\s*(\d{1,2}(?::?\d\d){0,2})\b")
_DATE = re.compile(r"\d{4}-\d|\d/\d|\d{8}t|-\d{1,2}-\d")
_DECIMAL = re.compile(r"\d*[.](\d+)")
_INTERVAL_PART = re.compile(r"[+-]?\d+\s*([a-z]+)\s*")
_INTERVAL_UNITS: dict[str, int] = {
    "year": 1 << 2,
    "mon": 1 << 1,
    "month": 1 << 1,
    "day": 1 << 3,
    "hour": 1 << 10,
    "minute": 1 << 11,
}
"""Name of a unit, without the ``s`` of several -> its bit in the modifier of an interval."""
_PLAIN_DATE = re.compile(r"\d{4}-\d\d-\d\d", re.ASCII)
_PLAIN_TIME = re.compile(
    r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:\.\d{1,6})?(Z|[+-]\d\d(?::?\d\d)?)?", re.ASCII
)
"""A time in ISO 8601 with all digits that PostgreSQL keeps: (offset)."""
_RANGE_TYPES: dict[str, str] = {
    "daterange": "date",
    "datemultirange": "date",
    "tsrange": "timestamp",
    "tsmultirange": "timestamp",
    "tstzrange": "timestamptz",
    "tstzmultirange": "timestamptz",
}
"""Type of ranges -> type of their bounds."""


def is_range_of_times(column: Column) -> bool:
    """True for ranges of dates or times."""
    return column.type in _RANGE_TYPES


def is_plain_time(text: str, column: Column) -> bool:
    """True for the usual text of a date or time, of which the column keeps all: a short way."""
    if column.type == "date":
        return _PLAIN_DATE.fullmatch(text) is not None
    if column.modifier >= 0 or column.type not in ("timestamp", "timestamptz"):
        return False
    match = _PLAIN_TIME.fullmatch(text)
    return match is not None and (column.type == "timestamptz" or match[1] is None)


def clock_word_of(text: str) -> str:
    """The word in a text that the server reads as the time of the write; empty without one."""
    for word in _WORD.findall(text.lower()):
        if word in _CLOCK_WORDS:
            return word
    return ""


def dropped_from_time(text: str, column: Column) -> str:
    """The reason why a column drops a part of a text; empty if it keeps all of it.

    It is a column of ``date``, ``timestamp``, ``timestamptz``, ``time``, ``timetz``, or of ranges
    of these.
    """
    type_name = _RANGE_TYPES.get(column.type, column.type)
    folded = text.lower()
    words = _WORD.findall(folded)
    has_clock = bool(_CLOCK.search(folded)) or not _TIME_WORDS.isdisjoint(words)
    if type_name == "date" and has_clock and _has_time(folded, words):
        return "which has a time"
    offset = _offset_of(folded, words) if has_clock else ""
    is_midnight_in_utc = type_name == "date" and offset in _UTC_WORDS
    if offset and type_name in ("timestamp", "time", "date") and not is_midnight_in_utc:
        return "whose offset it ignores"
    if type_name in ("time", "timetz") and (_DATE.search(folded) or _has_date_word(words)):
        return "whose date it drops"
    fractions = [fraction.rstrip("0") for fraction in _FRACTION.findall(folded)]
    if type_name != "date" and any(len(part) > column.second_digits for part in fractions):
        return f"of which it keeps {column.second_digits} digits"
    return ""


def _has_time(text: str, words: list[str]) -> bool:
    """True if the clock in a text is not midnight."""
    if not _TIME_WORDS.isdisjoint(words):
        return True
    # The digits of an offset are not a time.
    without_offset = _OFFSET.sub(lambda match: match[0][0], text)
    return any(digits.strip("t0:.") for digits in _CLOCK_DIGITS.findall(without_offset))


def _has_date_word(words: list[str]) -> bool:
    return any(_DATE_WORD.fullmatch(word) for word in words)


def _offset_of(text: str, words: list[str]) -> str:
    """The offset or the zone of a time; empty without one."""
    for word in words:
        is_known = word in _TIME_WORDS or word in _OTHER_WORDS or _DATE_WORD.fullmatch(word)
        if not is_known:
            return word
    # A date has hyphens, too, which are before the clock.
    clock = _CLOCK.search(text)
    rest = text if clock is None else text[clock.start() :]
    offset = _OFFSET.search(rest)
    return "" if offset is None else offset[1]


def dropped_from_interval(text: str, column: Column) -> str:
    """The reason why an interval drops a part of a text; empty if it keeps all of it."""
    digits = [part.rstrip("0") for part in _DECIMAL.findall(text)]
    if any(len(part) > column.second_digits for part in digits):
        return f"of which it keeps {column.second_digits} digits"
    fields = column.interval_fields
    if not fields:
        return ""
    parts = text.lower().strip()
    units = [name.removesuffix("s") for name in _INTERVAL_PART.findall(parts)]
    is_known = not _INTERVAL_PART.sub("", parts)
    least = min(map(_rank, (bit for bit in _INTERVAL_UNITS.values() if bit & fields)), default=0)
    if not is_known or any(_rank(_INTERVAL_UNITS.get(unit, 0)) < least for unit in units):
        return "of which it may drop a part"
    return ""


def _rank(bit: int) -> int:
    """Place of a unit among all, the smallest first; 0 for one that is not known."""
    order = (1 << 11, 1 << 10, 1 << 3, 1 << 1, 1 << 2)
    return order.index(bit) + 1 if bit in order else 0
