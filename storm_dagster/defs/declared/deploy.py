"""Reconciliation of a declared topology, through nimbus.

Its steps are submit, hot deploy, gray upgrade, rebalance and activate. Every change is a run in the
code location of the cluster, as from the command line; this module does not write cluster state.
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
from storm_dagster.core.submission.kept_sizes import with_parallelism
from storm_dagster.defs.declared.declaration import (
    Declaration,
    RunningTopology,
    TargetDescription,
    differences,
)
from storm_dagster.host.endpoints import home_dir
from storm_dagster.model import paths
from storm_dagster.model.dagster_names import DECLARED_OWNER_KEY, DECLARED_VERSION_KEY
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
"""Deploy of changed code: at once, by a gray upgrade, or only by a run that requests it."""
_WAIT_SECS = 300.0
"""Longest wait for one change, or for the deploy of another run."""
_MAX_UPGRADE_SECS = 900.0
"""Longest wait for a gray upgrade of all workers."""
_PAUSE_SECS = 1.0
"""Pause between two attempts to lock the deploys of a topology."""
_QUEUED_SECS = 15.0
"""A queue with room starts a run sooner, stock settings included."""

Notify = Callable[[str], None]
"""Function that logs one line."""


class RunQueued(Exception):
    """The change is a run that is queued in the Dagster instance of this run.

    It may be waiting for the place of this run.
    """


def read_actual(
    cluster: StormClusterState, blobs: BlobStore, name: str, view: ClusterView | None = None
) -> RunningTopology | None:
    """Read the running topology from ZooKeeper and its stored conf.

    ``view`` spares a read. ``None`` if the topology does not exist, :class:`Unavailable` if the
    cluster is unreachable.
    """
    topology = (view or cluster.load_view()).topology_named(name)
    if topology is None:
        return None
    base = topology.base
    upgrade = cluster.read_upgrade(topology.id) if base.status == "UPGRADING" else UpgradeState()
    record = upgrade.record
    # During a rollback the new code no longer counts.
    upgrading_to = None
    conf = _stored_conf(blobs, topology.code_dir)
    owner = _owner_in(conf)
    if record is not None and not record.rollback:
        new_conf = _stored_conf(blobs, record.code_dir)
        upgrading_to = _version_in(new_conf)
        # A gray upgrade that takes the topology over is continued by the new owner.
        owner = _owner_in(new_conf) or owner
    return RunningTopology(
        topology.id,
        base.status,
        base.workers,
        dict(base.executors),
        _version_in(conf),
        conf=conf,
        code_dir=topology.code_dir,
        upgrading_to=upgrading_to,
        upgraded=len(upgrade.upgraded),
        owner=owner,
    )


@contextmanager
def deploy_lock(
    cluster: StormClusterState,
    name: str,
    version: str | None,
    run_id: str,
    notify: Notify,
    owner: str | None = None,
) -> Iterator[bool]:
    """Lock of the deploys of a declared topology; true if this run has it.

    There is one deploy at a time, in any process of any code location. Waits while a run deploys
    another version, or for another ``owner``. ``False`` at once while a run deploys the same
    version for the same owner, because no work is left. :class:`Conflict` after five minutes.
    """
    path = paths.deploy(name)
    deadline = time.monotonic() + _WAIT_SECS
    claim = json.dumps({"run": run_id, "version": version, "owner": owner}).encode()
    while not cluster.state.claim_ephemeral_node(path, claim):
        other_claim = json.loads(cluster.state.get_data(path) or b"{}")
        is_same_version = version is not None and other_claim.get("version") == version
        # A run of an earlier release claims without an owner.
        if is_same_version and other_claim.get("owner") in (None, owner):
            notify(
                f"run {other_claim['run']} deploys version {version} of {name} now: "
                "it is left to that run"
            )
            yield False
            return
        if time.monotonic() >= deadline:
            raise Conflict(
                f"run {other_claim.get('run')} has been deploying {name!r} for {_WAIT_SECS:g} s: "
                "launch this again when it has finished, or cancel it"
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
    """The stored conf.

    Empty if the blob is missing, as for a topology that was just replaced.
    """
    try:
        conf = json.loads(blobs.read(conf_key(code_dir)))
    except (KeyNotFound, ValueError):
        return {}
    return conf if isinstance(conf, dict) else {}


def _version_in(conf: Mapping[str, Any]) -> str | None:
    """The code version of the declaration that was deployed with the conf, if any."""
    return str(conf[DECLARED_VERSION_KEY]) if DECLARED_VERSION_KEY in conf else None


def _owner_in(conf: Mapping[str, Any]) -> str | None:
    """The owner that deployed the conf, if any."""
    owner = conf.get(DECLARED_OWNER_KEY)
    return str(owner) if owner else None


def _refuse_full_queue(shares_queue: Callable[[str], bool]) -> Callable[[Mapping[str, Any]], None]:
    """A check that raises :class:`RunQueued` for a run that stays queued.

    Only for a run in the queue of this run.
    """
    queue_deadline = time.monotonic() + _QUEUED_SECS

    def check(run: Mapping[str, Any]) -> None:
        if run["status"] != "QUEUED" or time.monotonic() <= queue_deadline:
            return
        if shares_queue(run["run_id"]):
            raise RunQueued(
                f"run {run['run_id']} is queued: this run makes room for it, "
                "and declared_topologies_sensor records its deploy "
                "(concurrency.runs.max_concurrent_runs limits the runs at one time)"
            )

    return check


def _needs_hot_deploy(actual: RunningTopology) -> str | None:
    """Reason why a gray upgrade is not possible; ``None`` if it is."""
    if actual.workers < 2:
        return f"{actual.topology_id} has one worker"
    if actual.conf.get("topology.master.single.worker") is not True:
        return f"the topology master of {actual.topology_id} shares its worker"
    return None


@dataclass(frozen=True)
class Reconciler:
    """Reconciler of one topology with its declaration, through nimbus."""

    nimbus: NimbusClient
    declaration: Declaration
    described: TargetDescription
    policy: DeployPolicy
    batch: Mapping[str, Any]
    """Batches of a gray upgrade.

    The component whose workers are upgraded first, if any, and the number of workers in each batch.
    """
    token: str
    """Client token of the submission, update or gray upgrade."""
    notify: Notify
    shares_queue: Callable[[str], bool]
    """True if a run of nimbus waits in the queue of the caller's run."""
    take_over: bool = False
    """True to deploy over another owner."""

    def change(self, verb: str, body: Mapping[str, Any]) -> None:
        """Request a change by its verb and body, and wait for its run, if it has one.

        :class:`RunQueued` if that run waits for the place of this run.
        """
        path = f"/v1/topologies/{self.declaration.name}/{verb}"
        response = self.nimbus.post(path, dict(body), repeat=False, launches=True)
        run_id = response.get("run_id")
        self.notify(f"{verb}: run {run_id or 'none, the leader did it itself'}")
        if run_id:
            wait_for_run(
                self.nimbus,
                run_id,
                deadline=time.monotonic() + _WAIT_SECS,
                on_document=_refuse_full_queue(self.shares_queue),
            )

    def run(
        self, actual: RunningTopology | None, *, only_submit: bool = False, may_submit: bool = True
    ) -> list[str]:
        """Apply the differences from the declaration, and return the changes in words.

        With ``only_submit`` a running topology stays unchanged, without ``may_submit`` one that
        does not run is not submitted. With policy ``manual`` the code of a running topology stays.
        A topology of another owner is only changed with ``take_over``, by a deploy of the code,
        which is the same or not: :class:`Conflict` without it. Raises the typed error of a refused
        change, and :class:`RunQueued` if ``shares_queue`` is true for a run of nimbus that stays
        queued.
        """
        declaration = self.declaration
        described = self.described
        name = declaration.name
        differ = differences(declaration, described, actual)
        if "owner" in differ and not self.take_over:
            raise Conflict(f"topology {name!r} is {differ['owner']}")
        if "running" in differ:
            if not may_submit:
                self.notify(
                    f"{differ['running']}: it was ended, and stays so until a user deploys it by "
                    "hand"
                )
                return []
            return [self._submit()]
        if only_submit or actual is None:
            return []
        is_own_upgrade = (
            actual.status == "UPGRADING"
            and described.code_version is not None
            and actual.upgrading_to == described.code_version
        )
        if actual.status not in ("ACTIVE", "INACTIVE") and not is_own_upgrade:
            self.notify(f"{name} is {actual.status}: it is not changed until that is over")
            return []
        changes = self._change_code(differ, actual, is_own_upgrade=is_own_upgrade)
        # A hot deploy has applied workers and parallelism, but for executors that it keeps from a
        # rebalance; the text is of _deploy_code.
        if any(text.startswith("hot") for text in changes):
            differ = {**self._kept_executors(differ), **_without_sizes(differ)}
        changes += self._rebalance(differ, actual)
        if "status" in differ:
            self.change("deactivate" if declaration.inactive else "activate", {})
            changes.append("deactivated" if declaration.inactive else "activated")
        return changes

    def _change_code(
        self, differ: Mapping[str, str], actual: RunningTopology, *, is_own_upgrade: bool
    ) -> list[str]:
        """Deploy the code if it differs and the policy allows it, or to take the topology over.

        Returns the actions as texts. The owner is stored with the code, so that a take-over deploys
        the same code as well. With ``is_own_upgrade`` the current gray upgrade continues.
        """
        owner = self.declaration.owner
        takes_over = self.take_over and actual.owner != owner
        if "code" not in differ and not takes_over:
            return []
        if self.policy == "manual" and not (is_own_upgrade or takes_over):
            self.notify(f"{differ['code']}: deploy is manual, the code is not changed")
            return []
        gray = is_own_upgrade or (self.policy == "gray" and actual.status == "ACTIVE")
        changes = [self._deploy_code(actual, gray=gray)]
        if takes_over:
            changes.append(f"taken over from {actual.owner or 'no owner'} by {owner}")
        return changes

    def _submit(self) -> str:
        """Submit the declared topology; returns the action as text."""
        submission = submit_uploaded(
            self.nimbus,
            self._upload(),
            name=self.declaration.name,
            token=self.token,
            inactive=self.declaration.inactive,
            progress=lambda step, state: self.notify(f"{step}: {state}"),
            on_document=_refuse_full_queue(self.shares_queue),
        )
        return f"submitted as {submission.id} (run {submission.run_id})"

    def _kept_executors(self, differ: Mapping[str, str]) -> dict[str, str]:
        """Differences of the parallelism that a hot deploy has left.

        They are of components whose declared number is that of the former code as well: an update
        keeps the number that a rebalance has set.
        """
        document = self.nimbus.get(f"/v1/topologies/{self.declaration.name}")
        running = {name: part["executors"] for name, part in document["components"].items()}
        left: dict[str, str] = {}
        for component, count in self.declaration.parallelism.items():
            key = f"parallelism.{component}"
            if key in differ and running.get(component) != count:
                left[key] = differ[key]
        return left

    def _rebalance(self, differ: Mapping[str, str], actual: RunningTopology) -> list[str]:
        """Rebalance if workers or executors differ; returns the action as text, if any.

        Components that the running topology does not have are left out.
        """
        executors = {
            component: count
            for component, count in sorted(self.declaration.parallelism.items())
            if f"parallelism.{component}" in differ and component in actual.executors
        }
        sizes: dict[str, Any] = {}
        if "workers" in differ:
            sizes["workers"] = self.declaration.workers
        if not executors and not sizes:
            return []
        body: dict[str, Any] = {"wait_secs": 0, **sizes}
        if executors:
            body["executors"] = executors
        self.change("rebalance", body)
        sizes.update(executors)
        return ["rebalanced: " + ", ".join(f"{key}={count}" for key, count in sizes.items())]

    def _deploy_code(self, actual: RunningTopology, *, gray: bool) -> str:
        """Replace the running code by the declared code; returns the action as text.

        With ``gray`` by a gray upgrade, which continues the current one; by a hot deploy if the
        topology does not allow that. Returns when all tasks run, or the upgrade is complete.
        """
        name = self.declaration.name
        version = self.described.code_version
        is_upgrading = actual.status == "UPGRADING"
        if gray and not is_upgrading:
            obstacle = _needs_hot_deploy(actual)
            if obstacle:
                self.notify(f"{obstacle}: a hot deploy instead of a gray upgrade")
                gray = False
        if gray:
            handle = None if is_upgrading else self._upload().handle
            self._upgrade_all_workers(handle)
            return f"gray upgrade to {version}"
        self.change("update", {"handle": self._upload().handle, "token": self.token})
        wait_for_tasks(self.nimbus, name, deadline=time.monotonic() + _WAIT_SECS)
        return f"hot deploy of {version}"

    def _upgrade_all_workers(self, handle: str | None) -> None:
        """Upgrade all workers, batch by batch, with the uploaded code of ``handle``.

        Without ``handle`` the current upgrade continues. Returns when the upgrade is complete.
        :class:`InvalidTopology` if the upgrade was rolled back because of the new code,
        :class:`Unavailable` after 15 minutes; the batch under way then continues, and the next call
        continues the upgrade.
        """
        name = self.declaration.name
        deadline = time.monotonic() + _MAX_UPGRADE_SECS
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
                reason = upgrade.get("reason") or "a user requested it"
                raise InvalidTopology(f"the gray upgrade of {name!r} is rolled back: {reason}")
            self.change("gray-upgrade", next_batch(document, self.batch))

    def _upload(self) -> Any:
        """Pack and upload the declared topology; :class:`InvalidTopology` for a problem."""
        declaration = self.declaration
        described = self.described
        is_described = described.spec is not None and described.code_version is not None
        if not is_described or described.problem is not None:
            raise InvalidTopology(f"{declaration.name!r} cannot be deployed: {described.problem}")
        conf = declaration.submitted_conf
        # A declaration is the complete conf: a key that it no longer has is removed from the
        # topology.
        conf["topology.update.keep.conf"] = False
        conf[DECLARED_VERSION_KEY] = described.code_version
        if declaration.owner is not None:
            conf[DECLARED_OWNER_KEY] = declaration.owner
        home = home_dir(declaration.home)
        with tempfile.TemporaryDirectory(prefix="storm-dagster-deploy-") as folder:
            bundle = bundle_target(
                declaration.target, declaration.args, folder=Path(folder), home=home
            )
            spec = with_parallelism(bundle.topology, declaration.parallelism)
            return upload(
                self.nimbus, archive=bundle.archive, conf=conf, topology=spec, name=declaration.name
            )


