"""From the shell command to running tasks, stage by stage; from a click or a sensor's event to the
first step.

Dagster's stock code server and the one that forks runs side by side, each on a cluster of its own,
one after the other. Medians over all samples.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
from dataplane import pss_mb
from tables import Row, run

from storm_dagster.host.worker_spec import SPARE
from storm_dagster.model.dagster_names import STAGES
from storm_dagster.testing.cluster import LocalCluster, run_cli
from storm_dagster.testing.waiting import eventually

SENTENCES = str(Path(__file__).with_name("sentences.py"))
PARTITIONS = 300

_EVENTS = """query Run($id: ID!) { runOrError(runId: $id) { ... on Run {
  status creationTime startTime endTime stepStats { stepKey startTime endTime }
  eventConnection(limit: 1000) { events { ... on MessageEvent { timestamp eventType message } } } } } }"""
_LAUNCH = """mutation Launch($job: String!) { launchRun(executionParams: { selector: {
  repositoryLocationName: "storm", repositoryName: "__repository__", jobName: $job }, runConfigData: "{}" }) {
  __typename ... on LaunchRunSuccess { run { runId } } ... on PythonError { message } } }"""
_NEWEST = """query Newest($job: String!) { runsOrError(filter: { pipelineName: $job }, limit: 1) {
  ... on Runs { results { runId } } } }"""
_PARTITIONS = """query Partitions { assetNodeOrError(assetKey: { path: ["storm", "active_topology"] }) {
  ... on AssetNode { partitionKeysByDimension { name partitionKeys }
    partitionStats { numMaterialized numPartitions }
    assetPartitionStatuses { ... on DefaultPartitionStatuses { materializedPartitions unmaterializedPartitions } } } } }"""


class Measured:
    """One cluster, and Dagster's responses about its runs."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        dagster = cluster.endpoints.dagster
        assert dagster is not None
        self.dagster_home = dagster.home
        self._url = f"{dagster.url.rstrip('/')}/graphql"
        self._http = httpx.Client(timeout=60, trust_env=False)

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        """The data of a GraphQL response."""
        document = self._http.post(self._url, json={"query": query, "variables": variables}).json()
        if document.get("errors"):
            raise LookupError(str(document["errors"]))
        return document["data"]

    def submit(self, name: str, workers: int) -> tuple[dict[str, float], str]:
        """Seconds of each stage of one submission, by their names; and its run's id."""
        began = time.time()
        document = run_cli(
            "submit", SENTENCES, "--name", name, "--json",
            "--conf", f"topology.workers={workers}", "--conf", "bench.rate=10", home=self.cluster.home,
        ).check().document  # fmt: skip
        ended = time.time()
        taken = self._stages(document["run_id"], began, ended)
        taken["published -> all tasks run, command returns"] = ended - taken.pop("published at")
        return taken, document["run_id"]

    def spares_wait(self) -> bool:
        """Whether each supervisor has all of its spares."""
        lines = [each.info["cmdline"] or [] for each in psutil.process_iter(["cmdline"])]
        specs = [Path(line[-2]) for line in lines if line[-1:] == [SPARE]]
        waiting = sum(self.cluster.home in spec.parents and not spec.exists() for spec in specs)
        return waiting == self.cluster.conf["supervisor.worker.spares"] * len(
            self.cluster.processes("supervisor")
        )

    def _stages(self, run_id: str, began: float, ended: float) -> dict[str, float]:
        found = self.ask(_EVENTS, id=run_id)["runOrError"]
        events = [event for event in found["eventConnection"]["events"] if "timestamp" in event]

        def at(sign: str) -> float:
            return next(
                float(event["timestamp"]) / 1000
                for event in events
                if event["eventType"] == sign or event["message"].startswith(sign)
            )

        steps = {step["stepKey"].removeprefix("storm__"): step for step in found["stepStats"]}
        first = min(step["startTime"] for step in steps.values())
        return {
            "submit -> all tasks running": ended - began,
            "command: start, describe, pack, upload, until the run exists": found["creationTime"]
            - began,
            "launch: until Dagster has handed the run over": at("RUN_STARTING")
            - found["creationTime"],
            "run's process: until it speaks": at("Started process for run") - at("RUN_STARTING"),
            "run's process: until the first step": first - at("Started process for run"),
            **{
                f"step {name}": steps[name]["endTime"] - steps[name]["startTime"] for name in STAGES
            },
            "published at": at("published "),
        }

    def click(self, job: str) -> tuple[float, float]:
        """Seconds from a GraphQL launch to the first step and to SUCCESS."""
        began = time.time()
        launched = self.ask(_LAUNCH, job=job)["launchRun"]
        return self._first_and_last(launched["run"]["runId"], began)

    def _first_and_last(self, run_id: str, began: float) -> tuple[float, float]:
        def done() -> dict[str, Any] | None:
            found = self.ask(_EVENTS, id=run_id)["runOrError"]
            return found if found["endTime"] else None

        found = eventually(done, 120, f"the end of run {run_id}", interval=0.2)
        assert found is not None
        if found["status"] != "SUCCESS":
            raise RuntimeError(f"run {run_id} ended as {found['status']}")
        first = min(step["startTime"] for step in found["stepStats"] if step["startTime"])
        return first - began, found["endTime"] - began

    def newest(self, job: str) -> str | None:
        """Id of the job's newest run."""
        found = self.ask(_NEWEST, job=job)["runsOrError"]["results"]
        return found[0]["runId"] if found else None

    def lose_host(self, name: str) -> float:
        """A host stands still and its workers die: seconds from the sensor's request to the first
        step.
        """
        before = self.newest("reassign_topologies")
        document = self.cluster.show(name)
        node = document["workers"][0]["node"]
        supervisor = next(
            record for record in self.cluster.processes("supervisor") if record.id == node
        )
        os.kill(supervisor.pid, signal.SIGSTOP)
        try:
            for worker in document["workers"]:
                if worker["node"] == node:
                    os.kill(worker["pid"], signal.SIGKILL)
            run_id = eventually(
                lambda: (found := self.newest("reassign_topologies")) != before and found,
                120,
                "a reassignment",
                interval=0.2,
            )
            created = self.ask(_EVENTS, id=run_id)["runOrError"]["creationTime"]
            return self._first_and_last(str(run_id), created)[0]
        finally:
            os.kill(supervisor.pid, signal.SIGCONT)
            self.cluster.wait_running(name, 120)

    def partitions(self) -> float:
        """Seconds of the question that the partitions page of an asset asks, with 300
        topologies.
        """
        program = (
            "import sys, dagster as dg\n"
            "with dg.DagsterInstance.get() as instance:\n"
            "    keys = [f'topology-{number}' for number in range(int(sys.argv[1]))]\n"
            "    instance.add_dynamic_partitions('storm_topologies', keys)\n"
            "    for key in keys:\n"
            "        instance.report_runless_asset_event(\n"
            "            dg.AssetMaterialization(['storm', 'active_topology'], partition=key))\n"
        )
        subprocess.run(
            [sys.executable, "-c", program, str(PARTITIONS)],
            env={**os.environ, "DAGSTER_HOME": self.dagster_home},
            check=True,
            capture_output=True,
        )
        taken = []
        for _ in range(5):
            began = time.monotonic()
            stats = self.ask(_PARTITIONS)["assetNodeOrError"]["partitionStats"]
            taken.append(time.monotonic() - began)
            assert stats["numMaterialized"] >= PARTITIONS
        return statistics.median(taken)


