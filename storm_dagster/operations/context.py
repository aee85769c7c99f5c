"""Context of every operation: cluster state, blobs, conf, planner and clocks."""

import json
import logging
import math
import random
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any

from storm_dagster.blobstore.store import BlobStore, ReplicatedStore
from storm_dagster.core.liveness.limits import LivenessLimits
from storm_dagster.core.reassignment import Runnable
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.core.submission.conf import submitted_keys_in, total_conf
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.conf_layers import FORCED_SCHEDULER
from storm_dagster.model.errors import (
    AlreadyAlive,
    Corrupt,
    InvalidRequest,
    KeyNotFound,
    NotAlive,
    Unavailable,
)
from storm_dagster.model.names import code_key, conf_key, topology_name_of
from storm_dagster.model.placement import PlacementBatch, PlacementResult
from storm_dagster.model.topology import decode_topology
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.inimbus import INimbus, forced_scheduler, load_inimbus
from storm_dagster.spark.session_keys import SparkKeyCheck, no_key_check
from storm_dagster.zk.storm_cluster_state import StormClusterState


def encode_json(document: Any) -> bytes:
    """Encode the document as UTF-8 JSON without blanks.

    Maps keep their order, because the order of components decides task ids.
    """
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def decode_json(raw: bytes, key: str) -> Any:
    """Decode the document in ``raw``.

    :class:`Corrupt`, naming ``key``, if it is not valid JSON.
    """
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise Corrupt(
            f"{key} is not valid JSON ({error}): it was damaged, store it again"
        ) from None


Planner = Callable[[PlacementBatch], PlacementResult]
"""Function that plans a batch; :class:`Unavailable` if it is unreachable."""


def no_observer(point: str) -> None:
    """Observer of steps in production.

    :func:`~storm_dagster.operations.steps.step` does not call it.
    """


@dataclass(frozen=True)
class OperationsContext:
    """Handles of one process.

    ``now_secs`` only stamps records; it never decides whether a worker is dead.
    """

    cluster: StormClusterState
    blobs: BlobStore
    conf: ClusterConf
    """The cluster conf; :meth:`values` has the scheduler that a plug-in forces."""
    planner: Planner
    """The PySpark assignment; in tests of operations the local planner."""
    now_secs: Callable[[], int] = lambda: int(time.time())
    sleep: Callable[[float], None] = time.sleep
    log: logging.Logger = field(
        default_factory=lambda: logging.getLogger("storm_dagster.operations")
    )
    spark_keys: SparkKeyCheck = no_key_check
    """Check of a topology's Spark keys by the server of its components."""
    fallback: Planner = plan_placement
    """The local planner: reassignments use it when the planner is unreachable."""
    epoch: int | None = None
    """The leader's own epoch.

    ``None``: each operation takes the current one when it begins, as a run does.
    """
    verb: str = ""
    """Verb that the leader executes.

    Each of its transactions that changes the status of a topology leaves an event for Dagster
    (:func:`~storm_dagster.operations.transactions.note_change`).
    """
    run: str = ""
    """Id of the Dagster run of this process; the history of an assignment names it."""
    monotonic: Callable[[], float] = time.monotonic
    """Clock of deadlines and ages, seconds."""
    jitter: Callable[[], float] = random.random
    """Random number from 0 to 1, for the pauses between retries."""
    checkpoint: Callable[[str], None] = no_observer
    """Observer of the steps (:mod:`storm_dagster.operations.steps`).

    It is called with ``before.<step>`` and ``after.<step>`` of every step.
    """

    inimbus: INimbus | None = None
    """Plug-in of ``nimbus.inimbus.class``, by default the one that the conf names."""

    def __post_init__(self) -> None:
        if self.inimbus is None and self.conf.get("nimbus.inimbus.class"):
            object.__setattr__(self, "inimbus", load_inimbus(self.conf))

    def values(self) -> dict[str, Any]:
        """The cluster conf as a plain map, with the scheduler that a plug-in forces."""
        forced = forced_scheduler(self.inimbus)
        if forced is None:
            return self.conf.values
        return {**self.conf.values, FORCED_SCHEDULER: forced}

    def limits(self) -> LivenessLimits:
        """The cluster's liveness limits."""
        return LivenessLimits.from_conf(self.conf.values)

    def accepting_fewer(
        self, allow_degraded: bool = True, minimum: int | None = None
    ) -> "OperationsContext":
        """The context of a caller that allows a degraded topology.

        Too few copies of a blob are not an error in it. A write waits for ``minimum`` copies, by
        default for as many as the cluster wants. Without ``allow_degraded``, or without a
        replicated store, this context itself.
        """
        if not allow_degraded or not isinstance(self.blobs, ReplicatedStore):
            return self
        return replace(self, blobs=self.blobs.accepting_fewer(minimum))

    def find_blob(self, key: str) -> bytes | None:
        """The content of the blob; ``None`` if it does not exist."""
        try:
            return self.blobs.read(key)
        except KeyNotFound:
            return None

    def current_epoch(self) -> int:
        """The epoch that writes are fenced with.

        :class:`Unavailable` if the cluster has never had a leader.
        """
        if self.epoch is not None:
            return self.epoch
        stored = self.cluster.epoch()
        if stored is None:
            raise Unavailable(
                "the cluster has no leader yet: start a nimbus, or wait until one leads"
            )
        epoch, _ = stored
        return epoch


