"""A nimbus for functions of the client that accepts one change and keeps its request."""

from __future__ import annotations

from typing import Any


class AcceptingNimbus:
    """Stands where the client's functions take a ``NimbusClient``; pass ``wait=False``."""

    def __init__(self) -> None:
        self.path = ""
        self.body: dict[str, Any] = {}

    def accepting_fewer(self, allow_degraded: bool) -> AcceptingNimbus:
        """Itself: it needs no other nimbus."""
        return self

    def get(self, path: str) -> dict[str, Any]:
        """The topology, which runs."""
        return {"id": "wc-1-1", "name": "wc", "status": "ACTIVE"}

    def post(self, path: str, body: dict[str, Any], **options: bool) -> dict[str, Any]:
        """Accept the request of a verb."""
        self.path = path
        self.body = body
        return {"id": "wc-1-1", "name": "wc", "run_id": None}