def _without_sizes(differ: Mapping[str, str]) -> dict[str, str]:
    """The differences without those of workers and parallelism."""
    return {
        key: text
        for key, text in differ.items()
        if key != "workers" and not key.startswith("parallelism.")
    }


def next_batch(document: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """Body of the request for the next batch, by the document of `show`.

    The workers of the component of ``batch`` are upgraded first, then the others.
    """
    states = document["upgrade"]["workers"]
    former_workers = {worker for worker, state in states.items() if state == "former"}
    component = batch.get("component")
    component_workers = {
        f"{task['host']}:{task['port']}"
        for task in document["tasks"]
        if task["component"] == component
    }
    # Without the token of a former batch, with which the request would only return that the upgrade
    # began.
    if former_workers & component_workers:
        body = dict(batch)
    else:
        body = {"number": batch.get("number", 1)}
    return {key: value for key, value in body.items() if value is not None}


def _batch_over(document: Mapping[str, Any] | None) -> bool:
    """True if the upgrade waits for a request of the next batch, or has ended.

    It does not wait while a batch is under way, nor after its last batch, when it is about to end.
    """
    if document is None or document["status"] != "UPGRADING":
        return True
    upgrade = document.get("upgrade")
    if not upgrade or upgrade["asked"] or upgrade["upgrading"]:
        return False
    return "former" in upgrade["workers"].values()
