"""The sensor and the schedules of declared topologies: what they record and ask for while nothing
changes, when something does, and after somebody ended a topology. ZooKeeper and Dagster are real;
time is handed in.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import dagster as dg
import pytest

from storm_dagster.defs.declared import sensor as declared_sensor
from storm_dagster.defs.declared.assets import topology_assets
from storm_dagster.defs.declared.checks import (
    FreshnessAttributes,
    ScheduleAttributes,
    TopologyAlerts,
)
from storm_dagster.defs.declared.declaration import Declaration, LoadedFiles, describe_declared
from storm_dagster.defs.declared.deploy import deploy_lock
from storm_dagster.defs.declared.runs import topology_definitions
from storm_dagster.defs.declared.sensor import DECLARED_TAG, shared_definitions
from storm_dagster.defs.declared.topology import DeclaredTopology
from storm_dagster.defs.keys import PARTITIONS_NAME
from storm_dagster.defs.resources.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.defs.resources.processes import NimbusResource
from storm_dagster.model.errors import NotAlive
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.dagster.dagster_results import shown
from storm_rigs.operations.snapshots import show
from storm_rigs.stage.dagster_world import DagsterWorld, connection_waits, leading_nimbus

pytestmark = [pytest.mark.dagster, pytest.mark.zookeeper]

KEY = dg.AssetKey(["topologies", "wc"])


def component(python: str, par: int, **more: Any) -> dict[str, Any]:
    outputs = {"default": {"fields": ["word"]}}
    return {"object": {"python": python}, "parallelism": par, "outputs": outputs, **more}


def word_count(par: int) -> dict[str, Any]:
    def reads(source: str) -> list[dict[str, Any]]:
        return [{"component": source, "grouping": {"type": "shuffle"}}]

    return {
        "spouts": {"lines": component("wc:Lines", par)},
        "bolts": {
            "split": component("wc:Split", par, inputs=reads("lines")),
            "count": component("wc:Count", par, inputs=reads("split")),
        },
    }


CODE = """
from storm_dagster.api import Bolt, Grouping, Spout, Topology


class Lines(Spout):
    outputs = ["line"]


class Split(Bolt):
    outputs = ["word"]


class Count(Bolt):
    outputs = ["word", "count"]


class Wc(Topology):
    lines = Lines.spec()
    split = Split.spec(inputs={lines: Grouping.SHUFFLE}, par=2)
    count = Count.spec(inputs={split: Grouping.fields("word")}, par=2)
