"""The ``spark`` resource: dagster-pyspark's session.

It uses Spark Connect or a classic master. pyspark and dagster-pyspark are imported when a session
is first opened, not when definitions load.
"""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from storm_dagster.defs.resources.handles import ClusterHandle
from storm_dagster.model.errors import Unavailable
from storm_dagster.model.placement import PlacementBatch, PlacementResult
from storm_dagster.operations.context import Planner
from storm_dagster.security.server_identity import TrustedServers
from storm_dagster.security.spark_remote import (
    cluster_spark_servers,
    derived_spark_token,
    with_spark_token,
)
from storm_dagster.spark.session_keys import KeysResult
from storm_dagster.zk.storm_cluster_state import StormClusterState

if TYPE_CHECKING:
    from dagster_pyspark import LazyPySparkResource
    from pyspark.sql import SparkSession

_ASK_SECS = 2.0
"""Time in which the server must say which keys of a topology it refuses."""
_MAX_RESTARTS = 2
"""Starts of a lost server for which one placement waits."""
_RELEASE_SECS = 5.0
"""Time that the server has to release a session at the end of a run's process."""


class SparkResource(ClusterHandle):
    """Spark for placements, and a session for the user's own assets."""

    def pyspark(self, conf: dict[str, Any] | None = None) -> "LazyPySparkResource":
        """dagster-pyspark's resource for the cluster's Spark.

        That is ``spark.remote`` (Connect), else ``spark.master``. Its session is separate, never
        the one of placements. ``conf`` is added to the session's conf.
        """
        cluster_conf = self.conf()
        spark_conf: dict[str, str] = {}
        # Spark refuses both keys together: Connect comes first.
        if cluster_conf.get("spark.remote"):
            token = derived_spark_token(cluster_conf)
            servers = cluster_spark_servers(cluster_conf)
            spark_conf["spark.remote"] = with_spark_token(
                cluster_conf["spark.remote"], servers, self.home_path(), token
            )
        elif cluster_conf.get("spark.master"):
            spark_conf["spark.master"] = cluster_conf["spark.master"]
        return _pyspark_resource(
            {**spark_conf, **(conf or {})}, TrustedServers.of(cluster_conf), release=True
        )

    def planner(self, cluster: StormClusterState) -> Planner:
        """The PySpark assignment over the pinned session; connects at its first call.

        A placement waits while `dev` starts the server, also if it is lost during the wait; healing
        does not wait.

        The call raises :class:`Unavailable` if Spark is unreachable; the caller decides what to do
        then.
        """

        def plan(batch: PlacementBatch) -> PlacementResult:
            from storm_dagster.spark.planner import plan_on_cluster
            from storm_dagster.spark.session import await_start, is_starting_again

            conf = self.conf()
            home = self.home_path()
            remote: str = conf.get("spark.remote") or ""
            # Healing has the local planner; all other callers wait for the start of the server.
            is_healing = all(topology.event == "monitor" for topology in batch.topologies)
            opener = partial(open_session, trusted=TrustedServers.of(conf))
            restarts_left = _MAX_RESTARTS if remote and not is_healing else 0
            while True:
                if remote and not is_healing:
                    await_start(remote, home)
                try:
                    return plan_on_cluster(conf, cluster, batch, open_session=opener, home=home)
                except Unavailable:
                    # The server may have been lost before this call, or during it.
                    if not restarts_left or not is_starting_again(remote, home):
                        raise
                    restarts_left -= 1

        return plan

    def check_keys(self, url: str, keys: Mapping[str, str]) -> KeysResult:
        """Result of the Spark server at the URL for the keys of a topology.

        :class:`Unavailable` if it does not answer within 2 s.
        """
        from storm_dagster.spark.session import ask_keys

        conf = self.conf()
        token = derived_spark_token(conf)
        servers = cluster_spark_servers(conf)
        remote = with_spark_token(url, servers, self.home_path(), token)
        return ask_keys(remote, keys, _ASK_SECS, TrustedServers.of(conf))


def _pyspark_resource(
    spark_config: dict[str, Any], trusted: TrustedServers, *, release: bool
) -> "LazyPySparkResource":
    """dagster-pyspark's resource, whose Connect session sends only to ``trusted`` servers.

    With ``release`` such a session ends with this process, also if the server is unreachable.
    """
    from dagster_pyspark import LazyPySparkResource
    from dagster_spark.utils import flatten_dict

    from storm_dagster.spark.link import close_at_exit, limit_retries
    from storm_dagster.spark.session import open_default

    keys = dict(flatten_dict(spark_config))

    class ClusterPySpark(LazyPySparkResource):
        """Session on the cluster's Spark."""

        @property
        def spark_session(self) -> Any:
            if self._spark_session is None and "spark.remote" in keys:
                self._spark_session = open_default(keys, trusted)
                limit_retries(self._spark_session)
                if release:
                    remote = keys["spark.remote"]
                    # Other processes may use a session that the URL names.
                    is_own = ";session_id=" not in remote
                    close_at_exit(self._spark_session, remote if is_own else "", _RELEASE_SECS)
            return super().spark_session

        @property
        def spark_context(self) -> Any:
            # That of the class would open a session without a check.
            return self.spark_session.sparkContext

    return ClusterPySpark(spark_config=spark_config)


def open_session(spark_conf: Mapping[str, str], trusted: TrustedServers) -> "SparkSession":
    """Open a session by dagster-pyspark's resource.

    ``spark_conf`` names ``spark.remote`` or ``spark.master``. A Connect session outlives this
    process, and sends only to ``trusted`` servers.
    """
    session = _pyspark_resource(dict(spark_conf), trusted, release=False).spark_session
    if "spark.remote" in spark_conf:
        # The end of this process must not end the pinned session, which other processes use.
        vars(session)["release_session_on_close"] = False
    return session