def damaged_topology(view: ClusterView, name: str) -> str | None:
    """The reason why the view left out a damaged topology (by name or id).

    ``None`` if no record of that topology is damaged.
    """
    for path, reason in view.corrupt.items():
        topology_id = _topology_id_of_path(path)
        if topology_id in view.topologies:
            # The damaged record is not needed for placement.
            continue
        try:
            names = (topology_id, topology_name_of(topology_id))
        except InvalidRequest:
            continue
        if name in names:
            return reason
    return None


def _topology_id_of_path(path: str) -> str:
    """The second segment of a path, a topology id; ``""`` without one."""
    segments = path.removeprefix("/").split("/")
    return segments[1] if len(segments) > 1 else ""


def check_name_free(
    view: ClusterView,
    name: str,
    own: Collection[str | None] = (),
    remedy: str = "kill it first, choose another name, or update it",
    secs_until_removal: Callable[[TopologyView], float | None] = lambda topology: None,
) -> None:
    """Raise :class:`AlreadyAlive` if a topology has the name, a damaged one included.

    Topologies of the ids ``own`` may have it. ``secs_until_removal`` gets a killed one; ``None``
    where only the length of its delay is known.
    """
    for topology in view.topologies.values():
        if topology.base.name == name and topology.id not in own:
            if topology.base.status == "KILLED":
                raise _name_of_killed(topology, secs_until_removal(topology))
            raise AlreadyAlive(
                f"topology {name!r} is alive already "
                f"(id {topology.id}, {topology.base.status}): {remedy}"
            )
    damage = damaged_topology(view, name)
    if damage is not None:
        raise AlreadyAlive(
            f"topology {name!r} exists already and is damaged ({damage}): remove it first"
        )


def _name_of_killed(topology: TopologyView, secs_left: float | None) -> AlreadyAlive:
    """The error of a submission whose name this killed topology still has.

    It cannot be updated, and needs no other kill: its removal is due, which a kill without a delay
    brings forward. ``secs_left`` are the seconds until then, ``None`` if they are unknown.
    """
    name = topology.base.name
    taken = f"topology {name!r} is KILLED and not removed yet (id {topology.id})"
    if secs_left is not None and secs_left <= 0:
        return AlreadyAlive(
            f"{taken}: its removal is under way, and waits for its workers to end; submit it again "
            "in a few seconds"
        )
    if secs_left is None:
        due = f"{topology.base.delay_secs or 0} s after its kill"
    else:
        due = f"in {math.ceil(secs_left)} s"
    return AlreadyAlive(
        f"{taken}: its removal is due {due}; wait until then, or remove it now "
        f"with `storm-dagster kill {name} -w 0`"
    )


def topology_by_name(view: ClusterView, name: str) -> TopologyView:
    """The topology of that id or name.

    :class:`NotAlive` if none is alive, :class:`Corrupt` if its record is damaged.
    """
    topology = view.topologies.get(name) or view.topology_named(name)
    if topology is not None:
        return topology
    damage = damaged_topology(view, name)
    if damage is not None:
        raise Corrupt(f"topology {name!r} has a damaged record, and is left alone: {damage}")
    names = sorted(topology.base.name for topology in view.topologies.values())
    running = ", ".join(names) or "none"
    raise NotAlive(
        f"topology {name!r} is not alive (alive: {running}): "
        "check the name with `storm-dagster list`"
    )


def load_runnable(ctx: "OperationsContext", topology: TopologyView) -> Runnable:
    """Conf and topology of the code that a topology runs now.

    The submitted keys are those of its base, if it has those of this code. Raises the errors of
    :func:`load_code`.
    """
    runnable = load_code(ctx, topology.code_dir)
    keys = topology.base.submitted_keys.get(topology.code_dir)
    if keys is None:
        return runnable
    return replace(runnable, submitted_keys=frozenset(keys))


def load_code(ctx: "OperationsContext", code_dir: str) -> Runnable:
    """Conf and topology from the blobs of this code.

    They come with the submitted keys that the conf names. :class:`Unavailable` if no process holds
    them now (the topology is degraded, and never deleted for that), :class:`Corrupt` if they are
    damaged.
    """
    try:
        conf = load_stored_conf(ctx, code_dir)
        raw_code = ctx.blobs.read(code_key(code_dir))
    except KeyNotFound as error:
        raise Unavailable(
            f"topology code {code_dir} is degraded, no nimbus holds its code ({error.message}): "
            "start the nimbus that holds it, or kill and submit it again"
        ) from None
    return Runnable(
        spec=decode_topology(raw_code),
        conf=total_conf(ctx.values(), conf),
        submitted_keys=frozenset(submitted_keys_in(conf)),
    )


def load_stored_conf(ctx: "OperationsContext", code_dir: str) -> dict[str, Any]:
    """The conf that is stored with this code, not merged with the cluster's.

    :class:`KeyNotFound` if no reachable process holds it, :class:`Corrupt` if it is damaged.
    """
    key = conf_key(code_dir)
    conf = decode_json(ctx.blobs.read(key), key)
    if not isinstance(conf, dict):
        raise Corrupt(f"blob {key} is not a map: kill the topology and submit it again")
    return conf
