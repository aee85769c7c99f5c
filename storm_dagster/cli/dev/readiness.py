"""Readiness of each part of a local cluster, checked over the network.

No check assumes that a daemon is ready after some time.
"""

import os
import socket
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx

from storm_dagster.client.leader import find_leader
from storm_dagster.host.endpoints import cluster_conf
from storm_dagster.model.errors import Conflict, StormDagsterError
from storm_dagster.nimbus.dagster.transport import queries
from storm_dagster.security.checked_http import UntrustedConnection
from storm_dagster.security.server_identity import TrustedServers, UntrustedServer
from storm_dagster.security.settings import Security

NO_DAEMON = "dagster-daemon has not reported yet"
"""Reason of a Dagster that has loaded the code location and only lacks its daemon."""
# GraphQL with which Dagster loads the code location once more.
_RELOAD = 'mutation { reloadRepositoryLocation(repositoryLocationName: "storm") { __typename } }'


def listens(port: int, host: str = "127.0.0.1", trusted: TrustedServers | None = None) -> bool:
    """True if a process of this cluster accepts connections at the port.

    One of another user, who took the port before the daemon did, is none.
    """
    try:
        with socket.create_connection((host, port), timeout=1.0) as link:
            (trusted or TrustedServers()).check_socket(link, server=f"{host}:{port}", name=host)
            return True
    except (OSError, UntrustedServer):
        return False


def serves(path: Path) -> bool:
    """True if a process accepts connections on the unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(os.fsencode(path)) == 0


def _client(url: str, security: Security | None, timeout_secs: float) -> httpx.Client:
    """Client for requests that are sent ten times a second to ``url``."""
    # Authorities, which http does not use, take 20 ms to load.
    options = (security or Security()).client_options(plain=url.startswith("http://"))
    return httpx.Client(timeout=timeout_secs, **options)


def get_json(url: str, security: Security | None = None) -> Any:
    """The JSON document at the URL; ``None`` if there is none (yet)."""
    try:
        with _client(url, security, 3.0) as http:
            return http.get(url).json()
    except (httpx.HTTPError, ValueError):
        return None


def leader_url(urls: Sequence[str], security: Security | None = None) -> str | None:
    """Base URL of the nimbus that leads; ``None`` without one (yet)."""
    if not urls:
        return None
    with _client(urls[0], security, 5.0) as http:
        leader, _ = find_leader(http, urls)
    return leader


def supervisor_ids(url: str, security: Security | None = None) -> set[str]:
    """Ids of the supervisors that the nimbus at ``url`` sees."""
    document = get_json(f"{url}/v1/cluster", security)
    rows = document.get("supervisors", []) if isinstance(document, dict) else []
    return {str(row.get("id")) for row in rows}


def code_location_error(web_url: str, security: Security) -> tuple[bool, str] | None:
    """Reason why Dagster does not serve the code location (yet): (loading failed, text).

    ``None`` if it does. After a failure a request to reload it is sent: the location may have been
    loaded too early.
    """
    try:
        data = _graphql(web_url, queries()["Readiness"][0], security, 10.0)["data"]
        workspace = data["workspaceOrError"]
        daemons = {
            row["daemonType"]: row for row in data["instance"]["daemonHealth"]["allDaemonStatuses"]
        }
    except UntrustedConnection as error:
        return False, str(error)
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        return False, f"{web_url} does not answer ({type(error).__name__})"
    for entry in workspace.get("locationEntries", []):
        if entry["name"] != "storm":
            continue
        loaded = entry.get("locationOrLoadError") or {}
        if loaded.get("__typename") == "RepositoryLocation" and loaded.get("repositories"):
            # The webserver launches runs, but without this daemon no sensor heals.
            healthy = daemons.get("SENSOR", {}).get("healthy")
            return None if healthy else (False, NO_DAEMON)
        if loaded.get("__typename") == "PythonError":
            with suppress(httpx.HTTPError, ValueError):
                _graphql(web_url, _RELOAD, security, 30.0)
            message = str(loaded.get("message", "the code location failed to load"))
            return True, message.strip()[:1500]
        return False, f"code location storm is {str(entry.get('loadStatus')).lower()}"
    return False, "the workspace names no code location storm"


def _graphql(web_url: str, query: str, security: Security, timeout_secs: float) -> Any:
    """Answer of Dagster's webserver to a query.

    ``httpx.HTTPError`` or ``ValueError`` without a document of JSON.
    """
    with _client(web_url, security, timeout_secs) as http:
        return http.post(f"{web_url}/graphql", json={"query": query}).json()


def warm_up_dagster(web_url: str, security: Security) -> None:
    """Send Dagster the query of a launch, for its first imports.

    Dagster must respond to a launch within five seconds. Failures are ignored: the launch reports
    them.
    """
    with suppress(httpx.HTTPError, ValueError):
        _graphql(web_url, queries()["WarmUp"][0], security, 60.0)


def prepare_root(conf: dict[str, Any], stored_id: str | None, fresh_id: str) -> str:
    """Create the cluster's root in ZooKeeper if there is none.

    Returns the cluster id. ``conf`` are the values that ``dev`` adds, ``stored_id`` is the id in
    HOME, ``None`` for a new one, which gets ``fresh_id``. :class:`Conflict` if HOME has an id, and
    ZooKeeper is empty or has another cluster: a root that is missing is not created a second time.
    """
    from storm_dagster.zk.cluster_state import ZooKeeperClusterState
    from storm_dagster.zk.root import close_top, create_cluster_root, secure_root
    from storm_dagster.zk.storm_cluster_state import StormClusterState, open_session

    merged = cluster_conf().with_values(conf, "dev")
    with closing(open_session(merged.values)) as session:
        if stored_id is not None and session.users is not None:
            # The tree may be of an earlier release, or of another secret.
            secure_root(session)
        if session.users is not None:
            close_top(session)
        if stored_id is None:
            create_cluster_root(ZooKeeperClusterState(session), fresh_id)
    try:
        with StormClusterState.open(merged.values) as state:
            cluster_id = state.cluster_id()
    except StormDagsterError as error:
        raise Conflict(
            f"this HOME remembers cluster {stored_id}, but its ZooKeeper has no such state"
            f" ({error.message}): restore HOME/zookeeper, or remove HOME to start afresh"
        ) from None
    if stored_id is not None and cluster_id != stored_id:
        raise Conflict(
            f"this HOME remembers cluster {stored_id}, ZooKeeper holds {cluster_id}: use another"
            " --home"
        )
    return cluster_id
