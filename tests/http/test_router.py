"""Declared routes: one decorated method is an endpoint and its description."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import pytest
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.testclient import TestClient

from storm_dagster.http.description import HttpApi
from storm_dagster.http.documents import JsonMap
from storm_dagster.http.responses import EXCEPTION_HANDLERS
from storm_dagster.http.router import Parameter, Router
from storm_dagster.model.errors import KeyNotFound

Color = Annotated[str, Parameter("path", "color", "A color", schema=Literal["red", "blue"])]
Shade = Annotated[int, Parameter("query", "shade", schema=int, parse=lambda text: int(text or "1"))]


class Paint(BaseModel, extra="forbid"):
    """A paint, of which a description in two lines of the source has a sentence that is
    wrapped.
    """

    color: str
    shade: int


class PaintRoutes:
    """Routes with each kind of handler."""

    router: ClassVar = Router("paints", storm_errors=True)

    @router.route(
        "GET", "/paints/{color}", summary="A paint", responses={200: Paint}, errors=(404,)
    )
    def show(self, color: Color, shade: Shade) -> dict[str, Any]:
        if color == "green":
            raise KeyNotFound("no green paint")
        return {"color": color, "shade": shade}

    @router.route(
        "PUT",
        "/paints/{color}",
        summary="Mix a paint",
        body=Paint,
        body_required=True,
        responses={201: Paint},
    )
    def mix(self, color: Color, document: JsonMap) -> dict[str, Any]:
        return {"color": color, **document}

    @router.route(
        "DELETE",
        "/paints/{color:path}",
        summary="Remove a paint",
        parameters=(Parameter("path", "color"), Parameter("header", "X-Force")),
        responses={204: None},
    )
    def remove(self, request: Request) -> Response:
        return Response(status_code=204, headers={"X-Removed": request.path_params["color"]})


@pytest.fixture
def api() -> HttpApi:
    api = HttpApi("paints", "1")
    api.add(PaintRoutes())
    return api


def test_a_declared_method_is_an_endpoint(api: HttpApi) -> None:
    app = Starlette(routes=api.routes(), exception_handlers=EXCEPTION_HANDLERS)
    client = TestClient(app)
    assert client.get("/paints/red?shade=7&other=1").json() == {"color": "red", "shade": 7}
    assert client.get("/paints/red").json()["shade"] == 1
    refusal = client.get("/paints/green")
    assert refusal.status_code == 404
    assert refusal.json() == {"error": "KeyNotFound", "errorMessage": "no green paint"}
    mixed = client.put("/paints/blue", json={"shade": 3})
    assert (mixed.status_code, mixed.json()) == (201, {"color": "blue", "shade": 3})
    assert client.put("/paints/blue", content="[]").status_code == 400
    assert client.delete("/paints/a/b").headers["X-Removed"] == "a/b"
    assert client.get("/openapi.json").json() == api.document


def test_a_declared_method_is_described(api: HttpApi) -> None:
    show = api.document["paths"]["/paints/{color}"]["get"]
    assert show["tags"] == ["paints"] and show["summary"] == "A paint"
    color, shade = show["parameters"]
    assert color == {
        "name": "color",
        "in": "path",
        "required": True,
        "schema": {"enum": ["red", "blue"], "type": "string"},
        "description": "A color",
    }
    assert shade["in"] == "query" and not shade["required"] and "description" not in shade
    assert list(show["responses"]) == ["200", "400", "401", "404"]
    paint = show["responses"]["200"]["content"]["application/json"]["schema"]
    assert "\n" not in paint["description"] and set(paint["properties"]) == {"color", "shade"}
    mix = api.document["paths"]["/paints/{color}"]["put"]
    assert mix["requestBody"]["required"] and "201" in mix["responses"]
    remove = api.document["paths"]["/paints/{color}"]["delete"]
    assert remove["operationId"] == "delete_paints_color"
    assert "content" not in remove["responses"]["204"]


def misses_a_variable(self: Any) -> dict[str, Any]:
    return {}


def has_a_variable_of_another_path(self: Any, shade: Color) -> dict[str, Any]:
    return {}


def takes_what_no_request_has(self: Any, color: str) -> dict[str, Any]:
    return {}


def test_a_handler_that_does_not_fit_its_path_is_refused() -> None:
    for path, handler, reason in [
        ("/paints/{color}", misses_a_variable, "declare those of /paints/{color}"),
        ("/paints", has_a_variable_of_another_path, "declare those of /paints"),
        ("/paints/{color}", takes_what_no_request_has, "annotate it with a Parameter"),
    ]:
        declare = Router("paints").route("GET", path, summary="", responses={200: Paint})
        with pytest.raises(TypeError, match=reason):
            declare(handler)
    declare = Router("paints").route(
        "PUT", "/paints", summary="", body=Paint, responses={200: None}
    )
    with pytest.raises(TypeError, match="must take a document"):
        declare(misses_a_variable)


def test_two_documents_of_one_name_are_refused(api: HttpApi) -> None:
    class Routes:
        router: ClassVar = Router("others")

        @router.route("GET", "/a", summary="", responses={200: list[Paint]})
        def a(self) -> list[Any]:
            return []

    other: Any = type("Paint", (BaseModel,), {"__annotations__": {"weight": int}})

    class OtherRoutes:
        router: ClassVar = Router("others")

        @router.route("GET", "/b", summary="", responses={200: list[other]})
        def b(self) -> list[Any]:
            return []

    api.add(Routes())
    with pytest.raises(ValueError, match="two documents are called Paint"):
        api.add(OtherRoutes())
