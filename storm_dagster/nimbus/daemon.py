"""The nimbus daemon: its start in order, and its end.

Threads: the election (the caller's thread), the HTTP service, the leader's duties and its healing,
the blob synchronization, and upkeep. None of them waits for another, so that a slow download never
delays leadership.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from starlette.types import ASGIApp

from storm_dagster.core.asset_declarations import check_prefixes
from storm_dagster.host.endpoints import ClusterFile
from storm_dagster.host.files import hold_folder, write_if_possible
from storm_dagster.host.memory import return_free_memory
from storm_dagster.host.processes import RunFile
from storm_dagster.http.server import AnnouncedName, HttpService, listen
from storm_dagster.model import paths
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.dagster_names import DagsterNames
from storm_dagster.model.errors import StormDagsterError, Unavailable
from storm_dagster.model.version import __version__
from storm_dagster.nimbus.blobs.registry import BlobRegistry
from storm_dagster.nimbus.blobs.replicated_store import NimbusBlobStore
from storm_dagster.nimbus.blobs.replication import Replicator
from storm_dagster.nimbus.blobs.sync import BlobSync
from storm_dagster.nimbus.blobs.uploads import Uploads, clean_inbox
from storm_dagster.nimbus.dagster.client import DagsterClient
from storm_dagster.nimbus.dagster.transport import DagsterAccess, DagsterTransport
from storm_dagster.nimbus.http.service import build_app
from storm_dagster.nimbus.leader_status import LeaderStatus
from storm_dagster.nimbus.leadership.draining import LeaderDrains
from storm_dagster.nimbus.leadership.duties import (
    LeaderDuties,
    LeaderHealing,
    LeaderReports,
    LeaderTransitions,
)
from storm_dagster.nimbus.leadership.election import Election
from storm_dagster.nimbus.leadership.event_duties import LeaderEvents
from storm_dagster.nimbus.leadership.start import (
    ContainerHeartbeat,
    check_mode,
    container_heartbeat,
    open_blob_store,
    open_cluster,
    open_reads,
    thrift_host,
)
from storm_dagster.nimbus.member import Identity, Nimbus, repeat
from storm_dagster.nimbus.requests.accepted_operations import AcceptedOperations
from storm_dagster.nimbus.requests.action_listener import ActionNotifier
from storm_dagster.nimbus.requests.lifecycle import LifecycleRequests
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.nimbus.requests.submitting import Submissions
from storm_dagster.nimbus.requests.topology_stats import TopologyStats
from storm_dagster.nimbus.requests.unreported import LeaderOutbox
from storm_dagster.nimbus.thrift.service import ThriftService
from storm_dagster.operations.inimbus import PLUGIN_FOLDER, load_inimbus
from storm_dagster.operations.live.access_tokens import record_tokens
from storm_dagster.operations.live.worker_requests import WorkerLinks
from storm_dagster.security.exposure import check_exposure
from storm_dagster.security.peers import owners_only
from storm_dagster.security.settings import Security
from storm_dagster.zk.leadership import LeadershipSession

_log = logging.getLogger(__name__)

_SYNC_SECS = 5.0
"""Longest pause between two synchronizations of blobs."""
_GATHER_SECS = 0.2
"""Pause before a synchronization because of a new blob: those that follow it come along."""
_UPKEEP_SECS = 1.0
"""Pause between two rounds of the upkeep."""
_TRIM_SECS = 60.0
"""Interval at which unused memory is returned to the system."""
_JOIN_SECS = 5.0
"""Longest wait for the end of each thread; it is a daemon thread and ends with the process."""


def run(conf: ClusterConf, home: Path, nimbus_id: str, stop: threading.Event) -> int:
    """Run a nimbus until ``stop`` is set, and return the exit code of the process.

    The code is 0 after an ordered stop. After an error, at the start or later, it is the code of
    the error's class; the error is logged, and every part that was started is ended in the reverse
    order.
    """
    try:
        with ExitStack() as stack:
            _serve(conf, Path(home), nimbus_id, stop, stack)
    except StormDagsterError as error:
        _log.error("nimbus ends: %s", error.message)
        return error.exit_code
    except Exception:
        _log.exception("nimbus ends because of an unexpected error")
        return 1
    _log.info("nimbus ended")
    return 0


def _serve(
    conf: ClusterConf, home: Path, nimbus_id: str, stop: threading.Event, stack: ExitStack
) -> None:
    """Start all parts in order, and run the election until ``stop``.

    ``stack`` ends them in the reverse order: the services, leadership, the threads, the handles. A
    container that is gone, or an address that fails, also ends the election; its error is raised.
    """
    check_mode(conf)
    check_prefixes(conf.values)
    security = Security.of(conf)
    host = check_exposure(conf, "nimbus", "secret or tls")
    stack.enter_context(hold_folder(home, "nimbus", nimbus_id))
    folder = home / "nimbus" / nimbus_id
    _make_folders(folder)
    listener, thrift_listener = _listen(conf, host, stack)
    identity = _identity(nimbus_id, host, listener, thrift_listener, security)
    nimbus, sync = _open(conf, home, folder, identity, stack)
    sync_wake = threading.Event()
    election = Election(nimbus, sync, lambda epoch: _initialize(nimbus, epoch, sync_wake))
    stack.callback(election.close)
    nimbus.wake_election = election.wake

    reader = ClusterReader(nimbus, TopologyStats(WorkerLinks.of(conf)))
    stack.callback(reader.close)
    submissions = Submissions(nimbus)
    lifecycle = LifecycleRequests(nimbus)
    thrift = ThriftService(nimbus, reader, submissions, lifecycle, thrift_listener)
    accepted_operations = AcceptedOperations(nimbus, submissions, lifecycle)
    ended = threading.Event()
    threads = _leader_threads(nimbus, accepted_operations, ended)
    threads["nimbus-blob-sync"] = lambda: _synchronize(sync, sync_wake, ended)
    threads["nimbus-upkeep"] = lambda: _keep_up(nimbus, ended)
    if security.secret is not None:
        threads["nimbus-tokens"] = lambda: nimbus.access_tokens.run(ended)
    _start_threads(threads, stack)
    watches = _watch_surroundings(conf, folder, AnnouncedName(host, listener), ended, stop)
    # At the end the stack sets ``ended`` first, and then wakes the thread that waits for new blobs.
    stack.callback(sync_wake.set)
    stack.callback(ended.set)
    # Resigning first makes another nimbus lead at once, while this one still ends its threads.
    stack.callback(_resign, nimbus)
    app = build_app(nimbus, reader, submissions, lifecycle)
    service = _http_service(app, listener, security)
    stack.callback(service.stop)
    service.start()
    stack.callback(thrift.stop)
    thrift.start()
    ports = {"http": identity.http_port, "thrift": identity.thrift_port}
    record = RunFile.write(home, "nimbus", nimbus_id, ports=ports, required=False)
    stack.callback(record.remove, home)
    _log.info("nimbus %s serves %s as %s", nimbus_id, identity.http, identity.address)
    election.run(stop)
    for watch in watches:
        if watch.failure is not None:
            raise watch.failure


def _make_folders(folder: Path) -> None:
    """Make the folders of uploads and of the read cache, if the disk takes them.

    Without them uploads fail, and the read cache has no disk level.
    """
    for path in (folder / "inbox", folder / "cache"):
        make = partial(path.mkdir, parents=True, exist_ok=True)
        write_if_possible(make, f"{path} cannot be made")


def _identity(
    nimbus_id: str,
    host: str,
    listener: socket.socket,
    thrift_listener: socket.socket,
    security: Security,
) -> Identity:
    """Identity of this nimbus, with the ports at which it listens."""
    return Identity(
        id=nimbus_id,
        host=host,
        thrift_port=_port_of(thrift_listener),
        http_port=_port_of(listener),
        version=__version__,
        scheme=security.scheme,
    )


def _leader_threads(
    nimbus: Nimbus, accepted_operations: AcceptedOperations, ended: threading.Event
) -> dict[str, Callable[[], None]]:
    """Names and bodies of the threads that work while this nimbus leads, until ``ended``."""
    return {
        "nimbus-duties": lambda: LeaderDuties(nimbus).run(ended),
        "nimbus-transitions": lambda: LeaderTransitions(nimbus).run(ended),
        "nimbus-reports": lambda: LeaderReports(nimbus).run(ended),
        "nimbus-forwarding": lambda: LeaderEvents(nimbus).run(ended),
        "nimbus-healing": lambda: LeaderHealing(nimbus).run(ended),
        "nimbus-drains": lambda: LeaderDrains(nimbus).run(ended),
        "nimbus-takeover": lambda: accepted_operations.run(ended),
        "nimbus-actions": lambda: ActionNotifier(nimbus).run(ended),
    }


def _start_threads(threads: Mapping[str, Callable[[], None]], stack: ExitStack) -> None:
    """Start a thread for each name; ``stack`` waits for their ends."""
    for name, work in threads.items():
        thread = threading.Thread(target=work, name=name, daemon=True)
        stack.callback(thread.join, _JOIN_SECS)
        thread.start()


def _listen(conf: ClusterConf, host: str, stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    """Listening sockets of the HTTP service and of the Thrift service; ``stack`` closes them."""
    listener = listen(host, conf["nimbus.http.port"], "nimbus.http.port")
    stack.callback(listener.close)
    thrift_listener = listen(
        thrift_host(conf, host), conf["nimbus.thrift.port"], "nimbus.thrift.port"
    )
    stack.callback(thrift_listener.close)
    return listener, thrift_listener


def _port_of(listener: socket.socket) -> int:
    """Port of a listening socket: the conf may leave its choice to the system (port 0)."""
    _, port, *_ = listener.getsockname()
    return int(port)


def _watch_surroundings(
    conf: ClusterConf,
    folder: Path,
    announced_name: AnnouncedName,
    ended: threading.Event,
    stop: threading.Event,
) -> list[AnnouncedName | ContainerHeartbeat]:
    """Watch the announced name and the container, each in a thread until ``ended``.

    A watch that fails sets its ``failure``, and then ``stop``.
    """
    watches: list[AnnouncedName | ContainerHeartbeat] = [announced_name]
    container = container_heartbeat(conf, folder)
    if container is not None:
        watches.append(container)
    for watch in watches:
        threading.Thread(
            target=watch.run, args=(ended, stop), name="nimbus-surroundings", daemon=True
        ).start()
    return watches


def _http_service(app: ASGIApp, listener: socket.socket, security: Security) -> HttpService:
    """HTTP service of the application, with TLS if the conf has certificates."""
    tls = None
    if security.tls:
        tls = security.server_context(client_certificate=security.http_needs_certificate)
    return HttpService(app, listener, tls=tls, own_user_only=owners_only(security))


def _open(
    conf: ClusterConf, home: Path, folder: Path, identity: Identity, stack: ExitStack
) -> tuple[Nimbus, BlobSync]:
    """Open the handles of a nimbus and wire them to each other.

    ``folder`` is its data folder, ``home`` HOME, where the local cluster's file is. Later handles
    use earlier ones; ``stack`` closes them in the reverse order.
    """
    inimbus = load_inimbus(conf, folder / PLUGIN_FOLDER)
    security = Security.of(conf)
    base = open_blob_store(conf, folder)
    cluster = open_cluster(conf, folder, base)
    stack.callback(cluster.disconnect)
    reads = open_reads(conf, folder, cluster)
    if reads is not None:
        stack.callback(reads.close)
    leadership = LeadershipSession(cluster)
    stack.callback(leadership.close)
    status = LeaderStatus(identity.address, leadership.is_leader)
    registry = BlobRegistry(cluster, identity.address, reads)
    # The lambdas use ``nimbus``, which is made below from these parts.
    replicator = Replicator(
        lambda: nimbus.peers(),
        base.open,
        absent=lambda: nimbus.absent_seeds(),
        wait_secs=conf["topology.max.replication.wait.time.sec"],
        security=security,
    )
    stack.callback(replicator.close)
    blobs = NimbusBlobStore(
        base, status, registry, replicator, conf["topology.min.replication.count"], cluster
    )
    dagster = _dagster_client(conf, home, security)
    stack.callback(dagster.close)
    nimbus = Nimbus(
        conf=conf,
        identity=identity,
        inbox=folder / "inbox",
        cluster=cluster,
        leadership=leadership,
        status=status,
        registry=registry,
        blobs=blobs,
        uploads=Uploads(
            blobs, expiry_secs=conf["nimbus.file.copy.expiration.secs"], now=time.monotonic()
        ),
        dagster=dagster,
        unreported=LeaderOutbox(),
        inimbus=inimbus,
        reads=reads,
    )
    # A new leader reads the whole cluster in one pass of its election, which may take minutes.
    cluster.session.on_answer = nimbus.passes.progressed
    sync = BlobSync(nimbus)
    stack.callback(sync.close)
    return nimbus, sync


def _dagster_client(conf: ClusterConf, home: Path, security: Security) -> DagsterClient:
    """Client of the Dagster that serves the cluster, with the time limits of the conf."""
    transport = DagsterTransport(
        _dagster_access(conf, home),
        timeout=conf["dagster.graphql.timeout.secs"],
        security=security,
    )
    return DagsterClient(
        transport,
        location=conf["dagster.location"],
        names=DagsterNames(cluster=conf["dagster.cluster"]),
        launch_secs=conf["dagster.launch.timeout.secs"],
    )


def _dagster_access(conf: ClusterConf, home: Path) -> Callable[[], DagsterAccess | None]:
    """Return the source of Dagster's address.

    The conf gives it. If it does not, it is the webserver of the local cluster, which may start
    after nimbus.
    """
    configured = DagsterAccess.of(conf)
    if configured is not None:
        return lambda: configured

    def local() -> DagsterAccess | None:
        try:
            cluster = ClusterFile.read(home)
        except StormDagsterError:
            return None
        if cluster is None or cluster.dagster is None:
            return None
        return DagsterAccess.of(conf, cluster.dagster.url.rstrip("/") + "/graphql")

    return local


def _initialize(nimbus: Nimbus, epoch: int, sync_wake: threading.Event) -> None:
    """Read the whole cluster once as a new leader, and adopt the events of former leaders.

    A nimbus must not lead a cluster that it cannot read. Missing folders of the state are created,
    and the first leader that records access tokens stores its start.
    """
    for path in paths.FIRST_LEVEL:
        nimbus.cluster.state.mkdirs(path)
    view = nimbus.cluster.load_view()
    for path, problem in view.corrupt.items():
        _log.error("damaged: %s: %s", path, problem)
    _log.info(
        "leading %d topologies on %d supervisors", len(view.topologies), len(view.supervisors)
    )
    record_tokens(nimbus.operations(epoch), epoch)
    nimbus.unreported.adopt(nimbus.operations(epoch))
    sync_wake.set()


def _synchronize(sync: BlobSync, wake: threading.Event, ended: threading.Event) -> None:
    """Synchronize blobs until ``ended``.

    That is done every five seconds, when a blob is registered, and after an election was won.
    """
    while not ended.is_set():
        wake.clear()
        try:
            sync.run_once(wake.set)
        except Unavailable as error:
            _log.warning("blobs are not synchronized now: %s", error)
        except StormDagsterError as error:
            _log.error("blobs are not synchronized: %s", error)
        except Exception:
            _log.exception("synchronizing blobs failed")
        if not ended.is_set() and wake.wait(_SYNC_SECS):
            # Several blobs are registered within a moment: one round fetches them together.
            ended.wait(_GATHER_SECS)


def _keep_up(nimbus: Nimbus, ended: threading.Event) -> None:
    """Run the upkeep of nimbus until ``ended``.

    It expires idle transfers and old tokens, cleans the inbox, and returns unused memory to the
    system.
    """
    cleaning_secs = float(nimbus.conf["nimbus.cleanup.inbox.freq.secs"])
    expiration_secs = float(nimbus.conf["nimbus.inbox.jar.expiration.secs"])
    cleaned_at: float | None = None
    trimmed_at = time.monotonic()

    def work() -> None:
        nonlocal cleaned_at, trimmed_at
        now = time.monotonic()
        nimbus.uploads.advance(now)
        for entries in nimbus.expiring:
            entries.advance(now)
        if now - trimmed_at >= _TRIM_SECS:
            trimmed_at = now
            return_free_memory()
        if cleaned_at is None or now - cleaned_at >= cleaning_secs:
            cleaned_at = now
            clean_inbox(nimbus.inbox, expiration_secs=expiration_secs, now=time.time())
            nimbus.blobs.base.clean_abandoned(expiration_secs)

    repeat(work, _UPKEEP_SECS, ended, "upkeep")


def _resign(nimbus: Nimbus) -> None:
    """Stop acting as the leader and give leadership up; no effect at a follower."""
    nimbus.status.update(epoch=None, leader=None, leader_http=None)
    try:
        nimbus.leadership.resign()
    except StormDagsterError as error:
        _log.info("leadership ends with the session: %s", error)
