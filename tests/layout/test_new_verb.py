"""A trial of "Add a verb": a row and an operation are enough for every way in."""

from __future__ import annotations

import json
from typing import Annotated, Any

import pytest
from pydantic import Field

from storm_dagster.cli import app, change_verbs
from storm_dagster.client import change_topology
from storm_dagster.defs.forms import verb_config
from storm_dagster.defs.lifecycle.jobs import build_lifecycle_jobs
from storm_dagster.model.dagster_names import DagsterNames
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.requests import Flag, VerbRequest, check_request
from storm_dagster.model.verbs import VERBS, Verb
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.live.lifecycle import LEADER_OPERATIONS, OPERATIONS
from storm_dagster.operations.results import LifecycleResult
from storm_rigs.product.public_names import nimbus_openapi
from storm_rigs.protocols.client_requests import AcceptingNimbus


class ShakeRequest(VerbRequest):
    """Request to shake a topology."""

    force: Annotated[int, Flag("--force")] = Field(default=1, ge=1, le=9, description="How hard.")


def _shake(ctx: OperationsContext, name: str, force: int = 1) -> LifecycleResult:
    return LifecycleResult(f"{name}-1-1", name, "ACTIVE", changed=force > 1)


@pytest.fixture
def shake(monkeypatch: pytest.MonkeyPatch) -> Verb:
    verb = Verb(
        "shake",
        "Shake a topology. Nothing falls.",
        ShakeRequest,
        executed_by="leader",
        until=("ACTIVE",),
    )
    monkeypatch.setitem(VERBS, "shake", verb)  # type: ignore[arg-type]
    monkeypatch.setitem(OPERATIONS, "shake", _shake)  # type: ignore[arg-type]
    monkeypatch.setitem(LEADER_OPERATIONS, "shake", _shake)  # type: ignore[arg-type]
    return verb


def test_a_row_and_an_operation_make_every_way_in(shake: Verb) -> None:
    document = nimbus_openapi()
    operation = document["paths"]["/v1/topologies/{name}/{verb}"]["post"]
    (words,) = [one["schema"]["enum"] for one in operation["parameters"] if one["name"] == "verb"]
    assert "shake" in words and "#/components/schemas/ShakeRequest" in json.dumps(
        operation["requestBody"]
    )
    assert document["components"]["schemas"]["ShakeRequest"]["properties"]["force"]["maximum"] == 9
    with pytest.raises(InvalidRequest, match="'force' of shake"):
        check_request(shake.request, {"force": 10}, "shake")
    (job,) = [job for job in build_lifecycle_jobs(DagsterNames()) if job.name == "shake_topology"]
    op: Any = job.all_node_defs[0]
    fields = op.config_schema.config_type.fields
    assert set(fields) == {"name", "force"} and fields["force"].description == "How hard."
    with pytest.raises(ValueError, match="force"):
        verb_config(shake)(name="wc", force=10)
    command = change_verbs.command_of(shake)
    options = {option: parameter for parameter in command.params for option in parameter.opts}
    assert {"--force", "--json", "--dry-run", "--wait"} <= options.keys()
    assert (
        options["--force"].type.name == "integer range"
        and command.help == "Shake topology NAME. Nothing falls."
    )
    nimbus: Any = AcceptingNimbus()
    change_topology(nimbus, "wc", verb="shake", force=3, wait=False)
    assert (nimbus.path, nimbus.body) == ("/v1/topologies/wc/shake", {"force": 3})
    assert app.VERBS["restart"] == ("change_verbs", "Restart the workers of a topology")
