"""Every conf key that the system itself reads: its type, bounds and meaning.

Defaults are in ``defaults.yaml`` beside this module; a test compares the two. Names are
Storm's and JStorm's where they have one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from storm_dagster.model.masking import HIDDEN, is_secret_key
from storm_dagster.model.strategies import STRATEGIES

OWNED_PREFIXES = ("topology.", "storm.", "nimbus.", "supervisor.", "worker.")
"""An unknown key below these is a mistake; all other prefixes belong to the user."""

Kind = Literal["int", "number", "bool", "str", "list[str]", "list[int]", "map", "list[map]", "path"]


@dataclass(frozen=True)
class ConfKey:
    """One known key. ``null`` is allowed exactly when the shipped default is null."""

    kind: Kind
    doc: str
    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()


def _is_kind(kind: Kind, value: Any) -> bool:
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "bool":
        return isinstance(value, bool)
    if kind in ("str", "path"):
        return isinstance(value, str)
    if kind == "map":
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if not isinstance(value, list | tuple):
        return False
    inner: dict[str, Kind] = {"list[str]": "str", "list[int]": "int", "list[map]": "map"}
    return all(_is_kind(inner[kind], item) for item in value)


_NAMES = {
    "int": "an integer",
    "number": "a number",
    "bool": "true or false",
    "str": "a string",
    "path": "a path",
    "list[str]": "a list of strings",
    "list[int]": "a list of integers",
    "map": "a map",
    "list[map]": "a list of maps",
}


def check_value(key: str, value: Any) -> str | None:
    """Reason why ``value`` is not valid for the known ``key``; ``None`` when it is."""
    spec = CONF_KEYS[key]
    if not _is_kind(spec.kind, value):
        shown = HIDDEN if is_secret_key(key) else f"{value!r:.60}"
        return f"{key} must be {_NAMES[spec.kind]}, got {shown} ({type(value).__name__})"
    if spec.minimum is not None and value < spec.minimum:
        return f"{key} must be at least {spec.minimum:g}, got {value!r}"
    if spec.maximum is not None and value > spec.maximum:
        return f"{key} must be at most {spec.maximum:g}, got {value!r}"
    if spec.choices and value not in spec.choices:
        return f"{key} must be one of {', '.join(spec.choices)}, got {value!r:.60}"
    return None


CONF_KEYS: dict[str, ConfKey] = {
    # -- cluster ----------------------------------------------------------------------------------------
    "storm.local.dir": ConfKey("path", "Folder of a daemon's local state; null: the cluster's HOME"),
    "storm.cluster.mode": ConfKey("str", "Daemons run only in distributed mode", choices=("distributed", "local")),
    "storm.local.hostname": ConfKey("str", "Host name that this daemon announces and binds to"),
    "storm.zookeeper.servers": ConfKey("list[str]", "Hosts of the ZooKeeper ensemble, each 'host' or 'host:port'"),
    "storm.zookeeper.port": ConfKey("int", "Port of servers that name none", 1, 65535),
    "storm.zookeeper.root": ConfKey("str", "Root node of the cluster's state"),
    "storm.zookeeper.session.timeout": ConfKey("int", "Session timeout asked for, milliseconds", 500),
    "storm.zookeeper.connection.timeout": ConfKey("int", "Longest wait for a first connection, milliseconds", 100),
    "storm.zookeeper.retry.times": ConfKey("int", "Retries of one read after a lost connection", 0),
    "storm.zookeeper.retry.interval": ConfKey("int", "First pause between retries, milliseconds", 1),
    "storm.zookeeper.auth.scheme": ConfKey("str", "How clients prove themselves to ZooKeeper", choices=("digest",)),
    "storm.zookeeper.auth.payload": ConfKey(
        "str", "'user:password' of the cluster in ZooKeeper; its nodes are then closed to all others. Secret"
    ),
    "storm.zookeeper.auth.file": ConfKey("path", "File of lines 'user:password', readable by its owner only"),
    "storm.zookeeper.ssl.enable": ConfKey("bool", "Speak TLS with ZooKeeper; the embedded server does not"),
    "storm.zookeeper.ssl.truststore.path": ConfKey(
        "path", "PEM certificates of the authority of ZooKeeper's servers; readable for workers"
    ),
    "storm.zookeeper.ssl.keystore.path": ConfKey(
        "path", "PEM file with certificate and key for servers that ask for one; not for workers of other users"
    ),
    "storm.zookeeper.ssl.keystore.password": ConfKey("str", "Password of the key in it. Secret"),
    "storm.zookeeper.ssl.hostnameVerification": ConfKey("bool", "Whether servers' certificates must name their hosts"),
    "storm.bind.external": ConfKey("bool", "Allow services beyond loopback, with a secret or TLS"),
    "storm.secret": ConfKey("str", "What daemons, runs and clients of the cluster know. Secret"),
    "storm.secret.file": ConfKey("path", "File that holds storm.secret, readable by its owner only"),
    "storm.tls.cert": ConfKey("path", "PEM certificate (chain) of this daemon or client; null: no TLS"),
    "storm.tls.key": ConfKey("path", "PEM key of storm.tls.cert, readable by its owner only"),
    "storm.tls.ca": ConfKey("path", "PEM certificates of the authority that both sides trust"),
    "storm.zookeeper.tick.time": ConfKey("int", "tickTime of the embedded server, milliseconds", 100),
    "storm.cluster.state.store": ConfKey("str", "'module:factory' of another ClusterState; null: ZooKeeper"),
    "storm.health.check.timeout.ms": ConfKey("int", "Longest run of one health check script, milliseconds", 1),
    "storm.log.level": ConfKey("str", "Log level of daemons", choices=("DEBUG", "INFO", "WARNING", "ERROR")),
    "storm.blobstore.inputstream.buffer.size.bytes": ConfKey("int", "Chunk of a blob download, bytes", 1024),
    "blobstore.dir": ConfKey("path", "Base folder or fsspec URL of blobs; null: below storm.local.dir"),
    # -- nimbus -----------------------------------------------------------------------------------------
    "nimbus.seeds": ConfKey("list[str]", "Nimbuses that clients try: 'host' or 'host:http port'"),
    "nimbus.host": ConfKey("str", "Deprecated: one seed"),
    "nimbus.thrift.port": ConfKey("int", "Thrift port; 0: any free one", 0, 65535),
    "nimbus.thrift.threads": ConfKey("int", "Threads that serve Thrift calls", 1),
    "nimbus.thrift.max_buffer_size": ConfKey("int", "Largest Thrift frame, bytes", 1024),
    "nimbus.http.port": ConfKey("int", "HTTP port; 0: any free one", 0, 65535),
    "nimbus.task.timeout.secs": ConfKey("int", "Silence after which a task is dead, seconds", 1),
    "nimbus.task.launch.secs": ConfKey("int", "Time that a placed task has to report first, seconds", 1),
    "nimbus.supervisor.timeout.secs": ConfKey("int", "Silence after which a supervisor gets no new work, seconds", 1),
    "nimbus.monitor.freq.secs": ConfKey(
        "int", "Longest pause between two polls of the leader for dead tasks, seconds", 1
    ),
    "nimbus.monitor.backstop.secs": ConfKey(
        "int", "Absence of an armed sensor after which the leader heals, seconds", 1
    ),
    "nimbus.mass.loss.percent": ConfKey("int", "Share of workers lost at once above which healing pauses", 1, 100),
    "nimbus.cleanup.inbox.freq.secs": ConfKey("int", "Pause between inbox cleanings, seconds", 1),
    "nimbus.inbox.jar.expiration.secs": ConfKey("int", "Age at which an inbox file is removed, seconds", 1),
    "nimbus.file.copy.expiration.secs": ConfKey("int", "Idle time after which a transfer is dropped, seconds", 1),
    "nimbus.upload.max.bytes": ConfKey("int", "Largest archive that is accepted, bytes", 1),
    "nimbus.assignment.wait.secs": ConfKey("int", "Longest turn of a run that waits to publish, seconds", 1),
    "nimbus.cache.class": ConfKey("str", "'module:class' of another disk cache; null: SQLite"),
    "nimbus.cache.reset": ConfKey("bool", "Empty the disk cache at start"),
    "nimbus.blobstore.class": ConfKey("str", "'local' or 'fsspec'", choices=("local", "fsspec")),
    "nimbus.inimbus.class": ConfKey("str", "'module:class' of an INimbus plug-in"),
    "nimbus.topology.action.notifier.plugin.class": ConfKey(
        "str", "'module:class' that is notified of topology actions"
    ),
    "nimbus.executors.perTopology": ConfKey("int", "Most executors of a topology; null: any number", 1),
    "nimbus.slots.perTopology": ConfKey("int", "Most workers of a topology; null: any number", 1),
    "nimbus.admins": ConfKey("list[str]", "Users who may do everything (with client certificates)"),
    "nimbus.admins.groups": ConfKey("list[str]", "Groups of such users"),
    "nimbus.users": ConfKey("list[str]", "Users who may submit and list topologies; empty: only admins"),
    "nimbus.groups": ConfKey("list[str]", "Groups of such users"),
    "nimbus.impersonation.acl": ConfKey(
        "map", "user -> {hosts: [...], groups: [...]}: groups for whose members the user may act, and from which hosts"
    ),
    # -- supervisor -------------------------------------------------------------------------------------
    "supervisor.slots.ports": ConfKey("list[int]", "Worker ports of a supervisor"),
    "supervisor.http.port": ConfKey("int", "HTTP port of a supervisor's log service; 0: any free one", 0, 65535),
    "supervisor.heartbeat.frequency.secs": ConfKey("int", "Pause between a supervisor's heartbeats, seconds", 1),
    "supervisor.monitor.frequency.secs": ConfKey("number", "Longest pause of a supervisor's loop, seconds", 0.05),
    "supervisor.worker.start.timeout.secs": ConfKey("int", "Time that a worker has to start, seconds", 1),
    "supervisor.worker.timeout.secs": ConfKey("int", "Silence after which a worker is replaced, seconds", 1),
    "supervisor.worker.shutdown.sleep.secs": ConfKey("number", "Time between TERM and KILL of a worker, seconds", 0),
    "supervisor.memory.capacity.mb": ConfKey("int", "Memory offered, MiB", 1),
    "supervisor.cpu.capacity": ConfKey("int", "CPU offered, percent points of one core", 1),
    "supervisor.blobstore.download.max_retries": ConfKey("int", "Tries of one download", 1),
    "supervisor.health.check.dir": ConfKey("path", "Folder of health check scripts; null: none"),
    "supervisor.worker.environment": ConfKey(
        "list[str]",
        "Variables of the supervisor's environment that workers get beside the usual ones; AWS_* is a pattern",
    ),
    "supervisor.worker.memory.enforce": ConfKey("bool", "End workers that use more memory than worker.memory.size"),
    "supervisor.worker.max.files": ConfKey(
        "int", "Open files of a worker (RLIMIT_NOFILE); null: as the supervisor", 64
    ),
    "supervisor.worker.max.processes": ConfKey(
        "int", "Processes and threads of a worker's user (RLIMIT_NPROC; not of root); null: as the supervisor", 16
    ),
    "supervisor.run.worker.as.user": ConfKey(
        "bool", "Run workers as topology.submitter.user, else as supervisor.worker.user; the supervisor must be root"
    ),
    "supervisor.worker.zookeeper.keystore.path": ConfKey(
        "path", "storm.zookeeper.ssl.keystore.path of workers of other users; no password"
    ),
    "supervisor.worker.user": ConfKey("str", "User (name or uid) of workers whose submitter is no user of the host"),
    "supervisor.rack": ConfKey("str", "Rack of this host; null: unknown"),
    # -- worker -----------------------------------------------------------------------------------------
    "worker.heartbeat.frequency.secs": ConfKey(
        "number", "Pause between a worker's beats to its supervisor, seconds", 0.1
    ),
    "worker.memory.size": ConfKey(
        "int", "Memory of a worker, bytes; a label unless supervisor.worker.memory.enforce", 1
    ),
    "worker.cpu.slot.num": ConfKey("int", "CPU of a worker (a label)", 1),
    "worker.log.max.bytes": ConfKey("int", "Size at which a worker's log is rotated, bytes", 1024),
    "worker.log.backups": ConfKey("int", "Rotated logs kept for each worker", 0),
    "worker.gc.threshold": ConfKey("int", "First gc threshold in workers (measured: default costs 3x in decoding)", 1),
    "task.heartbeat.frequency.secs": ConfKey("number", "Pause between beats to the topology master, seconds", 0.1),
    "task.refresh.poll.secs": ConfKey("number", "Longest age of a worker's view of its assignment, seconds", 0.1),
    "task.cleanup.timeout.sec": ConfKey("int", "Time that tasks have to end at a kill, seconds", 0),
    "task.on.differ.node": ConfKey("bool", "Component conf: its tasks run on different supervisors"),
    # -- topology ---------------------------------------------------------------------------------------
    "topology.name": ConfKey("str", "Set by the system"),
    "topology.id": ConfKey("str", "Set by the system"),
    "topology.workers": ConfKey("int", "Number of workers", 1, 5_000),
    "topology.acker.executors": ConfKey("int", "Acker tasks; 0 turns acking off", 0, 100_000),
    "topology.tasks": ConfKey(
        "int", "Component conf: tasks, when more than the parallelism; 0: it does not run", 0, 1_000_000
    ),
    "topology.max.task.parallelism": ConfKey("int", "Most tasks of any component", 1),
    "topology.bolt.parallelism": ConfKey("map", "Bolt -> parallelism, overriding the code"),
    "topology.spout.parallelism": ConfKey("map", "Spout -> parallelism, overriding the code"),
    "topology.message.timeout.secs": ConfKey("int", "Time that a tuple tree has to complete, seconds", 1),
    "topology.max.spout.pending": ConfKey("int", "Most uncompleted tuple trees of one spout task", 1),
    "topology.tick.tuple.freq.secs": ConfKey("number", "Pause between tick tuples, seconds", 0.01),
    "topology.debug": ConfKey("bool", "Log every tuple"),
    "topology.priority": ConfKey("int", "Order of placement: lower first", 0),
    "topology.rebalance.threshold": ConfKey(
        "number", "Least gain in balance of a scheduled rebalance: 0.1 is a tenth of the fair share", 0
    ),
    "topology.scheduler.strategy": ConfKey("str", "Placement strategy", choices=tuple(STRATEGIES)),
    "topology.master.single.worker": ConfKey("bool", "Topology master alone in a worker; null: from 10 workers on"),
    "topology.master.worker.memory.size": ConfKey("int", "Memory of the topology master's worker, bytes", 1),
    "topology.python": ConfKey("str", "Interpreter of the workers; null: the supervisor's"),
    "topology.environment": ConfKey("map", "Environment variables of the workers"),
    "topology.spark.remote": ConfKey("str", "Spark Connect URL of Spark components; null: the cluster's Spark"),
    "topology.spark.conf": ConfKey("map", "Spark conf of Spark components"),
    "topology.metric.sample.rate": ConfKey("number", "Share of tuples whose latency is taken", 0, 1),
    "topology.error.throttle.interval.secs": ConfKey("int", "Window of error throttling, seconds", 1),
    "topology.max.error.report.per.interval": ConfKey("int", "Errors that a task may report in that window", 1),
    "topology.shellbolt.max.pending": ConfKey("int", "Tuples that may wait to be written to a shell bolt", 1),
    "topology.subprocess.timeout.secs": ConfKey("int", "Silence after which a shell component is replaced, seconds", 1),
    "topology.transfer.batch.size": ConfKey("int", "Most tuples in one frame between workers", 1),
    "topology.executor.queue.size": ConfKey("int", "Tuples that may wait for one task before back pressure", 2),
    "topology.backpressure.enable": ConfKey("bool", "Hold spouts and bolts while queues downstream are full"),
    "topology.state.dir": ConfKey("path", "Folder of state that components keep; null: below storm.local.dir"),
    "topology.users": ConfKey("list[str]", "Users who may see and change the topology"),
    "topology.submitter.user": ConfKey("str", "User who submitted the topology; set by nimbus for its limited users"),
    "topology.groups": ConfKey("list[str]", "Groups of such users"),
    "topology.state.local": ConfKey(
        "bool", "State may stay on its host, where it is lost or old for tasks that move to and fro"
    ),
    "topology.dead.letter.tries": ConfKey(
        "int", "Failures after which a tuple is a dead letter, whatever its spout does; 0: the spout decides", 0
    ),
    "topology.dead.letter.max.bytes": ConfKey(
        "int", "Most bytes of dead letters that a spout's task keeps; the oldest are dropped", 4096
    ),
    "topology.dead.letter.stream": ConfKey(
        "str", "Component conf: stream of a spout, of one field, on which its dead letters are emitted, too"
    ),
    "topology.state.checkpoint.interval.ms": ConfKey(
        "int", "Longest time between two checkpoints of a stateful bolt, milliseconds", 1
    ),
    "topology.state.remember.secs": ConfKey(
        "int", "Least time for which a stateful bolt remembers applied ids, seconds", 1
    ),
    "topology.bolts.window.length.count": ConfKey("int", "Component conf: window length, tuples", 1),
    "topology.bolts.window.length.duration.ms": ConfKey("int", "Component conf: window length, milliseconds", 1),
    "topology.bolts.window.sliding.interval.count": ConfKey("int", "Component conf: tuples between two windows", 1),
    "topology.bolts.window.sliding.interval.duration.ms": ConfKey(
        "int", "Component conf: time between two windows, milliseconds", 1
    ),
    "topology.bolts.window.session.gap.ms": ConfKey(
        "int", "Component conf: silence that ends a session, milliseconds", 1
    ),
    "topology.bolts.window.session.key": ConfKey(
        "str", "Component conf: field whose values have sessions of their own"
    ),
    "topology.bolts.tuple.timestamp.field.name": ConfKey(
        "str", "Component conf: field that holds a tuple's time, milliseconds since 1970"
    ),
    "topology.bolts.tuple.timestamp.max.lag.ms": ConfKey(
        "int", "Component conf: how far tuples may be out of order, milliseconds", 0
    ),
    "topology.bolts.watermark.event.interval.ms": ConfKey(
        "int", "Component conf: time between two watermarks, milliseconds", 1
    ),
    "topology.bolts.watermark.idle.timeout.ms": ConfKey(
        "int", "Component conf: silence of a sending task after which watermarks do not wait for it, milliseconds", 1
    ),
    "topology.bolts.late.tuple.stream": ConfKey("str", "Component conf: stream that late tuples go to"),
    "topology.disable.loadaware.messaging": ConfKey(
        "bool", "Shuffle strictly in turn, regardless of the load of the receivers"
    ),
    "topology.testing.always.try.serialize": ConfKey(
        "bool", "Send each tuple as bytes, also inside a worker (slow); the test harness does by default"
    ),
    "topology.serialization.register": ConfKey(
        "list[str]", "Dataclasses and Enums, 'module:QualName', that values of tuples and of state may be"
    ),
    "worker.blocked.report.secs": ConfKey(
        "number", "Time after which a component that holds up its worker's loop is reported, seconds", 0.1
    ),
    "topology.min.replication.count": ConfKey("int", "Nimbuses that must hold the code before it runs", 1),
    "topology.max.replication.wait.time.sec": ConfKey("int", "Longest wait for that, seconds", 0),
    "topology.hot.deploy.enable": ConfKey("bool", "Thrift: submit over a running topology as a hot deploy"),
    "topology.update.keep.conf": ConfKey(
        "bool", "Whether new code keeps the conf given at earlier submissions that is not given again"
    ),
    "topology.submitted.keys": ConfKey("list[str]", "Set by the system: keys that came with the submission"),
    "topology.upgrade": ConfKey("bool", "Thrift: submit over a running topology as a gray upgrade"),
    "topology.upgrade.worker.num": ConfKey("int", "Workers of the first gray batch", 0),
    "topology.upgrade.component": ConfKey("str", "Component of the gray batch"),
    "topology.upgrade.workers": ConfKey("str", "'host:port,...' of the gray batch"),
    "topology.upgrade.ttl": ConfKey("int", "Time that a gray upgrade may take, milliseconds", 1),
    # -- keys outside the owned prefixes that the system reads ------------------------------------------
    "use.userdefine.assignment": ConfKey("list[map]", "Workers with fixed slots or tasks"),
    "use.old.assignment": ConfKey("bool", "Reuse the previous assignment of the name"),
    "isolation.scheduler.machines": ConfKey("list[str]", "Hosts that the topology is confined to"),
    "jstorm.reserve.workers": ConfKey("int", "Slots that must stay free", 0),
    "container.nimbus.heartbeat": ConfKey(
        "path", "Folder for heartbeats of the container of nimbus; null: no container"
    ),
    "container.heartbeat.timeout.seconds": ConfKey(
        "int", "Age of the container's newest beat at which nimbus ends, seconds", 1
    ),
    "container.heartbeat.frequence": ConfKey("int", "Pause between beats of nimbus and container, seconds", 1),
    "spark.remote": ConfKey("str", "Spark Connect URL of the placement; null: embedded, or spark.master"),
    "spark.master": ConfKey("str", "Classic Spark master; null: Spark Connect"),
    "spark.connect.port": ConfKey("int", "Port of the embedded Spark Connect server; 0: any free one", 0, 65535),
    "spark.driver.memory": ConfKey("str", "Heap of the embedded Spark server"),
    "dagster.graphql.url": ConfKey("str", "GraphQL URL of the Dagster webserver"),
    "dagster.graphql.headers": ConfKey(
        "map", "Headers that nimbus sends to Dagster, such as {Dagster-Cloud-Api-Token: ...}. Secret"
    ),
    "dagster.graphql.token.file": ConfKey(
        "path", "File with a token for Dagster (Authorization: Bearer), readable by its owner only"
    ),
    "dagster.graphql.timeout.secs": ConfKey(
        "number", "Silence of Dagster after which the leader acts by itself, seconds", 0.1, 20
    ),
    "dagster.cluster": ConfKey(
        "str", "cluster= of the code location's build_storm_defs; null: its names have no prefix"
    ),
    "dagster.target.roots": ConfKey(
        "list[str]",
        "Folders in which the target of a run launched by hand lies; null: the code location's folder and examples/",
    ),
    "dagster.location": ConfKey("str", "Code location that holds our definitions"),
    "dagster.repository": ConfKey("str", "Repository in that location"),
    "dagster.metrics.retention.hours": ConfKey("int", "Hours of rolled up statistics that are kept", 2),
    "dagster.history.retention.days": ConfKey("int", "Age at which runs of our jobs are deleted, days", 1),
    "dagster.history.retention.ticks.hours": ConfKey(
        "int", "Age at which ticks of our sensors and schedules are deleted, hours", 1
    ),
}