_LOADS = {
    "dagster": "import dagster",
    "ours": "import storm_dagster.defs; storm_dagster.defs.defs().get_repository_def()",
}
_LOADING = """
import json, time
began = time.monotonic()
{load}
taken = time.monotonic() - began
pss = next(line for line in open("/proc/self/smaps_rollup") if line.startswith("Pss:"))
print(json.dumps([taken, int(pss.split()[1]) / 1024]))
"""


def load(what: str, samples: int) -> tuple[float, float]:
    """(seconds, MB) of loading it in a process of its own."""
    found = []
    for _ in range(samples):
        program = _LOADING.format(load=_LOADS[what])
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True
        )
        found.append(json.loads(done.stdout.strip().splitlines()[-1]))
    return statistics.median(taken for taken, _ in found), statistics.median(
        size for _, size in found
    )


@dataclass
class Samples:
    """What was measured on one cluster; seconds."""

    first_submission: dict[str, float]
    submissions: list[dict[str, float]]
    clicks: list[tuple[float, float]]
    """From a click to the first step, and to SUCCESS."""
    losses: list[float]
    code_server_mb: float
    partitions_page: float


def measure(home: Path, samples: int, losses: int, *, forked: bool) -> Samples:
    """All measurements on a cluster of its own."""
    with LocalCluster(home, warm_runs=forked) as cluster:
        measured = Measured(cluster)
        submissions: list[dict[str, float]] = []
        for number in range(1 + samples):
            eventually(measured.spares_wait, 60, "the spares of the supervisors")
            time.sleep(3)  # They are importing.
            taken, _ = measured.submit(f"s{number}", 4)
            submissions.append(taken)
            cluster.cli("kill", f"s{number}", "-w", "0")
            eventually(
                lambda: not cluster.processes("worker"), 60, "the end of the topology's workers"
            )
        clicks = [measured.click("clean_inbox") for _ in range(samples)]
        measured.submit("lost", 4)
        lost = [measured.lose_host("lost") for _ in range(losses)]
        cluster.cli("kill", "lost", "-w", "0")
        code_server = psutil.Process(cluster.processes("dagster-code")[0].pid)
        family = [code_server, *code_server.children(recursive=True)]
        return Samples(
            first_submission=submissions[0],
            submissions=submissions[1:],
            clicks=clicks,
            losses=lost,
            code_server_mb=sum(pss_mb(process.pid) for process in family),
            partitions_page=measured.partitions(),
        )


