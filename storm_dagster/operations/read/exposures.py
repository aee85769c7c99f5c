"""Security checks of a cluster, by its conf and while it runs, with remedies."""

import re
import stat
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from storm_dagster.host.cgroups import cgroup_of, may_make_cgroups
from storm_dagster.host.endpoints import ClusterFile
from storm_dagster.host.processes import RunFile
from storm_dagster.model.conf import ClusterConf, mask_text, seed_urls
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.security.exposure import address_beyond_loopback
from storm_dagster.security.peers import can_identify_peers
from storm_dagster.security.server_identity import (
    PEER_USERS,
    PLAINTEXT_PEERS,
    TrustedServers,
    UntrustedServer,
    user_id,
    user_name,
)
from storm_dagster.security.settings import Security, public_authorities, zookeeper_tls

HealthResult = tuple[Literal["ok", "warning", "broken"], str, str]
"""State, problem or measurement, and remedy."""


class ClusterPlace(NamedTuple):
    """The files and the conf by which clients find a cluster."""

    home: Path
    conf_dir: Path | str | None
    conf: ClusterConf


_SECRET = "openssl rand -hex 32 > FILE; chmod 600 FILE; storm.secret.file: FILE"
"""Remedy without a secret."""
_SAFE_ZOOKEEPER = (3, 9, 2)
"""Oldest version of ZooKeeper without known holes."""


def _callers(place: ClusterPlace) -> Iterator[HealthResult]:
    """Check that callers of daemons and workers prove who they are."""
    security = Security.of(place.conf)
    if security.secret is not None:
        yield "ok", "callers prove that they know the secret", ""
        return
    if security.tls:
        yield "warning", "no secret: links of workers are not authenticated", _SECRET
        return
    access = "every local user may do all"
    if can_identify_peers():
        access = "daemons and workers serve this user and root"
    if not place.conf["storm.zookeeper.ssl.enable"]:
        access += "; ZooKeeper takes connections of every user of this machine"
    yield "warning", f"no secret: {access}", _SECRET


def _tls(place: ClusterPlace) -> Iterator[HealthResult]:
    """Check that HTTP and Thrift are encrypted beyond this host."""
    if Security.of(place.conf).tls:
        yield "ok", "HTTP and Thrift speak TLS", ""
        if not place.conf["storm.zookeeper.ssl.enable"]:
            yield (
                "ok",
                "traffic to ZooKeeper is not encrypted",
                "trust its network, or set storm.zookeeper.ssl.enable",
            )
        return
    address = address_beyond_loopback(str(place.conf["storm.local.hostname"]))
    if address is not None:
        yield (
            "warning",
            f"no TLS: answers from {address} can be read on the way",
            "set storm.tls.cert, .key and .ca",
        )
    else:
        yield "ok", "no TLS, and every port is on loopback", ""


def _version_of(status: bytes) -> tuple[int, ...] | None:
    """The version in a server's response to ``srvr``; ``None`` without one."""
    match = re.search(rb"version: (\d+)\.(\d+)\.(\d+)", status)
    return None if match is None else tuple(map(int, match.groups()))


def _zookeeper(place: ClusterPlace) -> Iterator[HealthResult]:
    """Check version and access lists of each ZooKeeper server that responds."""
    from storm_dagster.zk.embedded import server_address, server_status
    from storm_dagster.zk.root import is_open_to_all

    conf = place.conf
    if (
        ClusterFile.read(place.home) is None
        and conf.origins["storm.zookeeper.servers"] == "default"
    ):
        yield "ok", "none is configured; the one of dev serves this machine", ""
        return
    answering: list[str] = []
    tls = zookeeper_tls(conf)
    trusted = TrustedServers.of(conf)
    for server in conf["storm.zookeeper.servers"]:
        address = server_address(server, conf)
        try:
            status = server_status(*address, 1.0, tls, trusted)
        except UntrustedServer as error:
            problem, _, remedy = error.message.partition(": ")
            yield "warning", problem, remedy
            continue
        version = _version_of(status)
        if version is None:
            yield "ok", f"{server} shows no version: it is stopped, or does not answer srvr", ""
            continue
        answering.append(f"{address[0]}:{address[1]}")
        if version < _SAFE_ZOOKEEPER:
            version_text = ".".join(map(str, version))
            yield (
                "warning",
                f"{server} is ZooKeeper {version_text}, with known holes",
                "upgrade it to 3.9.2 or newer",
            )
    if answering and is_open_to_all(
        ",".join(answering), str(conf["storm.zookeeper.root"]), tls, trusted
    ):
        remedy = (
            "stop the cluster, set storm.secret.file, then `storm-dagster daemon zookeeper secure`"
        )
        yield (
            "warning",
            "every client that reaches ZooKeeper may change the cluster and make it run code",
            remedy,
        )
    elif answering:
        yield "ok", "nodes of the cluster are closed to others", ""


