"""Bringing about what is declared: submit, hot deploy, gray upgrade, rebalance, activate, each through nimbus.

Every change is a run in the code location of the cluster, as from the command line; nothing here writes
cluster state.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from storm_dagster.client import NimbusClient, submit_uploaded, upload, wait_for_run, wait_for_tasks
from storm_dagster.defs.declared import (
    CODE_VERSION_KEY,
    Actual,
    Declaration,
    Described,
    differences,
    with_parallelism,
)
from storm_dagster.defs.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.model.endpoints import home_dir
from storm_dagster.model.errors import InvalidTopology, KeyNotFound, Unavailable
from storm_dagster.model.names import conf_key
from storm_dagster.packaging.bundle import bundle_target

__all__ = ["DeployPolicy", "bring_about", "read_actual"]

DeployPolicy = Literal["hot", "gray", "manual"]
_WAIT_SECS = 300.0

Say = Callable[[str], None]


def read_actual(zookeeper: ZooKeeperResource, blobstore: BlobStoreResource, name: str) -> Actual | None:
    """The running topology as ZooKeeper and its stored conf have it; ``None`` when there is none.

    :class:`Unavailable` when the cluster is out of reach.
    """
    with zookeeper.cluster() as cluster:
        topology = cluster.load_view().topology_named(name)
        if topology is None:
            return None
        version: str | None = None
        try:
            with blobstore.blobs(cluster) as blobs:
                conf = json.loads(blobs.read(conf_key(topology.code_dir)))
            version = str(conf[CODE_VERSION_KEY]) if CODE_VERSION_KEY in conf else None
        except (KeyNotFound, ValueError):
            version = None
    base = topology.base
    return Actual(topology.id, base.status, base.workers, dict(base.executors), version)


def _upload(
    nimbus: NimbusClient, declaration: Declaration, described: Described, executors: Mapping[str, int]
) -> Any:
    if described.spec is None or described.problem is not None or described.code_version is None:
        raise InvalidTopology(f"{declaration.name!r} cannot be deployed: {described.problem}")
    conf = {**declaration.submitted_conf, CODE_VERSION_KEY: described.code_version}
    with tempfile.TemporaryDirectory(prefix="storm-dagster-deploy-") as folder:
        bundle = bundle_target(
            declaration.target, declaration.args, folder=Path(folder), home=home_dir(declaration.home)
        )
        spec = with_parallelism(bundle.topology, executors)
        return upload(nimbus, archive=bundle.archive, conf=conf, topology=spec, name=declaration.name)


def _change(nimbus: NimbusClient, name: str, verb: str, body: Mapping[str, Any], say: Say) -> str | None:
    """One change, waited for; the id of its run."""
    answer = nimbus.post(f"/v1/topologies/{name}/{verb}", dict(body), repeat=False)
    run_id = answer.get("run_id")
    say(f"{verb}: run {run_id or 'none, the leader did it itself'}")
    if run_id:
        wait_for_run(nimbus, run_id, deadline=time.monotonic() + _WAIT_SECS)
    return run_id


def _gray(
    nimbus: NimbusClient,
    declaration: Declaration,
    described: Described,
    batch: Mapping[str, Any],
    token: str,
    say: Say,
) -> None:
    """Batch by batch until every worker runs the new code, then complete. A failing batch rolls back by itself."""
    name = declaration.name
    uploaded = _upload(nimbus, declaration, described, declaration.parallelism)
    body: dict[str, Any] = {"handle": uploaded.handle, "token": token, **batch}
    deadline = time.monotonic() + 2 * _WAIT_SECS
    while time.monotonic() < deadline:
        _change(nimbus, name, "gray-upgrade", body, say)
        document = nimbus.get(f"/v1/topologies/{name}")
        if document["status"] != "UPGRADING":
            raise Unavailable(
                f"the gray upgrade of {name!r} ended as {document['status']}: see the run of gray_upgrade_topology"
            )
        workers = (document.get("upgrade") or {}).get("workers") or {}
        former = sorted(key for key, state in workers.items() if state == "former")
        if not former:
            _change(nimbus, name, "complete-upgrade", {}, say)
            return
        # The master keeps its worker; further batches are taken as the first was chosen.
        body = {"token": token, **batch}
    raise Unavailable(f"the gray upgrade of {name!r} was not over in time: `storm-dagster show {name}`")


def bring_about(
    nimbus: NimbusClient,
    declaration: Declaration,
    described: Described,
    actual: Actual | None,
    *,
    policy: DeployPolicy,
    batch: Mapping[str, Any],
    token: str,
    say: Say,
    only_submit: bool = False,
) -> list[str]:
    """Change what differs from the declaration; what was done, in words.

    With ``only_submit`` a topology that runs is left alone. With policy ``manual`` its code is. Raises the
    typed error of whatever refuses.
    """
    name, done = declaration.name, list[str]()
    differ = differences(declaration, described, actual)
    if "running" in differ:
        uploaded = _upload(nimbus, declaration, described, declaration.parallelism)
        submission = submit_uploaded(
            nimbus,
            uploaded,
            name=name,
            token=token,
            inactive=declaration.inactive,
            progress=lambda step, state: say(f"{step}: {state}"),
        )
        return [f"submitted as {submission.id} (run {submission.run_id})"]
    if only_submit or actual is None:
        return []
    if actual.status not in ("ACTIVE", "INACTIVE"):
        say(f"{name} is {actual.status}: it is left alone until that is over")
        return []
    if "code" in differ:
        if policy == "manual":
            say(f"{differ['code']}: deploy is manual, the code is left alone")
        elif policy == "gray" and actual.code_version is not None and actual.workers > 1:
            _gray(nimbus, declaration, described, batch, token, say)
            done.append(f"gray upgrade to {described.code_version}")
        else:
            uploaded = _upload(
                nimbus, declaration, described, {**actual.executors, **declaration.parallelism}
            )
            _change(nimbus, name, "update", {"handle": uploaded.handle, "token": token}, say)
            wait_for_tasks(nimbus, name, deadline=time.monotonic() + _WAIT_SECS)
            done.append(f"hot deploy of {described.code_version}")
    spread = {
        key.partition(".")[2]: declaration.parallelism[key.partition(".")[2]]
        for key in differ
        if key.startswith("parallelism.") and actual.executors.get(key.partition(".")[2]) is not None
    }
    # A hot deploy has brought workers and parallelism about already.
    if (spread or "workers" in differ) and not any(text.startswith("hot") for text in done):
        body: dict[str, Any] = {"wait_secs": 0}
        if "workers" in differ:
            body["workers"] = declaration.workers
        if spread:
            body["executors"] = spread
        _change(nimbus, name, "rebalance", body, say)
        done.append(f"rebalanced: {', '.join(sorted(differ.keys() - {'code', 'target', 'status'}))}")
    if "status" in differ:
        _change(nimbus, name, "deactivate" if declaration.inactive else "activate", {}, say)
        done.append("deactivated" if declaration.inactive else "activated")
    return done
