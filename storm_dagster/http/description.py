"""HTTP services by their descriptions: endpoints and ``/openapi.json`` are made of the file ``routes.yaml`` of a package.

``routes`` has, by tag, a row for each method and path: ``call`` names the handler, ``asks`` the parameters of query and
headers, ``body`` its type, each status the type of its document (empty: no body), and ``errors`` the statuses of errors
besides 400 and 401, which can come from every route. Types other than of JSON are by media type. A parameter has its
``name`` (default: its key), type (``is``, default ``str``) and place (``in``, default ``query``). ``documents`` have
``fields`` with their types, or ``keys`` whose type is the one in ``keys`` of the file; those in ``optional`` may be absent.
``extra: forbid`` closes a document and those in it; ``ignore`` is for one in it that may gain keys; other documents may.
Types are those of :class:`~storm_dagster.http.schemas.Types`.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from storm_dagster.http.query import query_text
from storm_dagster.http.responses import Endpoint, bounded_json, run_read
from storm_dagster.http.schemas import Schemas, Types
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.tables import load_table

_CONVERTOR = re.compile(r"\{(\w+):\w+\}")

Reader = Callable[[str | None], Any]
"""Makes an argument of the text of a query parameter, ``None`` when that is absent."""


@functools.cache
def _read_table(package: str) -> Mapping[str, Any]:
    return load_table(f"{package}.routes", "routes")


class HttpApi:
    """The routes of one service, and their description in OpenAPI 3.1."""

    def __init__(self, title: str, version: str) -> None:
        self._routes: list[Route] = []
        self._types, self._schemas = Types(), Schemas()
        self.document: dict[str, Any] = {
            "openapi": "3.1.0",
            "info": {"title": title, "version": version},
            "paths": {},
            "components": {
                "schemas": self._schemas.components,
                "securitySchemes": {"secret": {"type": "http", "scheme": "bearer"}},
            },
            # The secret is asked for only where the cluster has one.
            "security": [{}, {"secret": []}],
        }
        """What ``/openapi.json`` answers."""
        self._types.add(_read_table("storm_dagster.http"), {})

    def routes(self) -> list[Route]:
        """Everything that was added, and ``/openapi.json``."""

        async def openapi(request: Request) -> Response:
            return JSONResponse(self.document)

        self.add("storm_dagster.http", {"openapi": openapi})
        return self._routes

    def add(
        self,
        package: str,
        handlers: Mapping[str, Any],
        types: Mapping[str, Any] | None = None,
        readers: Mapping[str, Reader] | None = None,
    ) -> None:
        """Add the routes of a package.

        A handler (``call`` names it, or its object and method) is an endpoint, if it is ``async``; or takes ``request``; or
        takes what stands in the path, in its order, the JSON body, if the row has one, and parameters of the query by
        their names. It returns a document or a response, in a thread. ``types`` are those that the file does not describe.
        """
        table = _read_table(package)
        self._types.add(table, types or {})
        for tag, rows in table["routes"].items():
            for place, row in rows.items():
                method, path = place.split()
                first, _, rest = row["call"].partition(".")
                call = getattr(handlers[first], rest) if rest else handlers[first]
                parameters = {key: table["parameters"][key] for key in re.findall(r"\{(\w+)", path)}
                parameters |= {key: table["parameters"][key] for key in row.get("asks", "").split()}
                storm = bool(table.get("storm"))
                endpoint = _endpoint(call, method, row, parameters, readers or {}, storm)
                self._routes.append(Route(path, endpoint, methods=[method]))
                described = {"tags": [tag], **self._describe(row, parameters, storm)}
                template = _CONVERTOR.sub(r"{\1}", path)
                described["operationId"] = re.sub(r"\W+", "_", f"{method.lower()}{template}").strip("_")
                self.document["paths"].setdefault(template, {})[method.lower()] = described

    def _describe(self, row: Mapping[Any, Any], parameters: Mapping[str, Any], storm: bool) -> dict[str, Any]:
        """The operation object; ``storm``: errors have the form of Storm's UI."""
        reasons, error = _read_table("storm_dagster.http")["reasons"], self._types.of("ErrorDocument")
        errors = {
            "application/json": {
                "schema": self._schemas.of(self._types.of("StormErrorDocument") | error if storm else error)
            }
        }
        responses: dict[str, Any] = {}
        for status in (key for key in row if isinstance(key, int)):
            content = self._content(row[status])
            responses[str(status)] = {"description": reasons[status], **({"content": content} if content else {})}
        for status in sorted({400, 401, *row.get("errors", ())}):
            responses[str(status)] = {"description": reasons[status], "content": errors}
        described: dict[str, Any] = {"summary": row["summary"], "responses": responses}
        if parameters:
            described["parameters"] = [
                {
                    "name": one.get("name", key),
                    "in": one.get("in", "query"),
                    "required": one.get("required", one.get("in") == "path"),
                    "schema": self._schemas.of(self._types.of(one.get("is", "str"))),
                    **({"description": one["text"]} if "text" in one else {}),
                }
                for key, one in parameters.items()
            ]
        if "body" in row:
            described["requestBody"] = {"required": row.get("required", False), "content": self._content(row["body"])}
        return described

    def _content(self, kind: Any) -> dict[str, Any]:
        media = kind if isinstance(kind, dict) else {"application/json": kind} if kind else {}
        return {name: {"schema": self._schemas.of(self._types.of(each))} for name, each in media.items()}


def _endpoint(
    call: Callable[..., Any],
    method: str,
    row: Mapping[Any, Any],
    parameters: Mapping[str, Any],
    readers: Mapping[str, Reader],
    storm: bool,
) -> Endpoint:
    if inspect.iscoroutinefunction(call):
        return call
    whole = "request" in inspect.signature(call).parameters
    status = next(key for key in row if isinstance(key, int))
    asked = [one.get("name", key) for key, one in parameters.items() if one.get("in", "query") == "query"]
    run = run_read if method == "GET" else run_in_threadpool

    def work(request: Request, *document: Any) -> Any:
        if whole:
            return call(request)
        texts = {name: query_text(request, name) for name in asked}
        given = {name: readers[name](text) if name in readers else text for name, text in texts.items()}
        return call(*request.path_params.values(), *document, **given)

    async def endpoint(request: Request) -> Response:
        try:
            document = None if method == "GET" else await bounded_json(request)
            answer = await run(work, request, *((document,) if "body" in row else ()))
        except StormDagsterError as error:
            if not storm:
                raise
            answer = {"error": type(error).__name__, "errorMessage": error.message}
            return JSONResponse(answer, status_code=error.http_status)
        return answer if isinstance(answer, Response) else JSONResponse(answer, status_code=status)

    return endpoint
