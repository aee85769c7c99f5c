"""Table of the methods of Storm's Nimbus service.

Each row says which function serves the method, which permission a caller needs, and if the audit
log has a line for each call.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from storm_dagster.core.authorization import Operation
from storm_dagster.model.errors import NotAlive
from storm_dagster.nimbus.thrift.handler import NimbusHandler


@dataclass(frozen=True)
class Method:
    """One method that is served."""

    function: Callable[[NimbusHandler], Callable[..., Any]]
    """Get the function of a handler that takes the arguments of a call, in their order."""
    operation: Operation = "admin"
    """Operation that the caller must be allowed; ``topology`` is about the first argument."""
    changes: bool = False
    """True if the audit log has a line for each call."""
    find_topology_by: Literal["id", "name"] | None = None
    """Meaning of the first argument, in place of which the function takes the topology."""
    while_starting: Callable[[NimbusHandler], Callable[..., Any]] | None = None
    """The same for a topology that is being submitted, which the function takes; ``None``: such a
    topology is not alive yet.
    """

    def call(self, handler: NimbusHandler, arguments: Sequence[Any]) -> Any:
        """Call the function; an argument that the client left out is ``None``."""
        function = self.function(handler)
        if self.find_topology_by is None:
            return function(*arguments)
        name, *options = arguments
        find = handler.find_by_id if self.find_topology_by == "id" else handler.find_by_name
        try:
            topology = find(name)
        except NotAlive:
            starting = handler.find_starting(name, self.find_topology_by)
            if starting is None:
                # It may have been published between the two reads.
                return function(find(name), *options)
            if self.while_starting is None:
                raise
            return self.while_starting(handler)(starting, *options)
        return function(topology, *options)


@dataclass(frozen=True)
class RefusedMethod:
    """One method that is not served: silence would promise an effect."""

    reason: str
    """Reason and remedy."""


_SUPERVISORS_USE_ZOOKEEPER = RefusedMethod(
    "supervisors and workers speak to ZooKeeper here, and not to nimbus"
)

METHODS: Mapping[str, Method | RefusedMethod] = {
    # Changes of topologies.
    "submitTopology": Method(
        lambda handler: handler.submit_topology, operation="submit", changes=True
    ),
    "submitTopologyWithOpts": Method(
        lambda handler: handler.submit_topology, operation="submit", changes=True
    ),
    "killTopology": Method(
        lambda handler: handler.kill_topology, operation="topology", changes=True
    ),
    "killTopologyWithOpts": Method(
        lambda handler: handler.kill_topology, operation="topology", changes=True
    ),
    "activate": Method(lambda handler: handler.activate, operation="topology", changes=True),
    "deactivate": Method(lambda handler: handler.deactivate, operation="topology", changes=True),
    "rebalance": Method(lambda handler: handler.rebalance, operation="topology", changes=True),
    "setLogConfig": Method(
        lambda handler: handler.set_log_config, operation="topology", changes=True
    ),
    "getLogConfig": Method(lambda handler: handler.log_config, operation="topology"),
    "getComponentPendingProfileActions": Method(
        lambda handler: handler.profile_actions, operation="topology", find_topology_by="id"
    ),
    # Blobs.
    "beginCreateBlob": Method(lambda handler: handler.blobs.begin_create, changes=True),
    "beginUpdateBlob": Method(lambda handler: handler.blobs.begin_update, changes=True),
    "uploadBlobChunk": Method(lambda handler: handler.blobs.uploads.append),
    "finishBlobUpload": Method(lambda handler: handler.blobs.uploads.finish, changes=True),
    "cancelBlobUpload": Method(lambda handler: handler.blobs.uploads.cancel, changes=True),
    "getBlobMeta": Method(lambda handler: handler.blobs.meta),
    "setBlobMeta": Method(lambda handler: handler.blobs.set_meta, changes=True),
    "beginBlobDownload": Method(lambda handler: handler.blobs.begin_download),
    "downloadBlobChunk": Method(lambda handler: handler.downloads.read),
    "deleteBlob": Method(lambda handler: handler.blobs.delete, changes=True),
    "listBlobs": Method(lambda handler: handler.blobs.list),
    "getBlobReplication": Method(lambda handler: handler.blobs.replication),
    "updateBlobReplication": Method(lambda handler: handler.blobs.update_replication, changes=True),
    "createStateInZookeeper": Method(lambda handler: handler.blobs.register, changes=True),
    "isRemoteBlobExists": Method(lambda handler: handler.blobs.exists),
    # Files. The upload of a file is not a change: its submission is.
    "beginFileUpload": Method(lambda handler: handler.archives.begin, operation="submit"),
    "uploadChunk": Method(lambda handler: handler.archives.append, operation="submit"),
    "finishFileUpload": Method(lambda handler: handler.archives.finish, operation="submit"),
    "beginFileDownload": Method(lambda handler: handler.begin_file_download),
    "downloadChunk": Method(lambda handler: handler.downloads.read),
    # The cluster.
    "getNimbusConf": Method(lambda handler: handler.nimbus_conf),
    "getClusterInfo": Method(lambda handler: handler.summaries.cluster, operation="list"),
    "getLeader": Method(lambda handler: handler.summaries.leader, operation="list"),
    "getOwnerResourceSummaries": Method(lambda handler: handler.summaries.owners, operation="list"),
    "getTopologySummaries": Method(lambda handler: handler.summaries.topologies, operation="list"),
    "isTopologyNameAllowed": Method(
        lambda handler: handler.is_topology_name_allowed, operation="list"
    ),
    "getTopologyHistory": Method(lambda handler: handler.topology_history, operation="list"),
    "getSupervisorPageInfo": Method(lambda handler: handler.pages.supervisor_page),
    # One topology.
    "getTopologySummary": Method(
        lambda handler: handler.summaries.topology,
        operation="topology",
        find_topology_by="id",
        while_starting=lambda handler: handler.summaries.starting,
    ),
    "getTopologySummaryByName": Method(
        lambda handler: handler.summaries.topology,
        operation="topology",
        find_topology_by="name",
        while_starting=lambda handler: handler.summaries.starting,
    ),
    "getTopologyInfo": Method(
        lambda handler: handler.pages.topology_info,
        operation="topology",
        find_topology_by="id",
        while_starting=lambda handler: handler.pages.starting_info,
    ),
    "getTopologyInfoWithOpts": Method(
        lambda handler: handler.pages.topology_info,
        operation="topology",
        find_topology_by="id",
        while_starting=lambda handler: handler.pages.starting_info,
    ),
    "getTopologyInfoByName": Method(
        lambda handler: handler.pages.topology_info,
        operation="topology",
        find_topology_by="name",
        while_starting=lambda handler: handler.pages.starting_info,
    ),
    "getTopologyInfoByNameWithOpts": Method(
        lambda handler: handler.pages.topology_info,
        operation="topology",
        find_topology_by="name",
        while_starting=lambda handler: handler.pages.starting_info,
    ),
    "getTopologyPageInfo": Method(
        lambda handler: handler.pages.topology_page,
        operation="topology",
        find_topology_by="id",
        while_starting=lambda handler: handler.pages.starting_page,
    ),
    "getComponentPageInfo": Method(
        lambda handler: handler.pages.component_page, operation="topology", find_topology_by="id"
    ),
    "getTopologyConf": Method(
        lambda handler: handler.pages.conf_text, operation="topology", find_topology_by="id"
    ),
    "getTopology": Method(
        lambda handler: handler.running_topology, operation="topology", find_topology_by="id"
    ),
    "getUserTopology": Method(
        lambda handler: handler.submitted_topology, operation="topology", find_topology_by="id"
    ),
    # Methods that are not served.
    "setWorkerProfiler": RefusedMethod(
        "workers here are not JVMs: dump their stacks with the `workers` resource in Dagster"
    ),
    "uploadNewCredentials": RefusedMethod(
        "credentials are not kept: put them where the workers find them, and "
        "`storm-dagster restart`"
    ),
    "debug": RefusedMethod(
        "tuples are not sampled: set topology.debug with an update of the topology"
    ),
    "getSupervisorAssignments": _SUPERVISORS_USE_ZOOKEEPER,
    "sendSupervisorWorkerHeartbeats": _SUPERVISORS_USE_ZOOKEEPER,
    "sendSupervisorWorkerHeartbeat": _SUPERVISORS_USE_ZOOKEEPER,
    "processWorkerMetrics": _SUPERVISORS_USE_ZOOKEEPER,
}
"""Every method by its name in ``storm.thrift`` and in Storm's supervisors."""


def operation_of_method(name: str) -> Operation:
    """Operation that a caller of the method must be allowed.

    Methods that are refused or unknown are for administrators.
    """
    method = METHODS.get(name)
    if isinstance(method, Method):
        return method.operation
    return "admin"
