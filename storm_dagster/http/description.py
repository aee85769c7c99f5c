"""HTTP services by their descriptions: endpoints and ``/openapi.json`` are made of the file
``routes.yaml`` of a package.

``routes`` has, by tag, a row for each method and path: ``call`` names the handler, ``asks`` the
parameters of query and headers, ``body`` its type, each status the type of its document (empty: no
body), and ``errors`` the statuses of errors besides 400 and 401, which can come from every route.
Types other than of JSON are by media type. A parameter has its ``name`` (default: its key), type
(``is``, default ``str``) and place (``in``, default ``query``). ``documents`` have ``fields`` with
their types, or ``keys`` whose type is the one in ``keys`` of the file; those in ``optional`` may be
absent. ``extra: forbid`` closes a document and those in it; ``ignore`` is for one in it that may
gain keys; other documents may. Types are those of :class:`~storm_dagster.http.description.Types`.
"""

import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, create_model
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from storm_dagster.http.responses import Endpoint, bounded_json, query_text, run_read
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.tables import load_table

_PLAIN: Mapping[str, Any] = {
    "any": Any,
    **{kind.__name__: kind for kind in (str, bytes, bool, int, float)},
    "natural": Annotated[int, Field(ge=0)],
    "port": Annotated[int, Field(ge=0, le=65535)],
}


class Types:
    """The types of a service: ``str``, ``maybe T`` (or null), ``list T``, ``map T`` (by strings), a
    list of words, and those that are added.
    """

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
        """Add the ``types`` (words or a pattern) and ``documents`` of a file, and ``given`` ones,
        which they may refer to.
        """
        self._known |= given
        for name, rule in table.get("types", {}).items():
            self._known[name] = (
                Annotated[str, Field(pattern=rule)] if isinstance(rule, str) else self.of(rule)
            )
        usual = {key: name for name, keys in table.get("keys", {}).items() for key in _words(keys)}
        for name, row in table.get("documents", {}).items():
            fields = {key: usual[key] for key in _words(row.get("keys", ""))} | row.get(
                "fields", {}
            )
            self._known[name] = self._document(name, fields, {"extra": table.get("extra"), **row})

    def _document(
        self, name: str, fields: Mapping[str, Any], row: Mapping[str, Any]
    ) -> type[BaseModel]:
        absent = _words(row.get("optional", ""))
        # Storm's keys need not be identifiers (":host"): fields are numbered, and called by their
        # alias.
        members: dict[str, Any] = {
            f"field_{number}": (self.of(kind), Field(None if key in absent else ..., alias=key))
            for number, (key, kind) in enumerate(fields.items())
        }
        config = ConfigDict(extra=row["extra"]) if row["extra"] else ConfigDict()
        return create_model(name, __config__=config, __doc__=row.get("doc"), **members)


def _words(keys: str | list[Any]) -> list[str]:
    return (
        keys.split() if isinstance(keys, str) else [word for part in keys for word in _words(part)]
    )


_LINE_BREAK = re.compile(r"(?<!\n)\n(?!\n)")
"""A line break inside of a paragraph, of a docstring that is wrapped."""
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
        self._types = Types()
        self._components: dict[str, Any] = {}
        self.document: dict[str, Any] = {
            "openapi": "3.1.0",
            "info": {"title": title, "version": version},
            "paths": {},
            "components": {
                "schemas": self._components,
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

        A handler (``call`` names it, or its object and method) is an endpoint, if it is ``async``;
        or takes ``request``; or takes what stands in the path, in its order, the JSON body, if the
        row has one, and parameters of the query by their names. It returns a document or a
        response, in a thread. ``types`` are those that the file does not describe.
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
                described["operationId"] = re.sub(r"\W+", "_", f"{method.lower()}{template}").strip(
                    "_"
                )
                self.document["paths"].setdefault(template, {})[method.lower()] = described

    def _describe(
        self, row: Mapping[Any, Any], parameters: Mapping[str, Any], storm: bool
    ) -> dict[str, Any]:
        """The operation object; ``storm``: errors have the form of Storm's UI."""
        reasons, error = (
            _read_table("storm_dagster.http")["reasons"],
            self._types.of("ErrorDocument"),
        )
        schema = self._schema(self._types.of("StormErrorDocument") | error if storm else error)
        errors = {"application/json": {"schema": schema}}
        responses: dict[str, Any] = {}
        for status in (key for key in row if isinstance(key, int)):
            content = self._content(row[status])
            responses[str(status)] = {
                "description": reasons[status],
                **({"content": content} if content else {}),
            }
        for status in sorted({400, 401, *row.get("errors", ())}):
            responses[str(status)] = {"description": reasons[status], "content": errors}
        described: dict[str, Any] = {"summary": row["summary"], "responses": responses}
        if parameters:
            described["parameters"] = [
                {
                    "name": one.get("name", key),
                    "in": one.get("in", "query"),
                    "required": one.get("required", one.get("in") == "path"),
                    "schema": self._schema(self._types.of(one.get("is", "str"))),
                    **({"description": one["text"]} if "text" in one else {}),
                }
                for key, one in parameters.items()
            ]
        if "body" in row:
            described["requestBody"] = {
                "required": row.get("required", False),
                "content": self._content(row["body"]),
            }
        return described

    def _schema(self, kind: Any) -> dict[str, Any]:
        """The JSON schema of a type. ``ValueError`` when another type of the same name is in the
        document already.
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

    def _content(self, kind: Any) -> dict[str, Any]:
        media = kind if isinstance(kind, dict) else {"application/json": kind} if kind else {}
        return {
            name: {"schema": self._schema(self._types.of(each))} for name, each in media.items()
        }


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
    asked = [
        one.get("name", key) for key, one in parameters.items() if one.get("in", "query") == "query"
    ]
    run = run_read if method == "GET" else run_in_threadpool

    def work(request: Request, *document: Any) -> Any:
        if whole:
            return call(request)
        texts = {name: query_text(request, name) for name in asked}
        given = {
            name: readers[name](text) if name in readers else text for name, text in texts.items()
        }
        return call(*request.path_params.values(), *document, **given)

    async def endpoint(request: Request) -> Response:
        try:
            document = None if method == "GET" else await bounded_json(request)
            answer = await run(work, request, *((document,) if "body" in row else ()))
        except StormDagsterError as error:
            if not storm:
                raise
            answer = {"error": error.kind, "errorMessage": error.message}
            return JSONResponse(answer, status_code=error.http_status)
        return answer if isinstance(answer, Response) else JSONResponse(answer, status_code=status)

    return endpoint
