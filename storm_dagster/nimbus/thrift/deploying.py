"""The conf keys by which a submission replaces what runs: hot deploy and gray upgrade."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from storm_dagster.core.gray_upgrade import Selection, selection_of_conf
from storm_dagster.nimbus.requests.lifecycle import LifecycleRequests

__all__ = ["Deploy", "deploy_of"]


@dataclass(frozen=True)
class Deploy:
    """How a submission takes the place of the topology of its name."""

    verb: Literal["update", "gray-upgrade"]
    selection: Selection | None = None

    def launch(self, requests: LifecycleRequests, name: str, handle: str, token: str) -> dict[str, Any]:
        """Start it: :class:`NotAlive` when nothing of the name runs, :class:`Conflict` when its status forbids it."""
        document: dict[str, Any] = {"handle": handle, "token": token}
        if self.selection is not None:
            document |= {
                "workers": list(self.selection.workers),
                "component": self.selection.component,
                "number": self.selection.number,
            }
        return requests.act(name, self.verb, document)


def deploy_of(conf: Mapping[str, Any]) -> Deploy | None:
    """What the conf asks for; ``None`` for a plain submission. A gray upgrade counts before a hot deploy, as in JStorm."""
    if conf.get("topology.upgrade"):
        return Deploy("gray-upgrade", selection_of_conf(conf))
    return Deploy("update") if conf.get("topology.hot.deploy.enable") else None
