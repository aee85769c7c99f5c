"""bytewax for the benchmark beside other engines: installed from PyPI into a throw-away
environment, without acks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peer_storm import free_ports

from storm_dagster.model.errors import Unavailable

VERSION = "0.21.1"


class Bytewax:
    """An environment with bytewax, and the processes of one dataflow; a context manager."""

    name = f"bytewax {VERSION}"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Bytewax:
        self._folder.mkdir(parents=True)
        self._python = self._folder / "venv" / "bin" / "python"
        for command in (
            [sys.executable, "-m", "venv", str(self._folder / "venv")],
            [str(self._python), "-m", "pip", "install", "--quiet", f"bytewax=={VERSION}"],
        ):
            done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
            if done.returncode:
                raise Unavailable(
                    f"PyPI gives no bytewax {VERSION} for this Python: {done.stderr[-300:]}"
                )
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def submit(self, shape: str, workers: int, conf: Mapping[str, Any]) -> None:
        """Start a dataflow in so many processes; ``conf`` has ``bench.folder`` and ``batch``."""
        flow = f"{Path(__file__).with_name('peer_flow.py')}:flow"
        env = {
            **os.environ,
            "PEER_SHAPE": shape,
            "PEER_BATCH": str(conf.get("batch", 1)),
            "PEER_FOLDER": str(conf["bench.folder"]),
        }
        env.pop("PYTHONPATH", None)
        addresses = ";".join(f"127.0.0.1:{port}" for port in free_ports(workers))
        for number in range(workers):
            cluster = ["-i", str(number), "-a", addresses] if workers > 1 else []
            with (self._folder / f"process{number}.out").open("wb") as out:
                command = [str(self._python), "-m", "bytewax.run", flow, *cluster]
                self._processes.append(
                    subprocess.Popen(
                        command,
                        cwd=self._folder,
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=out,
                    )
                )

    def kill(self) -> None:
        """End its processes."""
        for process in self._processes:
            process.kill()
            process.wait(30)
        self._processes.clear()
