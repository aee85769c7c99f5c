"""One child process of ``dev``, which is restarted with back-off."""

import logging
import os
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from storm_dagster.cli.dev.ending import kill_family
from storm_dagster.host.processes import RunFile

log: logging.Logger = logging.getLogger(__name__)
_BACKOFF = (0.2, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
"""Pauses before the restarts of a daemon, in seconds; the last one repeats."""
_STABLE_SECS = 60.0
"""Time after which a daemon that runs counts as stable: its pauses begin from the first."""


@dataclass(frozen=True)
class DaemonSpec:
    """Start settings of one daemon.

    A restart uses the same, ports included.
    """

    role: str
    id: str
    argv: tuple[str, ...]
    ports: dict[str, int] = field(default_factory=dict)
    """Name of a port -> port, for its run file."""

    @property
    def name(self) -> str:
        """Name for people."""
        return f"{self.role} {self.id}" if self.id != "0" else self.role


def spawn(
    argv: Sequence[str],
    output: Path,
    env: dict[str, str],
    *,
    mode: Literal["ab", "wb"] = "ab",
    cwd: Path | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[bytes]:
    """Start a process that prints to the file ``output``.

    It gets a new session: Ctrl-C in the terminal then reaches this process alone, which ends its
    children in order.
    """
    with output.open(mode) as stream:
        return subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=env,
            start_new_session=True,
            cwd=cwd,
            pass_fds=pass_fds,
        )


class Daemon:
    """Child in a new session; ``HOME/logs/<role>-<id>.out`` has its output."""

    def __init__(self, spec: DaemonSpec, home: Path, env: dict[str, str]) -> None:
        self.spec = spec
        self.deaths = 0
        """Number of its deaths since it last ran for a minute."""
        self._home = home
        self._env = env
        self._child: subprocess.Popen[bytes] | None = None
        """Its last process, also after the end of it; ``None`` before the first start."""
        self._record: RunFile | None = None
        """Run file of this process; ``None`` if it died before it was written."""
        self._started = 0.0
        """Time of its last start (monotonic clock)."""
        self._start_at: float | None = None
        """Time of its restart (monotonic clock); ``None`` unless its death was noticed."""

    @property
    def output(self) -> Path:
        """File with its standard output; its own log is beside it."""
        return self._home / "logs" / f"{self.spec.role}-{self.spec.id}.out"

    @property
    def pid(self) -> int | None:
        """Its pid while it runs."""
        if self._child is None or self._child.returncode is not None:
            return None
        return self._child.pid

    def start(self) -> None:
        """Start it now, and write its run file; a large file of output is rotated before."""
        self.output.parent.mkdir(parents=True, exist_ok=True)
        if self.output.exists() and self.output.stat().st_size > 20 * 2**20:
            os.replace(self.output, self.output.with_suffix(".out.1"))
        env = dict(self._env)
        if self.spec.role.startswith("dagster-"):
            # One heap, which the daemons of this package set themselves.
            env["MALLOC_ARENA_MAX"] = "1"
        self._child = spawn(self.spec.argv, self.output, env, cwd=self._home)
        self._started = time.monotonic()
        self._start_at = None
        try:
            self._record = RunFile.write(
                self._home, self.spec.role, self.spec.id, self.spec.ports, pid=self._child.pid
            )
        except ProcessLookupError:
            # Already dead: the next poll restarts it.
            self._record = None

    def watch(self) -> bool:
        """Restart it if it died and its pause is over.

        True if this call did so. The first call after a death only begins the pause, and kills what
        is left of its session.
        """
        now = time.monotonic()
        if self._child is None:
            return False
        if self._start_at is None:
            code = self._child.poll()
            if code is None:
                if self.deaths and now - self._started > _STABLE_SECS:
                    self.deaths = 0
                return False
            pause = _BACKOFF[min(self.deaths, len(_BACKOFF) - 1)]
            self.deaths += 1
            self._start_at = now + pause
            log.warning(
                "%s ended with code %s; it is started again in %g s", self.spec.name, code, pause
            )
            if self._record is not None:
                # Processes of its session still use the ports of the next one.
                kill_family(self._home, [self._record])
            return False
        if now < self._start_at:
            return False
        self.start()
        return True

    def reap(self) -> None:
        """Collect its exit code if it is dead, so that it is not left as a zombie."""
        if self._child is not None:
            self._child.poll()

    def tail(self, size: int = 1000) -> str:
        """The last ``size`` bytes of its output and of its log, for an error message."""
        texts: list[str] = []
        for path in (self.output, self.output.with_suffix(".log")):
            with suppress(OSError):
                texts.append(path.read_bytes()[-size:].decode("utf-8", "replace").strip())
        return "\n".join(text for text in texts if text)
