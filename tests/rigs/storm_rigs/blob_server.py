"""A server of blobs for supervisors, whose answers a test can spoil."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import Response


@dataclass
class BlobServer:
    """Serves blobs as a nimbus does, records requests, and fails on demand."""

    blobs: dict[str, bytes] = field(default_factory=dict)
    lies: dict[str, str] = field(default_factory=dict)
    """Key -> a hash that is announced in place of the true one."""
    failures: int = 0
    """So many requests are answered with 503 first."""
    requests: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""

    def put_code(self, code_dir: str, conf: dict[str, Any] | None = None, archive: bytes | None = None) -> None:
        """The three blobs of a topology."""
        self.blobs[f"{code_dir}-stormjar.jar"] = archive if archive is not None else zip_bytes({"wc.py": b"x = 1\n"})
        self.blobs[f"{code_dir}-stormconf.ser"] = json.dumps(conf or {}).encode()
        self.blobs[f"{code_dir}-stormcode.ser"] = b"{}"

    def gets(self, key: str) -> int:
        return self.requests.count(("GET", key))

    async def serve_blob(self, request: Request) -> Response:
        key = request.path_params["key"]
        self.requests.append((request.method, key))
        if self.failures > 0:
            self.failures -= 1
            return Response("{}", 503)
        if key not in self.blobs:
            return Response('{"error": {"type": "KeyNotFound", "message": "no blob"}}', 404)
        content = self.blobs[key]
        return Response(
            content, headers={"X-Content-SHA256": self.lies.get(key) or hashlib.sha256(content).hexdigest()}
        )


def zip_bytes(entries: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return buffer.getvalue()
