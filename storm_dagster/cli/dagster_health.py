"""Health of the cluster's Dagster (webserver, code location, storage, daemon), read over HTTP without importing dagster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from storm_dagster.model.dagster_errors import STORAGE_REMEDY, storage_problem
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.instance_advice import instance_advice
from storm_dagster.model.security import Security
from storm_dagster.nimbus.dagster.client import location_problem
from storm_dagster.nimbus.dagster.transport import DagsterAccess, DagsterTransport
from storm_dagster.operations.read.exposures import HealthResult

# Reads runs and heartbeats: both lie in the storage.
_QUERY = """
{ runsOrError(limit: 1) { __typename ... on PythonError { message } }
  instance { info daemonHealth { allDaemonStatuses { daemonType required healthy } } } }
"""


def check_dagster(conf: Any, timeout: float = 8.0) -> Iterator[HealthResult]:
    """Health of the Dagster of ``dagster.graphql.*``; each query has ``timeout`` seconds.

    Uses nimbus's credentials. The first result is the worst; the advice on its settings comes last. Nothing
        when no Dagster is configured.
    """
    transport = None
    try:
        access = DagsterAccess.of(conf)
        if access is None:
            return
        transport = DagsterTransport(lambda: access, timeout=timeout, security=Security.of(conf))
        document = transport.post(access.url, {"query": _QUERY})
        trouble = storage_problem(document)
        if trouble is not None:
            yield "broken", f"Dagster's storage does not respond: {trouble}", STORAGE_REMEDY
            return
        seen = transport.graphql("Locations", {})
    except StormDagsterError as error:
        yield "broken", error.message, "fix what it names"
        return
    finally:
        if transport is not None:
            transport.close()
    try:
        if document["data"]["runsOrError"]["__typename"] != "Runs":
            raise KeyError(document["data"]["runsOrError"])
        instance: dict[str, Any] = document["data"]["instance"]
        rows: list[dict[str, Any]] = instance["daemonHealth"]["allDaemonStatuses"]
    except (KeyError, TypeError):
        yield "broken", f"{access.url} answered {str(document)[:300]}", "check its webserver's log"
        return
    error = location_problem(
        "submissions fail",
        seen.get("locationEntries") or [],
        repositoryLocationName=conf["dagster.location"],
        repositoryName=conf["dagster.repository"],
    )
    ill = sorted(str(row["daemonType"]).lower() for row in rows if row["required"] and not row["healthy"])
    if error is not None:
        yield "broken", error.message, "fix what it names"
    elif ill:
        yield (
            "warning",
            f"its daemon does not report ({', '.join(ill)})",
            "start dagster-daemon: without it no sensor and no schedule runs",
        )
    else:
        yield "ok", f"{access.url} answers, storage, code location and daemon too", ""
    try:
        settings = yaml.safe_load(instance.get("info") or "{}")
    except yaml.YAMLError:
        return
    for advice in instance_advice(settings if isinstance(settings, dict) else {}):
        yield (
            "ok",
            f"could be better: {advice.setting} is {advice.now}",
            f"{advice.better}: {advice.gain}; it costs: {advice.cost}",
        )
