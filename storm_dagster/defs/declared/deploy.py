"""Reconciliation of a declared topology: submit, hot deploy, gray upgrade, rebalance, activate,
each through nimbus.

Every change is a run in the code location of the cluster, as from the command line; nothing here
writes cluster state.
"""

import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from storm_dagster.blobstore.store import BlobStore
from storm_dagster.client import NimbusClient, submit_uploaded, upload, wait_for_run, wait_for_tasks
from storm_dagster.client.waiting import wait_for_status
from storm_dagster.defs.declared.declaration import (
    Actual,
    Declaration,
    Described,
    differences,
    with_parallelism,
)
from storm_dagster.host.endpoints import home_dir
from storm_dagster.model import paths
from storm_dagster.model.dagster_names import DECLARED_VERSION_KEY
from storm_dagster.model.errors import (
    Conflict,
    InvalidTopology,
    KeyNotFound,
    NotAlive,
    StormDagsterError,
)
from storm_dagster.model.names import conf_key
from storm_dagster.model.view import ClusterView, UpgradeState
from storm_dagster.packaging.archive import bundle_target
from storm_dagster.zk.storm_cluster_state import StormClusterState

DeployPolicy = Literal["hot", "gray", "manual"]
_WAIT_SECS, _LONGEST_SECS = 300.0, 900.0
_PAUSE_SECS = 1.0
_QUEUED_SECS = 15.0
"""A queue with room starts a run sooner, stock settings included."""

Notify = Callable[[str], None]


class LeftToQueue(Exception):
    """The change is a queued run of the instance of this very run, whose slot it may be waiting
    for.
    """


def read_actual(
    cluster: StormClusterState, blobs: BlobStore, name: str, view: ClusterView | None = None
) -> Actual | None:
    """The running topology as ZooKeeper (``view``, else read now) and its stored conf have it;
    ``None`` when there is none.

    :class:`Unavailable` when the cluster is out of reach.
    """
    topology = (view or cluster.load_view()).topology_named(name)
    if topology is None:
        return None
    base = topology.base
    upgrade = cluster.read_upgrade(topology.id) if base.status == "UPGRADING" else UpgradeState()
    record = upgrade.record
    brings = None if record is None or record.rollback else record.code_dir
    conf = _stored_conf(blobs, topology.code_dir)
    return Actual(
        topology.id,
        base.status,
        base.workers,
        dict(base.executors),
        _version_in(conf),
        conf=conf,
        code_dir=topology.code_dir,
        upgrading_to=None if brings is None else _version_in(_stored_conf(blobs, brings)),
        upgraded=len(upgrade.upgraded),
    )


@contextmanager
def alone(
    cluster: StormClusterState, name: str, version: str | None, run_id: str, notify: Notify
) -> Iterator[bool]:
    """One deploy of a declared topology at a time, whatever started it and wherever it runs.

    Waits while a run deploys another version; ``False`` at once while one deploys this very
    version: there is nothing to do. :class:`Conflict` after five minutes.
    """
    path, deadline = paths.deploy(name), time.monotonic() + _WAIT_SECS
    mine = json.dumps({"run": run_id, "version": version}).encode()
    while not cluster.state.claim_ephemeral_node(path, mine):
        other = json.loads(cluster.state.get_data(path) or b"{}")
        if version is not None and other.get("version") == version:
            notify(
                f"run {other['run']} deploys version {version} of {name} now: it is left to that run"
            )
            yield False
            return
        if time.monotonic() >= deadline:
            raise Conflict(
                f"run {other.get('run')} has been deploying {name!r} for {_WAIT_SECS:g} s: launch this again when it has "
                "finished, or cancel it"
            )
        time.sleep(_PAUSE_SECS)
    try:
        yield True
    finally:
        # Without ZooKeeper the session ends, and the node with it.
        with suppress(StormDagsterError):
            if cluster.state.owned(path):
                cluster.state.delete_node(path)


def _stored_conf(blobs: BlobStore, code_dir: str) -> dict[str, Any]:
    """Empty when the blob is gone, as of a topology that somebody just replaced."""
    try:
        conf = json.loads(blobs.read(conf_key(code_dir)))
    except (KeyNotFound, ValueError):
        return {}
    return conf if isinstance(conf, dict) else {}


