"""One worker process, from its spec to its exit code."""

import contextlib
import ctypes
import gc
import logging
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storm_dagster.host.files import read_json_object
from storm_dagster.host.processes import RunFile
from storm_dagster.host.references import resolve_references
from storm_dagster.host.requirements import require_linux
from storm_dagster.host.worker_spec import WorkerSpec
from storm_dagster.model.conf import default_conf
from storm_dagster.model.conf_layers import merge_conf
from storm_dagster.model.errors import StormDagsterError, Unavailable
from storm_dagster.model.exit_codes import EXIT_STOPPED, EXIT_SUPERSEDED
from storm_dagster.model.fusion import fuse
from storm_dagster.model.json_logs import JsonFormatter
from storm_dagster.model.slot import Slot
from storm_dagster.model.topology import ComponentSpec, TopologySpec, decode_topology
from storm_dagster.security.server_identity import TrustedServers
from storm_dagster.security.spark_remote import ClusterSpark
from storm_dagster.worker.dataplane.events import EventSender
from storm_dagster.worker.dataplane.transport import Transport
from storm_dagster.worker.engine.native import NativeEngine
from storm_dagster.worker.runtime.cluster_sync import ClusterSync
from storm_dagster.worker.runtime.heartbeat import HeartbeatThread, Watchdog, first_start_failure
from storm_dagster.worker.runtime.lease import WorkerLease
from storm_dagster.worker.runtime.log_file import open_worker_log
from storm_dagster.worker.runtime.loop import Loop
from storm_dagster.worker.tasks.errors import ErrorReporter
from storm_dagster.worker.tasks.shared import Shared
from storm_dagster.zk.session import lease_of
from storm_dagster.zk.storm_cluster_state import StormClusterState

_log = logging.getLogger(__name__)

_BIND_SECS = 5.0
"""Time for which a port that is in use is tried: the former worker of the slot may be ending."""
_GC_THRESHOLDS = (100_000, 50, 100)
"""Thresholds of the collector's generations. Measured: with Python's defaults, decoding of big
batches takes three times as long.
"""
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
"""Parameters of ``mallopt``."""
_LARGE_BYTES = 4 * 1024 * 1024
"""Size from which a block of memory is returned to the system when it is freed."""


def _set_up_log(spec: WorkerSpec, conf: dict[str, Any]) -> None:
    """Replace the handlers of the root logger by the worker's file, if that can be opened."""
    handler, refusal = open_worker_log(Path(spec.log_path))
    if conf.get("storm.log.format") == "json":
        fixed = {
            "role": "worker",
            "topology": spec.topology_id,
            "host": spec.host,
            "port": spec.port,
        }
        handler.setFormatter(JsonFormatter(fixed))
    else:
        handler.setFormatter(
            logging.Formatter("%(asctime)s %(levelname)s %(threadName)s %(name)s: %(message)s")
        )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(str(conf.get("storm.log.level") or "INFO"))
    logging.getLogger("kazoo").setLevel(logging.WARNING)
    if refusal:
        _log.warning("%s", refusal)


def _load(spec: WorkerSpec) -> tuple[dict[str, Any], TopologySpec]:
    """Return conf and topology: with resolved references, and fused chains."""
    code = Path(spec.code_dir)
    stored = read_json_object(code / "stormconf.ser", "the supervisor must fetch it again")
    topology = decode_topology((code / "stormcode.ser").read_bytes())
    own_conf = resolve_references(merge_conf({"stored": stored}))
    # The supervisor keeps some keys of its conf back: here these have their defaults.
    conf = merge_conf({"defaults": default_conf(), "cluster": spec.conf, "stored": own_conf})
    user_components = {
        "bolts": _without_system(topology.bolts),
        "spouts": _without_system(topology.spouts),
    }
    return conf, fuse(topology.model_copy(update=user_components), conf)


def _without_system(parts: Mapping[str, ComponentSpec]) -> dict[str, ComponentSpec]:
    return {name: part for name, part in parts.items() if not name.startswith("__")}


def _bind(spec: WorkerSpec, conf: Mapping[str, Any]) -> Transport:
    """Bind the slot's port.

    That proves that no other process of this slot runs on this host. Raises :class:`Unavailable` if
    the port stays in use for five seconds.
    """
    batch = int(conf.get("topology.transfer.batch.size") or 100)
    blocked_secs = conf["supervisor.worker.timeout.secs"]
    deadline = time.monotonic() + _BIND_SECS
    while True:
        try:
            return Transport(
                spec.host,
                spec.port,
                spec.token,
                batch,
                spec.link_key,
                blocked_secs,
                TrustedServers.of(spec.conf),
            )
        except Unavailable:
            if time.monotonic() >= deadline:
                raise
            time.sleep(0.05)


