"""The planner of operations: placement on Spark.

It uses a pinned Connect session or a classic master. Many processes attach to the pinned session on
the server in turn. A process that attaches to a live session finds its Python workers and plans
warm; a new session would need more than a second before the first Python function runs. All
processes of the cluster can read the stored id. It is replaced by compare and set when the server
has dropped the session.
"""

import hashlib
import logging
import os
import sys
import tempfile
import threading
import time
import uuid
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from storm_dagster.model import paths
from storm_dagster.model.conf import ClusterConf, Conf
from storm_dagster.model.errors import Conflict, Corrupt, Unavailable
from storm_dagster.model.placement import PlacementBatch, PlacementResult
from storm_dagster.security import spark_remote
from storm_dagster.security.server_identity import TrustedServers
from storm_dagster.spark import link
from storm_dagster.spark import session as sessions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)

OpenSession = Callable[[Mapping[str, str]], "SparkSession"]
"""Opener of a session from a Spark conf.

The conf is ``{"spark.remote": url}`` or ``{"spark.master": url}``.
"""

DEADLINE_SECS = 120.0
"""Time that a placement on Spark may take, the opening of its session included."""
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""Date of the archive's entries, the first of zip: equal modules give an equal archive."""


class ClusterSessionIds:
    """Store of the id in ZooKeeper, at ``/spark_sessions/placement``.

    ``state`` is a ``zk.ClusterState``.
    """

    def __init__(self, state: Any) -> None:
        self._state = state
        self._path = paths.spark_session("placement")

    def read(self) -> tuple[str, int] | None:
        """The id and its data version; ``None`` if no id is stored.

        :class:`Corrupt` if the node has no session id.
        """
        stored = self._state.get_data_with_version(self._path)
        if stored is None:
            return None
        raw, at = stored
        try:
            return str(uuid.UUID(raw.decode("ascii"))), at.version
        except (UnicodeDecodeError, ValueError):
            raise Corrupt(
                f"{self._path} holds no session id: delete the node, a new one is written"
            ) from None

    def replace(self, session_id: str, version: int | None) -> bool:
        """Store another id if the version is still ``version``; true if it was.

        With ``None``: if no id is stored.
        """
        data = session_id.encode("ascii")
        try:
            if version is None:
                self._state.transaction().create(self._path, data).commit()
            else:
                self._state.set_data(self._path, data, version)
        except Conflict:
            return False
        return True


class FixedSessionIds:
    """Store of a fixed id for one process; only this process knows a replacement."""

    def __init__(self, session_id: str) -> None:
        self._current = (session_id, 0)
        """Id, and number of its replacements in place of a data version."""

    def read(self) -> tuple[str, int]:
        return self._current

    def replace(self, session_id: str, version: int | None) -> bool:
        self._current = (session_id, (version or 0) + 1)
        return True


SessionIds = ClusterSessionIds | FixedSessionIds
"""Store of the id of one pinned session."""


def pinned_id(ids: SessionIds, *, gone: str | None = None) -> str:
    """The stored id; a new one if none is stored, or if the stored one is ``gone``.

    ``gone`` is the id of a session that the server has dropped. Of several processes that replace
    it one writes the new id, and the others use that. :class:`Conflict` if the id changes all the
    time.
    """
    for _ in range(10):
        stored = ids.read()
        version: int | None = None
        if stored is not None:
            session_id, version = stored
            if session_id != gone:
                return session_id
        new_id = str(uuid.uuid4())
        if ids.replace(new_id, version):
            return new_id
    raise Conflict("the id of the pinned Spark session changed ten times in a row: try again")


class _PinnedSession(NamedTuple):
    """An open session of this process, and its id on the server."""

    id: str
    session: "SparkSession"


_SMALL_TASKS = 10_000
"""Largest number of tasks for which Spark's optimizations of large queries cost more than they
save.
"""


