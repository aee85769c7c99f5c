"""Routes that describe themselves: each declares once its endpoint and its entry in ``/openapi.json``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from storm_dagster.http.responses import Endpoint
from storm_dagster.http.schemas import ErrorDocument, Schemas, StormErrorDocument

_CONVERTOR = re.compile(r"\{(\w+):\w+\}")
_REASONS = {
    200: "done",
    201: "made",
    202: "accepted: a run does it",
    204: "done",
    206: "part of it",
    304: "not changed",
    400: "the request is wrong",
    401: "credentials are missing or wrong",
    403: "not allowed",
    404: "it does not exist",
    409: "not in this state, or not from this epoch",
    413: "too large",
    416: "the range lies outside",
    500: "a record is damaged: it is quarantined, nothing is guessed",
    503: "not now: no leader, or ZooKeeper or Dagster out of reach",
}


def path_names(path: str) -> list[str]:
    """Names of the parameters in a route's path, in their order."""
    return re.findall(r"\{(\w+)", path)


class Media(dict[str, Any]):
    """Types by media type, for an answer that is not JSON alone."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a path, query or header."""

    name: str
    kind: Any
    """Type of its value."""
    text: str = ""
    where: Literal["path", "query", "header"] = "query"
    required: bool = False


@dataclass(frozen=True)
class HttpOperation:
    """One method of one path.

    ``answers`` maps a status to the type of its document, to ``None`` for an answer without a body, or to
    :class:`Media`. Errors (``errors``) carry the error document; 400, and 401 where the service asks for
    credentials, can come from every route.
    """

    method: Literal["GET", "POST", "PUT", "DELETE"]
    path: str
    endpoint: Endpoint
    summary: str
    tag: str
    parameters: tuple[Parameter, ...] = ()
    body: tuple[str, Any] | None = None
    """(media type, type)."""
    body_required: bool = False
    answers: Mapping[int, Any] = field(default_factory=dict)
    errors: tuple[int, ...] = ()
    storm: bool = False
    """Whether errors have the form of Storm's UI."""

    @property
    def template(self) -> str:
        """The path as OpenAPI writes it."""
        return _CONVERTOR.sub(r"{\1}", self.path)

    def describe(self, schemas: Schemas) -> dict[str, Any]:
        """The operation object."""
        responses: dict[str, Any] = {}
        for status, answer in self.answers.items():
            media = answer if isinstance(answer, Media) else Media({"application/json": answer})
            content = {name: {"schema": schemas.of(kind)} for name, kind in media.items() if kind is not None}
            responses[str(status)] = {
                "description": _REASONS.get(status, "done"),
                **({"content": content} if content else {}),
            }
        error = schemas.of(StormErrorDocument | ErrorDocument if self.storm else ErrorDocument)
        for status in sorted({400, 401, *self.errors}):
            responses[str(status)] = {
                "description": _REASONS[status],
                "content": {"application/json": {"schema": error}},
            }
        described: dict[str, Any] = {
            "summary": self.summary,
            "operationId": re.sub(r"\W+", "_", f"{self.method.lower()}{self.template}").strip("_"),
            "tags": [self.tag],
            "responses": responses,
        }
        if self.parameters:
            described["parameters"] = [
                {
                    "name": one.name,
                    "in": one.where,
                    "required": one.required or one.where == "path",
                    "schema": schemas.of(one.kind),
                    **({"description": one.text} if one.text else {}),
                }
                for one in self.parameters
            ]
        if self.body is not None:
            media, kind = self.body
            described["requestBody"] = {
                "required": self.body_required,
                "content": {media: {"schema": schemas.of(kind)}},
            }
        return described


def document_of(title: str, version: str, operations: Iterable[HttpOperation]) -> dict[str, Any]:
    """The OpenAPI 3.1 document of a service."""
    table: dict[str, Any] = {}
    schemas = Schemas()
    for operation in operations:
        table.setdefault(operation.template, {})[operation.method.lower()] = operation.describe(schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": version},
        "paths": table,
        "components": {
            "schemas": schemas.components,
            "securitySchemes": {"secret": {"type": "http", "scheme": "bearer"}},
        },
        # The secret is asked for only where the cluster has one.
        "security": [{}, {"secret": []}],
    }


def build_routes(title: str, version: str, operations: list[HttpOperation]) -> list[Route]:
    """Starlette's routes of the operations, and ``/openapi.json`` that describes them."""

    async def openapi(request: Request) -> Response:
        return JSONResponse(document)

    described = HttpOperation(
        "GET", "/openapi.json", openapi, "This description", "service", answers={200: dict[str, Any]}
    )
    document = document_of(title, version, [*operations, described])
    return [Route(one.path, one.endpoint, methods=[one.method]) for one in (*operations, described)]
