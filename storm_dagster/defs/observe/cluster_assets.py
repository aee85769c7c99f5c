"""External assets: the daemons, which Dagster shows and observes but never makes."""

from __future__ import annotations

import dagster as dg

from storm_dagster.defs.binding import cluster_key
from storm_dagster.defs.keys import INBOX, NIMBUS, OWNER, SUPERVISORS, TOPOLOGIES, WORKERS
from storm_dagster.model.dagster_names import DagsterNames

__all__ = ["build_cluster_assets"]

_ASSETS: list[tuple[dg.AssetKey, list[dg.AssetKey], set[str], str]] = [
    (
        SUPERVISORS,
        [],
        {"zookeeper"},
        "The supervisors that live now, their slots, and what runs in them. One process on each host; "
        "observed on change and at most once a minute.",
    ),
    (
        WORKERS,
        [SUPERVISORS],
        {"python"},
        "The slots that hold workers, and which of them run; how long each recovery took. Observed on "
        "change and at most once a minute.",
    ),
    (
        TOPOLOGIES,
        [WORKERS],
        set(),
        "The topologies that live now, with links to what they do. Observed on change and at most once "
        "a minute.",
    ),
    (NIMBUS, [], {"zookeeper"}, "Who leads the cluster, under which epoch, and which nimbuses follow."),
    (
        INBOX,
        [],
        set(),
        "Uploads, stagings and remains of topologies that nobody needs any more; `clean_inbox` removes them.",
    ),
]


def build_cluster_assets(names: DagsterNames) -> list[dg.AssetSpec]:
    """What `supervisor_sensor`, `leader_sensor` and the jobs of the upkeep observe."""
    return [
        dg.AssetSpec(
            key=cluster_key(names, key),
            deps=[cluster_key(names, dep) for dep in deps],
            group_name=names.name("cluster"),
            description=description,
            kinds={"storm", *kinds},
            owners=[OWNER],
        )
        for key, deps, kinds, description in _ASSETS
    ]
