"""Check of the cluster for ``doctor``: one request to the leader, or ZooKeeper's records."""

import platform
import time
from collections.abc import Iterator, Mapping
from typing import Any

from storm_dagster.cli.healing_verbs import healing_results
from storm_dagster.cli.health import healing_sensor
from storm_dagster.cli.options import Invocation
from storm_dagster.cli.zookeeper_reading import check_by_zookeeper
from storm_dagster.client.http import NimbusClient
from storm_dagster.core.host_problems import clock_problem
from storm_dagster.host.clock import clock_ahead_of
from storm_dagster.host.endpoints import ClusterFile
from storm_dagster.model.errors import StormDagsterError, Unavailable
from storm_dagster.model.event_log import LATE_SECS, destination_remedy, event_log_text
from storm_dagster.operations.read.exposures import HealthResult

_MAX_TOPOLOGIES = 50
"""Number of topologies whose problems are read."""


def names_no_cluster(invocation: Invocation) -> bool:
    """True if no cluster runs in HOME, and neither the conf nor an option names another one."""
    if invocation.conf_dir is not None or invocation.conf.origins["nimbus.seeds"] != "default":
        return False
    return ClusterFile.read(invocation.home) is None


def _events(logs: Mapping[str, Any], now_secs: float) -> Iterator[HealthResult]:
    """Yield a warning for each topology whose events have waited for long."""
    for name, document in sorted(logs.items()):
        if document["waiting"] and now_secs - document["since"] > LATE_SECS:
            text = event_log_text(document, now_secs)
            yield (
                "warning",
                f"topology {name}: {text}",
                destination_remedy(document["declared"]),
            )


def check_cluster(invocation: Invocation) -> Iterator[HealthResult]:
    """Yield the leader's reports about the cluster; without a leader those of ZooKeeper."""
    if names_no_cluster(invocation):
        yield "ok", "none runs in this HOME", ""
        return
    try:
        with invocation.nimbus(patience=2.0) as nimbus:
            asked_at = time.time()
            document = _read_problems(nimbus)
    except StormDagsterError as error:
        remedy = "see HOME/logs/nimbus-*.log; `storm-dagster stop`, then `dev` again"
        if invocation.conf_dir is not None:
            seeds = ", ".join(invocation.conf["nimbus.seeds"])
            remedy = (
                f"check the nimbus log on the hosts of nimbus.seeds ({seeds}), start it there with"
                f" `storm-dagster daemon nimbus --conf-dir {invocation.conf_dir}`, or correct"
                " nimbus.seeds"
            )
        yield "broken", error.message, remedy
        yield from check_by_zookeeper(invocation.conf)
        return
    for name, reason in sorted(document.get("corrupt", {}).items()):
        yield (
            "broken",
            f"the records of {name} cannot be read, so that it is not healed: {reason}",
            "restore it from a backup (docs/backup.md)",
        )
    yield from _events(document.get("events", {}), time.time())
    yield from healing_results(document)
    if document.get("alarm"):
        yield "warning", f"healing is frozen: {document['alarm']}", "storm-dagster status"
    yield from _problems(document, asked_at)
    supervisors = document.get("supervisors")
    if not supervisors:
        yield "broken", "no supervisor is registered", "see HOME/logs/supervisor-*.log"
    else:
        state, healing = healing_sensor(invocation.home, bool(document.get("healer")))
        remedy = "" if state == "ok" else "start dagster-daemon and turn heartbeat_sensor on"
        yield state, f"{supervisors} supervisors, {healing}", remedy


def _read_problems(nimbus: NimbusClient) -> dict[str, Any]:
    """Document of ``GET /v1/problems``.

    A leader of the release before does not have it: the document then names that.
    """
    try:
        return nimbus.get("/v1/problems", limit=_MAX_TOPOLOGIES)
    except Unavailable:
        raise
    except StormDagsterError:
        cluster = nimbus.get("/v1/cluster")
    return {
        **cluster,
        "supervisors": len(cluster.get("supervisors", ())),
        "skipped": ["topologies and hosts: the leader is of an earlier release"],
    }


def _problems(document: Mapping[str, Any], asked_at: float) -> Iterator[HealthResult]:
    """Yield the problems of hosts and topologies, and a line for each part that was left out."""
    now = document.get("now_secs")
    if now is not None:
        ahead_secs = clock_ahead_of(float(now), asked_at, time.time())
        clock = clock_problem("this client", platform.node(), ahead_secs)
        if clock is not None:
            yield clock.severity, clock.text, clock.remedy
    for problem in document.get("problems", ()):
        yield problem["severity"], problem["text"], problem["remedy"]
    more = document.get("more")
    if more:
        text = f"and {more} more topologies have tasks that do not run"
        yield "warning", text, "storm-dagster list"
    for text in document.get("skipped", ()):
        yield "warning", f"not checked: {text}", ""
