"""Records of one file, by its format: lines, CSV or Parquet.

A record that cannot be read is returned with the reason, and those after it are read.
"""

import codecs
import csv
import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import msgspec

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_BZIP2 = "it is compressed with bzip2: give it a name that ends with .bz2"
_FORMS: tuple[tuple[bytes, str], ...] = (
    (codecs.BOM_UTF32_LE, 'it is UTF-32: set encoding="utf-32" of the FileSource'),
    (codecs.BOM_UTF32_BE, 'it is UTF-32: set encoding="utf-32" of the FileSource'),
    (codecs.BOM_UTF16_LE, 'it is UTF-16: set encoding="utf-16" of the FileSource'),
    (codecs.BOM_UTF16_BE, 'it is UTF-16: set encoding="utf-16" of the FileSource'),
    (b"\x1f\x8b", "it is compressed with gzip: give it a name that ends with .gz"),
    *((b"BZh%d1AY" % level, _BZIP2) for level in range(1, 10)),
    (b"\xfd7zXZ\0", "it is compressed with xz: give it a name that ends with .xz"),
    (b"\x28\xb5\x2f\xfd", "it is compressed with zstd: give it a name that ends with .zst"),
    (b"PK\x03\x04", "it is a zip archive: give it a name that ends with .zip"),
    (b"PAR1\x15", 'it is a file of Parquet: set format="parquet" of the FileSource'),
)
"""First bytes of a file that is not of UTF-8 -> what it is, and the remedy."""
_BYTES_AS_HALVES = "storm_dagster.bytes_as_halves"
"""Name of the handler of bytes that are not of an encoding (:func:`_bytes_as_halves`)."""
_MAX_EXCERPT = 1 << 16
"""Maximum number of characters that are kept of a record that cannot be read."""
_OTHER_DELIMITERS = ";\t|"
"""Delimiters that a header of one field shows, if they are in it."""

ShortRows = Literal["reject", "none"]
"""Handling of a row of CSV that has fewer fields than the header."""


class FileRow(msgspec.Struct, frozen=True, gc=False):
    """One record of a file."""

    value: Any
    """The record, or the text of one that cannot be read."""
    line: int | None = None
    """Number of the line at which it begins, from 1 on; ``None`` in a format without lines."""
    error: str = ""
    """Reason why it cannot be read."""


class TextOptions(NamedTuple):
    """Form of the text of a file."""

    encoding: str = "utf-8"
    delimiter: str | None = None
    """Character between the fields of CSV; ``None``: a comma, unless the header shows another."""
    short_rows: ShortRows = "reject"

    @property
    def is_utf8(self) -> bool:
        """True for the default encoding, in which lines are bytes."""
        return codecs.lookup(self.encoding).name in ("utf-8", "utf-8-sig")


def line_rows(file: Any, options: TextOptions, lines_before: int = 0) -> Iterator[FileRow]:
    """The lines of a file without their ends, as bytes, or as text of another encoding.

    Empty lines are no records. ``lines_before``: number of lines before the position of the file.
    """
    if not options.is_utf8:
        yield from _text_line_rows(file, options.encoding)
        return
    number = lines_before
    for line in file:
        number += 1
        if number == 1:
            _check_form(line)
            line = line.removeprefix(_BYTE_ORDER_MARK)
        text = line.rstrip(b"\r\n")
        if text:
            yield FileRow(text, number)


def _text_line_rows(file: Any, encoding: str) -> Iterator[FileRow]:
    with _text_of(file, encoding, "\n") as text_file:
        for number, line in enumerate(text_file, 1):
            if number == 1:
                line = _without_mark(line, encoding)
            text = line.rstrip("\r\n")
            if text:
                yield FileRow(text, number, _undecoded(text, encoding))


def _check_form(first_bytes: bytes) -> None:
    """Raise ``ValueError`` if a file that is read as UTF-8 is compressed, or of another form."""
    for mark, text in _FORMS:
        if first_bytes.startswith(mark):
            raise ValueError(text)


def _without_mark(first_line: str, encoding: str) -> str:
    """The first line of another encoding than UTF-8, without its byte order mark.

    Raises ``ValueError`` if the mark is that of UTF-8.
    """
    mark = _BYTE_ORDER_MARK.decode(encoding, _BYTES_AS_HALVES)
    if len(mark) == len(_BYTE_ORDER_MARK) and first_line.startswith(mark):
        raise ValueError(
            f"it begins with the byte order mark of UTF-8, and encoding of the FileSource is "
            f'{encoding!r}: set encoding="utf-8"'
        )
    return first_line.removeprefix("\ufeff")


