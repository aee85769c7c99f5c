"""A few words for JSON schemas, so that a document's schema reads like the document."""

from __future__ import annotations

from typing import Any

__all__ = [
    "ANY",
    "BOOL",
    "ERROR",
    "INT",
    "NUM",
    "PORT",
    "STORM_ERROR",
    "STR",
    "Schema",
    "arr",
    "at_least",
    "choice",
    "map_of",
    "nullable",
    "obj",
    "one_of",
    "text",
]

Schema = dict[str, Any]

STR: Schema = {"type": "string"}
INT: Schema = {"type": "integer"}
NUM: Schema = {"type": "number"}
BOOL: Schema = {"type": "boolean"}
ANY: Schema = {}
PORT: Schema = {"type": "integer", "minimum": 0, "maximum": 65535}


def obj(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """A map with exactly these keys; those of ``optional`` may be absent."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": sorted(required),
        "additionalProperties": False,
    }


def at_least(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    """A map with these keys, and perhaps others."""
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": sorted(required),
    }


def map_of(values: Schema) -> Schema:
    """A map with any keys."""
    return {"type": "object", "additionalProperties": values}


def arr(items: Schema) -> Schema:
    """A list."""
    return {"type": "array", "items": items}


def nullable(schema: Schema) -> Schema:
    """The schema, or ``null``."""
    return {"anyOf": [schema, {"type": "null"}]}


def choice(*values: str) -> Schema:
    """One of some words."""
    return {"type": "string", "enum": list(values)}


def text(pattern: str, longest: int | None = None) -> Schema:
    """Text of a form; the pattern is anchored by who writes it."""
    schema: Schema = {"type": "string", "pattern": pattern}
    if longest is not None:
        schema["maxLength"] = longest
    return schema


def one_of(*schemas: Schema) -> Schema:
    """Any of some schemas."""
    return {"anyOf": list(schemas)}


ERROR: Schema = obj({"error": obj({"type": STR, "message": STR})})
"""The error document of every route of our own."""
STORM_ERROR: Schema = obj({"error": STR, "errorMessage": STR})
"""That of Storm's UI."""
