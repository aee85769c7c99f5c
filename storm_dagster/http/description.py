"""Endpoints and ``/openapi.json`` of a service, from its declared routes."""

import inspect
import re
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, ClassVar

from pydantic import TypeAdapter
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from storm_dagster.http.documents import ErrorDocument, JsonMap, StormErrorDocument
from storm_dagster.http.responses import Endpoint, JSONResponse, bounded_json, query_text, run_read
from storm_dagster.http.router import (
    HttpOperation,
    Parameter,
    RouteHandlers,
    Router,
    path_template,
)
from storm_dagster.model.errors import StormDagsterError

_STATUS_TEXTS = {
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
    500: "a record is damaged: it is quarantined, and no value is assumed for it",
    503: "not now: no leader, or ZooKeeper or Dagster out of reach",
}
"""Description of each status in OpenAPI."""
_ERRORS_OF_EVERY_ROUTE = {400, 401}
"""Statuses of errors that a route need not declare."""
_LINE_BREAK = re.compile(r"(?<!\n)\n(?!\n)")
"""A line break inside of a paragraph, of a docstring that is wrapped."""


class HttpApi:
    """The routes of one service, and their description in OpenAPI 3.1."""

    router: ClassVar = Router("service")

    def __init__(self, title: str, version: str) -> None:
        self._routes: list[Route] = []
        self._components: dict[str, Any] = {}
        """Name of a document -> its schema, to which other schemas refer."""
        self.document: dict[str, Any] = {
            "openapi": "3.1.0",
            "info": {"title": title, "version": version},
            "paths": {},
            "components": {
                "schemas": self._components,
                "securitySchemes": {"secret": {"type": "http", "scheme": "bearer"}},
            },
            # The secret is required only where the cluster has one.
            "security": [{}, {"secret": []}],
        }
        """The content of ``/openapi.json``."""

    def add(self, handlers: RouteHandlers) -> None:
        """Add the routes of a class of handlers; ``handlers`` is an object of it.

        ``ValueError`` when another document of the same name is in the description.
        """
        for operation in handlers.router.operations:
            call = MethodType(operation.handler, handlers)
            endpoint = _endpoint(operation, call)
            self._routes.append(Route(operation.path, endpoint, methods=[operation.method]))
            operations = self.document["paths"].setdefault(path_template(operation.path), {})
            operations[operation.method.lower()] = self._describe(operation)

    def routes(self) -> list[Route]:
        """The routes that were added, and ``/openapi.json``; called once, after all are added."""
        self.add(self)
        return self._routes

    @router.route(
        "GET", "/openapi.json", summary="This description", responses={200: dict[str, Any]}
    )
    async def openapi(self, request: Request) -> Response:
        """The description of the service."""
        return JSONResponse(self.document)

    def _describe(self, operation: HttpOperation) -> JsonMap:
        """The operation object of OpenAPI."""
        identifier = f"{operation.method.lower()}{path_template(operation.path)}"
        described: JsonMap = {
            "tags": [operation.tag],
            "summary": operation.summary,
            "responses": self._describe_responses(operation),
        }
        if operation.parameters:
            described["parameters"] = [
                self._describe_parameter(parameter) for parameter in operation.parameters
            ]
        if operation.body is not None:
            described["requestBody"] = {
                "required": operation.body_required,
                "content": self._describe_content(operation.body),
            }
        described["operationId"] = re.sub(r"\W+", "_", identifier).strip("_")
        return described

    def _describe_responses(self, operation: HttpOperation) -> JsonMap:
        """The responses object: status -> description and content, also of errors."""
        error: Any = ErrorDocument
        if operation.storm_errors:
            error = StormErrorDocument | ErrorDocument
        error_content = self._describe_content(error)
        responses: JsonMap = {}
        for status, content in operation.responses.items():
            response: JsonMap = {"description": _STATUS_TEXTS[status]}
            if content is not None:
                response["content"] = self._describe_content(content)
            responses[str(status)] = response
        for status in sorted(_ERRORS_OF_EVERY_ROUTE.union(operation.errors)):
            responses[str(status)] = {
                "description": _STATUS_TEXTS[status],
                "content": error_content,
            }
        return responses

    def _describe_parameter(self, parameter: Parameter) -> JsonMap:
        described: JsonMap = {
            "name": parameter.name,
            "in": parameter.place,
            "required": parameter.required or parameter.place == "path",
            "schema": self._schema(parameter.schema),
        }
        if parameter.description:
            described["description"] = parameter.description
        return described

    def _describe_content(self, content: Any) -> JsonMap:
        """The content object of a type, or of types by media type."""
        types = content if isinstance(content, Mapping) else {"application/json": content}
        return {media: {"schema": self._schema(kind)} for media, kind in types.items()}

    def _schema(self, kind: Any) -> JsonMap:
        """The JSON schema of a type; documents in it become components.

        ``ValueError`` when another document of the same name is a component already.
        """
        schema = TypeAdapter(kind).json_schema(ref_template="#/components/schemas/{model}")
        components = schema.pop("$defs", {})
        for described in (schema, *components.values()):
            if "description" in described:
                described["description"] = _LINE_BREAK.sub(" ", described["description"])
        for name, component in components.items():
            if self._components.setdefault(name, component) != component:
                raise ValueError(f"two documents are called {name}: rename one of them")
        return schema


def _endpoint(operation: HttpOperation, call: Callable[..., Any]) -> Endpoint:
    """The endpoint that calls the handler of an operation.

    A handler that is not ``async`` runs in a thread, and its document gets the first declared
    status.
    """
    if inspect.iscoroutinefunction(call):
        return call
    reads = operation.method == "GET"
    run = run_read if reads else run_in_threadpool
    status = next(iter(operation.responses))

    def respond(request: Request, document: JsonMap | None) -> Any:
        if operation.takes_request:
            return call(request)
        arguments = {
            name: _argument(request, parameter) for name, parameter in operation.arguments.items()
        }
        if operation.body is not None:
            arguments["document"] = document
        return call(**arguments)

    async def endpoint(request: Request) -> Response:
        try:
            document = None if reads else await bounded_json(request)
            answer = await run(respond, request, document)
        except StormDagsterError as error:
            if not operation.storm_errors:
                raise
            storm_document = {"error": error.kind, "errorMessage": error.message}
            return JSONResponse(storm_document, status_code=error.http_status)
        if isinstance(answer, Response):
            return answer
        return JSONResponse(answer, status_code=status)

    return endpoint


def _argument(request: Request, parameter: Parameter) -> Any:
    """The argument of a handler for a parameter of the path or the query."""
    if parameter.place == "path":
        return request.path_params[parameter.name]
    text = query_text(request, parameter.name)
    if parameter.parse is None:
        return text
    return parameter.parse(text)
