"""A newcomer's first day: a stock Dagster project adds three lines and a declared topology, deploys
it, sees it heal, upgrades it, ends it, and removes the lines again. Whatever else the project does
is as before, run by run.

The package is installed all the time; `tests/distribution` installs it into an empty environment.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from storm_dagster.model.errors import StormDagsterError
from storm_dagster.testing.cluster import LocalCluster
from storm_dagster.testing.waiting import eventually
from storm_rigs.dagster.newcomer import PACKAGE, NewcomerProject, inventory
from storm_rigs.stage.stock_dagster import StockDagster

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.spark,
    pytest.mark.dagster,
    pytest.mark.long,
    pytest.mark.timeout(1800),
]

LOCATION = f"{PACKAGE}.definitions"
REPORT = dg.AssetKey("clicks_report")
TOPOLOGY = dg.AssetKey(["topologies", "clicks"])


class NewcomersDagster(StockDagster):
    """The stock Dagster of the project: no setting of any kind."""

    def day(self) -> dict[str, Any]:
        """History of the project: events of each run, and runs for each tick."""
        report, began = self.made(dg.AssetKey("price_report")), time.time()
        done: dict[str, Any] = {job: self.run(job) for job in ("nightly", "prices_job")}
        done["daily_job"] = self.run("daily_job", **{"dagster/partition": "2024-01-02"})
        eventually(
            lambda: self.made(dg.AssetKey("price_report")) > report,
            240,
            "the eager report",
            interval=1,
        )

        def ticked() -> list[dict[str, Any]]:
            return [
                t for t in self.ticks("tidy_schedule") if t["timestamp"] > began and t["runIds"]
            ]

        def tidied() -> list[Counter[str]]:
            runs = [self.instance.get_run_by_id(run) for tick in ticked() for run in tick["runIds"]]
            return [self.events(run.run_id) for run in runs if run is not None and run.is_success]

        eventually(tidied, 240, "a run of the user's schedule", interval=1)
        done["tidy"] = tidied()[0]
        done["runs of a tick"] = {(tick["status"], len(tick["runIds"])) for tick in ticked()}
        done["price reports"] = self.made(dg.AssetKey("price_report")) - report
        return done


def own(
    had: dict[str, dict[str, Any]], has: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
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
    with NewcomersDagster(project.root, LOCATION, tmp_path / "dagster") as stock:
        had, day = stock.shown(), stock.day()
        assert not (stock.home / "dagster.yaml").exists()
        assert day["runs of a tick"] == {("SUCCESS", 1)} and day["price reports"] == 1
        assert day["nightly"]["STEP_WORKER_STARTING"] == 2, (
            "the project's own executor runs its jobs"
        )

        # Three lines and a declared topology. Whoever reads the project finds all that was there.
        project.add_storm(cluster.home, **declared)
        assert own(loaded_alone, inventory(project.load())) == loaded_alone
        stock.reload()
        assert own(had, stock.shown()) == had

        # The deploy schedule submits what was never deployed; by hand it is the same deploy.
        stock.run("deploy_clicks")
        before = pids(cluster)
        assert len(before) == 3
        eventually(
            lambda: stock.made(REPORT) == 1, 240, "the eager asset behind the topology", interval=1
        )

        # A host is lost: its supervisor and its workers are killed. All tasks run again, elsewhere
        # or restarted.
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
        assert (stock.made(REPORT), stock.made(TOPOLOGY)) == (1, 1), (
            "a healed topology is no new version"
        )

        # Changed code is deployed once the definitions are loaded again, and asked for downstream
        # once.
        (old,) = running_conf(cluster)
        project.add_storm(cluster.home, "\nVERSION = 2\n", **declared)
        stock.reload()
        eventually(
            lambda: stock.made(REPORT) == 2,
            420,
            "the eager asset behind the changed topology",
            interval=1,
        )
        (new,) = running_conf(cluster)
        assert new != old

        # Ended by hand, it stays ended: the deploy schedule ticks, and nothing is submitted.
        stock.run("kill_clicks")
        eventually(
            lambda: cluster.topologies() == [],
            240,
            "the end",
            ignore=(StormDagsterError,),
            interval=1,
        )
        since = time.time()

        def skipped() -> list[dict[str, Any]]:
            ticks = [
                tick for tick in stock.ticks("deploy_clicks_schedule") if tick["timestamp"] > since
            ]
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
