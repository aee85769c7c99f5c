"""A nimbus, a supervisor's HTTP service and the workers of a word count, all running."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.nimbuses import RunningNimbus
from storm_rigs.worker_rig import WorkerRig


@dataclass
class Stage:
    """What runs."""

    url: str
    http: httpx.Client
    nimbus: RunningNimbus
    rig: WorkerRig
    cluster: StormClusterState
    supervisor: str
    """URL of the supervisor's HTTP service."""
    logs: Path

    @property
    def id(self) -> str:
        return self.rig.topology_id

    def get(self, path: str, **query: Any) -> Any:
        answer = self.http.get(f"/api/v1{path}", params=query)
        assert answer.status_code == 200, answer.text
        return answer.json()
