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


def document(name: str, fields: Mapping[str, Any], *, optional: str = "") -> type[BaseModel]:
    """A model that has exactly these keys, for documents whose keys are somebody else's; ``fields`` maps them to types.

    Keys of ``optional``, separated by spaces, may be absent.
    """
    absent = set(optional.split())
    # Storm's keys need not be identifiers (":host"): fields are numbered, and called by their alias.
    members: dict[str, Any] = {
        f"field_{number}": (kind, Field(None if key in absent else ..., alias=key))
        for number, (key, kind) in enumerate(fields.items())
    }
    return create_model(name, __config__=ConfigDict(extra="forbid"), **members)


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
