"""Types of documents on the wire: typed dictionaries from which pydantic makes the schemas of ``/openapi.json``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model, with_config
from typing_extensions import TypedDict

closed = with_config(ConfigDict(extra="forbid"))
"""Decorator of a document that has exactly the keys of its class, and so have those in it; others may gain keys."""
extensible = with_config(ConfigDict(extra="ignore"))
"""Decorator of a document that may gain keys inside one that may not."""

Natural = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
UploadHandle = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


def choice(*values: str) -> Any:
    """Make the type whose values are these words."""
    return Literal[values]  # type: ignore[valid-type]


@closed
class ErrorBody(TypedDict):
    """Type and message of an error."""

    type: str
    message: str


@closed
class ErrorDocument(TypedDict):
    """The error document of every route of our own."""

    error: ErrorBody


@closed
class StormErrorDocument(TypedDict):
    """The error document of Storm's UI."""

    error: str
    errorMessage: str


def types_of(keys: Mapping[Any, str]) -> dict[str, Any]:
    """Key -> type, of a map from types to their keys, separated by spaces."""
    return {key: kind for kind, names in keys.items() for key in names.split()}


def document(
    name: str,
    keys: str,
    types: Mapping[str, Any],
    others: Mapping[str, Any],
    *,
    optional: str = "",
    doc: str | None = None,
    extra: Literal["forbid", "ignore"] | None = "forbid",
) -> type[BaseModel]:
    """A model of a document with ``keys``, whose types are in ``types``, and ``others`` with types of their own.

    Keys of ``optional`` may be absent. ``extra``: ``"forbid"`` for a document that has no other keys, nor have those in
    it; ``"ignore"`` for one in it that may gain keys.
    """
    absent = set(optional.split())
    # Storm's keys need not be identifiers (":host"): fields are numbered, and called by their alias.
    members: dict[str, Any] = {
        f"field_{number}": (kind, Field(None if key in absent else ..., alias=key))
        for number, (key, kind) in enumerate({**{key: types[key] for key in keys.split()}, **others}.items())
    }
    config = ConfigDict(extra=extra) if extra else ConfigDict()
    return create_model(name, __config__=config, __doc__=doc, **members)


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