"""


class Busy:
    """A nimbus whose statistics differ at every call."""

    def __init__(self, world: DagsterWorld) -> None:
        self.world, self.calls = world, 0

    def __enter__(self) -> Busy:
        return self

    def __exit__(self, *_: object) -> None: ...

    def get(self, path: str) -> dict[str, Any]:
        self.calls += 1
        topology = self.world.topology("wc")
        if topology is None:
            raise NotAlive(f"{path} does not run")
        stats = {
            "emitted": 1000 * self.calls,
            "acked": 990 * self.calls,
            "complete_ms": 3 + self.calls % 7,
        }
        tasks = {
            str(task): {"status": "running", "stats": stats}
            for task in topology.tasks.component_of()
        }
        return show(self.world.cluster.load_view(), topology.id, {"tasks": tasks}, now_secs=0)


class BusyNimbus(NimbusResource):
    """The handle of a :class:`Busy`, by its home."""

    busy: ClassVar[dict[str, Any]] = {}

    def client(self, patience_secs: float | None = None) -> Any:
        return self.busy[str(self.home)]


class Shop:
    """A code location with the declared topology `wc`, and a clock."""

    def __init__(self, world: DagsterWorld, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.world, self.instance, self.file = world, world.instance, root / "wc_code.py"
        self.file.write_text(CODE, encoding="utf-8")
        self.now = 1_800_000_000.0
        self.cursor: str | None = None
        self.submitted = 0
        monkeypatch.setattr(declared_sensor, "time", SimpleNamespace(time=lambda: self.now))
        self.load()

    def load(self, **attributes: Any) -> None:
        declaration = Declaration("wc", f"{self.file}:Wc")
        described = describe_declared(declaration)
        common = {
            "group_name": "g",
            "owners": [],
            "tags": {},
            "description": None,
            "kinds": ["storm"],
            "deps": [],
        }
        assets = topology_assets(
            declaration, described, prefix=["topologies"], automation_condition=None, **common
        )
        first, *others = [asset.spec for asset in assets]
        home = str(self.world.home)
        BusyNimbus.busy[home] = Busy(self.world)
        self.topology = replace(
            DeclaredTopology(
                declaration=declaration,
                described=described,
                files=LoadedFiles(declaration, described),
                identifier="wc",
                specs=[first.merge_attributes(tags=DECLARED_TAG), *others],
                components={asset.component: asset.spec.key for asset in assets if asset.component},
                policy="hot",
                batch={},
                alerts=TopologyAlerts(complete_ms=500, failed_ratio=0.5),
                freshness=FreshnessAttributes(),
                schedule=ScheduleAttributes(deploy="*/10 * * * *", rebalance="0 3 * * *"),
                zookeeper=ZooKeeperResource(home=home),
                blobstore=BlobStoreResource(home=home, local_dir=str(self.world.home / "blobs")),
                nimbus=BusyNimbus(home=home),
            ),
            **attributes,
        )
        self.topologies = {"wc": self.topology}
        self.defs = dg.Definitions.merge(
            topology_definitions(self.topology, own_jobs=True), shared_definitions(self.topologies)
        )

    def runs(self, name: str = "wc", version: str | None = None, topology: Any = None) -> None:
        version = version or self.topology.described.code_version
        self.submitted += 1
        conf = {"topology.workers": 2, "declared.code.version": version}
        form = {
            "handle": self.world.upload(
                f"handle-{self.submitted}", topology or word_count(2), conf
            ),
            "token": f"token-{self.submitted}",
        }
        self.world.instance.add_dynamic_partitions(PARTITIONS_NAME, [name])
        config = {"ops": {"storm__topology_conf": {"config": form}}}
        assert self.world.run("submit_topology", partition=name, config=config).success
        self.world.run_workers(name)

    def ends(self) -> None:
        config = {"ops": {"kill_topology_op": {"config": {"name": "wc", "wait_secs": 0}}}}
        with leading_nimbus(self.world):
            assert self.world.run("kill_topology", config=config).success

    def tick(self, secs: float = 30.0) -> tuple[list[Any], dg.SensorResult]:
        """Events and result of a tick."""
        self.now += secs
        with dg.build_sensor_context(
            instance=self.instance, cursor=self.cursor, definitions=self.defs
        ) as context:
            answer = self.defs.resolve_sensor_def("declared_topologies_sensor")(context)
        assert isinstance(answer, dg.SensorResult)
        self.cursor = answer.cursor
        for event in answer.asset_events:
            self.instance.report_runless_asset_event(event)
        return list(answer.asset_events), answer

    def checks(self, secs: float = 70.0) -> dict[str, dg.AssetCheckEvaluation]:
        events, _ = self.tick(secs)
        return {
            event.check_name: event
            for event in events
            if isinstance(event, dg.AssetCheckEvaluation)
        }

    def schedule(self, name: str) -> Any:
        with dg.build_schedule_context(instance=self.instance) as context:
            return self.defs.resolve_schedule_def(name)(context)


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """On disk: a schedule's context takes no other."""
    (tmp_path / "dagster").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as made:
        yield made


@pytest.fixture
def shop(world: DagsterWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "code").mkdir()
    yield Shop(world, tmp_path / "code", monkeypatch)


