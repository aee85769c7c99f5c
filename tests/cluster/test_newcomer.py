"""A newcomer's first day: a stock Dagster project installs our package, deploys a topology, sees it heal, upgrades it,
ends it, and takes the package out again. Whatever else the project does is as before, run by run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import httpx
import psutil
import pytest

from storm_dagster.model.errors import StormDagsterError
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually
from storm_rigs.ensemble import free_ports
from storm_rigs.newcomer import PACKAGE, NewcomerProject, inventory

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.dagster,
    pytest.mark.long,
    pytest.mark.timeout(1800),
]

LOCATION = f"{PACKAGE}.definitions"
SELECTOR = {"repositoryLocationName": LOCATION, "repositoryName": "__repository__"}
REPORT = dg.AssetKey("clicks_report")
TOPOLOGY = dg.AssetKey(["topologies", "clicks"])
SHOWN = """query($selector: RepositorySelector!) { repositoryOrError(repositorySelector: $selector) {
  __typename ... on Repository {
    jobs { name } schedules { name cronSchedule scheduleState { status } } sensors { name sensorState { status } }
    allTopLevelResourceDetails { name resourceType } assetNodes { assetKey { path } } } } }"""
TICKS = """query($selector: ScheduleSelector!) { scheduleOrError(scheduleSelector: $selector) {
  __typename ... on Schedule { scheduleState { ticks(limit: 500) { timestamp status runIds skipReason } } } } }"""
LAUNCH = """mutation($params: ExecutionParams!) { launchRun(executionParams: $params) {
  __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""
RELOAD = """mutation($name: String!) { reloadRepositoryLocation(repositoryLocationName: $name) {
  __typename ... on WorkspaceLocationEntry { locationOrLoadError { __typename ... on PythonError { message } } } } }"""


class StockDagster:
    """`dagster dev` on the project, with an empty ``DAGSTER_HOME``: no setting of any kind."""

    def __init__(self, project: NewcomerProject, home: Path) -> None:
        self.project, self.home = project, home
        home.mkdir()
        self.port = free_ports(1)[0]
        self.instance = dg.DagsterInstance.from_config(str(home))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> StockDagster:
        command = [str(Path(sys.executable).with_name("dagster")), "dev", "-m", LOCATION]
        env = {**os.environ, "DAGSTER_HOME": str(self.home), "DAGSTER_DISABLE_TELEMETRY": "yes"}
        env.pop("STORM_DAGSTER_HOME", None)
        with (self.home.parent / "dagster-dev.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*command, "-h", "127.0.0.1", "-p", str(self.port)],
                cwd=self.project.root, env=env, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        try:
            # A webserver and its code location on a machine that runs other things too.
            eventually(self.shown, 240, "the stock Dagster", interval=1, ignore=(httpx.HTTPError, AssertionError))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        process, self._process = self._process, None
        assert process is not None
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        os.kill(process.pid, signal.SIGTERM)
        for each in psutil.wait_procs(family, 40)[1]:
            each.kill()
        process.wait(10)
        self.instance.dispose()

    def ask(self, query: str, **variables: Any) -> Any:
        document = {"query": query, "variables": variables}
        url = f"http://127.0.0.1:{self.port}/graphql"
        answer = httpx.post(url, json=document, timeout=120, trust_env=False).json()
        (result,) = answer["data"].values()
        return result

    def shown(self) -> dict[str, Any]:
        """Definitions of the code location in the webserver, by kind."""
        found = self.ask(SHOWN, selector=SELECTOR)
        assert found["__typename"] == "Repository", found
        return {
            "jobs": {job["name"]: True for job in found["jobs"]},
            "schedules": {
                each["name"]: (each["cronSchedule"], each["scheduleState"]["status"]) for each in found["schedules"]
            },
            "sensors": {each["name"]: each["sensorState"]["status"] for each in found["sensors"]},
            "resources": {each["name"]: each["resourceType"] for each in found["allTopLevelResourceDetails"]},
            "assets": {"/".join(node["assetKey"]["path"]): True for node in found["assetNodes"]},
        }

    def reload(self) -> None:
        """The button `Reload definitions`."""
        result = self.ask(RELOAD, name=LOCATION)
        assert result["locationOrLoadError"]["__typename"] == "RepositoryLocation", result

    def ticks(self, schedule: str) -> list[dict[str, Any]]:
        selector = {**SELECTOR, "scheduleName": schedule}
        return self.ask(TICKS, selector=selector)["scheduleState"]["ticks"]

    def run(self, job: str, **tags: str) -> Counter[str]:
        """Launch it and wait for its success: what it left in the event log."""
        result = self.ask(
            LAUNCH,
            params={
                "selector": {**SELECTOR, "jobName": job},
                "executionMetadata": {"tags": [{"key": k, "value": v} for k, v in tags.items()]},
            },
        )
        assert result["__typename"] == "LaunchRunSuccess", result
        run_id = result["run"]["runId"]

        def ended() -> dg.DagsterRun | None:
            run = self.instance.get_run_by_id(run_id)
            return run if run is not None and run.is_finished else None

        run = eventually(ended, 420, f"the end of {job}", interval=0.5)
        assert run is not None and run.is_success, [entry.user_message for entry in self.instance.all_logs(run_id)][
            -10:
        ]
        return self.events(run_id)

    def events(self, run_id: str) -> Counter[str]:
        return Counter(
            entry.dagster_event.event_type_value
            for entry in self.instance.all_logs(run_id)
            if entry.dagster_event is not None and entry.dagster_event.event_type_value != "ENGINE_EVENT"
        )

    def made(self, key: dg.AssetKey) -> int:
        """Materializations of an asset."""
        return len(self.instance.fetch_materializations(key, limit=1000).records)

    def day(self) -> dict[str, Any]:
        """History of the project: events of each run, and runs for each tick."""
        report, began = self.made(dg.AssetKey("price_report")), time.time()
        done: dict[str, Any] = {job: self.run(job) for job in ("nightly", "prices_job")}
        done["daily_job"] = self.run("daily_job", **{"dagster/partition": "2024-01-02"})
        eventually(lambda: self.made(dg.AssetKey("price_report")) > report, 240, "the eager report", interval=1)

        def ticked() -> list[dict[str, Any]]:
            return [t for t in self.ticks("tidy_schedule") if t["timestamp"] > began and t["runIds"]]

        def tidied() -> list[Counter[str]]:
            runs = [self.instance.get_run_by_id(run) for tick in ticked() for run in tick["runIds"]]
            return [self.events(run.run_id) for run in runs if run is not None and run.is_success]

        eventually(tidied, 240, "a run of the user's schedule", interval=1)
        done["tidy"] = tidied()[0]
        done["runs of a tick"] = {(tick["status"], len(tick["runIds"])) for tick in ticked()}
        done["price reports"] = self.made(dg.AssetKey("price_report")) - report
        return done


def own(had: dict[str, dict[str, Any]], has: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The part of the present definitions that was there before."""
    return {kind: {name: has[kind].get(name) for name in names} for kind, names in had.items()}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """`storm-dagster dev`, as the documents say."""
    with LocalCluster(tmp_path_factory.mktemp("newcomer") / "home", timeout=400) as made:
        yield made


def pids(cluster: LocalCluster) -> dict[int, str]:
    """Worker processes of the topology -> the supervisors that they belong to."""
    document = cluster.wait_running("clicks", 240)
    return {worker["pid"]: worker["node"] for worker in document["workers"]}


def running_conf(cluster: LocalCluster) -> set[str]:
    return {str(worker["version"]) for worker in cluster.wait_running("clicks", 240)["workers"]}


def test_a_stock_project_with_storm_and_without(
    cluster: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path / "project"))
    project = NewcomerProject(tmp_path / "project")
    declared: dict[str, Any] = {
        "workers": 3,
        "deploy": "hot",
        "conf": {"wordcount.lines.per.second": 50},
        "schedule": {"deploy": "* * * * *"},
    }
    loaded_alone = inventory(project.load())
    with StockDagster(project, tmp_path / "dagster") as stock:
        had, day = stock.shown(), stock.day()
        assert not (stock.home / "dagster.yaml").exists()
        assert day["runs of a tick"] == {("SUCCESS", 1)} and day["price reports"] == 1
        assert day["nightly"]["STEP_WORKER_STARTING"] == 2, "the project's own executor runs its jobs"

        # Three lines and a declared topology. Whoever reads the project finds all that was there.
        project.add_storm(cluster.home, **declared)
        assert own(loaded_alone, inventory(project.load())) == loaded_alone
        stock.reload()
        assert own(had, stock.shown()) == had

        # The deploy schedule submits what was never deployed; by hand it is the same deploy.
        stock.run("deploy_clicks")
        before = pids(cluster)
        assert len(before) == 3
        eventually(lambda: stock.made(REPORT) == 1, 240, "the eager asset behind the topology", interval=1)

        # A host is lost: its supervisor and its workers are killed. All tasks run again, elsewhere or restarted.
        node = next(iter(before.values()))
        killed = {pid for pid, where in before.items() if where == node}
        cluster.kill("supervisor", node)
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        eventually(
            lambda: not killed & pids(cluster).keys(), 300, "all tasks on live workers", interval=1,
            ignore=(StormDagsterError, AssertionError),
        )  # fmt: skip
        # The user's Dagster does all that it did, beside a topology.
        assert stock.day() == day
        assert (stock.made(REPORT), stock.made(TOPOLOGY)) == (1, 1), "a healed topology is no new version"

        # Changed code is deployed once the definitions are loaded again, and asked for downstream once.
        (old,) = running_conf(cluster)
        project.add_storm(cluster.home, "\nVERSION = 2\n", **declared)
        stock.reload()
        eventually(lambda: stock.made(REPORT) == 2, 420, "the eager asset behind the changed topology", interval=1)
        (new,) = running_conf(cluster)
        assert new != old

        # Ended by hand, it stays ended: the deploy schedule ticks, and nothing is submitted.
        stock.run("kill_clicks")
        eventually(lambda: cluster.topologies() == [], 240, "the end", ignore=(StormDagsterError,), interval=1)
        since = time.time()

        def skipped() -> list[dict[str, Any]]:
            ticks = [tick for tick in stock.ticks("deploy_clicks_schedule") if tick["timestamp"] > since]
            assert not [tick for tick in ticks if tick["runIds"]], ticks
            return [tick for tick in ticks if tick["status"] == "SKIPPED"]

        eventually(lambda: len(skipped()) >= 2, 300, "two ticks of the deploy schedule", interval=2)
        assert all("by hand" in tick["skipReason"] for tick in skipped())
        assert cluster.topologies() == []
        assert (stock.made(REPORT), stock.made(TOPOLOGY)) == (2, 2)

        # The lines go, and nothing of ours is left in the location.
        project.remove_storm()
        assert inventory(project.load()) == loaded_alone
        stock.reload()
        assert stock.shown() == had
        assert stock.day() == day
        assert (stock.made(REPORT), stock.made(TOPOLOGY)) == (2, 2)
