"""The ``nimbus`` resource: the HTTP client of the leading nimbus."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storm_dagster.client import NimbusClient, upload_target
from storm_dagster.defs.keys import described
from storm_dagster.defs.resources.handles import ClusterHandle
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.packaging.target import check_inside, target_roots

_PROGRAMS = frozenset({"topology.python", "topology.environment"})
"""Conf keys that decide which programs workers start."""


class NimbusResource(ClusterHandle):
    """Calls of nimbus: uploads, topologies, the cluster."""

    patience_secs: float = described("nimbus.patience_secs", default=15.0)

    def client(self, patience_secs: float | None = None) -> NimbusClient:
        """A client, to be closed by the caller (``with nimbus.client() as client``)."""
        return NimbusClient.of_cluster(
            self.conf(),
            Path(self.home) if self.home else None,
            conf_dir=Path(self.conf_dir) if self.conf_dir else None,
            patience=self.patience_secs if patience_secs is None else patience_secs,
        )

    def topologies(self) -> list[dict[str, Any]]:
        """The topologies, as `storm-dagster list --json` shows them."""
        with self.client() as client:
            return client.get("/v1/topologies")["topologies"]

    def topology(self, name: str) -> dict[str, Any]:
        """One topology, as `storm-dagster show NAME --json` shows it; :class:`NotAlive` when there is none."""
        with self.client() as client:
            return client.get(f"/v1/topologies/{name}")


def upload_of(
    log: logging.Logger,
    nimbus: NimbusResource,
    handle: str | None,
    target: str | None,
    conf: Mapping[str, Any],
    allow_degraded: bool = False,
) -> str | None:
    """The upload that a form means: the caller's ``handle``, else one made here of its TARGET; ``None`` without both.

    :class:`InvalidRequest` when both are given, and for a TARGET or a conf with which a form could run programs that
    are not the project's; errors of packing and uploading otherwise.
    """
    if handle and target:
        raise InvalidRequest("both handle and target are given: leave handle empty in a run launched by hand")
    if handle or not target:
        return handle or None
    if programs := sorted(_PROGRAMS & conf.keys()):
        raise InvalidRequest(f"a form cannot set {' and '.join(programs)}: set it in the topology's own conf")
    check_inside(target, target_roots(nimbus.conf()), nimbus.home_path())
    with nimbus.client() as client:
        uploaded = upload_target(
            client.accepting_fewer(allow_degraded),
            target,
            conf=conf,
            home=nimbus.home_path(),
            progress=lambda step, state: log.info("%s: %s %s", target, step, state),
        )
    log.info("uploaded %d bytes, sha256 %s (sent: %s)", uploaded.size, uploaded.sha256, uploaded.sent)
    return uploaded.handle