@pytest.mark.long
def test_only_a_new_version_requests_assets_downstream(
    shop: Shop,
) -> None:
    eager = dg.AutomationCondition.eager()

    @dg.asset(deps=[KEY], automation_condition=eager)
    def report() -> None: ...

    @dg.asset(deps=[dg.AssetKey(["topologies", "wc", "count"])], automation_condition=eager)
    def counts() -> None: ...

    mine = dg.Definitions(assets=[report, counts])
    cursor: Any = None

    def requested() -> int:
        nonlocal cursor
        result = dg.evaluate_automation_conditions(
            dg.Definitions.merge(mine, shop.defs), shop.instance, cursor=cursor
        )
        cursor = result.cursor
        for asset in (report, counts):
            if result.get_num_requested(asset.key):
                shop.instance.report_runless_asset_event(dg.AssetMaterialization(asset.key))
        return result.total_requested

    shop.runs()
    shop.tick()
    for _ in range(3):
        requested()
    for _ in range(40):
        shop.tick(300.0)
        assert requested() == 0
    assert len(shop.instance.fetch_materializations(KEY, limit=10).records) == 1
    first = shop.instance.fetch_observations(KEY, limit=1).records[0].asset_observation
    assert shop.now - shown(first)["dagster/last_updated_timestamp"] <= 600

    shop.ends()
    shop.tick(70.0)
    assert requested() == 0
    shop.runs(version="another")
    shop.tick(70.0)
    assert requested() >= 1
    materialization = shop.instance.get_latest_materialization_event(KEY)
    assert materialization is not None and materialization.asset_materialization is not None
    assert (materialization.asset_materialization.tags or {})["dagster/code_version"] == "another"
    shop.tick(70.0)
    assert requested() == 0


@pytest.mark.long
def test_six_busy_hours_of_300_tasks_stay_below_a_quarter_megabyte(
    shop: Shop, tmp_path: Path
) -> None:
    shop.runs(topology=word_count(100))
    (tmp_path / "six hours").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "six hours")) as shop.instance:
        # Ticks further apart than 30 s make no fewer observations, which are 10 minutes apart.
        for _ in range(6 * 12):
            _, answer = shop.tick(300.0)
            assert len(answer.cursor or "") < 2000
        written = events = 0
        for path in (tmp_path / "six hours").rglob("*.db"):
            with sqlite3.connect(path) as database:
                if database.execute(
                    "select 1 from sqlite_master where name = 'event_logs'"
                ).fetchone():
                    size, count = database.execute(
                        "select total(length(event)), count(*) from event_logs"
                    ).fetchone()
                    written, events = written + size, events + count
        assert events > 25
        assert written < 250_000, f"{events} events, {written} bytes"
        limit = dg.AssetCheckKey(KEY, "latency_within_limit")
        assert shop.instance.event_log_storage.get_asset_check_execution_history(limit, limit=10)


def test_an_ended_topology_stays_ended_and_its_checks_fail(shop: Shop) -> None:
    request = shop.schedule("deploy_wc_schedule")
    assert isinstance(request, dg.RunRequest), "what was never deployed is submitted by the clock"
    shop.runs()
    checks = shop.checks()
    assert all(check.passed for check in checks.values()), checks
    assert "is as declared" in str(shop.schedule("deploy_wc_schedule").skip_message)
    shop.ends()
    checks = shop.checks()
    assert {name for name, check in checks.items() if check.passed} == {
        "fresh",
        "reports",
    }
    assert not shop.tick()[1].run_requests
    assert "by hand" in str(shop.schedule("deploy_wc_schedule").skip_message)
    assert "does not run" in str(shop.schedule("rebalance_wc_schedule").skip_message)
    # A run that a schedule had asked for before somebody ended the topology.
    job = shop.defs.resolve_job_def("deploy_declared")
    late = job.execute_in_process(
        instance=shop.instance, tags={"dagster/schedule_name": "deploy_wc_schedule"}
    )
    assert late.success
    assert shop.world.topology("wc") is None
    checks = shop.checks(25 * 60.0)
    assert not checks["fresh"].passed and checks["fresh"].severity == dg.AssetCheckSeverity.ERROR


def test_sensor_and_schedule_never_both_request_changed_code(
    shop: Shop,
) -> None:
    shop.now = time.time()
    shop.runs(version="older")
    (request,) = list(shop.tick()[1].run_requests or [])
    assert (request.job_name, request.asset_selection) == ("deploy_declared", [KEY])
    job = shop.defs.resolve_job_def("deploy_declared")
    shop.instance.create_run_for_job(job, tags=request.tags, status=dg.DagsterRunStatus.STARTED)
    assert "already" in str(shop.schedule("deploy_wc_schedule").skip_message)
    assert not shop.tick(3600.0)[1].run_requests


