"""Declarations of routes, by a decorator at the handler of each.

A class of handlers has a :class:`Router`, and :meth:`~storm_dagster.http.description.HttpApi.add`
serves an object of it::

    TaskId = Annotated[str, Parameter("path", "task", "Task id", schema=int)]

    class TaskRoutes:
        router = Router("tasks")

        @router.route(
            "GET", "/v1/tasks/{task}", summary="A task", responses={200: TaskDocument}, errors=[404]
        )
        def show(self, task: TaskId) -> dict[str, Any]: ...
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_type_hints

_Handler = TypeVar("_Handler", bound=Callable[..., Any])
_VARIABLE = re.compile(r"\{(\w+)(?::\w+)?\}")
"""A parameter in the path of a route, such as ``{task}`` or ``{component:path}``."""


@dataclass(frozen=True)
class Parameter:
    """A parameter of requests.

    In the annotation of a handler's parameter, ``Annotated[str, Parameter(...)]``, it also says
    where the argument comes from.
    """

    place: Literal["path", "query", "header"]
    name: str
    description: str = ""
    schema: Any = str
    """Type of the value in OpenAPI. The handler gets the text and checks it, so that its error
    names the remedy.
    """
    required: bool = False
    """Of a parameter in the query or in a header; those of the path are always required."""
    parse: Callable[[str | None], Any] | None = None
    """Makes the argument of the text of a query parameter; ``None`` is passed to it when the
    parameter is absent.
    """


@dataclass(frozen=True)
class HttpOperation:
    """A declared route, with the handler that is called for it."""

    method: str
    path: str
    tag: str
    summary: str
    handler: Callable[..., Any]
    parameters: Sequence[Parameter]
    """In the order of OpenAPI: those of the path first."""
    arguments: Mapping[str, Parameter]
    """Parameters that the handler takes, by the names in its signature."""
    takes_request: bool
    """True if the handler takes the request, and reads parameters from it."""
    body: Any
    """Type of the JSON body, or types by media type; ``None`` for a request without a body."""
    body_required: bool
    responses: Mapping[int, Any]
    """Status -> type of its JSON document, or types by media type; ``None`` for an empty body. The
    first status is the one of a handler that returns a document.
    """
    errors: Sequence[int]
    """Statuses of errors besides those of every route."""
    storm_errors: bool
    """True if errors have the form of Storm's UI."""


class Router:
    """Routes of a class of handlers, in the order in which they are tried."""

    def __init__(self, tag: str, *, storm_errors: bool = False) -> None:
        """Create an empty router; ``tag`` groups its routes in OpenAPI.

        With ``storm_errors`` errors have the form of Storm's UI.
        """
        self.operations: list[HttpOperation] = []
        self._tag = tag
        self._storm_errors = storm_errors

    def route(
        self,
        method: Literal["GET", "POST", "PUT", "DELETE"],
        path: str,
        *,
        summary: str,
        responses: Mapping[int, Any],
        errors: Sequence[int] = (),
        body: Any = None,
        body_required: bool = False,
        parameters: Sequence[Parameter] = (),
    ) -> Callable[[_Handler], _Handler]:
        """Declare that the decorated handler responds to a method and path.

        A handler is an endpoint if it is ``async``. Other handlers run in a thread, and return a
        document or a response. They take ``request``, or a parameter for each annotated
        :class:`Parameter`, and ``document`` if the route has a JSON body.

        ``parameters`` are those that a handler reads from the request itself. ``errors`` are
        statuses of errors besides 400 and 401, which can come from every route. ``TypeError`` if
        the handler does not fit the path or the body.
        """

        def declare(handler: _Handler) -> _Handler:
            arguments = _arguments_of(handler)
            described = [*parameters, *arguments.values()]
            variables = [parameter.name for parameter in described if parameter.place == "path"]
            if variables != _VARIABLE.findall(path):
                raise TypeError(
                    f"{handler.__qualname__} has the path parameters {variables}: declare those "
                    f"of {path}"
                )
            names = inspect.signature(handler).parameters
            takes_request = "request" in names
            if not takes_request and ("document" in names) != (body is not None):
                raise TypeError(
                    f"{handler.__qualname__} must take a document if its route has a body, and "
                    "only then"
                )
            self.operations.append(
                HttpOperation(
                    method=method,
                    path=path,
                    tag=self._tag,
                    summary=summary,
                    handler=handler,
                    parameters=described,
                    arguments=arguments,
                    takes_request=takes_request,
                    body=body,
                    body_required=body_required,
                    responses=responses,
                    errors=errors,
                    storm_errors=self._storm_errors,
                )
            )
            return handler

        return declare


class RouteHandlers(Protocol):
    """An object whose methods handle the routes of its class."""

    router: ClassVar[Router]


def path_template(path: str) -> str:
    """The path in OpenAPI: ``{component:path}`` becomes ``{component}``."""
    return _VARIABLE.sub(r"{\1}", path)


def _arguments_of(handler: Callable[..., Any]) -> dict[str, Parameter]:
    """Parameters of requests by the names of the handler's parameters.

    ``TypeError`` for a parameter without one in its annotation, and for one of a header.
    """
    hints = get_type_hints(handler, include_extras=True)
    arguments: dict[str, Parameter] = {}
    for name in inspect.signature(handler).parameters:
        if name in ("self", "request", "document"):
            continue
        metadata = getattr(hints.get(name), "__metadata__", ())
        parameters = [entry for entry in metadata if isinstance(entry, Parameter)]
        if len(parameters) != 1 or parameters[0].place == "header":
            raise TypeError(
                f"parameter {name!r} of {handler.__qualname__} is not one of the path or the "
                "query: "
                "annotate it with a Parameter"
            )
        arguments[name] = parameters[0]
    return arguments
