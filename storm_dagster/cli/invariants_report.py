"""``doctor --invariants``: I1 to I8 asked of the live cluster."""

from __future__ import annotations

import logging
from typing import Any

from storm_dagster.cli.options import Invocation
from storm_dagster.cli.output import Steps, print_json, print_table
from storm_dagster.model.endpoints import ClusterFile
from storm_dagster.model.errors import Corrupt, Unavailable
from storm_dagster.model.security import Security


def report_invariants(invocation: Invocation, stable_secs: float) -> int:
    """Print what breaks an invariant, and for how long it was looked; the exit code (6 when one is broken).

    Processes are inspected when HOME belongs to this machine's cluster. :class:`Unavailable` without a cluster.
    """
    from storm_dagster.blobstore.client import NimbusBlobClient
    from storm_dagster.core.invariants import RULES
    from storm_dagster.operations.context import OperationsContext
    from storm_dagster.operations.read.inspection import inspect_cluster
    from storm_dagster.zk.storm_cluster_state import StormClusterState

    local = ClusterFile.read(invocation.home) is not None and invocation.conf_dir is None
    if not local and invocation.conf_dir is None:
        raise Unavailable(
            f"no cluster runs in {invocation.home}: start one with `storm-dagster dev`, or name another with "
            "--home or --conf-dir"
        )
    with StormClusterState.open(invocation.conf.values) as cluster:

        def leader_url() -> str:
            known = cluster.epoch()
            if known is None:
                raise Unavailable("no nimbus has led this cluster yet: start one with `storm-dagster nimbus`")
            return known[1].http

        with (
            NimbusBlobClient(leader_url, security=Security.of(invocation.conf)) as blobs,
            Steps("looking", quiet=invocation.json) as steps,
        ):
            ctx = OperationsContext(
                cluster=cluster,
                blobs=blobs,
                conf=invocation.conf,
                log=logging.getLogger("storm_dagster.doctor"),
                planner=_no_planner,
            )
            steps.begin("invariants")
            seen = inspect_cluster(ctx, home=invocation.home if local else None, stable_secs=stable_secs)
            steps.done("invariants")
    if invocation.json:
        print_json(
            {
                "ok": seen.sound,
                "violations": [violation.to_document() for violation in seen.violations],
                "warnings": [violation.to_document() for violation in seen.warnings],
                "waiting_for_the_cleaner": list(seen.garbage),
                "rules": {rule.name: rule.invariant for rule in RULES},
                "topologies": len(seen.view.topologies),
                "processes": "this machine" if local else "not looked at",
                "looks": seen.snapshots,
                "seconds": seen.seconds,
            }
        )
    else:
        rows = [
            (part.invariant, state, part.sentence, part.remedy)
            for state, found in (("broken", seen.violations), ("warning", seen.warnings))
            for part in found
        ]
        if not seen.violations:
            what = f"{len(RULES)} rules hold for {len(seen.view.topologies)} topologies, {seen.snapshots} looks"
            rows.append(("I1-I8", "ok", what, ""))
        if seen.garbage:
            rows.append(("I3", "ok", f"{len(seen.garbage)} left-overs wait for the cleaner", ""))
        print_table("", ["invariant", "state", "found", "how to fix"], rows)
    return 0 if seen.sound else Corrupt.exit_code


def _no_planner(batch: Any) -> Any:
    raise Unavailable("an inspection places nothing: use `storm-dagster plan`")