def _home(place: ClusterPlace) -> Iterator[HealthResult]:
    """Check that other users cannot read the HOME; a missing one is closed."""
    home = place.home
    mode = stat.S_IMODE(home.stat().st_mode) if home.exists() else 0o700
    # Workers of other users pass through the folder; the files in it are closed to them.
    passage_bits = 0o011 if place.conf.get("supervisor.run.worker.as.user") else 0
    if mode & 0o077 & ~passage_bits:
        yield (
            "warning",
            f"{home} has mode {mode:o}: others can read code, logs and tokens",
            f"chmod 700 {home}",
        )
    else:
        yield "ok", f"{home} is closed to other users", ""


def _spark(place: ClusterPlace) -> Iterator[HealthResult]:
    """Check that Spark Connect is encrypted beyond this host."""
    remote = str(place.conf.get("spark.remote") or "")
    host = urlsplit(remote).hostname
    address = None
    if host and "use_ssl=true" not in remote:
        address = address_beyond_loopback(host)
    if address:
        remedy = "put Spark behind a TLS proxy (;use_ssl=true), or on this host"
        yield "warning", f"Spark at {address}: its token and data travel in clear text", remedy
    else:
        yield "ok", "no Spark beyond loopback without TLS", ""


def _dagster(place: ClusterPlace) -> Iterator[HealthResult]:
    """Check that Dagster's webserver does not respond to clients without credentials."""
    import httpx

    from storm_dagster.security.checked_http import UntrustedConnection

    # With a conf folder, the local cluster of this HOME may be another one.
    cluster = ClusterFile.read(place.home) if place.conf_dir is None else None
    url = str(place.conf.get("dagster.graphql.url") or "")
    if not url and cluster is not None and cluster.dagster is not None:
        url = f"{cluster.dagster.url.rstrip('/')}/graphql"
    # Without our credentials, as an untrusted client.
    untrusted_url = re.sub(r"(?<=://)[^/@]*@", "", url)
    is_open = False
    refusal = ""
    if url:
        query = {"query": "{__typename}"}
        transport = Security.of(place.conf).transport(public_authorities())
        with httpx.Client(timeout=5, trust_env=False, transport=transport) as http:
            try:
                is_open = http.post(untrusted_url, json=query).is_success
            except UntrustedConnection as error:
                refusal = str(error)
            except (httpx.HTTPError, httpx.InvalidURL):
                is_open = False
    if refusal:
        problem, _, remedy = refusal.partition(": ")
        yield "warning", f"Dagster: {problem}", remedy
    elif is_open:
        remedy = "put an authenticating proxy before it, which also refuses requests of other sites"
        problem = (
            f"Dagster at {mask_text(url)} runs jobs for every client that reaches it, "
            "and pages in your browser do"
        )
        yield "warning", problem, remedy
    else:
        yield "ok", "no Dagster answers untrusted clients", ""


def _servers(place: ClusterPlace) -> Iterator[HealthResult]:
    """Check to which servers clients send in clear."""
    conf = place.conf
    security = Security.of(conf)
    for entry in conf[PLAINTEXT_PEERS]:
        yield (
            "warning",
            f"{entry} is called without TLS: every host on the way can read and change messages",
            f"use TLS, then remove it from {PLAINTEXT_PEERS}",
        )
    for user in conf[PEER_USERS]:
        if user_id(user) is None:
            # The hosts of a cluster share a conf, and not every user is on each of them.
            yield "ok", f"{PEER_USERS} names {user}, a user that this host does not have", ""
    if can_identify_peers():
        trusted = sorted(TrustedServers.of(conf).users)
        names = ", ".join(user_name(uid) for uid in trusted)
        yield "ok", f"on this host, without TLS, only servers of {names} are sent anything", ""
    elif security.configured:
        yield "ok", "clients sign their requests, or use TLS", ""
    else:
        yield (
            "warning",
            "this system does not say which user listens at a port: clients send nothing",
            _SECRET,
        )


