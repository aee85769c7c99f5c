"""The topology of every_number.py while faults go on: is all well, how long did that take, what is
lost or repeated.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from containers import PROJECT, Containers, Failure

PROBE = Path(__file__).parent / "probe"
NAME = "every-number"
LAG = 300
"""Numbers that may be under way: three seconds of the spout."""
CALM_SECS = 8.0
"""Time for which all must be well to count."""


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    fault: str
    healed: float | None
    """Seconds from the fault to the last moment at which not all was well, 0 without one; ``None``:
    not within the limit.
    """
    lost: int
    repeated: int


class Watcher:
    """Runs the probe in a container of its own, and reads its lines."""

    def __init__(self, made: Containers) -> None:
        self._made = made
        self.last: dict[str, Any] = {}
        self.rows: list[Row] = []
        self._name = f"{PROJECT}-probe"
        self.start()

    def start(self) -> None:
        """Start the probe."""
        made = self._made
        made.docker("rm", "--force", self._name, check=False)
        files = [part for file in made.files for part in ("-f", str(file))]
        self._process = subprocess.Popen(
            [
                "docker",
                "compose",
                "-p",
                PROJECT,
                *files,
                "run",
                "--rm",
                "-T",
                "--no-deps",
                "--name",
                self._name,
                "--volume",
                f"{PROBE}:/probe:ro",
                "--volume",
                f"{PROJECT}_state:/var/lib/storm_state",
                "--entrypoint",
                "/opt/storm/bin/python",
                "cli",
                "/probe/watch.py",
                NAME,
            ],
            env=made.env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self.last = json.loads(line)

    def close(self) -> None:
        """End the probe."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._made.docker("rm", "--force", self._name, check=False)

    def well(self) -> bool:
        """Whether all tasks run and the spout's numbers come back acked."""
        now = self.last
        fresh = bool(now) and time.time() - now["at"] < 4
        return (
            fresh
            and now["running"] is not None
            and now["running"] == now["tasks"]
            and now["newest"] - now["done"] <= LAG
        )

    def wait_well(self, timeout: float) -> float | None:
        """Seconds from now until all was well for a while, without that while; ``None`` when it
        took longer.
        """
        began = time.monotonic()
        since: float | None = None
        done = -1
        while time.monotonic() - began < timeout + CALM_SECS:
            if not self.well():
                since = None
            elif since is None:
                since, done = time.monotonic(), self.last["done"]
            elif time.monotonic() - since > CALM_SECS and self.last["done"] > done:
                return since - began
            time.sleep(0.3)
        return None

    def worker_of(self, component_task: int) -> tuple[str, int, int]:
        """Host, port and pid of the worker of a task."""
        for host, port, pid, tasks in self.last["workers"]:
            if component_task in tasks:
                return host, port, pid
        raise Failure(f"no worker has task {component_task}: {self.last}")

    def run(self, fault: str, inject: Callable[[], None], timeout: float = 300.0) -> Row:
        """Inject a fault into a topology that is well, watch it until it is well again, and note
        what that took.
        """
        if self.wait_well(120) is None:
            raise Failure(f"not well before the fault {fault!r}: {self.last}")
        before = self.last["written"] - self.last["different"]
        failures: list[Exception] = []

        def injected() -> None:
            try:
                inject()
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=injected, name=fault)
        began = ill_at = time.monotonic()
        thread.start()
        limit = began + timeout
        while thread.is_alive() or time.monotonic() - ill_at <= CALM_SECS:
            if not self.well():
                ill_at = time.monotonic()
            if thread.is_alive():
                limit = time.monotonic() + timeout
            elif time.monotonic() > limit:
                break
            time.sleep(0.3)
        if failures:
            raise Failure(f"the fault {fault!r} could not be injected: {failures[0]}")
        now = self.last
        healed = None if time.monotonic() > limit else ill_at - began
        row = Row(fault, healed, now["missing"], now["written"] - now["different"] - before)
        self.rows.append(row)
        return row


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    lines = ["| fault | healed after | lost | repeated |", "|---|---|---|---|"]
    for row in rows:
        healed = (
            "not healed"
            if row.healed is None
            else f"{row.healed:.0f} s"
            if row.healed
            else "less than 3 s"
        )
        lines.append(f"| {row.fault} | {healed} | {row.lost} | {row.repeated} |")
    return "\n".join(lines)
