"""The verb ``dead-letters``: pages are joined for export and replay."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from storm_dagster.cli.options import Invocation
from storm_dagster.cli.paged_verbs import dead_letters


def letter(number: int, **more: Any) -> dict[str, Any]:
    return {
        "number": number,
        "spout": "lines",
        "task": 7,
        "tries": 4,
        "component": "split",
        "failed_task": 2,
        "error": "ValueError: bad",
        "values": ["x"],
        "last_ms": 1_795_384_091_540,
        **more,
    }


class Nimbus:
    """Three letters in two pages."""

    asked: list[tuple[str, str, dict[str, Any]]]

    def __init__(self) -> None:
        self.asked = []

    def __enter__(self) -> Nimbus:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def request(self, method: str, path: str, *, params: dict[str, Any]) -> httpx.Response:
        self.asked.append((method, path, params))
        first = "after" not in params
        letters = [letter(1, replayed_ms=1_795_384_091_540), letter(2)] if first else [letter(3)]
        return httpx.Response(
            200, json={"id": "wc-1-1", "letters": letters, "next": "7:2" if first else None}
        )


@pytest.fixture
def nimbus(monkeypatch: pytest.MonkeyPatch) -> Nimbus:
    found = Nimbus()
    monkeypatch.setattr(Invocation, "nimbus", lambda self, patience=30.0: found)
    return found


def run(*argv: str) -> Any:
    return CliRunner().invoke(dead_letters, argv, catch_exceptions=False)


def test_a_page_is_listed(nimbus: Nimbus) -> None:
    done = run("wc", "--component", "lines")
    assert nimbus.asked == [
        ("GET", "/v1/topologies/wc/dead-letters", {"component": "lines", "limit": "100"})
    ]
    assert (
        "ValueError: bad" in done.output
        and "split[2]" in done.output
        and "more: --after 7:2" in done.output
    )
    assert len(json.loads(run("wc", "--json").output)["letters"]) == 2


def test_all_are_exported_as_lines(nimbus: Nimbus, tmp_path: Path) -> None:
    done = run("wc", "--export", str(tmp_path / "letters.jsonl"), "--json")
    assert json.loads(done.output) == {"id": "wc-1-1", "exported": 3}
    lines = (tmp_path / "letters.jsonl").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [1, 2, 3]
    assert [method for method, _, _ in nimbus.asked] == ["GET", "GET"]


def test_all_are_emitted_again(nimbus: Nimbus) -> None:
    assert run("wc", "--replay").output == "3 dead letters of wc-1-1 are emitted again\n"
    assert nimbus.asked[1] == (
        "POST",
        "/v1/topologies/wc/dead-letters/replay",
        {"limit": "1000", "after": "7:2"},
    )
    assert CliRunner().invoke(dead_letters, ["wc", "--replay", "--export", "-"]).exit_code != 0


def test_all_or_old_letters_are_deleted(nimbus: Nimbus) -> None:
    assert run("wc", "--delete", "--all").output == "3 dead letters of wc-1-1 are deleted\n"
    path = "/v1/topologies/wc/dead-letters/delete"
    assert nimbus.asked == [
        ("POST", path, {"limit": "1000", "older_secs": "0"}),
        ("POST", path, {"limit": "1000", "after": "7:2", "older_secs": "0"}),
    ]
    done = run("wc", "--delete", "--older-than", "60", "--json")
    assert json.loads(done.output) == {"id": "wc-1-1", "deleted": 3}
    assert nimbus.asked[2][2]["older_secs"] == "60"


@pytest.mark.parametrize(
    "options",
    [
        ["--delete"],
        ["--all"],
        ["--older-than", "60"],
        ["--delete", "--all", "--older-than", "60"],
        ["--delete", "--all", "--replay"],
        ["--delete", "--all", "--export", "-"],
    ],
)
def test_no_letter_is_deleted_by_an_incomplete_request(nimbus: Nimbus, options: list[str]) -> None:
    assert CliRunner().invoke(dead_letters, ["wc", *options]).exit_code != 0
    assert nimbus.asked == []
