"""Storm's REST of a nimbus that shows a word count, and a client of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from storm_rigs.stage.served_topology import ServedTopology


@dataclass
class StormRest(ServedTopology):
    """A word count, and its REST."""

    http: httpx.Client

    @property
    def url(self) -> str:
        """URL of the nimbus."""
        return self.nimbus.url

    @property
    def supervisor(self) -> str:
        """URL of the supervisor's HTTP service."""
        return self.service.url

    @property
    def logs(self) -> Path:
        """Folder of the supervisor's logs."""
        return self.rig.folder / "logs"

    def get(self, path: str, **query: Any) -> Any:
        """The document at a path below ``/api/v1``."""
        response = self.http.get(f"/api/v1{path}", params=query)
        assert response.status_code == 200, response.text
        return response.json()
