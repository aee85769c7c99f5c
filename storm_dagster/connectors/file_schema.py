"""The one schema of a folder of files, which all tasks and releases of a topology agree on.

The schema is in objects of the folder ``_schema``, which are created only if they do not exist, and
never changed: ``000001.json``, and a further one for each column whose type was not known before,
or that a declared schema adds. The newest one counts. See ``docs/decisions.md#dataset-schema``.
"""

import base64
import glob
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

import pyarrow as pa

from storm_dagster.api.arrow_values import (
    distinct_names,
    inferred_type,
    is_open,
    joined_type,
    refined_type,
)
from storm_dagster.connectors.exclusive_create import create_object
from storm_dagster.model.errors import Corrupt, InvalidRequest

FOLDER = "_schema"
"""Folder of the schema's objects; readers skip names that begin with ``_``."""
_NAME = re.compile(r"(\d{6})\.json$")
_VERSION = 1
"""Form of the objects."""
_FIELD_TYPES: dict[Any, pa.DataType] = {
    str: pa.string(),
    int: pa.int64(),
    float: pa.float64(),
    bool: pa.bool_(),
    bytes: pa.binary(),
    datetime: pa.timestamp("us", "UTC"),
    list: pa.null(),
    dict: pa.null(),
    object: pa.null(),
    Any: pa.null(),
}
"""Type of a field in ``outputs`` -> type of its column; that of ``null`` is agreed later."""


def declared_schema(schema: Any) -> pa.Schema | None:
    """The schema that a sink declares; ``None`` without one.

    ``schema`` is one of Arrow, or a map of columns to types as in ``outputs``. Raises
    :class:`InvalidRequest` for another object.
    """
    if schema is None:
        return None
    if isinstance(schema, pa.Schema):
        names = schema.names
        if len(set(names)) != len(names) or not names:
            raise InvalidRequest(f"the schema of a FileSink has a column twice, or none: {names}")
        return schema.remove_metadata()
    if not isinstance(schema, Mapping) or not schema:
        raise InvalidRequest(
            f"the schema of a FileSink is of type {type(schema).__name__}: use a pyarrow.Schema, "
            "or a map of columns to types such as {'n': int}"
        )
    fields: list[pa.Field] = []
    for name, field_type in schema.items():
        arrow_type = field_type if isinstance(field_type, pa.DataType) else None
        if arrow_type is None:
            arrow_type = _FIELD_TYPES.get(field_type)
        if arrow_type is None:
            kinds = ", ".join(kind.__name__ for kind in list(_FIELD_TYPES)[:9])
            raise InvalidRequest(
                f"column {name!r} of a FileSink: {field_type!r:.60} is not a type of a field, "
                f"use one of {kinds}, or a type of Arrow"
            )
        fields.append(pa.field(name, arrow_type))
    return pa.schema(fields)


def inferred_schema(
    stored_schema: pa.Schema | None, rows: Sequence[Mapping[str, Any]], skipped: Iterable[type] = ()
) -> pa.Schema:
    """The schema with the types that these rows have in its open columns.

    Without a stored one, of all columns of the rows. Values without a type, and those of the types
    ``skipped``, do not count. No type of a column changes.
    """
    fields: list[pa.Field] = []
    open_fields = column_names(rows) if stored_schema is None else list(stored_schema)
    for field in open_fields:
        if isinstance(field, str):
            field = pa.field(field, pa.null())
        if is_open(field.type):
            value_type = _joined_values([row.get(field.name) for row in rows], frozenset(skipped))
            field = field.with_type(refined_type(field.type, value_type))
        fields.append(field)
    return pa.schema(fields)


def _joined_values(values: Sequence[Any], skipped: frozenset[type]) -> pa.DataType:
    """The type of a column with these values."""
    value_types: list[pa.DataType] = []
    for value in values:
        if value is not None and type(value) not in skipped:
            # The row of a value without a type is rejected when it is written.
            with suppress(ValueError):
                value_types.append(inferred_type(value))
    return joined_type(value_types)


