"""Invariants I1 to I8 of a cluster (``docs/decisions.md#invariants``), checked on a snapshot of it. Pure.

Each rule yields one :class:`Violation` for everything that breaks it, and nothing for a sound cluster. What
was not read (``None`` in :class:`ClusterSnapshot`) is not checked. A cluster that is changing may break a rule
for a moment: :func:`confirm_violations` keeps what stays broken.
"""

from __future__ import annotations

from storm_dagster.core.invariants import placement_rules, state_rules
from storm_dagster.core.invariants.snapshot import (
    ClusterSnapshot,
    GrayNodes,
    PendingViolations,
    Rule,
    Violation,
    WorkerPid,
    confirm_violations,
)

__all__ = [
    "RULES",
    "ClusterSnapshot",
    "GrayNodes",
    "PendingViolations",
    "Rule",
    "Violation",
    "WorkerPid",
    "confirm_violations",
    "violations",
]

RULES: tuple[Rule, ...] = (
    Rule(
        "I1",
        "one_slot_per_task",
        "Every task of every topology has exactly one slot.",
        "`storm-dagster explain NAME` says why a task is where it is; `storm-dagster rebalance NAME --reassign` places all tasks again",
        placement_rules.one_slot_per_task,
        by_view=True,
    ),
    Rule(
        "I1",
        "slots_not_shared",
        "No slot is given to two topologies.",
        "`storm-dagster rebalance NAME --reassign` for one of them",
        placement_rules.slots_not_shared,
        by_view=True,
    ),
    Rule(
        "I1",
        "assigned_to_live_slots",
        "Every assigned slot belongs to a supervisor that lives and offers it.",
        "start the supervisor, or wait: its tasks are placed elsewhere (when slots are short, `show` says so)",
        placement_rules.assigned_to_live_slots,
        by_view=True,
        heals=True,
    ),
    Rule(
        "I2",
        "one_live_owner",
        "At most one live process runs a task.",
        "`storm-dagster logs NAME --worker HOST:PORT` of both; the older one must end itself when its lease is over",
        placement_rules.one_live_owner,
        by_view=True,
    ),
    Rule(
        "I2",
        "one_process_per_slot",
        "At most one worker process runs in a slot, the one that holds its node.",
        "end the process that `storm-dagster show` does not name",
        placement_rules.one_process_per_slot,
    ),
    Rule(
        "I3",
        "base_implies_published",
        "A topology that is visible has its tasks and its assignment.",
        "kill it and submit it again",
        state_rules.base_implies_published,
        by_view=True,
    ),
    Rule(
        "I3",
        "records_intact",
        "Every record of the cluster in ZooKeeper is readable.",
        "look at the node, then remove it or restore the ensemble's backup",
        state_rules.records_intact,
        by_view=True,
    ),
    Rule(
        "I3",
        "no_orphans",
        "Nothing remains of what is not listed.",
        "the leader's cleaner removes it; see its log when it stays",
        state_rules.no_orphans,
    ),
    Rule(
        "I3",
        "no_stray_processes",
        "No worker runs for a slot that no assignment names.",
        "restart the supervisor of that slot; a worker alone ends itself when its lease is over",
        state_rules.no_stray_processes,
    ),
    Rule(
        "I4",
        "blobs_present",
        "Archive, conf and code of every topology are stored, each with its content hash.",
        "start the nimbus that holds them, or submit the topology again",
        state_rules.blobs_present,
    ),
    Rule(
        "I4",
        "blobs_replicated",
        "The code of every topology is on as many nimbuses as it wants, or on all there are.",
        "`storm-dagster nimbuses` shows which one lacks it; it fetches what it lacks by itself",
        state_rules.blobs_replicated,
        heals=True,
    ),
    Rule(
        "I5",
        "epoch_rises",
        "Nothing was written in an epoch that was never led, and no state went back.",
        "ZooKeeper's data was replaced by an older copy: restore the newest, or submit again",
        state_rules.epoch_rises,
    ),
    Rule(
        "I6",
        "one_topology_per_token",
        "One client token, and one name, stand for one topology.",
        "kill the older of the two",
        state_rules.one_topology_per_token,
    ),
    Rule(
        "I7",
        "one_version_per_worker",
        "Each worker runs one version: the new one when it is upgraded; an upgrade and its status go together.",
        "`storm-dagster restart NAME`",
        state_rules.one_version_per_worker,
    ),
    Rule(
        "I8",
        "no_idle_writes",
        "Nothing is written when nothing changed.",
        "find the process that rewrites it in the logs of nimbus and of Dagster",
        state_rules.no_idle_writes,
    ),
    Rule(
        "I8",
        "wishes_end",
        "No rebalance waits for ever.",
        "`storm-dagster restart NAME`",
        state_rules.rebalances_end,
    ),
)
"""All rules, in the order of the invariants."""


def violations(snapshot: ClusterSnapshot) -> list[Violation]:
    """All violations in one snapshot."""
    return [violation for rule in RULES for violation in rule.check(snapshot)]
