"""Parameters that several routes of a nimbus have."""

from storm_dagster.http.documents import Number
from storm_dagster.http.router import Parameter

TOPOLOGY_NAME = Parameter("path", "name", "Topology name, or id")
EPOCH = Parameter(
    "header", "X-Storm-Epoch", "Refuse unless the leader's epoch is this one", schema=Number
)