def _bytes_as_halves(error: UnicodeError) -> tuple[str, int]:
    """Decode each byte that is not of an encoding to half of a surrogate pair, 0xdc00 and the byte.

    Python's own handler, ``surrogateescape``, has none for bytes of ASCII, as UTF-16 has them.
    """
    assert isinstance(error, UnicodeDecodeError)
    wrong_bytes = error.object[error.start : error.end]
    return "".join([chr(0xDC00 + byte) for byte in wrong_bytes]), error.end


codecs.register_error(_BYTES_AS_HALVES, _bytes_as_halves)


@contextmanager
def _text_of(file: Any, encoding: str, newline: str) -> Iterator[io.TextIOWrapper]:
    """The text of a file, which stays open.

    Bytes that are not of the encoding become halves of surrogate pairs.
    """
    text_file = io.TextIOWrapper(file, encoding, errors=_BYTES_AS_HALVES, newline=newline)
    try:
        yield text_file
    finally:
        text_file.detach()


def _undecoded(text: str, encoding: str) -> str:
    """Reason if a part of the text is not of the encoding; empty if all is."""
    if text.isascii():
        return ""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        # As _bytes_as_halves returns it.
        byte = ord(text[error.start]) & 0xFF
        return f"byte 0x{byte:02x} is not {encoding}: set encoding of the FileSource"
    return ""


def csv_rows(file: Any, options: TextOptions) -> Iterator[FileRow]:
    """The rows of a CSV file as maps from the names of its header.

    A row with another number of fields, with a quote out of place, or with bytes that are not of
    the encoding, has an error. Raises ``ValueError`` for a header that cannot be used, and for a
    field of more than 128 KiB, behind which no row is certain.
    """
    # "utf-8-sig" drops a byte order mark.
    encoding = "utf-8-sig" if options.is_utf8 else options.encoding
    with _text_of(file, encoding, "") as text_file:
        yield from _rows_of_text(text_file, options)


def _rows_of_text(text_file: io.TextIOWrapper, options: TextOptions) -> Iterator[FileRow]:
    # Lines of the current row.
    lines: list[str] = []

    def record_lines() -> Iterator[str]:
        for line in text_file:
            lines.append(line)
            yield line

    reader = csv.reader(record_lines(), delimiter=options.delimiter or ",", strict=True)
    header: list[str] | None = None
    while True:
        number = reader.line_num + 1
        lines.clear()
        error = ""
        row: list[str] = []
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as problem:
            error = _quoting_error(problem, number)
        if not row and not error:
            # An empty line.
            continue
        text = lines[0] if len(lines) == 1 else "".join(lines)
        if header is None and row:
            _check_begin(text, options)
            row[0] = _without_mark(row[0], options.encoding)
        if header is not None and len(row) == len(header) and not error and text.isascii():
            # The usual row: without the checks below it costs a third less.
            yield FileRow(dict(zip(header, row, strict=True)), number)
            continue
        error = _undecoded(text, options.encoding) or error
        if header is not None:
            yield _csv_row(header, row, number, text, error, options.short_rows)
        else:
            _check_header(row, error, options.delimiter, number)
            header = row


def _check_begin(text: str, options: TextOptions) -> None:
    """Raise ``ValueError`` if the first row is that of a file of another form."""
    if options.is_utf8:
        _check_form(text[:16].encode("utf-8", "surrogateescape"))
    if "\0" in text and options.delimiter != "\0":
        raise ValueError(
            "its header has NUL characters, so that it is not CSV: unpack it if it is a tar "
            "archive, or set encoding of the FileSource"
        )


def _csv_row(
    header: Sequence[str],
    fields: Sequence[str],
    number: int,
    text: str,
    error: str,
    short_rows: ShortRows,
) -> FileRow:
    """The record of the fields of a row, or of its text and the reason why it has none."""
    is_filled = len(fields) < len(header) and short_rows == "none"
    if not error and len(fields) != len(header) and not is_filled:
        error = f"{len(fields)} fields, and the header has {len(header)}"
    if error:
        return FileRow(text[:_MAX_EXCERPT], number, error)
    # The names of a short row without a field have None.
    return FileRow(dict(zip_longest(header, fields)), number)


def _quoting_error(problem: csv.Error, number: int) -> str:
    """Reason of a row that the reader refuses."""
    reason = str(problem)
    if "field larger" in reason:
        # Its end is unknown: the lines after it may be of the same field.
        raise ValueError(f"line {number}: {reason}") from None
    if "unexpected end of data" in reason:
        return "a quote is opened here, and not closed before the end of the file"
    return f"a quote is out of place ({reason})" if "expected after" in reason else reason


