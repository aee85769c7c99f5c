"""Gray upgrade, completion and rollback as jobs: what they ask for, what they show, and how they
fail.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from storm_dagster.core.upgrade.machine import Move
from storm_dagster.defs import keys
from storm_dagster.model.errors import Conflict
from storm_dagster.model.records import GrayWorker
from storm_dagster.model.removed_keys import REMOVED_KEYS
from storm_dagster.model.run_result import RunResult
from storm_dagster.zk.gray_upgrades import write_move
from storm_rigs.dagster.dagster_results import shown, step_failure
from storm_rigs.operations.upgrades import UpgradeStandIns
from storm_rigs.stage.dagster_world import DagsterWorld

pytestmark = [pytest.mark.dagster, pytest.mark.zookeeper]

CONF = {"topology.workers": 3, "topology.master.single.worker": True}


def op(job: str, **config: Any) -> dict[str, Any]:
    return {"ops": {f"{job}_op": {"config": {"name": "wc", **config}}}}


def observations(world: DagsterWorld) -> list[tuple[str, dict[str, Any]]]:
    """(description, metadata) of what was observed at the topology, oldest first."""
    records = world.instance.fetch_observations(keys.ACTIVE_TOPOLOGY, limit=50).records
    found = [record.asset_observation for record in reversed(records) if record.asset_observation]
    return [(str(one.description), shown(one)) for one in found]


@contextmanager
def at_work(stand_ins: UpgradeStandIns, fail: bool = False) -> Iterator[None]:
    """The topology master and the supervisors go on beside the run."""
    stop = threading.Event()

    def work() -> None:
        while not stop.wait(0.05):
            try:
                stand_ins.pick()
                state = stand_ins.state
                if fail and state.record is not None and not state.record.rollback:
                    # Between two looks a batch may not be picked yet.
                    if state.upgrading:
                        broken = GrayWorker(failed="h:1: its worker ended with exit code 1")
                        move = Move(min(state.upgrading), "failed", broken)
                        write_move(stand_ins.cluster.state, stand_ins.id, state, move)
                else:
                    stand_ins.supervise()
            except Conflict:
                continue

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.fixture
def stand_ins(world: DagsterWorld) -> UpgradeStandIns:
    assert world.submit("wc", conf=CONF).success
    return UpgradeStandIns(world.cluster, world.topology("wc").id)


def test_batch_by_batch_to_the_end(world: DagsterWorld, stand_ins: UpgradeStandIns) -> None:
    handle = world.upload("new", conf=CONF)
    with at_work(stand_ins):
        first = world.run(
            "gray_upgrade_topology", config=op("gray_upgrade_topology", handle=handle, number=1)
        )
        assert first.success
        assert world.topology("wc").base.status == "UPGRADING"
        rest = world.run(
            "gray_upgrade_topology", config=op("gray_upgrade_topology", component="split")
        )
        assert rest.success
        last = world.run("gray_upgrade_topology", config=op("gray_upgrade_topology", number=9))
        assert last.success or step_failure(last)[0] == "InvalidRequest"
    topology = world.topology("wc")
    assert topology.base.status == "ACTIVE" and topology.code_dir != topology.id
    seen = observations(world)
    by_worker = [metadata["worker"] for _, metadata in seen if metadata.get("code") == "upgraded"]
    assert sorted(set(by_worker)) == sorted(stand_ins.on(topology.code_dir))
    outcomes = [metadata["outcome"] for _, metadata in seen if "outcome" in metadata]
    assert outcomes[0] == "batch done" and outcomes[-1] == "completed"
    done = next(metadata for _, metadata in seen if metadata.get("outcome") == "batch done")
    assert (done["upgraded"], done["former"], done["status"]) == (1, 2, "UPGRADING")


@pytest.mark.usefixtures("leader")
def test_an_upgrade_may_be_completed_before_its_last_worker(
    world: DagsterWorld, stand_ins: UpgradeStandIns
) -> None:
    handle = world.upload("new", conf=CONF)
    with at_work(stand_ins):
        config = op("gray_upgrade_topology", handle=handle, number=1)
        assert world.run("gray_upgrade_topology", config=config).success
    assert world.run("complete_upgrade_topology", config=op("complete_upgrade_topology")).success
    topology = world.topology("wc")
    assert topology.base.status == "ACTIVE" and len(stand_ins.on(topology.code_dir)) == 1
    assert observations(world)[-1][0] == "complete-upgrade: completed, ACTIVE"
    again = world.run("complete_upgrade_topology", config=op("complete_upgrade_topology"))
    assert step_failure(again)[0] == "Conflict"


@pytest.mark.usefixtures("leader")
def test_rolled_back_by_hand(world: DagsterWorld, stand_ins: UpgradeStandIns) -> None:
    handle = world.upload("new", conf=CONF)
    with at_work(stand_ins):
        config = op("gray_upgrade_topology", handle=handle, number=2)
        assert world.run("gray_upgrade_topology", config=config).success
        assert world.run("rollback_topology", config=op("rollback_topology")).success
    topology = world.topology("wc")
    assert topology.base.status == "ACTIVE" and topology.code_dir == topology.id
    assert len(stand_ins.on(topology.id)) == 4
    assert observations(world)[-1][0] == "rollback: rolled back, ACTIVE"


@pytest.mark.parametrize("job", ["gray_upgrade_topology", "update_topology"])
def test_warnings_about_the_conf_are_tags_of_the_run(
    world: DagsterWorld, stand_ins: UpgradeStandIns, job: str
) -> None:
    key = min(REMOVED_KEYS)
    handle = world.upload("new", conf={**CONF, key: "old"})
    batch = {"number": 1} if job == "gray_upgrade_topology" else {}
    with at_work(stand_ins):
        result = world.run(job, config=op(job, handle=handle, **batch))
    assert result.success
    run = world.instance.get_run_by_id(result.run_id)
    assert run is not None
    (warning,) = RunResult.of_tags(run.tags).warnings
    assert key in warning
    assert RunResult.of_tags(run.tags).outcome in ("batch done", "changed")


def test_rolled_back_by_itself_fails_the_run_that_waits_and_says_why(
    world: DagsterWorld, stand_ins: UpgradeStandIns
) -> None:
    handle = world.upload("new", conf=CONF)
    with at_work(stand_ins, fail=True):
        config = op("gray_upgrade_topology", handle=handle, number=3, wait_secs=60)
        result = world.run("gray_upgrade_topology", config=config)
    kind, said = step_failure(result)
    assert kind == "InvalidTopology" and "exit code 1" in said
    assert world.topology("wc").base.status == "ACTIVE"
    assert world.topology("wc").code_dir == stand_ins.id


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({"number": 1}, "InvalidRequest"),
        ({"handle": "new"}, "InvalidRequest"),
        ({"handle": "new", "component": "nothing"}, "InvalidRequest"),
        ({"handle": "new", "workers": ["h:x"]}, "InvalidRequest"),
        ({"handle": "gone", "number": 1}, "NotAlive"),
    ],
)
def test_a_wrong_form_is_an_error_and_changes_nothing(
    world: DagsterWorld, stand_ins: UpgradeStandIns, config: dict[str, Any], kind: str
) -> None:
    world.upload("new", conf=CONF)
    result = world.run("gray_upgrade_topology", config=op("gray_upgrade_topology", **config))
    assert step_failure(result)[0] == kind
    assert world.topology("wc").base.status == "ACTIVE" and stand_ins.state.record is None
