"""The ``nimbus`` resource: the HTTP client of the leading nimbus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from storm_dagster.client import NimbusClient
from storm_dagster.defs.handles import ClusterHandle

__all__ = ["NimbusResource"]


class NimbusResource(ClusterHandle):
    """Calls of nimbus: uploads, topologies, the cluster."""

    patience_secs: float = Field(
        default=15.0, description="How long a call waits for a leader before it is Unavailable."
    )

    def client(self) -> NimbusClient:
        """A client, to be closed by the caller (``with nimbus.client() as client``)."""
        return NimbusClient.of_cluster(
            self.conf(),
            Path(self.home) if self.home else None,
            conf_dir=Path(self.conf_dir) if self.conf_dir else None,
            patience=self.patience_secs,
        )

    def topologies(self) -> list[dict[str, Any]]:
        """The topologies, as `storm-dagster list --json` shows them."""
        with self.client() as client:
            return client.get("/v1/topologies")["topologies"]

    def topology(self, name: str) -> dict[str, Any]:
        """One topology, as `storm-dagster show NAME --json` shows it; :class:`NotAlive` when there is none."""
        with self.client() as client:
            return client.get(f"/v1/topologies/{name}")

    def cluster(self) -> dict[str, Any]:
        """Nimbuses, supervisors, and whether a healing sensor is armed."""
        with self.client() as client:
            return client.get("/v1/cluster")
