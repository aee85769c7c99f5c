"""Deploy requests of the sensor of a declared topology, and the next workers of a gray upgrade."""

from __future__ import annotations

import time
from typing import Any

import dagster as dg
import pytest
from dagster._core.remote_origin import (
    GrpcServerCodeLocationOrigin,
    RemoteJobOrigin,
    RemoteRepositoryOrigin,
)

from storm_dagster.defs.declared.declaration import Declaration, RunningTopology, TargetDescription
from storm_dagster.defs.declared.deploy import next_batch
from storm_dagster.defs.declared.runs import deploy_request

pytestmark = pytest.mark.dagster

ELSEWHERE = RemoteRepositoryOrigin(
    GrpcServerCodeLocationOrigin(host="localhost", port=1, location_name="other"), "__repository__"
)
DECLARED = Declaration("wc", "wc.py")
NEW = TargetDescription(code_version="new")


def running(version: str = "old", status: str = "ACTIVE", **more: Any) -> RunningTopology:
    return RunningTopology("wc-1-1", status, 2, {}, version, **{"code_dir": "wc-1-1", **more})


def ask(instance: dg.DagsterInstance, actual: RunningTopology | None, later: float = 0.0) -> Any:
    return deploy_request(
        instance,
        dg.AssetKey(["topologies", "wc"]),
        declaration=DECLARED,
        described=NEW,
        actual=actual,
        now=time.time() + later,
    )


def launched(
    instance: dg.DagsterInstance, request: dg.RunRequest, status: dg.DagsterRunStatus, **tags: str
) -> None:
    @dg.job(name="deploy_declared")
    def deploy_declared() -> None: ...

    tagged = {**request.tags, **{key.replace("__", "/"): value for key, value in tags.items()}}
    instance.create_run_for_job(deploy_declared, tags=tagged, status=status)


@pytest.mark.parametrize(
    "actual",
    [
        None,
        running("new"),
        running(status="KILLED"),
        running(status="ROLLBACK"),
        running(status="UPGRADING"),
    ],
    ids=["nothing runs", "as declared", "killed", "rolled back", "somebody upgrades it"],
)
def test_nothing_is_asked_for_when_there_is_nothing_to_deploy_onto(
    instance: dg.DagsterInstance, actual: RunningTopology | None
) -> None:
    assert ask(instance, actual) is None


def test_each_change_is_asked_for_once_and_after_another_deploy_again(
    instance: dg.DagsterInstance,
) -> None:
    request = ask(instance, running())
    launched(instance, request, dg.DagsterRunStatus.STARTED)
    assert ask(instance, running(), later=3600) is None, "a run is at it"
    # The same code comes back after another was deployed: its blobs have another prefix.
    with dg.DagsterInstance.ephemeral() as later:
        assert ask(later, running(code_dir="wc-1-1.5")).run_key != request.run_key


def test_a_run_lost_with_its_process_blocks_deploys_two_hours(
    instance: dg.DagsterInstance,
) -> None:
    launched(instance, ask(instance, running()), dg.DagsterRunStatus.STARTED)
    assert ask(instance, running(), later=3600) is None
    assert ask(instance, running(), later=7300) is not None


def test_a_run_in_the_queue_holds_up_deploys_however_old_it_is(
    instance: dg.DagsterInstance,
) -> None:
    @dg.job(name="deploy_declared")
    def deploy_declared() -> None: ...

    origin = RemoteJobOrigin(ELSEWHERE, "deploy_declared")
    status, tags = dg.DagsterRunStatus.QUEUED, ask(instance, running()).tags
    instance.create_run_for_job(deploy_declared, tags=tags, status=status, remote_job_origin=origin)
    assert ask(instance, running(), later=1e6) is None


def test_an_outage_is_tried_again_and_a_mistake_is_not(instance: dg.DagsterInstance) -> None:
    first = ask(instance, running())
    launched(instance, first, dg.DagsterRunStatus.FAILURE)
    assert ask(instance, running()) is None, "not at once"
    second = ask(instance, running(), later=60)
    assert second.run_key != first.run_key
    launched(instance, second, dg.DagsterRunStatus.FAILURE, storm__final_error="InvalidTopology")
    assert ask(instance, running(), later=1e6) is None


def test_what_somebody_cancelled_is_left_alone(instance: dg.DagsterInstance) -> None:
    launched(instance, ask(instance, running()), dg.DagsterRunStatus.CANCELED)
    assert ask(instance, running(), later=1e6) is None


def test_an_upgrade_of_ours_that_nobody_drives_goes_on(instance: dg.DagsterInstance) -> None:
    first = ask(instance, running())
    launched(instance, first, dg.DagsterRunStatus.FAILURE, storm__final_error="InvalidTopology")
    one = ask(instance, running(status="UPGRADING", upgrading_to="new", upgraded=1))
    two = ask(instance, running(status="UPGRADING", upgrading_to="new", upgraded=2))
    assert len({first.run_key, one.run_key, two.run_key}) == 3


def test_workers_of_the_component_come_first_then_the_others() -> None:
    document = {
        "tasks": [
            {"component": "count", "host": "h", "port": 1},
            {"component": "count", "host": "h", "port": 2},
            {"component": "split", "host": "h", "port": 3},
        ],
        "upgrade": {"workers": {"h:1": "upgraded", "h:2": "former", "h:3": "former"}},
    }
    batch = {"component": "count", "number": 2}
    assert next_batch(document, batch) == batch
    document["upgrade"]["workers"]["h:2"] = "upgraded"
    assert next_batch(document, batch) == {"number": 2}
    assert next_batch(document, {"number": 1}) == {"number": 1}