def _workers(place: ClusterPlace) -> Iterator[HealthResult]:
    """Check that code of topologies does not run as the user of the daemons."""
    if place.conf.get("supervisor.run.worker.as.user"):
        yield "ok", "workers run under users of their own", ""
        return
    remedy = "let only administrators submit, or give each team its own cluster and its own user"
    yield (
        "warning",
        "WORKERS RUN AS THE DAEMONS' USER: EVERY USER WITH SUBMIT RIGHTS IS AN ADMINISTRATOR",
        remedy,
    )


def _tokens(place: ClusterPlace) -> Iterator[HealthResult]:
    """Check that access tokens belong to users, and that none has all rights."""
    if Security.of(place.conf).secret is None:
        yield "ok", "no secret: no access token counts", ""
        return
    document = _access_tokens(place)
    if document is None:
        yield "ok", "no nimbus shows the list of access tokens", "`storm-dagster token list`"
        return
    now = time.time()
    rows = [row for row in document["tokens"] if row["expires_secs"] >= now]
    admin = [row["id"] for row in rows if row["scope"] == "admin"]
    unowned = [row["id"] for row in rows if row["user"] is None]
    if admin:
        yield (
            "warning",
            f"{len(admin)} access tokens have the scope admin: {_some(admin)}",
            "`storm-dagster token revoke ID`, and --scope operate --user NAME instead",
        )
    if unowned:
        yield (
            "warning",
            f"{len(unowned)} access tokens belong to no user: {_some(unowned)}",
            "`storm-dagster token revoke ID`, and make others with --user NAME",
        )
    former_until_secs = document["former_until_secs"]
    if former_until_secs is None or former_until_secs >= now:
        yield (
            "warning",
            f"access tokens of earlier releases count {_until(former_until_secs)}, without a "
            "record and without a user",
            "make new ones with `storm-dagster token create`; a new secret ends the others at once",
        )
    if not admin and not unowned:
        yield "ok", f"{len(rows)} access tokens, each with a user, none of the scope admin", ""


def _some(ids: list[str]) -> str:
    """At most ten ids, for one line."""
    shown = ", ".join(ids[:10])
    return f"{shown}, ..." if len(ids) > 10 else shown


def _until(secs: int | None) -> str:
    if secs is None:
        return "without end, since the leading nimbus records none"
    return f"until {datetime.fromtimestamp(secs, timezone.utc):%Y-%m-%d}"


def _access_tokens(place: ClusterPlace) -> dict[str, Any] | None:
    """The list of access tokens by the first nimbus that shows it; ``None`` without one."""
    import httpx

    cluster = ClusterFile.read(place.home) if place.conf_dir is None else None
    urls = seed_urls(place.conf)
    if cluster is not None and cluster.nimbuses:
        urls = [nimbus.http for nimbus in cluster.nimbuses]
    with httpx.Client(timeout=5, **Security.of(place.conf).client_options()) as http:
        for url in urls:
            try:
                response = http.get(f"{url.rstrip('/')}/v1/access-tokens")
                if response.is_success:
                    return response.json()
            except (httpx.HTTPError, httpx.InvalidURL, ValueError, StormDagsterError):
                continue
    return None


def _children(place: ClusterPlace) -> Iterator[HealthResult]:
    """Check that no process of a topology outlives its worker on this host."""
    # With a supervisor in this HOME its cgroup counts, not that of the shell.
    supervisors = [record for record in RunFile.read_all(place.home) if record.role == "supervisor"]
    pids = [record.pid for record in supervisors if record.alive()]
    parents = {cgroup_of(pid) for pid in pids or ("self",)}
    if all(may_make_cgroups(parent) for parent in parents):
        yield "ok", "each worker has a cgroup (v2), which ends with it and all its children", ""
        return
    yield (
        "warning",
        "supervisors here cannot make cgroups (v2): a child that leaves the session, the parents "
        "and the environment of its worker within seconds outlives it",
        "run supervisors as root, or in a systemd unit with Delegate=yes, and mount "
        "/sys/fs/cgroup writable in containers",
    )


def exposures(place: ClusterPlace) -> dict[str, Callable[[ClusterPlace], Iterator[HealthResult]]]:
    """The checks by name.

    Raises the error of an unreadable conf here, because every check would fail with it.
    """
    Security.of(place.conf)
    return {
        "callers": _callers,
        "servers": _servers,
        "TLS": _tls,
        "ZooKeeper": _zookeeper,
        "HOME": _home,
        "Spark": _spark,
        "Dagster": _dagster,
        "workers": _workers,
        "tokens": _tokens,
        "children": _children,
    }