def _version_in(conf: Mapping[str, Any]) -> str | None:
    return str(conf[DECLARED_VERSION_KEY]) if DECLARED_VERSION_KEY in conf else None


def _patience(shares_queue: Callable[[str], bool]) -> Callable[[Mapping[str, Any]], None]:
    """Raises :class:`LeftToQueue` for a run that has been queued for long in the queue of this
    run.
    """
    until = time.monotonic() + _QUEUED_SECS

    def check(run: Mapping[str, Any]) -> None:
        if run["status"] == "QUEUED" and time.monotonic() > until and shares_queue(run["run_id"]):
            raise LeftToQueue(
                f"run {run['run_id']} is queued: this run makes room for it, and declared_topologies_sensor records what it "
                "deploys (concurrency.runs.max_concurrent_runs limits how many run at once)"
            )

    return check


def _needs_hot_deploy(actual: Actual) -> str | None:
    """Reason why the running topology cannot be upgraded worker by worker; ``None`` when it can."""
    if actual.workers < 2:
        return f"{actual.topology_id} has one worker"
    if actual.conf.get("topology.master.single.worker") is not True:
        return f"the topology master of {actual.topology_id} shares its worker"
    return None


@dataclass(frozen=True)
class Reconciler:
    """Brings one topology to its declaration, through nimbus."""

    nimbus: NimbusClient
    declaration: Declaration
    described: Described
    policy: DeployPolicy
    batch: Mapping[str, Any]
    """The component whose workers a gray upgrade takes first, if any, and the number of workers in
    each batch.
    """
    token: str
    notify: Notify
    shares_queue: Callable[[str], bool]
    """Whether a run of nimbus waits in the queue of the caller's run."""

    def change(self, verb: str, body: Mapping[str, Any]) -> None:
        """Ask for a change by its verb and body, and wait for its run."""
        path = f"/v1/topologies/{self.declaration.name}/{verb}"
        answer = self.nimbus.post(path, dict(body), repeat=False, launches=True)
        run_id = answer.get("run_id")
        self.notify(f"{verb}: run {run_id or 'none, the leader did it itself'}")
        if run_id:
            deadline = time.monotonic() + _WAIT_SECS
            wait_for_run(
                self.nimbus, run_id, deadline=deadline, on_document=_patience(self.shares_queue)
            )

    def run(
        self, actual: Actual | None, *, only_submit: bool = False, may_submit: bool = True
    ) -> list[str]:
        """Change what differs from the declaration; what was done, in words.

        With ``only_submit`` a topology that runs is left alone, without ``may_submit`` one that
        does not run. With policy ``manual`` its code is. Raises the typed error of whatever
        refuses, and :class:`LeftToQueue` where ``shares_queue`` says of a run of nimbus that it
        waits in the caller's queue.
        """
        declaration, described, name, done = (
            self.declaration,
            self.described,
            self.declaration.name,
            list[str](),
        )
        differ = differences(declaration, described, actual)
        if "running" in differ:
            if not may_submit:
                self.notify(
                    f"{differ['running']}: it was ended, and only somebody brings it back, by a deploy by hand"
                )
                return []
            submission = submit_uploaded(
                self.nimbus,
                self._upload(),
                name=name,
                token=self.token,
                inactive=declaration.inactive,
                progress=lambda step, state: self.notify(f"{step}: {state}"),
                on_document=_patience(self.shares_queue),
            )
            return [f"submitted as {submission.id} (run {submission.run_id})"]
        if only_submit or actual is None:
            return []
        going_on = (
            actual.status == "UPGRADING"
            and actual.upgrading_to == described.code_version is not None
        )
        if actual.status not in ("ACTIVE", "INACTIVE") and not going_on:
            self.notify(f"{name} is {actual.status}: it is left alone until that is over")
            return []
        if "code" in differ:
            if self.policy == "manual" and not going_on:
                self.notify(f"{differ['code']}: deploy is manual, the code is left alone")
            else:
                gray = going_on or (self.policy == "gray" and actual.status == "ACTIVE")
                done.append(self._deploy_code(actual, gray=gray))
        spread = {
            component: count
            for component, count in sorted(declaration.parallelism.items())
            if f"parallelism.{component}" in differ and component in actual.executors
        }
        more_or_fewer = {"workers": declaration.workers} if "workers" in differ else {}
        # A hot deploy has brought workers and parallelism about already.
        if (spread or more_or_fewer) and not any(text.startswith("hot") for text in done):
            executors = {"executors": spread} if spread else {}
            self.change("rebalance", {"wait_secs": 0, **more_or_fewer, **executors})
            done.append(
                "rebalanced: "
                + ", ".join(f"{key}={n}" for key, n in {**more_or_fewer, **spread}.items())
            )
        if "status" in differ:
            self.change("deactivate" if declaration.inactive else "activate", {})
            done.append("deactivated" if declaration.inactive else "activated")
        return done

    def _deploy_code(self, actual: Actual, *, gray: bool) -> str:
        """Replace the running code by the declared code; returns the action as text."""
        name, version = self.declaration.name, self.described.code_version
        under_way = actual.status == "UPGRADING"
        if gray and not under_way and (why_not := _needs_hot_deploy(actual)):
            self.notify(f"{why_not}: a hot deploy instead of a gray upgrade")
            gray = False
        if gray:
            handle = None if under_way else self._upload().handle
            self._upgrade_all_workers(handle)
            return f"gray upgrade to {version}"
        self.change("update", {"handle": self._upload().handle, "token": self.token})
        wait_for_tasks(self.nimbus, name, deadline=time.monotonic() + _WAIT_SECS)
        return f"hot deploy of {version}"

    def _upgrade_all_workers(self, handle: str | None) -> None:
        """Begin the upgrade with the uploaded code of ``handle`` (without: go on), and take batch
        after batch.

        Returns when the upgrade is complete. :class:`InvalidTopology` when the new code made it
        roll back, :class:`Unavailable` after 15 minutes; what is under way then goes on, and so
        does the next call.
        """
        name, deadline = self.declaration.name, time.monotonic() + _LONGEST_SECS
        if handle is not None:
            self.change("gray-upgrade", {"handle": handle, "token": self.token, **self.batch})
        while True:
            document = wait_for_status(
                self.nimbus, name, _batch_over, deadline=deadline, what="the end of a batch"
            )
            if document is None:
                raise NotAlive(f"topology {name!r} was killed while it was upgraded")
            if document["status"] == "ACTIVE":
                return
            upgrade = document.get("upgrade") or {}
            if document["status"] != "UPGRADING" or upgrade.get("rollback"):
                reason = upgrade.get("reason") or "somebody asked for that"
                raise InvalidTopology(f"the gray upgrade of {name!r} is rolled back: {reason}")
            self.change("gray-upgrade", next_batch(document, self.batch))

    def _upload(self) -> Any:
        declaration, described = self.declaration, self.described
        if (
            described.spec is None
            or described.problem is not None
            or described.code_version is None
        ):
            raise InvalidTopology(f"{declaration.name!r} cannot be deployed: {described.problem}")
        # A declaration is the whole conf: a key that is gone from it is gone from the topology.
        whole = {"topology.update.keep.conf": False}
        conf = {**declaration.submitted_conf, **whole, DECLARED_VERSION_KEY: described.code_version}
        home = home_dir(declaration.home)
        with tempfile.TemporaryDirectory(prefix="storm-dagster-deploy-") as folder:
            bundle = bundle_target(
                declaration.target, declaration.args, folder=Path(folder), home=home
            )
            spec = with_parallelism(bundle.topology, declaration.parallelism)
            return upload(
                self.nimbus, archive=bundle.archive, conf=conf, topology=spec, name=declaration.name
            )


def next_batch(document: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """The body of the next call, by `show` of the topology: the component's workers, and then the
    others.
    """
    left = {worker for worker, state in document["upgrade"]["workers"].items() if state == "former"}
    component = batch.get("component")
    of_component = {
        f"{task['host']}:{task['port']}"
        for task in document["tasks"]
        if task["component"] == component
    }
    wanted = dict(batch) if left & of_component else {"number": batch.get("number", 1)}
    # Nothing of a former batch's token: with it the call would only be told that the upgrade began.
    return {key: value for key, value in wanted.items() if value is not None}


def _batch_over(document: Mapping[str, Any] | None) -> bool:
    """Whether no batch is under way, nor an upgrade of which every worker is through about to be
    ended.
    """
    if document is None or document["status"] != "UPGRADING":
        return True
    upgrade = document.get("upgrade")
    if not upgrade or upgrade["asked"] or upgrade["upgrading"]:
        return False
    return "former" in upgrade["workers"].values()