def _return_large_memory() -> None:
    """Return blocks of 4 MiB and more to the system, always.

    The GNU C library would raise that limit to 32 MiB, and large messages of a few long-lived
    clients would leave hundreds of megabytes in pieces. Other libraries have no such limit.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, 2 * _LARGE_BYTES)


def run_worker(path: Path) -> int:
    """Run the worker of the spec ``path``, and return its exit code.

    See ``host.worker_spec``.
    """
    require_linux("a worker")
    spec = WorkerSpec.read(path)
    conf, topology = _load(spec)
    _set_up_log(spec, conf)
    _log.info(
        "worker %s of %s at %s:%d starts", spec.worker_id, spec.topology_id, spec.host, spec.port
    )
    archive = str(spec.archive_root)
    if archive not in sys.path:
        sys.path.insert(0, archive)
    _return_large_memory()
    gc.set_threshold(*_GC_THRESHOLDS)
    # The loop shares the interpreter with ClusterSync and kazoo; the default of 5 ms would delay
    # tuples.
    sys.setswitchinterval(0.001)
    transport = _bind(spec, conf)
    slot_name = f"{spec.node}-{spec.port}"
    run_file = RunFile.write(
        Path(spec.home), "worker", slot_name, {"data": spec.port}, required=False
    )
    code = EXIT_SUPERSEDED
    try:
        code = _run(spec, conf, topology, transport, StormClusterState.open(conf))
    except StormDagsterError as error:
        _log.error("%s", error)
        raise
    finally:
        transport.close(linger=code in (EXIT_STOPPED, EXIT_SUPERSEDED))
        run_file.remove(Path(spec.home))
        _log.info("worker %s ends with code %d", spec.worker_id, code)
    return code


def _state_dir(spec: WorkerSpec, conf: Mapping[str, Any]) -> Path:
    """Folder of the state of tasks."""
    if conf.get("topology.state.dir"):
        return Path(conf["topology.state.dir"])
    return Path(conf.get("storm.local.dir") or spec.home) / "state"


def _heartbeat_thread(
    spec: WorkerSpec, conf: Mapping[str, Any], loop: Loop, engine: NativeEngine
) -> HeartbeatThread:
    """The thread that writes the heartbeat, and watches for calls that take too long."""
    blocked_secs = float(conf.get("worker.blocked.report.secs") or 5)
    watchdog = Watchdog(
        engine.shared, lambda: loop.passes, blocked_secs, lambda: list(engine.runners.values())
    )
    beat_secs = float(conf.get("worker.heartbeat.frequency.secs") or 1)
    return HeartbeatThread(
        Path(spec.heartbeat_path),
        beat_secs,
        lambda: loop.passes,
        loop.status,
        lambda: first_start_failure(list(engine.runners.values())),
        watchdog.check,
    )


def _run(
    spec: WorkerSpec,
    conf: dict[str, Any],
    topology: TopologySpec,
    transport: Transport,
    cluster: StormClusterState,
) -> int:
    """Connect the parts of the worker, run its loop, and return the exit code."""
    lease = WorkerLease(lease_of(cluster.session).lease_end)
    reporter = ErrorReporter(conf, lambda *error: sync.report_error(*error), time.monotonic)
    shared = Shared(conf=conf, owns=lease.valid, wake=transport.wake, report=reporter)
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.formatter.add = lambda record: task_of(record, shared)
    shared.events.send = EventSender(spec, cluster, shared.events.on_response).send
    engine = NativeEngine(
        topology_id=spec.topology_id,
        spec=topology,
        conf=conf,
        shared=shared,
        transport=transport,
        slot=Slot(spec.node, spec.port),
        host=spec.host,
        archive=spec.archive_root,
        state_dir=_state_dir(spec, conf),
        # Only of the cluster's conf: no other server that the topology's conf names gets the token.
        cluster_spark=ClusterSpark.of(spec.conf),
    )
    loop = Loop(spec, conf, transport, lease, engine)
    sync = ClusterSync(spec, conf, cluster, lease, loop)
    loop.request_refresh = sync.request_refresh
    shared.storage.publisher = sync.publish_opening
    signal.signal(signal.SIGTERM, lambda *_: loop.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    heartbeat = _heartbeat_thread(spec, conf, loop, engine)
    heartbeat.start()
    sync.start()
    # The objects so far live as long as the process: later collections leave them out.
    gc.collect()
    gc.freeze()
    try:
        return loop.run()
    finally:
        heartbeat.stop()
        sync.stop()


def task_of(record: logging.LogRecord, shared: Shared) -> dict[str, Any]:
    """Return task and component whose call wrote a record.

    It is the task at which the loop is, or that has the thread.
    """
    if record.thread == threading.main_thread().ident:
        runner = shared.at
        return {} if runner is None else {"task": runner.task_id, "component": runner.component}
    component, _, task = (record.threadName or "").rpartition("-")
    if not component or not task.isdecimal():
        return {}
    return {"task": int(task), "component": component}