_TOTAL = "submit -> all tasks running"


def report(folder: Path, *, quick: bool) -> Iterator[Row]:
    """All rows, on two clusters below ``folder``."""
    samples = 2 if quick else 7
    loaded, bare = load("ours", samples), load("dagster", samples)
    yield "definitions load", f"dagster alone {bare[0]:.2f} s", f"{loaded[0]:.2f} s"
    yield "definitions loaded (PSS)", f"dagster alone {bare[1]:.0f} MB", f"{loaded[1]:.0f} MB"
    losses = 1 if quick else 3
    stock = measure(folder / "stock", samples, losses, forked=False)
    forked = measure(folder / "forked", samples, losses, forked=True)

    def row(metric: str, value: Callable[[Samples], float], unit: str = "s") -> Row:
        digits = 0 if unit == "MB" else 2
        return (
            metric,
            f"stock {value(stock):.{digits}f} {unit}",
            f"forked {value(forked):.{digits}f} {unit}",
        )

    def median_of_stage(name: str) -> Callable[[Samples], float]:
        return lambda kind: statistics.median(taken[name] for taken in kind.submissions)

    yield row("first submission of the cluster", lambda kind: kind.first_submission[_TOTAL])
    for name in forked.submissions[0]:
        yield row(f"{name}, 4 workers" if name == _TOTAL else f"- {name}", median_of_stage(name))
    yield row(
        "click (GraphQL) -> first step",
        lambda kind: statistics.median(first for first, _ in kind.clicks),
    )
    yield row(
        "click (GraphQL) -> SUCCESS",
        lambda kind: statistics.median(last for _, last in kind.clicks),
    )
    yield row("sensor event -> first step", lambda kind: statistics.median(kind.losses))
    yield row(
        "code server and what it has started (PSS)", lambda kind: kind.code_server_mb, unit="MB"
    )
    yield row(
        f"partitions page of an asset, {PARTITIONS} topologies (GraphQL)",
        lambda kind: kind.partitions_page,
    )


def rows(quick: bool) -> Iterator[Row]:
    """Rows for ``tables.run``."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        yield from report(Path(folder), quick=quick)


if __name__ == "__main__":
    run("submission", __doc__, rows)
