"""Types and documents that every HTTP service has."""

from typing import Annotated, Any

from pydantic import BaseModel, Field

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
"""SHA-256 in hexadecimal digits."""
Number = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
"""Text of a number, in a path or a header."""
Natural = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=0, le=65535)]
JsonMap = dict[str, Any]
READ_ERRORS = (404, 500, 503)
"""Statuses of errors that OpenAPI lists for routes of nimbus that read."""
CHANGE_ERRORS = (404, 409, 500, 503)
"""Statuses of errors that OpenAPI lists for routes of nimbus that change."""


def absent_field() -> Any:
    """Default of a field that is absent or has a value, but is never null."""
    return Field(default=None)


class ErrorBody(BaseModel, extra="forbid"):
    """Type and message of an error."""

    type: str
    message: str


class ErrorDocument(BaseModel, extra="forbid"):
    """The error document of all routes but Storm's."""

    error: ErrorBody


class StormErrorDocument(BaseModel, extra="forbid"):
    """The error document of Storm's UI."""

    error: str
    errorMessage: str
