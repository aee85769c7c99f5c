"""The invariants: silent for a sound cluster, one sentence for each violation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from storm_dagster.core.invariants.rules import RULES
from storm_dagster.core.invariants.snapshot import ClusterSnapshot
from storm_dagster.defs import build_storm_defs
from storm_dagster.defs.instance_settings import SETTINGS_CHECK
from storm_dagster.defs.observe.checks import (
    CHECK_ASSETS,
    DIAGNOSIS_CHECK,
    EXPOSURES_CHECK,
    PLACEMENT_CHECKS,
    view_findings,
)
from storm_dagster.model import paths
from storm_dagster.model.names import jar_key, placement_key
from storm_dagster.model.ranges import encode_ranges
from storm_dagster.model.records import Assignment, encode_record
from storm_dagster.model.view import ClusterView
from storm_dagster.operations.context import OperationsContext
from storm_dagster.operations.read.inspection import InspectionResult, inspect_cluster
from storm_dagster.testing.cluster import run_cli
from storm_dagster.testing.waiting import eventually
from storm_rigs.dagster.dagster_results import shown
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.dagster_world import DagsterWorld, PlainPlanner, dagster_world

pytestmark = [pytest.mark.dagster, pytest.mark.zookeeper]


def check(world: DagsterWorld, name: str) -> dg.AssetCheckEvaluation:
    """The evaluation of one check, run alone as the UI runs it."""
    job = dg.define_asset_job(
        "one_check",
        selection=dg.AssetSelection.checks(*[c for c in checks(world) if c.name == name]),
    )
    result = (
        dg.Definitions.merge(world.defs, dg.Definitions(jobs=[job]))
        .resolve_job_def("one_check")
        .execute_in_process(instance=world.instance)
    )
    (evaluation,) = result.get_asset_check_evaluations()
    return evaluation


def checks(world: DagsterWorld) -> list[dg.AssetCheckKey]:
    return [key for definition in world.defs.asset_checks or [] for key in definition.check_keys]


def named(view: ClusterView, name: str) -> Any:
    return view.topology_named(name)


def broken(view: ClusterView, name: str, **changes: Any) -> ClusterView:
    topology = named(view, name)
    return replace(view, topologies={**view.topologies, topology.id: replace(topology, **changes)})


def findings(view: ClusterView) -> dict[str, list[str]]:
    return {name: found for name, found in view_findings(view).items() if found}


def test_every_check_passes_on_a_sound_cluster(world: DagsterWorld) -> None:
    world.submit("wc", conf={"topology.workers": 2})
    world.run_workers("wc")
    names = {key.name for key in checks(world)}
    others = {"blobs_present", "invariants", SETTINGS_CHECK, EXPOSURES_CHECK, DIAGNOSIS_CHECK}
    assert names == {*CHECK_ASSETS, *PLACEMENT_CHECKS, *others}
    for name in names - {
        SETTINGS_CHECK,
        EXPOSURES_CHECK,
    }:  # They look at Dagster, and at who reaches the cluster.
        evaluation = check(world, name)
        assert evaluation.passed, name
        assert shown(evaluation)["topologies"] == 1


def test_exposures_are_those_of_doctor_with_their_remedies(world: DagsterWorld) -> None:
    def evaluated() -> tuple[dg.AssetCheckEvaluation, list[dict[str, Any]]] | None:
        evaluation = check(world, EXPOSURES_CHECK)
        listed = run_cli("doctor", "--security", "--json", home=world.home).document["findings"]
        rows = [record.data for record in shown(evaluation)["findings"]]
        alike = [
            (row["check"], row["state"], row["found"], row["remedy"] or None) for row in rows
        ] == [(row["check"], row["state"], row["found"], row["mend"]) for row in listed]
        return (evaluation, listed) if alike else None

    # Each gives ZooKeeper a second to tell its version.
    evaluation, listed = eventually(evaluated, 60, "the findings of doctor")
    assert not evaluation.passed and evaluation.severity is dg.AssetCheckSeverity.WARN
    exposed = [row for row in listed if row["state"] != "ok"]
    assert shown(evaluation)["exposures"] == len(exposed)
    assert {"callers", "ZooKeeper", "workers"} <= {row["check"] for row in exposed}
    assert all(row["mend"] in (evaluation.description or "") for row in exposed)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_workers_of_this_machine_are_inspected_unless_conf_dir_names_another_cluster(
    world: DagsterWorld, monkeypatch: pytest.MonkeyPatch, elsewhere: bool
) -> None:
    inspected: list[Path | None] = []

    def inspect(
        ops: OperationsContext, *, home: Path | None, stable_secs: float
    ) -> InspectionResult:
        inspected.append(home)
        return inspect_cluster(ops, stable_secs=stable_secs)

    monkeypatch.setattr("storm_dagster.defs.observe.checks.inspect_cluster", inspect)
    world.defs = build_storm_defs(
        home=str(world.home),
        conf_dir=str(world.home) if elsewhere else None,
        blob_dir=str(world.home / "blobs"),
    )
    assert check(world, "invariants").passed
    assert inspected == [None if elsewhere else world.home]


def test_what_a_topology_suffers_from_fails_its_check(world: DagsterWorld) -> None:
    world.submit("wc", conf={"topology.workers": 2})
    topology_id = world.topology("wc").id
    assert check(world, DIAGNOSIS_CHECK).passed, "it has only begun"
    view = world.cluster.load_view()
    base = view.topologies[topology_id].base.model_copy(update={"launch_time_secs": 1_700_000_000})
    world.cluster.state.set_data(paths.topology(topology_id), encode_record(base))
    evaluation = check(world, DIAGNOSIS_CHECK)
    assert not evaluation.passed and evaluation.severity is dg.AssetCheckSeverity.WARN
    (row,) = [record.data for record in shown(evaluation)["findings"]]
    assert (row["topology"], row["kind"]) == ("wc", "silent-master")
    assert "storm-dagster restart wc" in str(row["remedy"])
    assert str(row["found"]) in (evaluation.description or "")


def test_a_closed_cluster_exposes_nothing(
    tmp_path: Path, instance: dg.DagsterInstance, stage: Stage
) -> None:
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("a-secret-planted-for-tests-4711")
    stage.conf |= {"storm.secret.file": str(secret), "supervisor.run.worker.as.user": True}
    world = dagster_world(stage, instance, {"spark": PlainPlanner()})
    world.home.chmod(0o711)
    evaluation = check(world, EXPOSURES_CHECK)
    assert evaluation.passed, evaluation.description
    world.home.chmod(0o755)
    assert "chmod 700" in (check(world, EXPOSURES_CHECK).description or "")


def test_a_rebalance_that_moved_too_much_is_found(world: DagsterWorld) -> None:
    world.submit("wc", conf={"topology.workers": 2})
    key = placement_key(world.topology("wc").id)
    stored = json.loads(world.blobs.read(key))
    one, other = stored["workers"]
    # As if the two workers had changed places.
    before = {
        f"{a['node']}:{a['port']}": encode_ranges(b["tasks"])
        for a, b in ((one, other), (other, one))
    }
    world.blobs.put(key, json.dumps({**stored, "moves": {"before": before, "slack": 1}}).encode())
    evaluation = check(world, "fewest_moves")
    assert not evaluation.passed
    assert evaluation.severity is dg.AssetCheckSeverity.WARN
    assert "moved" in shown(evaluation)["found"]


def test_a_missing_blob_is_found(world: DagsterWorld) -> None:
    world.submit("wc")
    world.blobs.delete(jar_key(world.topology("wc").id))
    evaluation = check(world, "blobs_present")
    assert not evaluation.passed
    assert "stormjar.jar" in shown(evaluation)["found"]


def test_a_task_in_two_slots_and_a_task_without_slot_are_found(world: DagsterWorld) -> None:
    world.submit("wc", conf={"topology.workers": 2})
    world.run_workers("wc")
    view = world.cluster.load_view()
    topology = named(view, "wc")
    first, second = topology.assignment.workers
    both = topology.assignment.model_copy(
        update={"workers": (first, second.model_copy(update={"tasks": first.tasks}))}
    )
    found = findings(broken(view, "wc", assignment=Assignment.model_validate(both)))
    assert set(found) == {"one_slot_per_task"}
    text = " ".join(found["one_slot_per_task"])
    assert "more than one slot" in text
    assert "have no slot" in text


def test_a_slot_of_two_topologies_is_found(world: DagsterWorld) -> None:
    for name in ("a", "b"):
        world.submit(name, conf={"topology.workers": 1})
        world.run_workers(name)
    view = world.cluster.load_view()
    a, b = named(view, "a"), named(view, "b")
    slot = a.assignment.workers[0]
    moved = b.assignment.workers[0].model_copy(
        update={"node": slot.node, "host": slot.host, "port": slot.port}
    )
    found = findings(
        broken(view, "b", assignment=b.assignment.model_copy(update={"workers": (moved,)}))
    )
    assert set(found) == {"slots_not_shared"}


def test_a_visible_topology_without_assignment_is_found(world: DagsterWorld) -> None:
    world.submit("wc")
    found = findings(broken(world.cluster.load_view(), "wc", assignment=None))
    assert set(found) == {"base_implies_published"}


def test_two_live_owners_fail_the_check_and_a_handover_does_not(world: DagsterWorld) -> None:
    world.submit("wc", conf={"topology.workers": 2})
    world.run_workers("wc")
    view = world.cluster.load_view()
    live = dict(named(view, "wc").live_workers)
    (_, first), (two, second) = sorted(live.items())
    live[two] = second.model_copy(update={"tasks": first.tasks})
    assert set(findings(broken(view, "wc", live_workers=live))) == {"one_live_owner"}
    live[two] = second.model_copy(update={"tasks": first.tasks, "version": second.version + 1})
    assert findings(broken(view, "wc", live_workers=live)) == {}


def test_a_lost_supervisor_is_found(world: DagsterWorld) -> None:
    world.submit("wc", conf={"topology.workers": 1})
    view = world.cluster.load_view()
    node = named(view, "wc").assignment.workers[0].node
    lost = replace(view, supervisors={k: v for k, v in view.supervisors.items() if k != node})
    assert set(findings(lost)) == {"assigned_to_live_slots"}


def test_a_damaged_record_is_found(world: DagsterWorld) -> None:
    world.submit("wc")
    world.cluster.state.set_data(f"/taskbeats/{world.topology('wc').id}", b"{")
    assert not check(world, "records_intact").passed


def test_a_killed_topology_is_not_held_to_its_blobs(world: DagsterWorld) -> None:
    world.submit("wc")
    view = world.cluster.load_view()
    base = named(view, "wc").base.model_copy(update={"status": "KILLED"})
    (rule,) = (rule for rule in RULES if rule.name == "blobs_present")
    assert rule.check(ClusterSnapshot(view, blobs={}))
    assert rule.check(ClusterSnapshot(broken(view, "wc", base=base), blobs={})) == []
