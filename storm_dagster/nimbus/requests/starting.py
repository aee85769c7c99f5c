"""Topologies that are being submitted, for lists, pages and authorization."""

import json
import threading
import time
from collections.abc import Iterable, Mapping
from typing import Any

from storm_dagster.core.submission.conf import USER_LIST_KEYS
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.nimbus.member import Nimbus
from storm_dagster.operations.submit.open_tokens import (
    OpenTokenReader,
    StartingTopology,
    starting_topologies,
)
from storm_dagster.operations.submit.staging import staging_key

_MAX_AGE_SECS = 0.2
"""Maximum age of the list."""


class StartingTopologies:
    """Shared list of the topologies that are being submitted. Thread-safe."""

    def __init__(self, nimbus: Nimbus) -> None:
        self._nimbus = nimbus
        self._token_reader = OpenTokenReader()
        """Reader of the records of tokens; it spares reads of finished ones."""
        self._newest: tuple[float, list[StartingTopology]] | None = None
        """Monotonic time at the end of the newest read, and its list."""
        self._lock = threading.Lock()

    def read(self) -> tuple[float, list[StartingTopology]]:
        """Monotonic time at which the list was read, and the list; at most 0.2 s old.

        A view of the cluster that was loaded later has each topology that was published since.
        """
        with self._lock:
            if self._newest is not None:
                read_at, _ = self._newest
                if time.monotonic() - read_at <= _MAX_AGE_SECS:
                    return self._newest
            topologies = starting_topologies(self._token_reader, self._nimbus.cluster.state)
            topologies.sort(key=lambda topology: (topology.name, topology.id))
            self._newest = (time.monotonic(), topologies)
            return self._newest

    def forget(self) -> None:
        """Drop the list: a submission was accepted or cancelled through this nimbus."""
        with self._lock:
            self._newest = None

    def authorization_conf(
        self, topologies: Iterable[StartingTopology]
    ) -> Mapping[str, Any] | None:
        """Conf by which requests for topologies that are being submitted are authorized.

        The user who submits a topology may change it. Another user may if the conf that is staged
        lists the user, for each of the topologies. ``None`` without a topology.
        """
        confs = [self._conf(topology) for topology in topologies]
        if not confs:
            return None
        common: dict[str, list[str]] = {}
        for key in USER_LIST_KEYS:
            allowed = set(confs[0][key])
            for conf in confs[1:]:
                allowed &= conf[key]
            common[key] = sorted(allowed)
        return common

    def _conf(self, topology: StartingTopology) -> dict[str, set[str]]:
        """The users and groups of one topology, as its staged conf has them."""
        lists: dict[str, set[str]] = {key: set() for key in USER_LIST_KEYS}
        try:
            document = json.loads(self._nimbus.blobs.read(staging_key(topology.token, "conf")))
        except (StormDagsterError, ValueError):
            # Its first stage has not ended.
            document = {}
        if isinstance(document, Mapping):
            for key in USER_LIST_KEYS:
                lists[key].update(str(name) for name in document.get(key) or ())
        if topology.owner:
            lists["topology.users"].add(topology.owner)
        return lists
