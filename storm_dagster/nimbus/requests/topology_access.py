"""The conf of a running topology, by which the HTTP service authorizes requests for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from storm_dagster.model.errors import StormDagsterError
from storm_dagster.model.names import conf_key
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.nimbus.requests.reading import ClusterReader
from storm_dagster.operations.context import topology_by_name


def topology_conf_reader(nimbus: Nimbus, reader: ClusterReader) -> Callable[[str], Mapping[str, Any] | None]:
    """A function from a topology's name or id to its conf; ``None`` when it does not run or cannot be read.

    Then only administrators may do anything with it: what is not known is allowed to nobody.
    """

    def read(name: str) -> Mapping[str, Any] | None:
        try:
            topology = topology_by_name(reader.view(), name)
            document = json.loads(nimbus.blobs.read(conf_key(topology.code_dir)))
        except (StormDagsterError, ValueError):
            return None
        return document if isinstance(document, Mapping) else None

    return read
