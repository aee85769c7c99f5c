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

from storm_dagster.blobstore.store import BlobStore
from storm_dagster.client import NimbusClient, submit_uploaded, upload, wait_for_run, wait_for_tasks
from storm_dagster.defs.declared import (
    CODE_VERSION_KEY,
    Actual,
    Declaration,
    Described,
    differences,
    with_parallelism,
)
from storm_dagster.defs.declared_upgrade import upgrade_all_workers
from storm_dagster.defs.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.model.endpoints import home_dir
from storm_dagster.model.errors import InvalidTopology, KeyNotFound
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
        base, upgrading_to = topology.base, None
        with blobstore.blobs(cluster) as blobs:
            conf = _stored_conf(blobs, topology.code_dir)
            if base.status == "UPGRADING":
                record = cluster.read_upgrade(topology.id).record
                if record is not None and not record.rollback:
                    upgrading_to = _version_in(_stored_conf(blobs, record.code_dir))
    return Actual(
        topology.id,
        base.status,
        base.workers,
        dict(base.executors),
        _version_in(conf),
        conf=conf,
        code_dir=topology.code_dir,
        upgrading_to=upgrading_to,
    )


def _stored_conf(blobs: BlobStore, code_dir: str) -> dict[str, Any]:
    """Empty when the blob is gone, as of a topology that somebody just replaced."""
    try:
        conf = json.loads(blobs.read(conf_key(code_dir)))
    except (KeyNotFound, ValueError):
        return {}
    return conf if isinstance(conf, dict) else {}


def _version_in(conf: Mapping[str, Any]) -> str | None:
    return str(conf[CODE_VERSION_KEY]) if CODE_VERSION_KEY in conf else None


def _upload(nimbus: NimbusClient, declaration: Declaration, described: Described) -> Any:
    if described.spec is None or described.problem is not None or described.code_version is None:
        raise InvalidTopology(f"{declaration.name!r} cannot be deployed: {described.problem}")
    conf = {**declaration.submitted_conf, CODE_VERSION_KEY: described.code_version}
    with tempfile.TemporaryDirectory(prefix="storm-dagster-deploy-") as folder:
        bundle = bundle_target(
            declaration.target, declaration.args, folder=Path(folder), home=home_dir(declaration.home)
        )
        spec = with_parallelism(bundle.topology, declaration.parallelism)
        return upload(nimbus, archive=bundle.archive, conf=conf, topology=spec, name=declaration.name)


def _change(nimbus: NimbusClient, name: str, verb: str, body: Mapping[str, Any], say: Say) -> str | None:
    """One change, waited for; the id of its run."""
    answer = nimbus.post(f"/v1/topologies/{name}/{verb}", dict(body), repeat=False)
    run_id = answer.get("run_id")
    say(f"{verb}: run {run_id or 'none, the leader did it itself'}")
    if run_id:
        wait_for_run(nimbus, run_id, deadline=time.monotonic() + _WAIT_SECS)
    return run_id


def _deploy_code(
    nimbus: NimbusClient,
    declaration: Declaration,
    described: Described,
    actual: Actual,
    *,
    gray: bool,
    batch: Mapping[str, Any],
    token: str,
    say: Say,
) -> str:
    """The declared code in the place of what runs; what was done, in words."""
    name = declaration.name
    under_way = actual.status == "UPGRADING"
    if gray and not under_way and (why_not := _needs_hot_deploy(actual)):
        say(f"{why_not}: a hot deploy instead of a gray upgrade")
        gray = False
    if gray:
        handle = None if under_way else _upload(nimbus, declaration, described).handle

        def change(verb: str, body: Mapping[str, Any]) -> None:
            _change(nimbus, name, verb, body, say)

        upgrade_all_workers(nimbus, name, handle, batch, token=token, change=change)
        return f"gray upgrade to {described.code_version}"
    uploaded = _upload(nimbus, declaration, described)
    _change(nimbus, name, "update", {"handle": uploaded.handle, "token": token}, say)
    wait_for_tasks(nimbus, name, deadline=time.monotonic() + _WAIT_SECS)
    return f"hot deploy of {described.code_version}"


def _needs_hot_deploy(actual: Actual) -> str | None:
    """Why what runs cannot be upgraded worker by worker; ``None`` when it can."""
    if actual.workers < 2:
        return f"{actual.topology_id} has one worker"
    if actual.conf.get("topology.master.single.worker") is not True:
        return f"the topology master of {actual.topology_id} shares its worker"
    return None


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
        uploaded = _upload(nimbus, declaration, described)
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
    going_on = actual.status == "UPGRADING" and actual.upgrading_to == described.code_version is not None
    if actual.status not in ("ACTIVE", "INACTIVE") and not going_on:
        say(f"{name} is {actual.status}: it is left alone until that is over")
        return []
    if "code" in differ:
        if policy == "manual" and not going_on:
            say(f"{differ['code']}: deploy is manual, the code is left alone")
        else:
            gray = going_on or (policy == "gray" and actual.status == "ACTIVE")
            done.append(
                _deploy_code(
                    nimbus, declaration, described, actual, gray=gray, batch=batch, token=token, say=say
                )
            )
    spread = {
        component: count
        for component, count in sorted(declaration.parallelism.items())
        if f"parallelism.{component}" in differ and component in actual.executors
    }
    more_or_fewer = {"workers": declaration.workers} if "workers" in differ else {}
    # A hot deploy has brought workers and parallelism about already.
    if (spread or more_or_fewer) and not any(text.startswith("hot") for text in done):
        executors = {"executors": spread} if spread else {}
        _change(nimbus, name, "rebalance", {"wait_secs": 0, **more_or_fewer, **executors}, say)
        done.append(
            "rebalanced: " + ", ".join(f"{key}={n}" for key, n in {**more_or_fewer, **spread}.items())
        )
    if "status" in differ:
        _change(nimbus, name, "deactivate" if declaration.inactive else "activate", {}, say)
        done.append("deactivated" if declaration.inactive else "activated")
    return done
