"""Resources: handles by which assets, ops and sensors reach the cluster.

A resource finds running daemons and never owns their life. Building one opens no connection, so
that definitions load without a cluster. Connections are opened inside ``with`` blocks, in the
process that uses them.
"""

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
from pydantic import PrivateAttr

from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.blobstore.store import BlobStore
from storm_dagster.client import command
from storm_dagster.client.blobs import NimbusBlobClient
from storm_dagster.defs.instance_settings import tick_conf
from storm_dagster.defs.keys import catalog_field
from storm_dagster.host.endpoints import ClusterFile, DevFile, cluster_conf, home_dir
from storm_dagster.host.processes import RunFile
from storm_dagster.host.waiting import poll
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.errors import Conflict, InvalidRequest, Unavailable
from storm_dagster.security.settings import Security
from storm_dagster.zk.storm_cluster_state import StormClusterState

_MAX_START_SECS = 300
"""Time in which a local cluster that is started must be ready."""
_BUILT_IN_CODE = (
    "Run config cannot set its fields: give them to build_storm_defs(), build_storm_resources() "
    "or the resource itself, where they may be dg.EnvVar."
)


def _local_cluster_runs(home: Path) -> bool:
    """True if a local cluster runs in that state folder."""
    return any(record.role == "dev" and record.alive() for record in RunFile.read_all(home))


def start_arguments(home: Path) -> list[str]:
    """Command line that starts the smallest useful cluster in ``home``.

    If the last ``dev`` there had no Dagster of its own, this one has none, either: the Dagster that
    runs this code serves the cluster.
    """
    arguments = ["dev", "--detach", "--ports", "auto", "--home", str(home)]
    arguments += ["--supervisors", "2", "--slots", "4", "--nimbuses", "1"]
    last = DevFile.read(home)
    if last.own_dagster:
        return arguments
    arguments.append("--no-dagster")
    url = str(last.conf.get("dagster.graphql.url") or "")
    # An address with a password is in a file, never on a command line.
    if url and "@" not in url:
        arguments += ["-c", f"dagster.graphql.url={url}"]
    return arguments


