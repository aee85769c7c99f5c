"""Health of a cluster's Dagster and of the processes of a local cluster.

Dagster's health is read over HTTP, without importing dagster.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml

from storm_dagster.host.endpoints import ClusterFile
from storm_dagster.host.processes import RunFile
from storm_dagster.model.dagster_names import STORAGE_REMEDY, storage_problem
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.instance_advice import instance_advice
from storm_dagster.nimbus.dagster.client import REPOSITORY, location_problem
from storm_dagster.nimbus.dagster.transport import DagsterAccess, DagsterTransport, queries
from storm_dagster.operations.read.exposures import HealthResult
from storm_dagster.security.settings import Security

ProcessState = Literal["runs", "frozen", "dead"]
_FIRST_TICK_SECS = 120.0
"""A sensor's first tick comes half a minute after Dagster's daemon, later on a busy machine."""


def check_dagster(conf: Any, timeout: float = 8.0) -> Iterator[HealthResult]:
    """Check webserver, code location, storage and daemon of the Dagster.

    It is the Dagster of ``dagster.graphql.*``. Uses nimbus's credentials; each query has
    ``timeout`` seconds. The first result is the worst; the advice on its settings comes last.
    Without a configured Dagster there are no results. Errors are results, too: none is raised.
    """
    try:
        access = DagsterAccess.of(conf)
        if access is None:
            return
        with closing(
            DagsterTransport(lambda: access, timeout=timeout, security=Security.of(conf))
        ) as transport:
            document = transport.post(access.url, {"query": queries()["Health"][0]})
            problem = storage_problem(document)
            if problem is not None:
                yield "broken", f"Dagster's storage does not respond: {problem}", STORAGE_REMEDY
                return
            locations = transport.graphql("Locations", {})
    except StormDagsterError as error:
        yield "broken", error.message, "fix what it names"
        return
    try:
        instance = _instance_of(document)
        rows: list[dict[str, Any]] = instance["daemonHealth"]["allDaemonStatuses"]
    except (KeyError, TypeError):
        yield "broken", f"{access.url} answered {str(document)[:300]}", "check its webserver's log"
        return
    error = location_problem(
        "submissions fail",
        locations.get("locationEntries") or [],
        repositoryLocationName=conf["dagster.location"],
        repositoryName=REPOSITORY,
    )
    unhealthy = sorted(
        str(row["daemonType"]).lower() for row in rows if row["required"] and not row["healthy"]
    )
    if error is not None:
        yield "broken", error.message, "fix what it names"
    elif unhealthy:
        remedy = "start dagster-daemon: without it no sensor and no schedule runs"
        yield "warning", f"its daemon does not report ({', '.join(unhealthy)})", remedy
    else:
        yield "ok", f"{access.url} answers, storage, code location and daemon too", ""
    yield from _advice_on_settings(instance)


def _instance_of(document: Any) -> dict[str, Any]:
    """The instance in a response; ``KeyError`` or ``TypeError`` if it is not as expected."""
    runs = document["data"]["runsOrError"]
    if runs["__typename"] != "Runs":
        raise KeyError(runs)
    return document["data"]["instance"]


def _advice_on_settings(instance: dict[str, Any]) -> Iterator[HealthResult]:
    """Yield settings of the instance (``dagster.yaml``) that could be better."""
    try:
        settings = yaml.safe_load(instance.get("info") or "{}")
    except yaml.YAMLError:
        return
    for advice in instance_advice(settings if isinstance(settings, dict) else {}):
        remedy = f"{advice.better}: {advice.gain}; it costs: {advice.cost}"
        yield "ok", f"could be better: {advice.setting} is {advice.now}", remedy


def state_of(record: RunFile) -> ProcessState:
    """State of the process of a run file.

    ``frozen`` is a process that a signal has stopped (SIGSTOP, Ctrl-Z, a debugger).
    """
    if not record.alive():
        return "dead"
    try:
        stopped = psutil.Process(record.pid).status() in (
            psutil.STATUS_STOPPED,
            psutil.STATUS_TRACING_STOP,
        )
    except psutil.Error:
        return "dead"  # It has just ended.
    return "frozen" if stopped else "runs"


def uptime(record: RunFile) -> float:
    """Seconds since the process started; 0 if it has just ended."""
    try:
        return time.time() - psutil.Process(record.pid).create_time()
    except psutil.Error:
        return 0.0


def healing_sensor(home: Path, armed: bool) -> tuple[Literal["ok", "warning"], str]:
    """State of the healing sensor, and a text about it.

    ``armed`` is true if the cluster has a healer. Right after a ``dev`` in ``home`` that started
    Dagster, too, the sensor is not expected to be armed yet.
    """
    if armed:
        return "ok", "healing sensor armed: it heals"
    cluster = ClusterFile.read(home)
    if cluster is not None and cluster.dagster is not None and not cluster.dagster.own:
        return "warning", (
            "no healing sensor of this cluster runs in the Dagster at "
            f"{cluster.dagster.url}: the leader heals instead, more slowly"
        )
    for record in RunFile.read_all(home):
        if record.role == "dev" and record.alive() and uptime(record) < _FIRST_TICK_SECS:
            return "ok", "the healing sensor is starting; the leader heals until it runs"
    return "warning", "no healing sensor is armed: the leader heals instead, more slowly"


def withdrawn_lines(supervisors: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each supervisor that offers fewer slots than it has, with the reason.

    ``supervisors`` are the rows of ``GET /v1/cluster``; an earlier nimbus has no reasons.
    """
    return [
        f"supervisor {row['id']} on {row['host']} withholds slots: {row['withdrawn']}"
        for row in supervisors
        if row.get("withdrawn")
    ]


def advice(states: Iterable[tuple[RunFile, ProcessState]], home: Path) -> list[str]:
    """A line for each frozen process, and for a dead ``dev`` whose cluster still lives.

    Empty if there is neither.
    """
    processes = list(states)
    is_anything_alive = any(state != "dead" for _, state in processes)
    unwatched = "so a process that dies is not restarted"
    lines: list[str] = []
    for record, state in processes:
        is_dev = record.role == "dev"
        if state == "frozen":
            name = "dev" if is_dev else f"{record.role} {record.id}"
            effect = f"is frozen, {unwatched}" if is_dev else "is frozen"
            remedy = f"`kill -CONT {record.pid}` lets it continue"
            lines.append(f"{name} (pid {record.pid}) {effect}: {remedy}")
        elif is_dev and state == "dead" and is_anything_alive:
            lines.append(
                f"dev (pid {record.pid}) has ended without ending its cluster, {unwatched}: "
                f"`storm-dagster stop --home {home}`, then `storm-dagster dev --home {home}`;"
                " its topologies continue"
            )
    return lines
