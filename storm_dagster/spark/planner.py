"""The planner of operations: placement on Spark, over a pinned Connect session or a classic master.

A pinned session is one on the server that many processes attach to in turn. A process that attaches
to a session that lives already finds its Python workers and plans warm; a session of its own would
cost more than a second before the first Python function runs. The id is kept where all processes of
the cluster find it, and replaced by compare and set when the server has dropped the session.
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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from storm_dagster.model import paths
from storm_dagster.model.conf import ClusterConf, Conf
from storm_dagster.model.errors import Conflict, Corrupt, Unavailable
from storm_dagster.model.placement import PlacementBatch, PlacementResult
from storm_dagster.security import spark_remote
from storm_dagster.spark import link
from storm_dagster.spark import session as sessions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger(__name__)

OpenSession = Callable[[Mapping[str, str]], "SparkSession"]
"""Opens the session of a Spark conf: ``{"spark.remote": url}`` or ``{"spark.master": url}``."""

DEADLINE_SECS = 120.0
_EPOCH = (1980, 1, 1, 0, 0, 0)


class ClusterSessionIds:
    """The id in ZooKeeper, at ``/spark_sessions/placement``; ``state`` is a ``zk.ClusterState``."""

    def __init__(self, state: Any) -> None:
        self._state = state
        self._path = paths.spark_session("placement")

    def read(self) -> tuple[str, int] | None:
        """The id and its data version; :class:`Corrupt` when the node holds something else."""
        found = self._state.get_data_with_version(self._path)
        if found is None:
            return None
        raw, at = found
        try:
            return str(uuid.UUID(raw.decode("ascii"))), at.version
        except (UnicodeDecodeError, ValueError):
            raise Corrupt(
                f"{self._path} holds no session id: delete the node, a new one is written"
            ) from None

    def replace(self, session_id: str, version: int | None) -> bool:
        """Keep another id if the version is still this one (``None``: if there is none); whether it
        was.
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
    """An id that is agreed upon beforehand, for one process; a replacement is known to it alone."""

    def __init__(self, session_id: str) -> None:
        self._kept = (session_id, 0)

    def read(self) -> tuple[str, int]:
        return self._kept

    def replace(self, session_id: str, version: int | None) -> bool:
        self._kept = (session_id, (version or 0) + 1)
        return True


SessionIds = ClusterSessionIds | FixedSessionIds
"""Store of the id of one pinned session."""


def pinned_id(ids: SessionIds, *, gone: str | None = None) -> str:
    """The stored id, created when there is none, and replaced when it is the one that is ``gone``.

    Of several processes that find it gone one writes, the others take what that one wrote.
    """
    for _ in range(10):
        kept = ids.read()
        if kept is not None and kept[0] != gone:
            return kept[0]
        fresh = str(uuid.uuid4())
        if ids.replace(fresh, kept[1] if kept is not None else None):
            return fresh
    raise Conflict("the id of the pinned Spark session changed ten times in a row: try again")


