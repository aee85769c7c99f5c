"""The table of verbs in the HTTP page is the one of the code."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import storm_dagster.client
from storm_dagster.model.requests import CodeRequest
from storm_dagster.model.verbs import VERBS, Verb
from storm_dagster.operations.live.lifecycle import LEADER_OPERATIONS, OPERATIONS
from storm_rigs.protocols.client_requests import AcceptingNimbus

PAGE = Path(__file__).parents[2] / "docs" / "http.md"


def waits(verb: Verb) -> Iterator[str]:
    if verb.until:
        yield " or ".join("gone" if status is None else status for status in verb.until)
    if verb.tasks:
        yield "all tasks run"
    if not verb.until and not verb.tasks:
        yield "the batch"


def row(verb: Verb) -> str:
    fields = (
        ", ".join(f"`{name}`" for name in verb.request.model_fields if name != "dry_run") or "-"
    )
    who = "the leader" if verb.executed_by == "leader" else "a run"
    return f"| `{verb.name}` | {fields} | {who} | {', '.join(waits(verb))} | {verb.summary} |"


def test_the_page_has_every_verb_with_its_fields() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    start = lines.index("| verb | fields | executed by | clients wait for | effect |")
    assert lines[start + 2 : start + 2 + len(VERBS) + 1] == [*map(row, VERBS.values()), ""]


@pytest.mark.parametrize("verb", VERBS.values(), ids=lambda verb: verb.name)
def test_every_verb_has_an_operation_that_takes_its_fields(verb: Verb) -> None:
    operation = OPERATIONS[verb.name]
    assert operation.__doc__ and {"ctx", "name"} <= inspect.signature(operation).parameters.keys()
    if not verb.batches:
        assert (
            verb.request.model_fields.keys() - {"dry_run"}
            <= inspect.signature(operation).parameters.keys()
        )
    assert all(info.description for info in verb.request.model_fields.values())


def test_every_operation_of_the_tables_is_that_of_a_verb() -> None:
    assert OPERATIONS.keys() == VERBS.keys()
    leader_verbs = {verb.name for verb in VERBS.values() if verb.executed_by == "leader"}
    assert LEADER_OPERATIONS.keys() == leader_verbs


FIELDS: dict[str, Any] = {
    "allow_degraded": True,
    "component": "count",
    "dry_run": False,
    "executors": {"count": 4},
    "handle": "a-handle",
    "number": 2,
    "reassign": True,
    "token": "a-token",
    "wait_secs": 0,
    "workers": 3,
}
"""Field of a request -> a value of it."""


@pytest.mark.parametrize("verb", VERBS.values(), ids=lambda verb: verb.name)
def test_every_verb_has_a_function_of_the_client_that_takes_its_fields(verb: Verb) -> None:
    function = getattr(storm_dagster.client, verb.job)
    parameters = inspect.signature(function).parameters
    keywords = {
        name
        for name, parameter in parameters.items()
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY
    }
    options = {"wait", "timeout", "progress"}
    code = {"conf", "home", "requirements"} if verb.brings_code else set[str]()
    assert keywords == verb.request.model_fields.keys() | options | code
    assert ({"target", "args"} <= parameters.keys()) is verb.brings_code
    assert function.__doc__ and len(function.__doc__.splitlines()) > 1

    fields = {name: FIELDS[name] for name in verb.request.model_fields}
    if verb.name == "gray-upgrade":
        fields["workers"] = ["host:6700"]
    nimbus = AcceptingNimbus()
    function(nimbus, "wc", wait=False, **fields)
    assert nimbus.path == f"/v1/topologies/wc/{verb.name}"
    assert nimbus.body == {name: value for name, value in fields.items() if value is not False}


@pytest.mark.parametrize("verb", VERBS.values(), ids=lambda verb: verb.name)
def test_the_functions_keep_the_names_of_earlier_releases(verb: Verb) -> None:
    word = verb.name.replace("-", "_")
    names = {word, f"{word}_topology"}
    if word == "rollback":
        names |= {"roll_back", "roll_back_topology"}
    functions = {getattr(storm_dagster.client, name) for name in names}
    assert len(functions) == 1


def test_a_word_that_is_not_a_verb_has_no_function() -> None:
    assert not hasattr(storm_dagster.client, "explode_topology")
    assert issubclass(VERBS["update"].request, CodeRequest)
    with pytest.raises(ImportError):
        from storm_dagster.client import explode_topology  # pyright: ignore # noqa: F401
