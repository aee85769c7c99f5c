"""Health of a cluster's Dagster, read over HTTP without importing dagster, and of the processes of
a local one.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml

from storm_dagster.host.processes import RunFile
from storm_dagster.model.dagster_names import STORAGE_REMEDY, storage_problem
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.instance_advice import instance_advice
from storm_dagster.nimbus.dagster.client import REPOSITORY, location_problem
from storm_dagster.nimbus.dagster.transport import DagsterAccess, DagsterTransport, queries
from storm_dagster.operations.read.exposures import HealthResult
from storm_dagster.security.settings import Security

ProcessState = Literal["runs", "frozen", "dead"]


def check_dagster(conf: Any, timeout: float = 8.0) -> Iterator[HealthResult]:
    """Health of the Dagster of ``dagster.graphql.*``: webserver, code location, storage, daemon.

    Uses nimbus's credentials; each query has ``timeout`` seconds. The first result is the worst;
    the advice on its settings comes last. Nothing when no Dagster is configured.
    """
    try:
        access = DagsterAccess.of(conf)
        if access is None:
            return
        with closing(
            DagsterTransport(lambda: access, timeout=timeout, security=Security.of(conf))
        ) as transport:
            document = transport.post(access.url, {"query": queries()["Health"][0]})
            if (trouble := storage_problem(document)) is not None:
                yield "broken", f"Dagster's storage does not respond: {trouble}", STORAGE_REMEDY
                return
            seen = transport.graphql("Locations", {})
    except StormDagsterError as error:
        yield "broken", error.message, "fix what it names"
        return
    try:
        if document["data"]["runsOrError"]["__typename"] != "Runs":
            raise KeyError(document["data"]["runsOrError"])
        instance: dict[str, Any] = document["data"]["instance"]
        rows: list[dict[str, Any]] = instance["daemonHealth"]["allDaemonStatuses"]
    except (KeyError, TypeError):
        yield "broken", f"{access.url} answered {str(document)[:300]}", "check its webserver's log"
        return
    ours = {
        "repositoryLocationName": conf["dagster.location"],
        "repositoryName": REPOSITORY,
    }
    error = location_problem("submissions fail", seen.get("locationEntries") or [], **ours)
    ill = sorted(
        str(row["daemonType"]).lower() for row in rows if row["required"] and not row["healthy"]
    )
    if error is not None:
        yield "broken", error.message, "fix what it names"
    elif ill:
        remedy = "start dagster-daemon: without it no sensor and no schedule runs"
        yield "warning", f"its daemon does not report ({', '.join(ill)})", remedy
    else:
        yield "ok", f"{access.url} answers, storage, code location and daemon too", ""
    try:
        settings = yaml.safe_load(instance.get("info") or "{}")
    except yaml.YAMLError:
        return
    for advice in instance_advice(settings if isinstance(settings, dict) else {}):
        remedy = f"{advice.better}: {advice.gain}; it costs: {advice.cost}"
        yield "ok", f"could be better: {advice.setting} is {advice.now}", remedy


def state_of(record: RunFile) -> ProcessState:
    """``frozen`` is a process that was stopped by a signal (SIGSTOP, Ctrl-Z, a debugger) and does
    nothing.
    """
    if not record.alive():
        return "dead"
    try:
        stopped = psutil.Process(record.pid).status() in (
            psutil.STATUS_STOPPED,
            psutil.STATUS_TRACING_STOP,
        )
    except psutil.Error:
        return "dead"  # It ended in this moment.
    return "frozen" if stopped else "runs"


def uptime(record: RunFile) -> float:
    """Seconds since the process started; 0 when it ended in this moment."""
    try:
        return time.time() - psutil.Process(record.pid).create_time()
    except psutil.Error:
        return 0.0


_FIRST_TICK_SECS = 120.0
"""A sensor's first tick comes half a minute after Dagster's daemon, later on a busy machine."""


def healing_sensor(home: Path, armed: bool) -> tuple[Literal["ok", "warning"], str]:
    """State of the healing sensor; right after ``dev`` it is not expected to be armed yet."""
    if armed:
        return "ok", "healing sensor armed"
    if any(
        each.role == "dev" and each.alive() and uptime(each) < _FIRST_TICK_SECS
        for each in RunFile.read_all(home)
    ):
        return "ok", "the healing sensor is starting; the leader heals by itself meanwhile"
    return "warning", "no healing sensor is armed: the leader heals by itself, more slowly"


def advice(states: Iterable[tuple[RunFile, ProcessState]], home: Path) -> list[str]:
    """Advice about processes that are frozen or dead; none when all are healthy."""
    seen, lines = list(states), list[str]()
    for record, state in seen:
        process = f"{record.role} {record.id}" if record.role != "dev" else "dev"
        go_on = f"`kill -CONT {record.pid}` lets it go on"
        unwatched = "so nothing that dies is started again"
        if state == "frozen":
            frozen = "is frozen" if record.role != "dev" else f"is frozen, {unwatched}"
            lines.append(f"{process} (pid {record.pid}) {frozen}: {go_on}")
        elif record.role == "dev" and state == "dead" and any(other != "dead" for _, other in seen):
            lines.append(
                f"dev (pid {record.pid}) has ended without ending its cluster, {unwatched}: "
                f"`storm-dagster stop --home {home}`, then `storm-dagster dev --home {home}`; its topologies go on"
            )
    return lines
