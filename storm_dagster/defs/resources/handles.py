"""Resources: handles by which assets, ops and sensors reach the cluster.

A resource finds what runs and never owns its life. Building one connects to nothing: definitions
load without a cluster. Connections are opened inside ``with`` blocks, in the process that uses
them.
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
from storm_dagster.defs.keys import described
from storm_dagster.host.endpoints import ClusterFile, cluster_conf, home_dir
from storm_dagster.host.processes import RunFile
from storm_dagster.host.waiting import poll
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.errors import Conflict, InvalidRequest, Unavailable
from storm_dagster.security.settings import Security
from storm_dagster.zk.storm_cluster_state import StormClusterState

_LONGEST_SECS = 300


def _local_cluster_runs(home: Path) -> bool:
    """Whether a local cluster lives in that state folder."""
    return any(record.role == "dev" and record.alive() for record in RunFile.read_all(home))


def _start_cluster(home: Path) -> None:
    """Start the smallest useful cluster in ``home``; returns when it is ready. It outlives this
    process.
    """
    arguments = (
        *("dev", "--detach", "--ports", "auto", "--home", str(home)),
        *("--supervisors", "2", "--slots", "4", "--nimbuses", "1"),
    )
    try:
        # This run may belong to another cluster, which must not take the new one for its own when
        # it ends.
        done = command.run_cli(
            *arguments, "--json", env={command.CLUSTER_MARK: ""}, timeout=_LONGEST_SECS
        )
    except subprocess.TimeoutExpired:
        raise Unavailable(
            f"`storm-dagster {' '.join(arguments)}` did not end within {_LONGEST_SECS} s: look at HOME/logs"
        ) from None
    done.check()


def ensure_local_cluster(home: Path) -> None:
    """Start the smallest useful cluster in ``home`` when none runs there, and wait until it is
    ready.

    Only resources with ``spawn=True`` (development) call it; a sensor, or a run without that flag,
    starts no daemon. Two runs that find none at once start one: the second is refused by `dev` and
    uses the first's. Raises :class:`Unavailable` when none is ready within five minutes.
    """
    if _local_cluster_runs(home) and ClusterFile.read(home) is not None:
        return
    try:
        _start_cluster(home)
    except (Conflict, Unavailable):
        if not _local_cluster_runs(home):
            raise
        cluster = poll(lambda: ClusterFile.read(home), timeout=_LONGEST_SECS, pause=0.5)
        if cluster is None:
            raise Unavailable(
                f"the cluster that starts in {home} is not ready: look at {home}/logs"
            ) from None


_BUILT_IN_CODE = (
    "Run config cannot set its fields: give them to build_storm_defs(), build_storm_resources() or the resource itself, "
    "where they may be dg.EnvVar."
)


class ClusterHandle(dg.ConfigurableResource):
    """Location of the cluster: a local cluster's HOME, or a conf folder.

    Its fields are given where it is built, and are no run config: whoever may launch a run could
    otherwise name the cluster that gets the run's signatures, or plug-ins that the run imports.
    """

    home: str | None = described("cluster.home", default=None)
    conf_dir: str | None = described("cluster.conf_dir", default=None)
    overrides: dict[str, Any] = described("cluster.overrides", default_factory=dict)
    asset_keys: dict[str, str] = described("cluster.asset_keys", default_factory=dict)
    spawn: bool = described("cluster.spawn", default=False)
    _ticks_in: dg.DagsterInstance | None = PrivateAttr(default=None)
    _closed: dg.ResourceDefinition | None = PrivateAttr(default=None)

    def get_resource_definition(self) -> Any:
        """The definition, always the same one, with the fields as they were given and an empty
        config schema.
        """
        if self._closed is None:
            made = super().get_resource_definition()
            fields = made.config_field
            default = fields.default_value if fields is not None and fields.default_provided else {}
            about = f"{self.__doc__}\n\n{_BUILT_IN_CODE}"
            self._closed = made.configured(lambda _: default, config_schema={}, description=about)
        return self._closed

    @classmethod
    def configure_at_launch(cls, **kwargs: Any) -> Any:
        """Refused: :class:`InvalidRequest`."""
        raise InvalidRequest(f"{cls.__name__}.configure_at_launch: {_BUILT_IN_CODE}")

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """Remember whether this serves a run, or a tick that nobody launched."""
        self._ticks_in = context.instance if context.run is None else None

    def asset_key(self, original: dg.AssetKey) -> dg.AssetKey:
        """The key under which that asset of ours is shown."""
        shown = self.asset_keys.get(original.to_user_string())
        return original if shown is None else dg.AssetKey.from_user_string(shown)

    def conf(self, ticks_in: dg.DagsterInstance | None = None) -> ClusterConf:
        """The merged conf, read now: a cluster that was restarted meanwhile is found again.

        A sensor or schedule that built the resource itself passes the instance that it
        ``ticks_in``. With ``spawn`` a local cluster is started first when none runs, except in a
        tick: a cluster that was stopped would come back by itself.
        """
        if self.spawn and self._ticks_in is None:
            ensure_local_cluster(self.home_path())
        conf = cluster_conf(
            self.home_path(), Path(self.conf_dir) if self.conf_dir else None, self.overrides or None
        )
        return tick_conf(conf, ticks_in or self._ticks_in)

    def home_path(self) -> Path:
        """The state folder, whether it exists or not."""
        return home_dir(self.home)


class _Connected(ClusterHandle):
    """Opens connections once, and keeps them until the end of the run or tick; then ephemeral nodes
    vanish.
    """

    _held: ExitStack | None = PrivateAttr(default=None)

    def setup_for_execution(self, context: dg.InitResourceContext) -> None:
        """From now until the end of the run or tick, one connection serves every step."""
        super().setup_for_execution(context)
        self._held = ExitStack()

    def teardown_after_execution(self, context: dg.InitResourceContext) -> None:
        """Close what was opened."""
        held, self._held = self._held, None
        if held is not None:
            held.close()


class ZooKeeperResource(_Connected):
    """Cluster state: one session for a whole run or tick, opened at first use."""

    _cluster: StormClusterState | None = PrivateAttr(default=None)

    @contextmanager
    def cluster(self, ticks_in: dg.DagsterInstance | None = None) -> Iterator[StormClusterState]:
        """The cluster's state; outside of a run or tick a session of its own, closed at the end.

        :class:`Unavailable` when ZooKeeper is out of reach or the root does not exist: it is never
        created from here.
        """
        if self._held is None:
            with StormClusterState.open(self.conf(ticks_in).values) as cluster:
                yield cluster
            return
        if self._cluster is None:
            self._held.callback(setattr, self, "_cluster", None)
            self._cluster = self._held.enter_context(StormClusterState.open(self.conf().values))
        yield self._cluster


class BlobStoreResource(_Connected):
    """Blobs: a client of the leading nimbus, one for a whole run or tick."""

    local_dir: str | None = described("blobstore.local_dir", default=None)
    _client: tuple[StormClusterState, NimbusBlobClient] | None = PrivateAttr(default=None)

    @contextmanager
    def blobs(self, cluster: StormClusterState) -> Iterator[BlobStore]:
        """The store of ``cluster``: its leader is looked up before each request."""
        if self.local_dir:
            yield LocalBlobStore(Path(self.local_dir))
        elif self._held is None:
            with self._open(cluster) as client:
                yield client
        else:
            # A client that was made for another session would ask a closed one for its leader.
            if self._client is None or self._client[0] is not cluster:
                self._client = (cluster, self._held.enter_context(self._open(cluster)))
            yield self._client[1]

    def _open(self, cluster: StormClusterState) -> NimbusBlobClient:
        """A client whose writes end with the leadership epoch of now, like those of the run."""
        known = cluster.epoch()
        epoch = None if known is None else known[0]
        return NimbusBlobClient(cluster.leader_http, epoch=epoch, security=Security.of(self.conf()))