def test_runs_of_sensor_and_schedule_have_the_job_tags(shop: Shop) -> None:
    shop.load(job_tags={"dagster-k8s/config": "{}", "team": "shop"})
    request = shop.schedule("deploy_wc_schedule")
    assert request.tags == {"dagster-k8s/config": "{}", "team": "shop", "storm/topology": "wc"}
    shop.runs(version="older")
    (request,) = list(shop.tick()[1].run_requests or [])
    assert request.tags.items() > {"dagster-k8s/config": "{}", "team": "shop"}.items()
    assert request.tags["storm/topology"] == "wc" and request.run_key


def test_a_version_of_another_location_materializes_all_parts_once(shop: Shop) -> None:
    shop.runs(version="elsewhere")
    events, _ = shop.tick()
    versions = {
        event.asset_key.to_user_string(): (event.tags or {})["dagster/data_version"]
        for event in events
        if isinstance(event, dg.AssetMaterialization)
    }
    assert versions.keys() == {
        "topologies/wc",
        "topologies/wc/lines",
        "topologies/wc/split",
        "topologies/wc/count",
    }
    assert len(set(versions.values())) == 1
    later = [*shop.tick(70.0)[0], *shop.tick(700.0)[0]]
    assert not [event for event in later if isinstance(event, dg.AssetMaterialization)]


def test_deploys_of_one_version_are_one_and_other_versions_wait(shop: Shop) -> None:
    said: list[str] = []
    began, done = threading.Event(), threading.Event()

    def second() -> None:
        with shop.topology.zookeeper.cluster() as cluster:
            began.set()
            with deploy_lock(cluster, "wc", "v2", "run-3", said.append) as mine:
                assert mine
                done.set()

    with shop.topology.zookeeper.cluster() as one, shop.topology.zookeeper.cluster() as two:
        with deploy_lock(one, "wc", "v1", "run-1", said.append) as first:
            with deploy_lock(two, "wc", "v1", "run-2", said.append) as same:
                assert (first, same) == (True, False)
            assert "run-1" in said[0]
            thread = threading.Thread(target=second)
            thread.start()
            assert began.wait(30)
            assert not done.wait(0.5), "another version waits"
        assert done.wait(30)
        thread.join(30)
        with deploy_lock(two, "wc", "v1", "run-4", said.append) as later:
            assert later


def test_a_second_deploy_of_the_same_version_succeeds_without_changes(
    shop: Shop,
) -> None:
    version = shop.topology.described.code_version
    with (
        shop.topology.zookeeper.cluster() as cluster,
        deploy_lock(cluster, "wc", version, "run-1", print),
    ):
        result = shop.defs.resolve_job_def("deploy_wc").execute_in_process(instance=shop.instance)
    assert result.success and shop.world.topology("wc") is None


def test_code_that_is_newer_than_the_location_is_seen(shop: Shop) -> None:
    shop.runs()
    assert shop.checks()["as_declared"].passed
    os.utime(shop.file, (1, 1))
    assert shop.checks() == {}, "the same content is no change"
    shop.file.write_text(CODE + "\n# changed\n", encoding="utf-8")
    events, answer = shop.tick(70.0)
    said = str(answer.skip_reason)
    (check,) = [event for event in events if getattr(event, "check_name", "") == "as_declared"]
    assert not check.passed and check.severity == dg.AssetCheckSeverity.WARN
    assert "reload definitions" in str(check.description)
    assert "reload definitions" in said
    shop.load()
    assert "reload" not in str(shop.tick(70.0)[1].skip_reason)


def test_code_not_loaded_by_the_location_requests_no_runs(shop: Shop) -> None:
    shop.file.write_text(CODE + "\n# changed\n", encoding="utf-8")
    newer = describe_declared(shop.topology.declaration).code_version
    shop.runs(version=newer)
    for _ in range(3):
        assert not shop.tick(70.0)[1].run_requests
        assert "reload definitions" in str(shop.schedule("deploy_wc_schedule").skip_message)
    shop.load()
    assert not shop.tick(70.0)[1].run_requests
    assert "is as declared" in str(shop.schedule("deploy_wc_schedule").skip_message)


