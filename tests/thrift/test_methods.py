"""The table of Storm's methods: names, permissions, and lines of the audit log."""

from __future__ import annotations

from storm_dagster.nimbus.thrift.idl import load_idl
from storm_dagster.nimbus.thrift.methods import METHODS, Method, operation_of_method

OF_SUPERVISORS = {
    "getSupervisorAssignments",
    "processWorkerMetrics",
    "sendSupervisorWorkerHeartbeat",
    "sendSupervisorWorkerHeartbeats",
}
"""Methods that Storm's supervisors and workers call, which ``storm.thrift`` leaves out."""
SUBMITTER = {
    "beginFileUpload",
    "finishFileUpload",
    "submitTopology",
    "submitTopologyWithOpts",
    "uploadChunk",
}
READER = {
    "getClusterInfo",
    "getLeader",
    "getOwnerResourceSummaries",
    "getTopologyHistory",
    "getTopologySummaries",
    "isTopologyNameAllowed",
}
ADMINISTRATOR = {"beginFileDownload", "downloadChunk", "getNimbusConf", "getSupervisorPageInfo"}
CHANGES = {
    "activate",
    "beginCreateBlob",
    "beginUpdateBlob",
    "cancelBlobUpload",
    "createStateInZookeeper",
    "deactivate",
    "deleteBlob",
    "finishBlobUpload",
    "killTopology",
    "killTopologyWithOpts",
    "rebalance",
    "setBlobMeta",
    "setLogConfig",
    "submitTopology",
    "submitTopologyWithOpts",
    "updateBlobReplication",
}


def served() -> dict[str, Method]:
    return {name: method for name, method in METHODS.items() if isinstance(method, Method)}


def test_the_table_has_every_method_of_the_service() -> None:
    assert METHODS.keys() == {*load_idl().Nimbus.thrift_services, *OF_SUPERVISORS}


def test_each_method_needs_the_permission_of_its_kind() -> None:
    for name, method in served().items():
        if name in SUBMITTER:
            expected = "submit"
        elif name in READER:
            expected = "list"
        elif name in ADMINISTRATOR or "Blob" in name or name == "createStateInZookeeper":
            expected = "admin"
        else:
            expected = "topology"
        assert method.operation == expected, name
    assert operation_of_method("debug") == operation_of_method("noSuchMethod") == "admin"


def test_the_audit_log_has_changes_only() -> None:
    assert {name for name, method in served().items() if method.changes} == CHANGES


def test_a_method_that_takes_a_topology_needs_the_permission_for_it() -> None:
    for name, method in served().items():
        if method.find_topology_by is not None:
            assert method.operation == "topology", name
