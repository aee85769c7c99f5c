"""Routes of dead letters: what they ask of the workers' answers, and that only POST emits again."""

from __future__ import annotations

from typing import Any, cast

import pytest
from starlette.applications import Starlette
from starlette.testclient import TestClient

from storm_dagster.host.conf_files import load_cluster_conf
from storm_dagster.http.description import HttpApi
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.nimbus.http.service import add_routes
from storm_rigs.product.public_names import Handle

PATH = "/v1/topologies/wc/dead-letters"


class Reader(Handle):
    asked: list[tuple[Any, ...]]

    def __init__(self) -> None:
        super().__init__(asked=[])

    def dead_letters(self, name: str, replay: bool = False, **asked: str | None) -> dict[str, Any]:
        self.asked.append((name, replay, asked))
        return {"id": "wc-1-1", "letters": [], "next": None}


def test_a_page_is_read_and_emitted_again() -> None:
    reader, api = Reader(), HttpApi("nimbus", "1")
    add_routes(
        api,
        cast(Any, Handle(conf=load_cluster_conf())),
        cast(Any, reader),
        cast(Any, Handle()),
        cast(Any, Handle()),
        cast(Any, Handle()),
    )
    client = TestClient(Starlette(routes=api.routes()))
    assert client.get(PATH, params={"component": "lines", "limit": "7"}).json()["letters"] == []
    assert client.post(f"{PATH}/replay", params={"after": "7:2"}).status_code == 200
    assert client.get(f"{PATH}/replay").status_code in (404, 405)
    assert reader.asked == [
        ("wc", False, {"component": "lines", "limit": "7", "after": None}),
        ("wc", True, {"component": None, "limit": None, "after": "7:2"}),
    ]
    assert client.post(f"{PATH}/delete", params={"older_secs": "60"}).status_code == 200
    assert reader.asked.pop()[2]["delete_older_secs"] == 60.0
    for params in ({}, {"older_secs": "-1"}, {"older_secs": "x"}):
        with pytest.raises(InvalidRequest, match="give whole seconds"):
            client.post(f"{PATH}/delete", params=params)
    assert len(reader.asked) == 2
    described = api.document["paths"]["/v1/topologies/{name}/dead-letters/replay"]["post"][
        "parameters"
    ]
    assert [one["name"] for one in described] == ["name", "component", "limit", "after"]
