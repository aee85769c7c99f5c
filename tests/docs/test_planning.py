"""docs/planning.md: its examples are planned, and its tables hold every key with its default."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.model.plan_document import (
    PlanComponent,
    PlanDocument,
    PlanOldWorker,
    PlanSupervisor,
    PlanTopology,
)
from storm_dagster.operations.read.plan_file import parse_plans, result_document

PAGE = (Path(__file__).parents[2] / "docs" / "planning.md").read_text(encoding="utf-8")
EXAMPLES = list(
    zip(
        re.findall(r"```yaml\n(.*?)```", PAGE, flags=re.S),
        re.findall(r"```text\n(.*?)```", PAGE, flags=re.S),
        strict=True,
    )
)


def rows_of(name: str, outcome: dict[str, Any]) -> list[list[str]]:
    """Cells of the page for an outcome."""
    head = [f"{name}: {outcome['status']}, {outcome['moved']} tasks moved"]
    return [
        head,
        *(
            [
                worker["node"],
                f"{worker['host']}:{worker['port']}",
                ", ".join(map(str, worker["tasks"])),
                ", ".join(
                    f"{component} {count}" for component, count in worker["components"].items()
                ),
                "yes" if worker["kept"] else "no",
            ]
            for worker in outcome["workers"]
        ),
    ]


@pytest.mark.parametrize(("plan", "shown"), EXAMPLES, ids=["fits", "lost"])
def test_an_example_is_planned_as_the_page_shows(plan: str, shown: str) -> None:
    ((name, outcome),) = result_document(parse_plans(plan)[0], plan_placement)["topologies"].items()
    assert rows_of(name, outcome) == [re.split(r" {2,}", line) for line in shown.splitlines()]


@pytest.mark.parametrize(
    ("head", "model"),
    [
        ("The document", PlanDocument),
        ("A supervisor", PlanSupervisor),
        ("A topology", PlanTopology),
        ("A component", PlanComponent),
        ("A worker in `old`", PlanOldWorker),
    ],
)
def test_a_table_has_every_key_and_its_default(head: str, model: type[BaseModel]) -> None:
    (table,) = re.findall(
        rf"^\*\*{re.escape(head)}\*\*\n\n(.*?)(?=\n\n|\Z)", PAGE, flags=re.S | re.M
    )
    shown = {
        key: default.strip("` ")
        for keys, default in re.findall(r"^\| (`[^|]*) \| ([^|]*) \|", table, flags=re.M)
        for key in re.findall(r"`(\w+)`", keys)
    }
    assert set(shown) == set(model.model_fields)
    for key, field in model.model_fields.items():
        if field.default is None:
            continue  # The page says what stands in for it.
        required = field.default is PydanticUndefined or key in ("supervisors", "topologies")
        wanted = "required" if required else str(field.default).lower()
        assert shown[key] == wanted, key
