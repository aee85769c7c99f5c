"""Names of everything that Dagster shows: asset keys, the partitions, tags. Other tools rely on them."""

from __future__ import annotations

import dagster as dg

__all__ = [
    "ACTIVE_TOPOLOGY",
    "ASSIGNMENT",
    "GROUP",
    "INBOX",
    "NIMBUS",
    "OWNER",
    "PARTITIONS",
    "PARTITIONS_NAME",
    "PUBLISHED_ASSIGNMENT",
    "REBALANCE_JOB",
    "STAGES",
    "SUBMIT_JOB",
    "SUPERVISORS",
    "TASK_INFO",
    "TOKEN_TAG",
    "TOPOLOGIES",
    "TOPOLOGY_CODE",
    "TOPOLOGY_CONF",
    "TOPOLOGY_STATS",
    "TOPOLOGY_TAG",
    "WORKERS",
    "topology_tags",
]

GROUP = "submission"
OWNER = "team:storm"

PARTITIONS_NAME = "storm_topologies"
PARTITIONS = dg.DynamicPartitionsDefinition(name=PARTITIONS_NAME)
"""One partition for each topology that lives, keyed by its name: one history per topology across deploys."""

TOPOLOGY_CONF = dg.AssetKey(["storm", "topology_conf"])
TOPOLOGY_CODE = dg.AssetKey(["storm", "topology_code"])
TASK_INFO = dg.AssetKey(["storm", "task_info"])
ASSIGNMENT = dg.AssetKey(["storm", "assignment"])
PUBLISHED_ASSIGNMENT = dg.AssetKey(["storm", "published_assignment"])
ACTIVE_TOPOLOGY = dg.AssetKey(["storm", "active_topology"])
STAGES = (TOPOLOGY_CONF, TOPOLOGY_CODE, TASK_INFO, ASSIGNMENT, PUBLISHED_ASSIGNMENT, ACTIVE_TOPOLOGY)
"""The six stages of a submission, in order."""

SUPERVISORS = dg.AssetKey(["storm", "cluster", "supervisors"])
NIMBUS = dg.AssetKey(["storm", "cluster", "nimbus"])
INBOX = dg.AssetKey(["storm", "cluster", "inbox"])
WORKERS = dg.AssetKey(["storm", "cluster", "workers"])
TOPOLOGIES = dg.AssetKey(["storm", "cluster", "topologies"])
TOPOLOGY_STATS = dg.AssetKey(["storm", "cluster", "topology_stats"])

SUBMIT_JOB = "submit_topology"
REBALANCE_JOB = "rebalance_topology"

TOKEN_TAG = "storm/token"
"""Run tag: the client token of the submission that the run belongs to."""
STAGED_BY_TAG = "storm/staged_by"
"""Run tag: the run whose epoch the staging has. In a re-execution it is another run's, until it takes over."""
TOPOLOGY_TAG = "storm/topology"
"""Run tag: the topology's name."""


def topology_tags(name: str) -> dict[str, str]:
    """Tags by which the runs of one topology are found in the UI."""
    return {TOPOLOGY_TAG: name}
