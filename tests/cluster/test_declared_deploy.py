"""A topology of `defs.yaml` on a whole cluster: what is declared changes, what runs follows; what
somebody changed by hand is shown and healed. Only the daemon is absent: the sensor's ticks and its
runs are made here, one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dagster as dg
import pytest
import yaml

from storm_dagster.defs.declared import sensor as declared_sensor
from storm_dagster.model.errors import Conflict, StormDagsterError
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.dagster,
    pytest.mark.long,
    pytest.mark.timeout(900),
]

KEY = dg.AssetKey(["topologies", "wc"])
NEWER, NEWEST = "\nVERSION = 2\n", "\nVERSION = 3\n"
EXAMPLE = Path(__file__).parents[2] / "examples" / "wordcount.py"
DEADLY = """
def _die(self, conf, context):
    import os

    os._exit(7)


LineSpout.initialize = split.initialize = CountBolt.initialize = _die
"""


class Shop:
    """A code location with one declared topology, loaded again for every poll, as Dagster's reload
    does.
    """

    def __init__(self, root: Path, cluster: LocalCluster, instance: dg.DagsterInstance) -> None:
        self.root, self.cluster, self.instance = root, cluster, instance
        self.checks: dict[str, Any] = {}
        self.place = root / "defs" / "wc"
        self.place.mkdir(parents=True)
        (root / "__init__.py").touch()
        (root / "defs" / "__init__.py").touch()
        (root / "pyproject.toml").write_text(
            '[tool.dg]\ndirectory_type = "project"\n\n[tool.dg.project]\nroot_module = "shop"\n'
        )

    def declare(self, code: str = "", **attributes: Any) -> None:
        (self.place / "wordcount.py").write_text(EXAMPLE.read_text() + code)
        declared = {
            "name": "wc",
            "target": "wordcount.py",
            "home": str(self.cluster.home),
            "workers": 3,
            "parallelism": {"count": 2},
            "schedule": {"deploy": "*/10 * * * *"},
            **attributes,
            "conf": {"wordcount.lines.per.second": 50, **attributes.get("conf", {})},
        }
        document = {"type": "storm_dagster.StormTopologyComponent", "attributes": declared}
        (self.place / "defs.yaml").write_text(yaml.safe_dump(document))

    def defs(self) -> dg.Definitions:
        return dg.load_from_defs_folder(path_within_project=self.root)

    def run(
        self, job: str, request: dg.RunRequest | None = None, config: Any = None
    ) -> dg.ExecuteInProcessResult:
        return (
            self.defs()
            .resolve_job_def(job)
            .execute_in_process(
                instance=self.instance,
                run_config=config,
                tags={**request.tags, "dagster/sensor_name": "declared_topologies_sensor"}
                if request
                else None,
                asset_selection=request.asset_selection if request else None,
                raise_on_error=False,
            )
        )

    def look(self) -> tuple[dict[str, str], list[dg.RunRequest]]:
        """Differences found by the check, and requests of the sensor. Its events are recorded."""
        defs = self.defs()
        with dg.build_sensor_context(instance=self.instance, definitions=defs) as context:
            answer = defs.resolve_sensor_def("declared_topologies_sensor")(context)
        assert isinstance(answer, dg.SensorResult), answer
        for event in answer.asset_events or ():
            self.instance.report_runless_asset_event(event)
            if isinstance(event, dg.AssetCheckEvaluation):
                self.checks[event.check_name] = event
        # Nothing is evaluated again while nothing changes.
        drift = self.checks["as_declared"].metadata["drift"].records
        assert self.checks["as_declared"].passed == (not drift)
        return {str(row.data["what"]): str(row.data["how"]) for row in drift}, list(
            answer.run_requests or ()
        )

    def schedule(self) -> Any:
        with dg.build_schedule_context(instance=self.instance) as context:
            return self.defs().resolve_schedule_def("deploy_wc_schedule")(context)

    def code_versions(self) -> tuple[str | None, str | None]:
        """The declared version, and the running one by the newest materialization."""
        event = self.instance.get_latest_materialization_event(KEY)
        assert event is not None and event.asset_materialization is not None
        (spec,) = [spec for spec in self.defs().resolve_all_asset_specs() if spec.key == KEY]
        return spec.code_version, (event.asset_materialization.tags or {}).get(
            "dagster/code_version"
        )

    def changes(self) -> set[tuple[str, str, str]]:
        """Keys, old and new values in the table of the newest materialization."""
        event = self.instance.get_latest_materialization_event(KEY)
        materialization = None if event is None else event.asset_materialization
        assert materialization is not None
        table: Any = materialization.metadata["changes"]
        return {(row.data["key"], row.data["old"], row.data["new"]) for row in table.records}

    def workers(self) -> dict[str, str]:
        """``host:port`` -> version of the code that the worker runs, the topology master's left
        out.
        """
        document = self.cluster.wait_running("wc", 120)
        master = next(
            task["id"] for task in document["tasks"] if task["component"] == "__topology_master"
        )
        return {
            f"{worker['host']}:{worker['port']}": worker["version"]
            for worker in document["workers"]
            if master not in worker["tasks"]
        }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("declared") / "home") as made:
        yield made


@pytest.fixture
def shop(cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    # Every look of the test is one at a new state.
    monkeypatch.setattr(declared_sensor, "_CHANGED_EVERY_SECS", 0.0)
    (tmp_path / "dagster").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as instance:
        yield Shop(tmp_path / "shop", cluster, instance)
    for module in [name for name in sys.modules if name.partition(".")[0] == "shop"]:
        del sys.modules[module]


def failure_text(result: dg.ExecuteInProcessResult) -> str:
    """The error of the step that failed."""
    (failed,) = [event for event in result.all_events if event.event_type_value == "STEP_FAILURE"]
    return str(failed.step_failure_data.user_failure_data.metadata["message"].value)


def wait_until_gone(cluster: LocalCluster) -> None:
    """Wait until the killed topology is removed."""
    eventually(lambda: cluster.topologies() == [], 90, "the end of wc", ignore=(StormDagsterError,))


def test_what_runs_follows_what_is_declared(shop: Shop, cluster: LocalCluster) -> None:
    shop.declare(deploy="gray")
    # Declared is not submitted: somebody launches that.
    assert shop.look() == ({"running": "topology 'wc' does not run"}, [])
    assert shop.run("submit_wc").success
    (old,) = set(shop.workers().values())
    assert shop.look() == ({}, [])
    first_id = cluster.show("wc")["id"]
    # The run has materialized the components with the topology.
    for component in ("lines", "split", "count"):
        event = shop.instance.get_latest_materialization_event(dg.AssetKey([*KEY.path, component]))
        assert event is not None and event.run_id, component

    # Changed code is shown, and upgraded worker by worker.
    shop.declare(NEWER, deploy="gray")
    drift, requests = shop.look()
    declared, running = shop.code_versions()
    assert drift == {"code": f"declared {declared}, running {running}"}
    assert declared != running
    (request,) = requests
    done = shop.run("deploy_declared", request)
    assert done.success, failure_text(done)
    (new,) = set(shop.workers().values())
    assert new != old and cluster.show("wc")["id"] == first_id
    assert shop.look() == ({}, [])
    assert len(set(shop.code_versions())) == 1

    # Code that dies takes itself back, once.
    shop.declare(DEADLY, deploy="gray")
    (request,) = shop.look()[1]
    failed = shop.run("deploy_declared", request)
    assert not failed.success and "rolled back" in failure_text(failed)
    assert eventually(
        lambda: set(shop.workers().values()) == {new}, 120, "the former code", interval=0.5
    )
    drift, requests = shop.look()
    assert set(drift) == {"code", "upgrade"} and requests == []
    assert "its worker ended with exit code 7" in drift["upgrade"]

    # What somebody changed by hand is shown and healed.
    shop.declare(NEWER, deploy="gray")
    assert shop.look() == ({}, [])
    # Workers that the roll-back restarted may be healed meanwhile: then it is to be asked for
    # again.
    eventually(
        lambda: cluster.cli("rebalance", "wc", "-n", "2", "-e", "count=1", "-w", "0"),
        60,
        "a rebalance",
        ignore=(Conflict,),
    )
    cluster.cli("deactivate", "wc")
    assert set(shop.look()[0]) == {"workers", "parallelism.count", "status"}
    assert shop.run("deploy_wc").success
    assert shop.look()[0] == {}
    assert cluster.wait_running("wc")["status"] == "ACTIVE"

    # An upgrade whose run died after its first batch goes on.
    shop.declare(NEWEST, deploy="gray")
    version = shop.code_versions()[0]
    cluster.cli(
        "gray-upgrade", "wc", str(shop.place / "wordcount.py"), "-n", "1",
        "--conf", f"declared.code.version={version}", "--conf", "topology.master.single.worker=true",
        "--conf", "wordcount.lines.per.second=50",
    )  # fmt: skip
    assert cluster.show("wc")["status"] == "UPGRADING"
    (request,) = shop.look()[1]
    done = shop.run("deploy_declared", request)
    assert done.success, failure_text(done)
    assert len(set(shop.workers().values())) == 1
    assert shop.look() == ({}, [])
    assert cluster.show("wc")["id"] == first_id

    assert shop.run("kill_wc").success
    wait_until_gone(cluster)


def test_one_deploy_at_a_time_and_what_was_ended_stays_ended(
    shop: Shop, cluster: LocalCluster
) -> None:
    shop.declare(deploy="hot")
    assert shop.run("deploy_wc").success
    first_id = cluster.wait_running("wc")["id"]
    assert shop.look() == ({}, [])

    # Another conf, by a hot deploy. Sensor, schedule and somebody ask for it at the same time:
    # there is one.
    shop.declare(deploy="hot", conf={"topology.max.spout.pending": 50})
    drift, requests = shop.look()
    assert drift["conf.topology.max.spout.pending"] == "declared 50, running 1500"
    (request,) = requests
    assert isinstance(shop.schedule(), dg.RunRequest)
    with ThreadPoolExecutor() as pool:
        both = [
            pool.submit(shop.run, "deploy_declared", request),
            pool.submit(shop.run, "deploy_wc"),
        ]
        for done in [each.result() for each in both]:
            assert done.success, failure_text(done)
    second_id = cluster.wait_running("wc")["id"]
    assert int(second_id.split("-")[1]) == int(first_id.split("-")[1]) + 1
    assert ("topology.max.spout.pending", "1500", "50") in shop.changes()
    assert shop.look() == ({}, [])
    assert "is as declared" in shop.schedule().skip_message

    # Ended by hand, it stays ended until somebody deploys it by hand.
    materialized = len(shop.instance.fetch_materializations(KEY, limit=50).records)
    assert shop.run("kill_wc").success
    wait_until_gone(cluster)
    assert shop.look() == ({"running": "topology 'wc' does not run"}, [])
    assert not shop.checks["all_tasks_run"].passed
    assert "by hand" in shop.schedule().skip_message
    assert shop.run("deploy_declared", request).success
    assert cluster.topologies() == []
    assert len(shop.instance.fetch_materializations(KEY, limit=50).records) == materialized
    done = shop.run("deploy_wc")
    assert done.success, failure_text(done)
    cluster.wait_running("wc")
    assert shop.look()[0] == {} and all(check.passed for check in shop.checks.values())
    assert shop.run("kill_wc").success
    # A topology belongs to its owner until it is removed.
    wait_until_gone(cluster)


def config_of(op: str) -> dict[str, Any]:
    """The field of the Launchpad by which a user takes the topology over."""
    return {"ops": {op: {"config": {"take_over": True}}}}


def test_two_deployments_never_fight_and_one_takes_over_by_hand(
    shop: Shop, cluster: LocalCluster
) -> None:
    # Both deploy at the same time: the first one is the owner, the other one is told so.
    shop.declare(deploy="hot", deployment="prod")
    first = shop.defs().resolve_job_def("deploy_wc")
    shop.declare(NEWER, deploy="hot", deployment="branch")
    second = shop.defs().resolve_job_def("deploy_wc")
    with ThreadPoolExecutor() as pool:
        runs = [
            pool.submit(job.execute_in_process, instance=shop.instance, raise_on_error=False)
            for job in (first, second)
        ]
        results = [run.result() for run in runs]
    (refused,) = [result for result in results if not result.success]
    assert "owned by shop:" in failure_text(refused) and "take_over" in failure_text(refused)
    owner, other = ("prod", "branch") if results[0].success else ("branch", "prod")
    codes = {"prod": "", "branch": NEWER}
    shop.declare(codes[owner], deploy="hot", deployment=owner)
    topology_id = cluster.wait_running("wc")["id"]
    assert shop.look() == ({}, [])

    # The other one never deploys, whatever looks at the topology.
    shop.declare(codes[other], deploy="hot", deployment=other)
    drift, requests = shop.look()
    assert set(drift) == {"owner", "code"} and requests == []
    assert f"owned by shop:{owner}" in shop.schedule().skip_message
    for job in ("deploy_wc", "submit_wc", "kill_wc"):
        assert f"owned by shop:{owner}" in failure_text(shop.run(job))
    assert cluster.wait_running("wc")["id"] == topology_id

    # A user takes it over. The former owner deploys no longer.
    done = shop.run("deploy_wc", config=config_of("deploy_wc_op"))
    assert done.success, failure_text(done)
    cluster.wait_running("wc")
    assert shop.look() == ({}, [])
    audit = f"owner of topology 'wc': 'shop:{other}', before 'shop:{owner}'"
    logs = [path.read_text(errors="replace") for path in (cluster.home / "logs").glob("nimbus*")]
    assert any(audit in log for log in logs)
    shop.declare(codes[owner], deploy="hot", deployment=owner)
    drift, requests = shop.look()
    assert set(drift) == {"owner", "code"} and requests == []

    # The same code is taken over, too.
    shop.declare(codes[other], deploy="gray", deployment="third")
    assert set(shop.look()[0]) >= {"owner"}
    done = shop.run("deploy_wc", config=config_of("deploy_wc_op"))
    assert done.success, failure_text(done)
    assert "owner" not in shop.look()[0]
    assert shop.run("kill_wc", config=config_of("kill_wc_op")).success
    wait_until_gone(cluster)