@dataclass(eq=False)
class ConnectPlanner:
    """Planner over Spark Connect, in the pinned session; callable with a batch, from any thread.

    The first call opens the session, later ones use it on. A session that the server has dropped is
    replaced once. Raises :class:`Unavailable` when Spark is out of reach, fails, or takes longer
    than ``deadline_secs``.
    """

    remote: str
    ids: SessionIds
    open_session: OpenSession | None = None
    deadline_secs: float = DEADLINE_SECS
    home: Path | None = None
    token: str | None = None
    """Of the server; without it that of the state folder ``home``, else of STORM_DAGSTER_HOME."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._session: tuple[str, SparkSession] | None = None

    def __call__(self, batch: PlacementBatch) -> PlacementResult:
        """Place the batch on Spark."""
        link.check_reachable(self.remote)
        with self._lock:
            try:
                return sessions.within(
                    self.deadline_secs, f"Spark at {self.remote}", lambda: self._plan(batch)
                )
            except Exception:
                self.close()
                raise

    def close(self, *, release: bool = False) -> None:
        """Close this process's side of the session; with ``release`` the server's side too."""
        if self._session is not None:
            link.forget_session(self._session[1], release=release)
            self._session = None

    def _plan(self, batch: PlacementBatch) -> PlacementResult:
        # Imports are neither the session's time nor the assignment's.
        from storm_dagster.spark.assignment.pipeline import plan_with_spark

        gone: str | None = None
        while True:
            started = time.monotonic()
            session_id = pinned_id(self.ids, gone=gone)
            try:
                session = self._attached(session_id)
                session_secs = time.monotonic() - started
                result = plan_with_spark(session, batch)
                return result.model_copy(update={"session_secs": session_secs})
            except Exception as error:
                if gone is not None or not link.is_session_gone(error):
                    raise
                _log.warning("the pinned Spark session %s is gone, a new one is opened", session_id)
                self.close()
                gone = session_id

    def _attached(self, session_id: str) -> "SparkSession":
        if self._session is not None and self._session[0] == session_id:
            return self._session[1]
        self.close()
        remote = spark_remote.remote_with_session(self.remote, session_id)
        url = spark_remote.with_spark_token(remote, [self.remote], self.home, self.token)
        session: SparkSession | None = None
        if self.open_session is not None:
            session = self.open_session({"spark.remote": url})
            link.close_at_exit(session)
            if (
                f"session_id={session_id}" in url
                and getattr(session, "session_id", None) != session_id
            ):
                # The opener returned a session that the process had already, which other code uses.
                session = None
        if session is None:
            session = sessions.open_connect(url)
        _ship_package(session, self.remote)
        self._session = (session_id, session)
        return session


def _ship_package(session: "SparkSession", remote: str) -> None:
    """Send this package to a server elsewhere, whose Python workers cannot import it; loopback
    shares ours.
    """
    if spark_remote.host_and_port(remote)[0] in ("127.0.0.1", "localhost", "[::1]"):
        return
    with tempfile.TemporaryDirectory(prefix="storm-dagster-spark-") as folder:
        spark_remote.add_python_archive(session, package_archive(Path(folder)))


def plan_classic(
    get_session: "Callable[[], SparkSession]", batch: PlacementBatch
) -> PlacementResult:
    """Place the batch on a classic session, whose driver is in this process; :class:`Unavailable`
    when it fails or takes too long.
    """

    def plan() -> PlacementResult:
        from storm_dagster.spark.assignment.pipeline import plan_with_spark

        started = time.monotonic()
        session = get_session()
        opened = time.monotonic() - started
        return plan_with_spark(session, batch).model_copy(update={"session_secs": opened})

    return sessions.within(DEADLINE_SECS, "Spark", plan)


_planners: dict[tuple[int, str, Path | None], ConnectPlanner] = {}


def plan_on_cluster(
    conf: ClusterConf | Conf,
    cluster: Any,
    batch: PlacementBatch,
    *,
    open_session: OpenSession | None = None,
    home: Path | None = None,
) -> PlacementResult:
    """Place the batch on the ``spark.remote`` of the cluster's conf, else on its ``spark.master``.

    ``cluster`` is the :class:`StormClusterState` whose ``state`` keeps the pinned session's id;
    ``open_session`` opens a session from a Spark conf (dagster-pyspark's resource does). Spark's
    token follows from the conf's ``storm.secret``, else it lies in the state folder ``home``,
    STORM_DAGSTER_HOME without it. A process attaches once. Raises :class:`Unavailable`, also when
    the conf names no Spark.
    """
    remote, master = conf.get("spark.remote"), conf.get("spark.master")
    if remote:
        ids = ClusterSessionIds(cluster.state)
        # Keyed by process: a gRPC channel does not survive a fork.
        planner = _planners.setdefault(
            (os.getpid(), str(remote), home),
            ConnectPlanner(str(remote), ids, open_session=open_session, home=home),
        )
        planner.ids, planner.token = ids, spark_remote.derived_spark_token(conf)
        return planner(batch)
    if master:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        where = {"spark.master": str(master)}
        return plan_classic(
            lambda: open_session(where) if open_session else sessions.open_classic(str(master)),
            batch,
        )
    raise Unavailable(
        "the cluster's conf names no Spark: set spark.remote (sc://host:port) or spark.master, "
        "or run storm-dagster dev, which starts one"
    )


def planner_for(
    conf: ClusterConf | Conf, session_id: str | None = None
) -> Callable[[PlacementBatch], PlacementResult]:
    """The planner of ``plan``: the cluster's Spark when there is one, else one in this process, on
    all its cores.

    ``session_id`` is the cluster's pinned session, which it joins and never replaces. Without it,
    what-if planning has a session of its own under an id that all users of that server's URL agree
    on, so that it is warm from the second call on and nothing is written anywhere.
    """
    remote = conf.get("spark.remote")
    if remote:
        agreed = uuid.uuid5(uuid.NAMESPACE_URL, f"{remote}#storm-dagster-plan")
        ids = FixedSessionIds(session_id or str(agreed))
        sessions.await_start(str(remote))
        return ConnectPlanner(str(remote), ids, token=spark_remote.derived_spark_token(conf))
    master = str(conf.get("spark.master") or "local[*]")
    return lambda batch: plan_classic(lambda: sessions.open_classic(master), batch)


def package_archive(folder: Path) -> Path:
    """A zip of the modules that the assignment's functions import, made in ``folder`` and named by
    its content.
    """
    root = Path(__file__).resolve().parents[1]
    target = folder / "package.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
        folders = (root / "model", root / "core", root / "spark")
        for path in sorted(
            [root / "__init__.py", *(path for folder in folders for path in folder.rglob("*.py"))]
        ):
            name = str(path.relative_to(root.parent))
            archive.writestr(zipfile.ZipInfo(name, _EPOCH), path.read_bytes())
    digest = hashlib.sha256(target.read_bytes()).hexdigest()[:16]
    return target.rename(folder / f"storm_dagster-{digest}.zip")