def _check_header(header: Sequence[str], error: str, delimiter: str | None, number: int) -> None:
    """Raise ``ValueError`` if a header cannot be used."""
    if error:
        raise ValueError(f"line {number}, the header: {error}")
    for name in header:
        if header.count(name) > 1:
            raise ValueError(f"line {number}: the header has {name!r} twice: rename a column")
    if delimiter is not None or len(header) > 1:
        return
    for other in _OTHER_DELIMITERS:
        if other in header[0]:
            raise ValueError(
                f"line {number}: the header is one field with {other!r} in it: set "
                f'delimiter={other!r} of the FileSource, or delimiter="," if it is one name'
            )


def parquet_rows(file: Any) -> Iterator[FileRow]:
    """The rows of a Parquet file as maps.

    Times in nanoseconds become microseconds, those of int96 as Spark reads them. A row with a value
    that Python cannot hold has an error, such as a time with nanoseconds, a date after the year
    9999, or text that is not UTF-8. Raises ``ValueError`` if a name occurs twice in the schema.
    """
    from pyarrow.parquet import ParquetFile

    # In nanoseconds, years after 2262 would become others without an error.
    reader = ParquetFile(file, coerce_int96_timestamp_unit="us")
    _check_names(reader.schema_arrow)
    # 1000 rows at a time bound the memory.
    for batch in reader.iter_batches(1000):
        try:
            rows = _in_microseconds(batch).to_pylist()
        except Exception:
            for index in range(batch.num_rows):
                yield _parquet_row(batch.slice(index, 1))
        else:
            for row in rows:
                yield FileRow(row)


def _check_names(parts: Any) -> None:
    """Raise ``ValueError`` if two columns, or two fields of a struct, have one name."""
    names: set[str] = set()
    for part in parts:
        if part.name in names:
            raise ValueError(f"its schema has {part.name!r} twice: rename a column or field")
        names.add(part.name)
        _check_names_inside(part.type)


def _check_names_inside(kind: Any) -> None:
    from pyarrow import types

    if not types.is_nested(kind):
        return
    parts = [kind.field(index) for index in range(kind.num_fields)]
    if types.is_struct(kind):
        _check_names(parts)
        return
    for part in parts:
        _check_names_inside(part.type)


def _in_microseconds(batch: Any) -> Any:
    """A batch of Arrow whose times and durations have no nanoseconds, which Python lacks.

    Raises ``ValueError`` of Arrow if that would change a value.
    """
    import pyarrow

    schema = pyarrow.schema([_field_in_microseconds(field) for field in batch.schema])
    if schema == batch.schema:
        return batch
    columns: list[Any] = []
    for column, field in zip(batch.columns, schema, strict=True):
        columns.append(column if column.type == field.type else column.cast(field.type))
    return pyarrow.RecordBatch.from_arrays(columns, schema=schema)


def _field_in_microseconds(field: Any) -> Any:
    return field.with_type(_type_in_microseconds(field.type))


def _type_in_microseconds(kind: Any) -> Any:
    """The type with microseconds in place of nanoseconds, also inside of lists and structs."""
    import pyarrow as pa
    from pyarrow import types

    if types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    if types.is_time64(kind) and kind.unit == "ns":
        return pa.time64("us")
    if types.is_duration(kind) and kind.unit == "ns":
        return pa.duration("us")
    if types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, _type_in_microseconds(kind.value_type), kind.ordered)
    if types.is_struct(kind):
        parts = [kind.field(index) for index in range(kind.num_fields)]
        return pa.struct([_field_in_microseconds(part) for part in parts])
    if types.is_map(kind):
        item_type = _type_in_microseconds(kind.item_type)
        return pa.map_(_type_in_microseconds(kind.key_type), item_type, kind.keys_sorted)
    if types.is_large_list(kind):
        return pa.large_list(_field_in_microseconds(kind.value_field))
    if types.is_fixed_size_list(kind):
        return pa.list_(_field_in_microseconds(kind.value_field), kind.list_size)
    if types.is_list(kind):
        return pa.list_(_field_in_microseconds(kind.value_field))
    return kind


def _parquet_row(row: Any) -> FileRow:
    """The record of a batch of one row, or its text and the reason why Python cannot hold it."""
    values: dict[str, Any] = {}
    error = ""
    for index, name in enumerate(row.schema.names):
        column = row.select([index])
        try:
            values[name] = _in_microseconds(column).to_pylist()[0][name]
        except Exception as problem:
            text = " ".join(str(problem).split())
            kind = row.schema.field(index).type
            error = error or f"column {name!r} ({kind}) has no value of Python: {text}"
    if error:
        return FileRow(repr(values)[:_MAX_EXCERPT], error=error)
    return FileRow(values)
