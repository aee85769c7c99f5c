"""A user's Dagster whose queue starts one run at a time, with a long run in it: real daemon, real
workers.
"""

from __future__ import annotations

import math
import os
import signal
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import dagster as dg
import pytest
import yaml

from storm_dagster.model.errors import StormDagsterError, Unavailable
from storm_dagster.model.view import TopologyView
from storm_dagster.testing.cluster import run_cli
from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.stage.daemons import Daemons
from storm_rigs.stage.stock_dagster import StockDagster

pytestmark = [
    pytest.mark.long,
    pytest.mark.zookeeper,
    pytest.mark.dagster,
    pytest.mark.cluster,
    pytest.mark.timeout(900),
]

PACKAGE = "crowded_shop"
STEADY = Path(__file__).parent / "topologies" / "steady.py"
SETTINGS = """
telemetry: {enabled: false}
concurrency: {runs: {max_concurrent_runs: 1}}
"""
DEFINITIONS = """
import time
from pathlib import Path

import dagster as dg

from storm_dagster import build_storm_defs
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.defs.resources.spark import SparkResource

FOLDER = Path(__file__).parent


class PlainPlanner(SparkResource):
    def planner(self, cluster):
        return plan_placement


@dg.op
def read_everything() -> None:
    while not (FOLDER / "release").exists():
        time.sleep(0.1)


@dg.op
def add() -> None: ...


@dg.job
def long_report() -> None:
    read_everything()


@dg.job
def nightly() -> None:
    add()


defs = dg.Definitions.merge(
    dg.Definitions(jobs=[long_report, nightly]),
    dg.load_from_defs_folder(path_within_project=FOLDER),
    build_storm_defs(conf_dir=str(FOLDER / "conf"), resources={"spark": PlainPlanner()}),
)
"""


@dataclass
class Shop:
    """The user's project, its Dagster, and a cluster of three supervisors with two slots each."""

    folder: Path
    dagster: StockDagster
    daemons: Daemons

    @property
    def conf_dir(self) -> str:
        return str(self.folder / "conf")

    def runs(self, job: str) -> list[dg.DagsterRun]:
        return list(self.dagster.instance.get_runs(dg.RunsFilter(job_name=job)))

    def status(self, run_id: str) -> dg.DagsterRunStatus:
        run = self.dagster.instance.get_run_by_id(run_id)
        assert run is not None
        return run.status

    def started(self, run_id: str) -> float:
        record = self.dagster.instance.get_run_record_by_id(run_id)
        assert record is not None and record.start_time is not None
        return record.start_time

    def occupy(self) -> str:
        """The long run, which has the only place in the queue until :meth:`release`."""
        (self.folder / "release").unlink(missing_ok=True)
        run_id = self.dagster.launch("long_report")
        eventually(
            lambda: self.status(run_id) == dg.DagsterRunStatus.STARTED,
            120,
            "the long run",
            interval=0.2,
        )
        return run_id

    def release(self) -> None:
        (self.folder / "release").touch()

    def topology(self, name: str) -> TopologyView | None:
        with self.daemons.cluster() as cluster:
            return cluster.load_view().topology_named(name)

    def nodes(self, name: str) -> set[str]:
        """Supervisors of the topology's live workers, once these are all that are assigned."""
        topology = self.topology(name)
        assert topology is not None and topology.assignment is not None, f"{name} is not assigned"
        assigned = {worker.slot for worker in topology.assignment.workers}
        assert assigned == set(topology.live_workers), "not all workers live"
        return {node for node, _ in assigned}