def test_the_rebalance_schedule_asks_for_a_run_only_where_tasks_would_move(shop: Shop) -> None:
    shop.runs()
    assert "wc: it is balanced" in str(shop.schedule("rebalance_wc_schedule").skip_message)
    shop.ends()
    shop.world.lose_supervisor("s2")
    shop.runs()
    shop.world.supervisor("s2", present_secs=599)
    assert "wc: it is balanced" in str(shop.schedule("rebalance_wc_schedule").skip_message)
    shop.world.supervisor("s2")
    request = shop.schedule("rebalance_wc_schedule")
    assert isinstance(request, dg.RunRequest)
    job = shop.defs.resolve_job_def("rebalance_declared")
    shop.instance.create_run_for_job(
        job, run_config=request.run_config, tags=request.tags, status=dg.DagsterRunStatus.STARTED
    )
    assert "already" in str(shop.schedule("rebalance_wc_schedule").skip_message)


def test_a_declared_topology_that_is_no_longer_steady_is_not_rebalanced(shop: Shop) -> None:
    """A worker dies before the tick, or between the tick and its run."""
    shop.world.lose_supervisor("s2")
    shop.runs()
    shop.world.supervisor("s2")
    request = shop.schedule("rebalance_wc_schedule")
    topology = shop.world.topology("wc")
    assert topology is not None
    worker = topology.workers[0]
    shop.world.stop_worker(topology.id, worker.node, worker.port)
    skipped = str(shop.schedule("rebalance_wc_schedule").skip_message)
    assert "1 of its workers do not live, healing comes first" in skipped
    # Its nimbus knows no requests: a run that sends one fails.
    job = shop.defs.resolve_job_def("rebalance_declared")
    late = job.execute_in_process(
        run_config=request.run_config, tags=request.tags, instance=shop.instance
    )
    assert late.success


def test_a_cluster_out_of_reach_is_not_fresh_after_a_while(shop: Shop, tmp_path: Path) -> None:
    shop.runs()
    shop.tick()
    away = shop.topology.zookeeper
    (tmp_path / "away").mkdir()
    (tmp_path / "away" / "storm.yaml").write_text(
        "storm.zookeeper.servers: ['127.0.0.1']\nstorm.zookeeper.port: 9\nstorm.zookeeper.connection.timeout: 300\n"
    )
    shop.topologies["wc"] = replace(
        shop.topology, zookeeper=ZooKeeperResource(home=str(tmp_path / "away"))
    )
    assert shop.tick(120.0)[0] == [], "a moment without ZooKeeper is no news"
    assert not shop.checks(15 * 60.0)["fresh"].passed
    assert shop.tick(120.0)[0] == []
    shop.topologies["wc"] = replace(shop.topology, zookeeper=away)
    assert all(check.passed for check in shop.checks().values())


def test_without_zookeeper_ticks_hold_up_no_sensor_or_schedule_of_the_project(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = connection_waits(monkeypatch)
    assert "does not answer" in str(shop.tick()[1].skip_reason)
    for name in ("deploy_wc_schedule", "rebalance_wc_schedule"):
        assert "does not answer" in str(shop.schedule(name).skip_message)
    assert waits == [2000] * 3


def test_all_topologies_of_a_cluster_take_one_session_and_a_short_cursor(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.runs()
    for number in range(29):
        declaration = replace(shop.topology.declaration, name=f"other{number}")
        spec = shop.topology.specs[0].replace_attributes(
            key=dg.AssetKey(["topologies", f"other{number}"])
        )
        shop.topologies[f"other{number}"] = replace(
            shop.topology, declaration=declaration, specs=[spec]
        )
    opened: list[Any] = []
    opening = StormClusterState.open

    def counted(*args: Any, **more: Any) -> StormClusterState:
        opened.append(args)
        return opening(*args, **more)

    monkeypatch.setattr(StormClusterState, "open", counted)
    shop.tick(70.0)
    shop.tick(70.0)
    events, answer = shop.tick(70.0)
    assert len(opened) == 3
    assert len(answer.cursor or "") < 2000
    assert not events


def test_a_deploy_passes_other_runs_of_a_queue(shop: Shop) -> None:
    jobs = [job for job in shop.defs.resolve_all_job_defs() if not job.name.startswith("__")]
    assert {"deploy_wc", "submit_wc", "kill_wc", "deploy_declared", "kill_declared"} <= {
        job.name for job in jobs
    }
    assert {job.tags.get("dagster/priority") for job in jobs} == {"100"}
