"""Conf of a cluster for clients and the code location: its files, and the settings that ``dev`` recorded.

Order, later wins: shipped defaults, ``storm.yaml`` (of ``--conf-dir``, else of HOME), what the running
``dev`` was given with ``-c`` (``HOME/dev.json``), the addresses in ``HOME/cluster.json``, then
``-c KEY=VALUE`` of the caller.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from storm_dagster.model.conf import ClusterConf, Conf, load_cluster_conf
from storm_dagster.model.endpoints import ClusterFile, home_dir
from storm_dagster.model.errors import Corrupt
from storm_dagster.model.host import write_atomically

DEV_CONF = "dev.json"
"""File of HOME with the conf that the running ``dev`` was given beyond ``HOME/storm.yaml``."""


def write_dev_conf(home: Path, values: Conf) -> None:
    """Record the settings of ``dev``, so that the code location and clients have the same conf as the daemons."""
    # It may hold the cluster's secret.
    write_atomically(home / DEV_CONF, json.dumps(dict(values)) + "\n", mode=0o600)


def _dev_conf(home: Path) -> dict[str, Any]:
    path = home / DEV_CONF
    try:
        loaded = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise Corrupt(f"{path} is damaged ({error}): stop the cluster and remove the file") from None
    if not isinstance(loaded, dict):
        raise Corrupt(f"{path} is damaged (no map): stop the cluster and remove the file")
    return loaded


def cluster_addresses(cluster: ClusterFile) -> dict[str, Any]:
    """The conf keys that follow from the addresses of a running local cluster."""
    values: dict[str, Any] = {
        "storm.zookeeper.servers": cluster.zookeeper.split(","),
        "storm.zookeeper.root": cluster.zookeeper_root,
        "storm.zookeeper.ssl.enable": False,
    }
    if cluster.nimbuses:
        values["nimbus.seeds"] = [nimbus.http.partition("://")[2].rstrip("/") for nimbus in cluster.nimbuses]
    if cluster.spark is not None:
        values["spark.remote"] = cluster.spark.remote
    if cluster.dagster is not None:
        values["dagster.graphql.url"] = cluster.dagster.url.rstrip("/") + "/graphql"
    return values


def cluster_conf(home: Path | None = None, conf_dir: Path | None = None, overrides: Conf | None = None) -> ClusterConf:
    """The merged conf for a client of the cluster in ``home`` (default: ``STORM_DAGSTER_HOME``).

    With an explicit ``conf_dir`` the cluster is the one that its ``storm.yaml`` names, and
    ``HOME/cluster.json`` is not read. Raises :class:`InvalidRequest` for a wrong conf and
    :class:`Corrupt` for a damaged ``cluster.json``.
    """
    if conf_dir is not None:
        return load_cluster_conf(conf_dir, overrides)
    home = home_dir(home)
    conf = load_cluster_conf(home)
    cluster = ClusterFile.read(home)
    if cluster is not None:
        conf = conf.with_values(_dev_conf(home), str(home / DEV_CONF))
        conf = conf.with_values(cluster_addresses(cluster), str(home / "cluster.json"))
    if overrides:
        conf = conf.with_values(overrides, "-c")
    return conf
