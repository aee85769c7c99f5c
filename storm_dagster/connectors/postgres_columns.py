"""Columns of a table of PostgreSQL, as its catalog describes them."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

COLUMNS_QUERY = """
with recursive part (name, type, mod, is_array, is_domain) as (
    select attname, atttypid, atttypmod, false, false from pg_catalog.pg_attribute
    where attrelid = to_regclass(%s) and attnum > 0 and not attisdropped
  union all
    select name, case typtype when 'd' then typbasetype else typelem end,
        case when typtype = 'd' and typtypmod >= 0 then typtypmod else mod end,
        is_array or typtype <> 'd', is_domain or typtype = 'd'
    from part join pg_catalog.pg_type on pg_type.oid = type
    where typtype = 'd' or typelem <> 0 and typlen = -1 and typcategory = 'A'
)
select name::text, typname::text, mod, is_array,
    typnamespace = 'pg_catalog'::regnamespace, typtype::text
from part join pg_catalog.pg_type on pg_type.oid = type
where typtype <> 'd' and not (typelem <> 0 and typlen = -1 and typcategory = 'A')
"""
"""Query for the columns of a table, with their types without arrays and domains around them.

Users that may only insert into the table can read the catalog.
"""
_MAX_NAME_BYTES = 63
"""PostgreSQL truncates a longer name."""
_SECOND_FIELD = 1 << 12
"""Bit of seconds in the modifier of an interval."""
_FIELD_SECS = ((1 << 11, 60), (1 << 10, 3600), (1 << 3, 86_400))
"""Bit of a unit in the modifier of an interval, and its seconds; the smallest unit first."""


class Column(NamedTuple):
    """Type of a column."""

    type: str
    """Name of the type, of the elements if the column is an array, such as ``int4``.

    Empty for a type that is not one of PostgreSQL's own.
    """
    modifier: int
    """Number behind the type that its length or precision is in; -1 without one."""
    is_array: bool
    kind: str = "b"
    """``b`` for a base type, ``e`` for an enumeration, ``c`` for a composite type."""

    @property
    def name(self) -> str:
        """Name for errors, such as ``numeric(10,2)`` or ``jsonb[]``."""
        return f"{self.type or 'a type of its own'}{self._size()}{'[]' if self.is_array else ''}"

    def _size(self) -> str:
        if self.type == "numeric" and self.modifier >= 0:
            precision, scale = self.digits or (0, 0)
            return f"({precision},{scale})"
        if self.max_length is not None:
            return f"({self.max_length})"
        return ""

    @property
    def is_json(self) -> bool:
        """True if values, or elements, are of JSON."""
        return self.type in ("json", "jsonb")

    @property
    def max_length(self) -> int | None:
        """Number of characters of a ``varchar(n)`` or ``char(n)``, else ``None``."""
        # The modifier includes the four bytes of a length.
        if self.type in ("varchar", "bpchar") and self.modifier >= 4:
            return self.modifier - 4
        return None

    @property
    def digits(self) -> tuple[int, int] | None:
        """(precision, scale) of a ``numeric(p, s)``, else ``None``; the scale may be negative."""
        if self.type != "numeric" or self.modifier < 4:
            return None
        packed = self.modifier - 4
        scale = packed & 0x7FF
        return packed >> 16, scale - 0x800 if scale >= 0x400 else scale

    @property
    def second_digits(self) -> int:
        """Digits of a fraction of a second that a type of times keeps."""
        return 6 if self.modifier < 0 else min(6, self.modifier & 0xFFFF)

    @property
    def interval_fields(self) -> int:
        """Bits of the units that an ``interval year to month`` and the like keep.

        0 for an interval that has seconds, and so all units.
        """
        if self.type != "interval" or self.modifier < 0:
            return 0
        fields = (self.modifier >> 16) & 0x7FFF
        return 0 if fields & _SECOND_FIELD else fields

    @property
    def interval_step_secs(self) -> int:
        """Seconds of the smallest unit that an interval keeps.

        0 for one with microseconds; -1 for one of months or years, which no number of seconds is.
        """
        fields = self.interval_fields
        for bit, secs in _FIELD_SECS:
            if fields & bit:
                return secs
        return -1 if fields else 0


Columns = Mapping[str, Column]
"""Name -> type of the columns of a table."""


def columns_of(lines: Iterable[tuple[Any, ...]]) -> dict[str, Column]:
    """The columns in the lines of :data:`COLUMNS_QUERY`."""
    columns: dict[str, Column] = {}
    for name, type_name, modifier, is_array, is_own, kind in lines:
        columns[name] = Column(type_name if is_own else "", modifier, is_array, kind)
    return columns


def column_of(columns: Columns, name: Any) -> Column | None:
    """The column of a field; ``None`` if the table has none of this name."""
    if not isinstance(name, str):
        # The statement refuses it, with its row.
        return None
    if len(name) > _MAX_NAME_BYTES // 4:
        name = name.encode("utf-8", "replace")[:_MAX_NAME_BYTES].decode("utf-8", "ignore")
    return columns.get(name)
