"""Options of ``dev``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True)
class DevOptions:
    """Options of ``dev``."""

    supervisors: int = 2
    slots: int = 4
    nimbuses: int = 1
    ports: Literal["auto", "default"] = "default"
    timeout: float = 240.0
    """Longest wait for readiness, seconds."""
    zookeepers: int = 1
    """Servers of the ZooKeeper ensemble."""
    warm_runs: bool = True
    """True if Dagster's runs start in forks of a process that has loaded their libraries."""
    spark_workers: int = 0
    """Workers of a Spark standalone cluster on which the Connect server runs its jobs; 0: they run
    in the server.
    """
    own_dagster: bool = True
    """False if a Dagster that ``dev`` does not start serves this cluster."""
    workspaces: tuple[Path, ...] = ()
    """Workspace files of the user, whose code locations dev's own Dagster serves, too."""

    @property
    def size(self) -> tuple[int, int, int, int]:
        """Supervisors, slots of each, nimbuses, ZooKeeper servers."""
        return self.supervisors, self.slots, self.nimbuses, self.zookeepers