@dataclass(eq=False)
class ConnectPlanner:
    """Planner over Spark Connect, in the pinned session.

    It is callable with a batch, from any thread. The first call opens the session, later ones reuse
    it. A session that the server has dropped is replaced once. Raises :class:`Unavailable` if Spark
    is unreachable, fails, or takes longer than ``deadline_secs``.
    """

    remote: str
    """URL of the server, without its token."""
    ids: SessionIds
    open_session: OpenSession | None = None
    """Opener of sessions; ``None``: :func:`sessions.open_connect`."""
    deadline_secs: float = DEADLINE_SECS
    home: Path | None = None
    """State folder with the server's token; ``None``: STORM_DAGSTER_HOME."""
    token: str | None = None
    """Token of the server; by default that of the state folder ``home``."""
    trusted: TrustedServers = field(default_factory=TrustedServers)
    """Servers that may be sent to."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        """Held during a placement: one at a time in the session."""
        self._session: _PinnedSession | None = None
        """Open session; ``None`` before the first placement, and after an error."""

    def __call__(self, batch: PlacementBatch) -> PlacementResult:
        """Place the batch on Spark."""
        link.check_reachable(self.remote, trusted=self.trusted)
        with self._lock:
            try:
                return sessions.within(
                    self.deadline_secs, f"Spark at {self.remote}", lambda: self._plan(batch)
                )
            except Exception:
                # The next call attaches once more: this session may be the reason.
                self.close()
                raise

    def close(self, *, release: bool = False) -> None:
        """Close this process's side of the session; with ``release`` also the server's."""
        if self._session is not None:
            link.forget_session(self._session.session, release=release)
            self._session = None

    def _plan(self, batch: PlacementBatch) -> PlacementResult:
        """Place the batch in the pinned session, which is replaced once if it is gone."""
        # Here, so that imports count neither to the session's time nor to the assignment's.
        from storm_dagster.spark.assignment.pipeline import plan_with_spark

        gone: str | None = None
        while True:
            started = time.monotonic()
            session_id = pinned_id(self.ids, gone=gone)
            try:
                session = self._attach(session_id)
                _choose_optimizations(session, batch)
                session_secs = time.monotonic() - started
                result = plan_with_spark(session, batch)
                return result.model_copy(update={"session_secs": session_secs})
            except Exception as error:
                if gone is not None or not link.is_session_gone(error):
                    raise
                _log.warning("the pinned Spark session %s is gone, a new one is opened", session_id)
                self.close()
                gone = session_id

    def _attach(self, session_id: str) -> "SparkSession":
        """The open session of that id, opened if necessary."""
        if self._session is not None and self._session.id == session_id:
            return self._session.session
        # No session is open yet, or another process has replaced the id.
        self.close()
        remote = spark_remote.remote_with_session(self.remote, session_id)
        url = spark_remote.with_spark_token(remote, [self.remote], self.home, self.token)
        session: SparkSession | None = None
        if self.open_session is not None:
            session = self.open_session({"spark.remote": url})
            link.close_at_exit(session)
            # The pinned id is in the URL, unless the conf's URL names a session itself.
            is_requested = getattr(session, "session_id", None) == session_id
            if f"session_id={session_id}" in url and not is_requested:
                # The opener returned an existing session of the process, which other code uses.
                session = None
        if session is None:
            session = sessions.open_connect(url, self.trusted)
        _ship_package(session, self.remote)
        self._session = _PinnedSession(session_id, session)
        return session


def _choose_optimizations(session: "SparkSession", batch: PlacementBatch) -> None:
    """Switch the optimizations of large queries on or off, for the size of the batch.

    For each batch, Spark compiles Java code and plans stages, which takes longer than the job of a
    small batch: without both, a placement takes 0.2 s instead of 0.3 s. The setting is the pinned
    session's, which other processes use as well, so it is set each time.
    """
    tasks = sum(len(topology.tasks) for topology in batch.topologies)
    is_large = tasks > _SMALL_TASKS
    for key in ("spark.sql.codegen.wholeStage", "spark.sql.adaptive.enabled"):
        session.conf.set(key, str(is_large).lower())


def _ship_package(session: "SparkSession", remote: str) -> None:
    """Send this package to a server whose Python workers cannot import it.

    It is on another host. Workers on loopback use the package of this host.
    """
    if spark_remote.host_and_port(remote)[0] in ("127.0.0.1", "localhost", "[::1]"):
        return
    with tempfile.TemporaryDirectory(prefix="storm-dagster-spark-") as folder:
        spark_remote.add_python_archive(session, package_archive(Path(folder)))


def plan_classic(
    get_session: "Callable[[], SparkSession]", batch: PlacementBatch
) -> PlacementResult:
    """Place the batch on a classic session, whose driver is in this process.

    :class:`Unavailable` if it fails or takes too long.
    """

    def plan() -> PlacementResult:
        from storm_dagster.spark.assignment.pipeline import plan_with_spark

        started = time.monotonic()
        session = get_session()
        session_secs = time.monotonic() - started
        result = plan_with_spark(session, batch)
        return result.model_copy(update={"session_secs": session_secs})

    return sessions.within(DEADLINE_SECS, "Spark", plan)


_planners: dict[tuple[int, str, Path | None], ConnectPlanner] = {}
"""(Process id, server's URL, state folder) -> planner with its open session."""


def plan_on_cluster(
    conf: ClusterConf | Conf,
    cluster: Any,
    batch: PlacementBatch,
    *,
    open_session: OpenSession | None = None,
    home: Path | None = None,
) -> PlacementResult:
    """Place the batch on the cluster's Spark.

    It is the ``spark.remote`` of the cluster's conf, else its ``spark.master``. ``cluster`` is the
    :class:`StormClusterState` whose ``state`` stores the pinned session's id; ``open_session``
    opens a session from a Spark conf (dagster-pyspark's resource does). Spark's token is derived
    from the conf's ``storm.secret``, else it is in the state folder ``home``, by default
    STORM_DAGSTER_HOME. A process attaches once. Raises :class:`Unavailable`, also if the conf names
    no Spark.
    """
    remote = conf.get("spark.remote")
    master = conf.get("spark.master")
    if remote:
        ids = ClusterSessionIds(cluster.state)
        # The key has the process, because a gRPC channel does not survive a fork.
        planner = _planners.setdefault(
            (os.getpid(), str(remote), home),
            ConnectPlanner(str(remote), ids, open_session=open_session, home=home),
        )
        planner.ids = ids
        planner.token = spark_remote.derived_spark_token(conf)
        planner.trusted = TrustedServers.of(conf)
        return planner(batch)
    if master:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

        def get_session() -> "SparkSession":
            if open_session is None:
                return sessions.open_classic(str(master))
            return open_session({"spark.master": str(master)})

        return plan_classic(get_session, batch)
    raise Unavailable(
        "the cluster's conf names no Spark: set spark.remote (sc://host:port) or spark.master, "
        "or run storm-dagster dev, which starts one"
    )


def planner_for(
    conf: ClusterConf | Conf, session_id: str | None = None
) -> Callable[[PlacementBatch], PlacementResult]:
    """The planner of ``plan``.

    It uses the cluster's Spark, else one in this process on all its cores. ``session_id`` is the
    cluster's pinned session, to which the planner attaches without ever replacing it. Without it,
    what-if planning has a separate session. Its id is derived from the server's URL and equal for
    all users of it, so that the session is warm from the second call on and no state is written.
    """
    remote = conf.get("spark.remote")
    if remote:
        common_id = uuid.uuid5(uuid.NAMESPACE_URL, f"{remote}#storm-dagster-plan")
        ids = FixedSessionIds(session_id or str(common_id))
        sessions.await_start(str(remote))
        return ConnectPlanner(
            str(remote),
            ids,
            token=spark_remote.derived_spark_token(conf),
            trusted=TrustedServers.of(conf),
        )
    master = str(conf.get("spark.master") or "local[*]")
    return lambda batch: plan_classic(lambda: sessions.open_classic(master), batch)


def package_archive(folder: Path) -> Path:
    """Write a zip of the modules that the assignment imports into ``folder``.

    Its name has the hash of its content.
    """
    root = Path(__file__).resolve().parents[1]
    modules = [root / "__init__.py"]
    for package in ("model", "core", "spark"):
        modules += (root / package).rglob("*.py")
    target = folder / "package.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(modules):
            name = str(path.relative_to(root.parent))
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), path.read_bytes())
    digest = hashlib.sha256(target.read_bytes()).hexdigest()[:16]
    return target.rename(folder / f"storm_dagster-{digest}.zip")
