"""Types of documents on the wire, by the names that ``routes.yaml`` files give them, and their JSON schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model

_PLAIN: Mapping[str, Any] = {
    "any": Any,
    "str": str,
    "bytes": bytes,
    "bool": bool,
    "int": int,
    "float": float,
    "natural": Annotated[int, Field(ge=0)],
    "port": Annotated[int, Field(ge=0, le=65535)],
}


class Types:
    """The types of a service: ``str``, ``maybe T`` (or null), ``list T``, ``map T`` (by strings), a list of words, and those
    that are added."""

    def __init__(self) -> None:
        self._known = dict(_PLAIN)

    def of(self, name: Any) -> Any:
        """The type of that name; ``KeyError`` when there is none."""
        if isinstance(name, list):
            return Literal[tuple(name)]
        outer, _, inner = name.partition(" ")
        if outer == "maybe":
            return self.of(inner) | None
        if outer == "list":
            return list[self.of(inner)]
        if outer == "map":
            return dict[str, self.of(inner)]
        return self._known[name]

    def add(self, table: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        """Add the ``types`` (words or a pattern) and ``documents`` of a file, and ``given`` ones, which they may refer to."""
        self._known |= given
        for name, rule in table.get("types", {}).items():
            self._known[name] = Annotated[str, Field(pattern=rule)] if isinstance(rule, str) else self.of(rule)
        usual = {key: name for name, keys in table.get("keys", {}).items() for key in _words(keys)}
        for name, row in table.get("documents", {}).items():
            fields = {key: usual[key] for key in _words(row.get("keys", ""))} | row.get("fields", {})
            self._known[name] = self._document(name, fields, {"extra": table.get("extra"), **row})

    def _document(self, name: str, fields: Mapping[str, Any], row: Mapping[str, Any]) -> type[BaseModel]:
        absent = _words(row.get("optional", ""))
        # Storm's keys need not be identifiers (":host"): fields are numbered, and called by their alias.
        members: dict[str, Any] = {
            f"field_{number}": (self.of(kind), Field(None if key in absent else ..., alias=key))
            for number, (key, kind) in enumerate(fields.items())
        }
        config = ConfigDict(extra=row["extra"]) if row["extra"] else ConfigDict()
        return create_model(name, __config__=config, __doc__=row.get("doc"), **members)


def _words(keys: str | list[Any]) -> list[str]:
    return keys.split() if isinstance(keys, str) else [word for part in keys for word in _words(part)]


class Schemas:
    """JSON schemas of Python types, and the named components that they refer to."""

    def __init__(self) -> None:
        self.components: dict[str, Any] = {}

    def of(self, kind: Any) -> dict[str, Any]:
        """The schema of a type. ``ValueError`` when another type of the same name is in the document already."""
        schema = TypeAdapter(kind).json_schema(ref_template="#/components/schemas/{model}")
        for name, component in schema.pop("$defs", {}).items():
            if self.components.setdefault(name, component) != component:
                raise ValueError(f"two documents are called {name}: rename one of them")
        return schema
