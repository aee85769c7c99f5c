"""The table of verbs in the HTTP page is the one of the code."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

from storm_dagster.client import change_topology
from storm_dagster.model.verbs import VERBS, CodeRequest, Verb
from storm_dagster.operations.live import lifecycle, rebalance

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
def test_every_verb_has_an_operation_that_takes_its_fields_and_a_function_of_the_client(
    verb: Verb,
) -> None:
    operation = (
        rebalance.rebalance if verb.name == "rebalance" else lifecycle.operation_of(verb.name)
    )
    assert operation.__doc__ and {"ctx", "name"} <= inspect.signature(operation).parameters.keys()
    if not verb.batches:
        assert (
            verb.request.model_fields.keys() - {"dry_run"}
            <= inspect.signature(operation).parameters.keys()
        )
    import storm_dagster.client as client

    made = getattr(client, verb.job.removesuffix("_topology") + "_topology")
    assert made.func is change_topology and made.keywords == {"verb": verb.name}
    assert all(info.description for info in verb.request.model_fields.values())


def test_who_is_no_verb_has_no_function() -> None:
    import storm_dagster.client as client

    assert not hasattr(client, "explode_topology") and issubclass(
        VERBS["update"].request, CodeRequest
    )
    with pytest.raises(ImportError):
        from storm_dagster.client import explode_topology  # pyright: ignore # noqa: F401
