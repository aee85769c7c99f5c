"""ZooKeeper paths, below ``storm.zookeeper.root``."""

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
# Operators' pause of healing; absent without one.
HEALING_PAUSE = "/healing_pause"
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
# Events for Dagster that the cluster has taken: one log for each name of a topology that reports.
EVENTS = "/events"
# Changes that leaders made without Dagster and have not reported to it yet: one bounded record.
UNREPORTED = "/unreported"
# Memories of sensors between their ticks that are too large for a cursor: the newest records of
# each.
SENSORS = "/sensors"
# Access tokens: who has one, for what and until when; never a token itself. The data version of the
# node rises with each change.
ACCESS_TOKENS = "/access_tokens"

FIRST_LEVEL = (
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
the leader's node by their sessions, ``DEPLOYS`` by the first run that deploys a declared topology,
``EVENTS`` by the leader with the first event that it takes, ``ACCESS_TOKENS`` by the first leader
that records tokens, ``HEALING_PAUSE`` by the leader with each pause.
"""


def supervisor(supervisor_id: str) -> str:
    """Ephemeral heartbeat record of one supervisor."""
    return f"{SUPERVISORS}/{supervisor_id}"


def workers(topology_id: str) -> str:
    """Parent of the live workers of one topology."""
    return f"{WORKERS}/{topology_id}"


def worker(topology_id: str, node: str, port: int) -> str:
    """Ephemeral record of one live worker process; absent means dead."""
    return f"{WORKERS}/{topology_id}/{node}-{port}"


def deploy(name: str) -> str:
    """Ephemeral record of the run that deploys the declared topology ``name``."""
    return f"{DEPLOYS}/{name}"


def event_log(name: str) -> str:
    """Head of the event log of the topology ``name``; it survives the topology."""
    return f"{EVENTS}/{name}"


def event_batch(name: str, first: int) -> str:
    """Index of the batch of that log whose first event has that number.

    The order of the names is that of the numbers.
    """
    return f"{EVENTS}/{name}/{first:012d}"


def topology(topology_id: str) -> str:
    """The StormBase: a topology exists while this node does."""
    return f"{TOPOLOGY}/{topology_id}"


def log_levels(topology_id: str) -> str:
    """Levels of loggers that were changed while the topology runs.

    The node is below the topology's base and is removed with it.
    """
    return f"{TOPOLOGY}/{topology_id}/log_levels"


def state_home(topology_id: str) -> str:
    """Location of the state of the topology's tasks.

    The node is below the topology's base and is removed with it.
    """
    return f"{TOPOLOGY}/{topology_id}/state"


def assignment(topology_id: str) -> str:
    """Assignment of tasks to slots.

    The data version of the node is the version of the assignment.
    """
    return f"{ASSIGNMENTS}/{topology_id}"


def assignment_backup(name: str) -> str:
    """The newest assignment of a topology name; it survives a kill."""
    return f"{ASSIGNMENTS_BAK}/{name}"


def tasks(topology_id: str) -> str:
    """Task ids of each component."""
    return f"{TASKS}/{topology_id}"


def taskbeats(topology_id: str) -> str:
    """Heartbeat counters of all workers of one topology, from its topology master."""
    return f"{TASKBEATS}/{topology_id}"


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


def metrics(topology_id: str) -> str:
    """Registry of metric ids of one topology."""
    return f"{METRICS}/{topology_id}"


def blob(key: str, holder: str | None = None) -> str:
    """Node of a blob, or of one nimbus that holds it.

    The holder's node is the ephemeral child ``<host:port>-<sequence>``.
    """
    if holder is None:
        return f"{BLOBSTORE}/{key}"
    return f"{BLOBSTORE}/{key}/{holder}"


def blob_max_sequence(key: str) -> str:
    """The highest sequence number that a blob's content ever had."""
    return f"{BLOBSTORE_MAX_SEQUENCE}/{key}"


def gray_upgrade(topology_id: str, part: str | None = None) -> str:
    """Gray upgrade of a topology, or one part of it.

    The parts are ``conf``, ``upgrading_workers`` and ``upgraded_workers``.
    """
    if part is None:
        return f"{GRAY_UPGRADE}/{topology_id}"
    return f"{GRAY_UPGRADE}/{topology_id}/{part}"


def token(client_token: str) -> str:
    """The topology id that a client token was given at its first use."""
    return f"{TOKENS}/{client_token}"


def operation(request: str) -> str:
    """Record of an accepted change of a running topology, until its run has ended."""
    return f"{OPERATIONS}/{request}"


def spark_session(use: str) -> str:
    """The pinned Spark Connect session id for one use."""
    return f"{SPARK_SESSIONS}/{use}"


def sensor_memory(sensor: str, record: str | None = None) -> str:
    """Memory of a sensor, or one of its records.

    The version of the memory's node counts the records.
    """
    if record is None:
        return f"{SENSORS}/{sensor}"
    return f"{SENSORS}/{sensor}/{record}"


def access_token(token_id: str) -> str:
    """Record of an access token, which counts while the node exists."""
    return f"{ACCESS_TOKENS}/{token_id}"
