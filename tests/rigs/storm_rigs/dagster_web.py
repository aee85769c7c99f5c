"""``storm-dagster daemon web`` in a process of its own, without any code location."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from storm_dagster.testing.waiting import eventually
from storm_rigs.ports import free_port


@contextmanager
def dagster_web(home: Path, conf: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Its URL and its pid, once it serves."""
    (home / "dagster.yaml").write_text("telemetry: {enabled: false}\n")
    (home / "workspace.yaml").write_text("load_from: []\n")
    port = free_port()
    pairs = [part for key, value in conf.items() for part in ("-c", f"{key}={json.dumps(value)}")]
    argv = [sys.executable, "-m", "storm_dagster", "daemon", "web", "--home", str(home)]
    argv += ["--port", str(port)]
    with (home / "out").open("wb") as out:
        child = subprocess.Popen(
            [*argv, "--workspace", str(home / "workspace.yaml"), *pairs],
            env={**os.environ, "DAGSTER_HOME": str(home)},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}"

        def up() -> bool:
            assert child.poll() is None, (home / "out").read_text()[-3000:]
            return httpx.get(f"{url}/server_info", trust_env=False).status_code in (200, 401)

        eventually(up, 120, "the web application", ignore=(httpx.HTTPError,))
        yield url, child.pid
    finally:
        child.terminate()
        child.wait(30)