@pytest.fixture(scope="module")
def shop(zookeeper_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    root = tmp_path_factory.mktemp("crowded")
    folder = root / PACKAGE
    place = folder / "defs" / "sums"
    for each in (place, folder / "conf"):
        each.mkdir(parents=True)
    (root / "pyproject.toml").write_text(
        f'[tool.dg]\ndirectory_type = "project"\n\n[tool.dg.project]\nroot_module = "{PACKAGE}"\n'
    )
    for package in (folder, folder / "defs"):
        (package / "__init__.py").touch()
    (folder / "definitions.py").write_text(DEFINITIONS)
    (place / "steady.py").write_text(STEADY.read_text())
    declared = {"name": "sums", "target": "steady.py:Steady", "conf_dir": str(folder / "conf")}
    document = {"type": "storm_dagster.StormTopologyComponent", "attributes": declared}
    (place / "defs.yaml").write_text(yaml.safe_dump(document))

    cache = {"XDG_CACHE_HOME": str(root / "cache")}
    dagster = StockDagster(root, f"{PACKAGE}.definitions", root / "dagster", SETTINGS, cache)
    host, _, port = zookeeper_server.rpartition(":")
    conf = {
        "storm.zookeeper.port": int(port),
        "storm.zookeeper.root": f"/t-{uuid.uuid4().hex[:12]}",
        "storm.zookeeper.session.timeout": 4000,
        "dagster.graphql.url": dagster.url,
        "dagster.location": dagster.module,
        # The sensor launches its run before the leader heals, also on a busy machine.
        "nimbus.monitor.backstop.secs": math.ceil(patience(20)),
    }
    daemons = Daemons(root / "home", [host], nimbuses=1, supervisors=3, conf=conf)
    seeds = [daemons.url(nimbus).removeprefix("http://") for nimbus in daemons.nimbuses]
    known = {**conf, "storm.zookeeper.servers": [host], "nimbus.seeds": seeds}
    (folder / "conf" / "storm.yaml").write_text(yaml.safe_dump(known))
    with daemons, dagster:
        yield Shop(folder, dagster, daemons)


def submit(shop: Shop, name: str, *options: str) -> None:
    done = run_cli(
        "submit",
        "--json",
        f"{STEADY}:Steady",
        "--name",
        name,
        "--conf-dir",
        shop.conf_dir,
        *options,
    )
    done.check()


def test_the_leader_heals_and_runs_of_storm_pass_those_that_wait(shop: Shop) -> None:
    submit(shop, "numbers")
    eventually(lambda: shop.nodes("numbers"), 120, "numbers", ignore=(AssertionError,))
    longest = shop.occupy()
    waiting = [shop.dagster.launch("nightly") for _ in range(2)]

    # A host is lost. The run that heals waits behind the user's, so the leader heals.
    node = min(shop.nodes("numbers"))
    topology = shop.topology("numbers")
    assert topology is not None
    shop.daemons.kill("supervisor", node)
    for (where, _), worker in topology.live_workers.items():
        if where == node:
            os.kill(worker.pid, signal.SIGKILL)
    eventually(
        lambda: node not in shop.nodes("numbers"), 240, "live workers elsewhere", interval=0.5,
        ignore=(AssertionError, StormDagsterError),
    )  # fmt: skip
    (healing,) = eventually(
        lambda: shop.runs("reassign_topologies"), 60, "the run that heals", interval=0.5
    )
    assert shop.status(longest) == dg.DagsterRunStatus.STARTED
    assert healing.status == dg.DagsterRunStatus.QUEUED
    healed = shop.topology("numbers")

    # A submission says why it does not start, and how to change that.
    with pytest.raises(Unavailable, match=r"still QUEUED .*concurrency\.runs\.max_concurrent_runs"):
        submit(shop, "more", "--timeout", "5")
    (submission,) = [
        run for run in shop.runs("submit_topology") if run.tags["storm/topology"] == "more"
    ]
    assert {shop.status(run) for run in waiting} == {dg.DagsterRunStatus.QUEUED}

    # Once there is room, healing comes first, then the submission, then what waited longer than
    # both.
    shop.release()
    order = [longest, healing.run_id, submission.run_id, *waiting]
    for run_id in order:
        shop.dagster.wait_success(run_id)
    assert [shop.started(run_id) for run_id in order[:4]] == sorted(
        shop.started(run_id) for run_id in order[:4]
    )
    assert shop.started(submission.run_id) < min(shop.started(run_id) for run_id in waiting)
    eventually(lambda: shop.nodes("more"), 120, "more", ignore=(AssertionError,))
    now = shop.topology("numbers")
    assert healed is not None and now is not None
    assert now.assignment_at == healed.assignment_at, "a late run moves nothing"


def test_a_deploy_of_a_declared_topology_makes_room_for_its_own_submission(shop: Shop) -> None:
    shop.release()
    for name in ("numbers", "more"):
        if shop.topology(name) is not None:
            run_cli("kill", "--json", name, "-w", "0", "--conf-dir", shop.conf_dir).check()
    shop.dagster.run("deploy_sums")
    eventually(lambda: shop.nodes("sums"), 120, "sums", ignore=(AssertionError,), interval=0.5)
    (submission,) = [
        run for run in shop.runs("submit_topology") if run.tags["storm/topology"] == "sums"
    ]
    shop.dagster.wait_success(submission.run_id)
    # The sensor records what the run could not wait for.
    key = dg.AssetKey(["topologies", "sums"])
    eventually(lambda: shop.dagster.made(key) == 1, 120, "the record of what runs", interval=0.5)
