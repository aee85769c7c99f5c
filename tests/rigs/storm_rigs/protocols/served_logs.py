"""The HTTP service of a folder of logs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import httpx


@dataclass
class Served:
    """What the tests ask."""

    logs: Path
    port: int
    http: httpx.Client
