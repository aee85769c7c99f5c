"""The conf of a cluster as clients and the code location see it: its files, and what ``dev`` recorded.

Order, later wins: shipped defaults, ``storm.yaml`` (of ``--conf-dir``, else of HOME), the addresses in
``HOME/cluster.json`` of a local cluster, then ``-c KEY=VALUE``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from storm_dagster.model.conf import ClusterConf, Conf, load_cluster_conf
from storm_dagster.model.endpoints import ClusterFile, home_dir

__all__ = ["cluster_addresses", "cluster_conf"]


def cluster_addresses(cluster: ClusterFile) -> dict[str, Any]:
    """The conf keys that follow from the addresses of a running local cluster."""
    values: dict[str, Any] = {
        "storm.zookeeper.servers": [cluster.zookeeper],
        "storm.zookeeper.root": cluster.zookeeper_root,
    }
    if cluster.nimbuses:
        values["nimbus.seeds"] = [nimbus.http.partition("://")[2].rstrip("/") for nimbus in cluster.nimbuses]
    if cluster.spark is not None:
        values["spark.remote"] = cluster.spark.remote
    if cluster.dagster is not None:
        values["dagster.graphql.url"] = cluster.dagster.url.rstrip("/") + "/graphql"
    return values


def cluster_conf(
    home: Path | None = None, conf_dir: Path | None = None, overrides: Conf | None = None
) -> ClusterConf:
    """The merged conf for a client of the cluster in ``home`` (default: ``STORM_DAGSTER_HOME``).

    With an explicit ``conf_dir`` the cluster is the one that its ``storm.yaml`` names, and
    ``HOME/cluster.json`` is not looked at. Raises :class:`InvalidRequest` for a wrong conf and
    :class:`Corrupt` for a damaged ``cluster.json``.
    """
    if conf_dir is not None:
        return load_cluster_conf(conf_dir, overrides)
    home = home_dir(home)
    conf = load_cluster_conf(home)
    cluster = ClusterFile.read(home)
    if cluster is not None:
        conf = conf.with_values(cluster_addresses(cluster), str(home / "cluster.json"))
    if overrides:
        conf = conf.with_values(overrides, "-c")
    return conf
