"""Every ZooKeeper path, relative to ``storm.zookeeper.root``."""

from collections.abc import Callable

CLUSTER_ID = "/cluster_id"
SUPERVISORS = "/supervisors"
WORKERS = "/workers"
HEALER = "/healer"
TOPOLOGY = "/topology"
ASSIGNMENTS = "/assignments"
ASSIGNMENTS_BAK = "/assignments_bak"
TASKS = "/tasks"
TASKBEATS = "/taskbeats"
TASKERRORS = "/taskerrors"
METRICS = "/metrics"
BLOBSTORE = "/blobstore"
BLOBSTORE_MAX_SEQUENCE = "/blobstoremaxkeysequencenumber"
GRAY_UPGRADE = "/gray_upgrade"
NIMBUS_MASTER = "/nimbus_master"
NIMBUS_SLAVE = "/nimbus_slave"
NIMBUS_SLAVE_DETAIL = "/nimbus_slave_detail"
EPOCH = "/epoch"
BLACKLIST = "/blacklist"
# Client tokens of submissions: a repeated submission gets the same topology id by its token.
TOKENS = "/tokens"
# Accepted changes of running topologies that Dagster runs execute, by request.
OPERATIONS = "/operations"
# The counter inside topology ids: its data version is the number.
COUNTER = "/counter"
# Pinned Spark Connect sessions, one node for each use ("placement").
SPARK_SESSIONS = "/spark_sessions"
# Actions on topologies that the action listener was not notified of yet, in their order (only if a
# listener is configured).
ACTIONS = "/actions"
# Declared topologies that a run deploys now: one ephemeral node for each.
DEPLOYS = "/deploys"
# Changes that leaders made without Dagster and have not reported to it yet: one bounded record.
UNREPORTED = "/unreported"
# Memories of sensors between their ticks that are too large for a cursor: the newest records of
# each.
SENSORS = "/sensors"

FIRST_LEVEL: tuple[str, ...] = (
    SUPERVISORS,
    WORKERS,
    TOPOLOGY,
    ASSIGNMENTS,
    ASSIGNMENTS_BAK,
    TASKS,
    TASKBEATS,
    TASKERRORS,
    METRICS,
    BLOBSTORE,
    BLOBSTORE_MAX_SEQUENCE,
    GRAY_UPGRADE,
    NIMBUS_SLAVE,
    NIMBUS_SLAVE_DETAIL,
    EPOCH,
    BLACKLIST,
    TOKENS,
    OPERATIONS,
    COUNTER,
    SPARK_SESSIONS,
    ACTIONS,
    UNREPORTED,
    SENSORS,
)
"""The persistent first-level nodes, created together with the root.

The others are created by their writers: the cluster's id with the root's owner, the healer's and
the leader's node by their sessions, ``DEPLOYS`` by the first run that deploys a declared topology.
"""


def _child_of(parent: str, below: str = "") -> Callable[[str], str]:
    return lambda name: f"{parent}/{name}{below}"


supervisor = _child_of(SUPERVISORS)
"""Ephemeral heartbeat record of one supervisor."""
workers = _child_of(WORKERS)
"""Parent of the live workers of one topology."""


def worker(topology_id: str, node: str, port: int) -> str:
    """Ephemeral record of one live worker process; absent means dead."""
    return f"{WORKERS}/{topology_id}/{node}-{port}"


deploy = _child_of(DEPLOYS)
"""Ephemeral record of the run that deploys the declared topology of that name."""
topology = _child_of(TOPOLOGY)
"""The StormBase: a topology exists while this node does."""
assignment = _child_of(ASSIGNMENTS)
"""Assignment of tasks to slots; the node's data version is the assignment's version."""
assignment_backup = _child_of(ASSIGNMENTS_BAK)
"""The newest assignment of a topology name; it survives a kill."""
tasks = _child_of(TASKS)
"""Task ids of each component."""
taskbeats = _child_of(TASKBEATS)
"""Heartbeat counters of all workers of one topology, written by its topology master."""


def task_errors(topology_id: str, component: str | None = None) -> str:
    """Errors of a topology, or of one of its components.

    A component id may hold ``/``, which ZooKeeper reserves; it and ``%`` are percent-escaped.
    """
    if component is None:
        return f"{TASKERRORS}/{topology_id}"
    escaped = component.replace("%", "%25").replace("/", "%2F")
    if component in (".", ".."):
        escaped = escaped.replace(".", "%2E")
    return f"{TASKERRORS}/{topology_id}/{escaped}"


metrics = _child_of(METRICS)
"""Registry of metric ids of one topology."""


def blob(key: str, holder: str | None = None) -> str:
    """A blob's node, or its ephemeral child of a nimbus that has the blob.

    The child is named ``<host:port>-<sequence>``.
    """
    if holder is None:
        return f"{BLOBSTORE}/{key}"
    return f"{BLOBSTORE}/{key}/{holder}"


blob_max_sequence = _child_of(BLOBSTORE_MAX_SEQUENCE)
"""The highest sequence number that a blob's content ever had."""


def gray_upgrade(topology_id: str, part: str | None = None) -> str:
    """Gray upgrade of a topology, or a part of it.

    The parts are ``conf``, ``upgrading_workers`` and ``upgraded_workers``.
    """
    if part is None:
        return f"{GRAY_UPGRADE}/{topology_id}"
    return f"{GRAY_UPGRADE}/{topology_id}/{part}"


log_levels = _child_of(TOPOLOGY, "/log_levels")
"""Levels of loggers that were changed while the topology runs; below its base, with which it is
deleted.
"""
state_home = _child_of(TOPOLOGY, "/state")
"""Place of the state of the topology's tasks; below its base, with which it is deleted."""
token = _child_of(TOKENS)
"""The topology id that a client token got at its first use."""
operation = _child_of(OPERATIONS)
"""Record of an accepted change of a running topology, until its run has ended."""
spark_session = _child_of(SPARK_SESSIONS)
"""The pinned Spark Connect session id for one use."""


def sensor_memory(sensor: str, record: str | None = None) -> str:
    """Memory of a sensor, or one record of it.

    The version of the node of the memory counts its records.
    """
    return f"{SENSORS}/{sensor}" if record is None else f"{SENSORS}/{sensor}/{record}"