def column_names(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of all fields, in the order of their first row.

    Without those that not every reader knows: empty ones, and those that differ in upper and lower
    case only.
    """
    columns: dict[Any, None] = {}
    for row in rows:
        columns.update(dict.fromkeys(row))
    return distinct_names([name for name in columns if name and isinstance(name, str)])


def with_declared(stored_schema: pa.Schema | None, declared: pa.Schema, url: str) -> pa.Schema:
    """The schema of a dataset with the columns that a sink declares.

    Raises :class:`InvalidRequest` if that would change a column of the dataset.
    """
    if stored_schema is None:
        return declared
    fields = {field.name: field for field in stored_schema}
    for field in declared:
        own = fields.get(field.name)
        if own is None and not field.nullable:
            raise InvalidRequest(
                f"{url} has files without the column {field.name!r}, which is declared as not "
                "null: declare it as nullable, or write to another folder"
            )
        if own is None:
            fields[field.name] = field
            continue
        refined = refined_type(own.type, field.type)
        if refined_type(field.type, refined) != refined:
            raise InvalidRequest(
                f"the schema of the FileSink declares the column {field.name!r} as {field.type}, "
                f"and the files in {url} have {own.type}: declare that type, or write to another "
                "folder"
            )
        fields[field.name] = own.with_type(refined)
    return pa.schema(list(fields.values()))


# -- objects ---------------------------------------------------------------------------------------


def encode_schema(schema: pa.Schema) -> bytes:
    """The content of an object."""
    document = {
        "storm_dagster_schema": _VERSION,
        "columns": {field.name: str(field.type) for field in schema},
        "arrow": base64.b64encode(schema.serialize().to_pybytes()).decode(),
    }
    return (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode()


def decode_schema(content: bytes, path: str) -> pa.Schema:
    """The schema in an object; :class:`Corrupt` if its content is damaged."""
    try:
        document = json.loads(content)
        version = document["storm_dagster_schema"]
        if version != _VERSION:
            raise ValueError(f"its form {version!r} is that of a later release")
        schema = pa.ipc.read_schema(
            pa.py_buffer(base64.b64decode(document["arrow"], validate=True))
        )
        columns = {field.name: str(field.type) for field in schema}
        if columns != document["columns"]:
            raise ValueError("its columns and its schema of Arrow differ")
        return schema
    except Exception as error:
        raise Corrupt(
            f"the schema of a dataset in {path} is damaged ({type(error).__name__}: {error}): "
            "restore the object, or write to another folder; until then no row is written or lost"
        ) from None


class DatasetSchema:
    """Schema of a folder of files.

    Used by one task. ``fs`` is the file system of fsspec, ``folder`` the folder's path in it.
    """

    def __init__(self, fs: Any, folder: str, url: str) -> None:
        self._fs = fs
        self._folder = f"{folder}/{FOLDER}"
        self._url = url
        self._number = 0
        """Number of the newest object; 0 without one."""
        self.schema: pa.Schema | None = None
        """The schema in that object; ``None`` before a task has agreed on one."""

    def load(self) -> None:
        """Read the newest object; :class:`Corrupt` if it is damaged."""
        newest = 0
        for path in self._fs.glob(f"{glob.escape(self._folder)}/*.json"):
            match = _NAME.search(path)
            if match:
                newest = max(newest, int(match[1]))
        if newest > self._number:
            path = self._path(newest)
            self.schema = decode_schema(self._fs.cat_file(path), path)
            self._number = newest

    def declare(self, declared: pa.Schema) -> None:
        """Add the columns of a declared schema; :class:`InvalidRequest` if it has other types."""
        while True:
            schema = with_declared(self.schema, declared, self._url)
            if self._agree(schema):
                return

    def infer(self, rows: Sequence[Mapping[str, Any]], skipped: Iterable[type] = ()) -> None:
        """Agree on the types that these rows have in open columns (:func:`inferred_schema`)."""
        while True:
            if self.schema is not None and not any(is_open(field.type) for field in self.schema):
                return
            if self._agree(inferred_schema(self.schema, rows, skipped)):
                return

    def _agree(self, schema: pa.Schema) -> bool:
        """Make this the schema of all tasks.

        False if another task was first: :attr:`schema` is then that of the other one.
        """
        if schema == self.schema or not len(schema):
            return True
        number = self._number + 1
        if create_object(self._fs, self._path(number), encode_schema(schema)):
            self.schema = schema
            self._number = number
            return True
        self.load()
        if self._number < number:
            raise Corrupt(f"{self._path(number)} exists, and cannot be listed: look at the folder")
        return False

    def _path(self, number: int) -> str:
        return f"{self._folder}/{number:06d}.json"
