"""Readiness of each part of a local cluster, checked over the network, never guessed from time."""

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx

from storm_dagster.client.leader import find_leader
from storm_dagster.host.endpoints import cluster_conf
from storm_dagster.model.errors import Conflict, StormDagsterError
from storm_dagster.nimbus.dagster.transport import queries


def listens(port: int, host: str = "127.0.0.1") -> bool:
    """Whether somebody accepts connections there."""
    try:
        with socket.create_connection((host, port), timeout=1.0):
            return True
    except OSError:
        return False


def serves(path: Path) -> bool:
    """Whether somebody accepts connections on a unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(os.fsencode(path)) == 0


def get_json(url: str, options: Mapping[str, Any] | None = None) -> Any:
    """The JSON document there, ``None`` when there is none (yet)."""
    try:
        answer = httpx.get(url, timeout=3.0, **_quick(url, options or {}))
        return answer.json()
    except (httpx.HTTPError, ValueError):
        return None


def _quick(url: str, options: Mapping[str, Any]) -> dict[str, Any]:
    # Asked ten times a second: certificates, which an http:// address has no use for, take 20 ms to
    # load.
    plain = {"verify": False} if url.startswith("http://") else {}
    return {"trust_env": False, **options, **plain}


def leader_url(urls: Sequence[str], options: Mapping[str, Any] | None = None) -> str | None:
    """Base URL of the nimbus that leads; ``None`` without one (yet)."""
    if not urls:
        return None
    with httpx.Client(**_quick(urls[0], options or {})) as http:
        leader, _ = find_leader(http, urls)
    return leader


def supervisor_ids(url: str, options: Mapping[str, Any] | None = None) -> set[str]:
    """Ids of the supervisors that the nimbus at ``url`` sees."""
    document = get_json(f"{url}/v1/cluster", options)
    rows = document.get("supervisors", []) if isinstance(document, dict) else []
    return {str(row.get("id")) for row in rows}


NO_DAEMON = "dagster-daemon has not reported yet"
"""The code location is loaded, and this is all that is missing."""
_RELOAD = 'mutation { reloadRepositoryLocation(repositoryLocationName: "storm") { __typename } }'


def code_location_error(web_url: str, options: Mapping[str, Any]) -> tuple[bool, str] | None:
    """Reason why Dagster does not serve our code location (yet); ``None`` when it does.

    The first part is whether loading failed; it is asked to load again, for it may have been asked
    too early.
    """
    asked = {"query": queries()["Readiness"][0]}
    try:
        answer = httpx.post(
            f"{web_url}/graphql", json=asked, timeout=10.0, **_quick(web_url, options)
        )
        data = answer.json()["data"]
        workspace = data["workspaceOrError"]
        daemons = {
            row["daemonType"]: row for row in data["instance"]["daemonHealth"]["allDaemonStatuses"]
        }
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        return False, f"{web_url} does not answer ({type(error).__name__})"
    for entry in workspace.get("locationEntries", []):
        if entry["name"] != "storm":
            continue
        loaded = entry.get("locationOrLoadError") or {}
        if loaded.get("__typename") == "RepositoryLocation" and loaded.get("repositories"):
            # Runs are launched by the webserver, but without this daemon nothing heals.
            healthy = daemons.get("SENSOR", {}).get("healthy")
            return None if healthy else (False, NO_DAEMON)
        if loaded.get("__typename") == "PythonError":
            with suppress(httpx.HTTPError):
                httpx.post(f"{web_url}/graphql", json={"query": _RELOAD}, timeout=30.0, **options)
            return True, str(loaded.get("message", "the code location failed to load")).strip()[
                :1500
            ]
        return False, f"code location storm is {str(entry.get('loadStatus')).lower()}"
    return False, "the workspace names no code location storm"


def warm_up_dagster(web_url: str, options: Mapping[str, Any]) -> None:
    """Ask Dagster what a launch will ask, so that the first submission does not pay for its first
    imports.

    A launch has to be answered within five seconds. Failures are left to the launch itself.
    """
    with suppress(httpx.HTTPError):
        httpx.post(
            f"{web_url}/graphql", json={"query": queries()["WarmUp"][0]}, timeout=60.0, **options
        )


def prepare_root(conf: dict[str, Any], known: str | None, fresh_id: str) -> str:
    """Make the cluster's root in ZooKeeper when there is none; returns the cluster id.

    ``known`` is the id that HOME remembers. Raises :class:`Conflict` when ZooKeeper is empty or
    holds another cluster although HOME remembers one: absence is not an order.
    """
    from storm_dagster.zk.cluster_state import ZooKeeperClusterState
    from storm_dagster.zk.root import close_top, create_cluster_root, secure_root
    from storm_dagster.zk.storm_cluster_state import StormClusterState, open_session

    merged = cluster_conf().with_values(conf, "dev")
    with closing(open_session(merged.values)) as session:
        if known is not None and session.users is not None:
            # The tree may be of an earlier release, or of another secret.
            secure_root(session)
        if session.users is not None:
            close_top(session)
        if known is None:
            create_cluster_root(ZooKeeperClusterState(session), fresh_id)
    try:
        with StormClusterState.open(merged.values) as state:
            found = state.cluster_id()
    except StormDagsterError as error:
        raise Conflict(
            f"this HOME remembers cluster {known}, but its ZooKeeper has no such state ({error.message}): restore "
            "HOME/zookeeper, or remove HOME to start afresh"
        ) from None
    if known is not None and found != known:
        raise Conflict(
            f"this HOME remembers cluster {known}, ZooKeeper holds {found}: use another --home"
        )
    return found
