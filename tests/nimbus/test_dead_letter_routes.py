"""Routes of dead letters: what they ask of the workers' answers, and that only POST emits again."""

from __future__ import annotations

from typing import Any, cast

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from storm_dagster.nimbus.http.topology_routes import topology_operations

PATH = "/v1/topologies/wc/dead-letters"


class Reader:
    asked: list[tuple[Any, ...]]

    def __init__(self) -> None:
        self.asked = []

    def dead_letters(self, name: str, replay: bool = False, **asked: str | None) -> dict[str, Any]:
        self.asked.append((name, replay, asked))
        return {"id": "wc-1-1", "letters": [], "next": None}


def test_a_page_is_read_and_emitted_again() -> None:
    reader, other = Reader(), cast(Any, type("Other", (), {"exposition": None})())
    operations = topology_operations(other, cast(Any, reader), other, other)
    client = TestClient(Starlette(routes=[Route(one.path, one.endpoint, methods=[one.method]) for one in operations]))
    assert client.get(PATH, params={"component": "lines", "limit": "7"}).json()["letters"] == []
    assert client.post(f"{PATH}/replay", params={"after": "7:2"}).status_code == 200
    assert client.get(f"{PATH}/replay").status_code in (404, 405)
    assert reader.asked == [
        ("wc", False, {"component": "lines", "limit": "7", "after": None}),
        ("wc", True, {"component": None, "limit": None, "after": "7:2"}),
    ]
    (described,) = [one for one in operations if one.path.endswith("/replay")]
    assert [one.name for one in described.parameters] == ["name", "component", "limit", "after"]
