"""External assets: the daemons, which Dagster shows and observes but never makes."""

from __future__ import annotations

import dagster as dg

from storm_dagster.defs.keys import INBOX, NIMBUS, OWNER, SUPERVISORS, TOPOLOGIES, TOPOLOGY_STATS, WORKERS

__all__ = ["build_cluster_assets"]


def build_cluster_assets() -> list[dg.AssetSpec]:
    """Supervisors and nimbuses, observed by `supervisor_sensor` and `leader_sensor`."""
    return [
        dg.AssetSpec(
            key=SUPERVISORS,
            group_name="cluster",
            description="The supervisors that live now, their slots, and what runs in them. One process on each host; "
            "observed on change and at most once a minute.",
            kinds={"storm", "zookeeper"},
            owners=[OWNER],
        ),
        dg.AssetSpec(
            key=WORKERS,
            deps=[SUPERVISORS],
            group_name="cluster",
            description="The worker processes that live now: where, since when, running which tasks; how long each "
            "recovery took. Observed on change and at most once a minute.",
            kinds={"storm", "python"},
            owners=[OWNER],
        ),
        dg.AssetSpec(
            key=TOPOLOGIES,
            deps=[WORKERS],
            group_name="cluster",
            description="The topologies that live now with throughput, latency and errors. Observed on change and at "
            "most once a minute.",
            kinds={"storm"},
            owners=[OWNER],
        ),
        dg.AssetSpec(
            key=NIMBUS,
            group_name="cluster",
            description="Who leads the cluster, under which epoch, and which nimbuses follow.",
            kinds={"storm", "zookeeper"},
            owners=[OWNER],
        ),
        dg.AssetSpec(
            key=INBOX,
            group_name="cluster",
            description="Uploads, stagings and remains of topologies that nobody needs any more; `clean_inbox` removes them.",
            kinds={"storm"},
            owners=[OWNER],
        ),
        dg.AssetSpec(
            key=TOPOLOGY_STATS,
            group_name="cluster",
            description="Throughput and latency of every component over time, rolled up with PySpark to Parquet.",
            kinds={"storm", "pyspark", "parquet"},
            owners=[OWNER],
        ),
    ]