def _start_cluster(home: Path) -> None:
    """Start the smallest useful cluster in ``home``, and wait until it is ready.

    It outlives this process. :class:`Unavailable` if it is not ready within five minutes,
    :class:`Conflict` if another process starts one there, and the other errors of `dev`.
    """
    arguments = start_arguments(home)
    try:
        # This run may belong to another cluster, which must not end the new one together with its
        # own processes.
        finished = command.run_cli(
            *arguments, "--json", env={command.CLUSTER_MARK: ""}, timeout=_MAX_START_SECS
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(
            f"`storm-dagster {' '.join(arguments)}` did not end within {_MAX_START_SECS} s: "
            "look at HOME/logs"
        ) from None
    finished.check()


def ensure_local_cluster(home: Path) -> None:
    """Start the smallest useful cluster in ``home`` if none runs there.

    Returns when the cluster is ready. Only resources with ``spawn=True`` (development) call it; a
    sensor, or a run without that flag, starts no daemon. If two runs call it at the same time, one
    cluster is started: `dev` refuses the second, which uses the first one. Raises
    :class:`Unavailable` if no cluster is ready within five minutes.
    """
    if _local_cluster_runs(home) and ClusterFile.read(home) is not None:
        return
    try:
        _start_cluster(home)
    except (Conflict, Unavailable):
        if not _local_cluster_runs(home):
            raise
        cluster = poll(lambda: ClusterFile.read(home), timeout=_MAX_START_SECS, pause=0.5)
        if cluster is None:
            raise Unavailable(
                f"the cluster that starts in {home} is not ready: look at {home}/logs"
            ) from None


class ClusterHandle(dg.ConfigurableResource):
    """Location of the cluster: a local cluster's HOME, or a conf folder.

    Its fields are set where it is built, and are not run config. Otherwise a user who may launch a
    run could name the cluster that gets the run's signatures, or plug-ins that the run imports.
    """

    home: str | None = catalog_field("cluster.home", default=None)
    conf_dir: str | None = catalog_field("cluster.conf_dir", default=None)
    overrides: dict[str, Any] = catalog_field("cluster.overrides", default_factory=dict)
    asset_keys: dict[str, str] = catalog_field("cluster.asset_keys", default_factory=dict)
    spawn: bool = catalog_field("cluster.spawn", default=False)
    _ticks_in: dg.DagsterInstance | None = PrivateAttr(default=None)
    """Instance in a tick of which this serves; ``None`` in a run."""
    _closed: dg.ResourceDefinition | None = PrivateAttr(default=None)
    """The definition without run config, once it was requested."""

    def get_resource_definition(self) -> Any:
        """The definition with the fields of this resource and an empty config schema.

        Each call returns the same one.
        """
        if self._closed is None:
            definition = super().get_resource_definition()
            fields = definition.config_field
            default = fields.default_value if fields is not None and fields.default_provided else {}
            description = f"{self.__doc__}\n\n{_BUILT_IN_CODE}"
            self._closed = definition.configured(
                lambda _: default, config_schema={}, description=description
            )
        return self._closed

    @classmethod
    def configure_at_launch(cls, **kwargs: Any) -> Any:
        """Refused: :class:`InvalidRequest`."""
        raise InvalidRequest(f"{cls.__name__}.configure_at_launch: {_BUILT_IN_CODE}")

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Remember if this serves a run, or a tick."""
        self._ticks_in = context.instance if context.run is None else None

    def asset_key(self, original: dg.AssetKey) -> dg.AssetKey:
        """The translated key of one of this package's assets."""
        translated = self.asset_keys.get(original.to_user_string())
        return original if translated is None else dg.AssetKey.from_user_string(translated)

    def conf(self, ticks_in: dg.DagsterInstance | None = None) -> ClusterConf:
        """The merged conf, read at each call, so that a restarted cluster is found.

        A sensor or schedule that built the resource itself passes the instance that it
        ``ticks_in``. With ``spawn`` a local cluster is started first if none runs; not in a tick,
        because a tick would restart a cluster that was stopped.
        """
        if self.spawn and self._ticks_in is None:
            ensure_local_cluster(self.home_path())
        conf_dir = Path(self.conf_dir) if self.conf_dir else None
        conf = cluster_conf(self.home_path(), conf_dir, self.overrides or None)
        return tick_conf(conf, ticks_in or self._ticks_in)

    def home_path(self) -> Path:
        """The state folder, which may be missing."""
        return home_dir(self.home)


class _Connected(ClusterHandle):
    """Resource with one connection for a whole run or tick.

    Its ephemeral nodes are deleted with the connection, at the end of the run or tick.
    """

    _connections: ExitStack | None = PrivateAttr(default=None)
    """Open connections of the run or tick; ``None`` outside of one."""

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Let one connection serve every step until the end of the run or tick."""
        super().setup_for_execution(context)
        self._connections = ExitStack()

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """Close the connections."""
        connections = self._connections
        self._connections = None
        if connections is not None:
            connections.close()


class ZooKeeperResource(_Connected):
    """Cluster state: one session for a whole run or tick, opened at first use."""

    _cluster: StormClusterState | None = PrivateAttr(default=None)
    """State over the session of the run or tick; ``None`` before its first use."""

    @contextmanager
    def cluster(self, ticks_in: dg.DagsterInstance | None = None) -> Iterator[StormClusterState]:
        """The cluster's state; outside of a run or tick over a separate session.

        That session is closed at the end. :class:`Unavailable` if ZooKeeper is unreachable or the
        root does not exist; the root is never created here.
        """
        if self._connections is None:
            with StormClusterState.open(self.conf(ticks_in).values) as cluster:
                yield cluster
            return
        if self._cluster is None:
            # Once the session is closed, the next run or tick opens another one.
            self._connections.callback(setattr, self, "_cluster", None)
            self._cluster = self._connections.enter_context(
                StormClusterState.open(self.conf().values)
            )
        yield self._cluster


class BlobStoreResource(_Connected):
    """Blobs: a client of the leading nimbus, one for a whole run or tick."""

    local_dir: str | None = catalog_field("blobstore.local_dir", default=None)
    _client: tuple[StormClusterState, NimbusBlobClient] | None = PrivateAttr(default=None)
    """Client of the run or tick, and the state by which it looks its leader up."""

    @contextmanager
    def blobs(
        self, cluster: StormClusterState, *, deadline_secs: float | None = None
    ) -> Iterator[BlobStore]:
        """The store of ``cluster``: its leader is looked up before each request.

        With ``local_dir`` it is that folder, without a nimbus. Outside of a run or tick the client
        is closed at the end, and so is one with a deadline of its own for each call.
        """
        if self.local_dir:
            yield LocalBlobStore(Path(self.local_dir))
        elif deadline_secs is not None:
            with self._open(cluster, deadline_secs) as client:
                yield client
        elif self._connections is None:
            with self._open(cluster) as client:
                yield client
        else:
            # A client of another session would look its leader up over a closed session.
            client_cluster, client = self._client or (None, None)
            if client is None or client_cluster is not cluster:
                client = self._connections.enter_context(self._open(cluster))
                self._client = (cluster, client)
            yield client

    def _open(self, cluster: StormClusterState, deadline_secs: float = 30.0) -> NimbusBlobClient:
        """A client whose writes end with the current leadership epoch.

        So do the writes of the run.
        """
        stored_epoch = cluster.epoch()
        epoch = None
        if stored_epoch is not None:
            epoch, _ = stored_epoch
        return NimbusBlobClient(
            cluster.leader_http,
            epoch=epoch,
            deadline_secs=deadline_secs,
            security=Security.of(self.conf()),
        )
