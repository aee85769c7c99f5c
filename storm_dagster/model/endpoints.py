"""``HOME/cluster.json``: addresses and pids of the processes of one local cluster."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from storm_dagster.model.errors import Corrupt
from storm_dagster.model.host import write_atomically


class _Endpoint(BaseModel):
    model_config: ClassVar[ConfigDict] = ConfigDict(frozen=True, extra="ignore")


class NimbusEndpoint(_Endpoint):
    """One nimbus."""

    thrift: str
    """``host:port``."""
    http: str
    """``http://host:port``."""
    pid: int


class SupervisorEndpoint(_Endpoint):
    """One supervisor."""

    id: str
    host: str
    ports: tuple[int, ...]
    pid: int
    http: str | None = None


class DagsterEndpoint(_Endpoint):
    """Dagster's webserver and its home."""

    url: str
    home: str
    pids: tuple[int, ...]


class SparkEndpoint(_Endpoint):
    """The embedded Spark Connect server."""

    remote: str
    pid: int | None = None
    starting: bool = False
    """Whether ``dev`` starts it still: a placement waits for it."""


class ClusterFile(_Endpoint):
    """The whole file."""

    zookeeper: str
    """``host:port``, those of an ensemble separated by commas."""
    zookeeper_root: str
    nimbuses: tuple[NimbusEndpoint, ...] = ()
    supervisors: tuple[SupervisorEndpoint, ...] = ()
    dagster: DagsterEndpoint | None = None
    spark: SparkEndpoint | None = None
    zookeeper_pid: int | None = None

    def write(self, home: Path) -> None:
        """Replace ``home/cluster.json`` atomically."""
        write_atomically(home / "cluster.json", self.model_dump_json(indent=2) + "\n")

    @staticmethod
    def read(home: Path) -> ClusterFile | None:
        """The file of ``home``, or ``None`` when there is none; :class:`Corrupt` when it is damaged."""
        path = home / "cluster.json"
        try:
            return ClusterFile.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise Corrupt(
                f"{path} is damaged ({error.errors()[0]['msg']}): stop the cluster and remove the file"
            ) from None


def home_dir(explicit: str | os.PathLike[str] | None = None) -> Path:
    """The state folder of a local cluster: ``explicit``, else ``STORM_DAGSTER_HOME``, else ``./.storm-dagster``."""
    chosen: Any = explicit or os.environ.get("STORM_DAGSTER_HOME") or ".storm-dagster"
    return Path(chosen).expanduser().absolute()
