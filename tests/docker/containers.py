"""The cluster of ``docker/compose.yaml`` under test: a project of its own, with its own secret,
topologies and ports.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "docker" / "compose.yaml"
PROJECT = "storm-dagster-test"
LASTING = (
    *("zk1", "zk2", "zk3", "nimbus1", "nimbus2", "supervisor1", "supervisor2", "supervisor3"),
    *("spark-master", "spark-worker1", "spark-worker2"),
    *("spark", "postgres", "dagster-code", "dagster-web", "dagster-daemon"),
)
"""Services that never end by themselves."""


class Failure(Exception):
    """Something is not as it must be; the message says what."""


def free_port() -> int:
    """A port of loopback that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Containers:
    """One Compose project. Every command has a time limit, and output is in the error when it
    fails.
    """

    def __init__(self, folder: Path, *more_files: Path) -> None:
        self.folder = folder
        self.secret = secrets.token_hex(32)
        self.topologies = folder / "topologies"
        self.topologies.mkdir()
        self.files = (COMPOSE, *more_files)
        self.env = {
            **os.environ,
            "SECRETS": str(folder / "secrets"),
            "TOPOLOGIES": str(self.topologies),
            "WEB_PORT": str(free_port()),
            "PROMETHEUS_PORT": str(free_port()),
        }

    def command(
        self,
        *command: str,
        timeout: float,
        env: Mapping[str, str] | None = None,
        check: bool = True,
    ) -> str:
        """The output of a command; :class:`Failure` when it fails or does not end in time."""
        try:
            done = subprocess.run(
                command, env={**self.env, **(env or {})}, cwd=ROOT, timeout=timeout, text=True,
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            )  # fmt: skip
        except subprocess.TimeoutExpired as late:
            text = late.output or ""
            text = text.decode(errors="replace") if isinstance(text, bytes) else text
            raise Failure(
                f"{' '.join(command)} did not end within {timeout:.0f} s: {text[-2000:]}"
            ) from None
        if check and done.returncode != 0:
            raise Failure(
                f"{' '.join(command)} failed with exit code {done.returncode}: {done.stdout[-4000:]}"
            )
        return done.stdout

    def setup(self, timeout: float = 1200.0, **env: str) -> str:
        """Run docker/setup with this project's secret."""
        return self.command(
            str(ROOT / "docker" / "setup"), timeout=timeout, env={"STORM_SECRET": self.secret, **env}
        )  # fmt: skip

    def compose(self, *arguments: str, timeout: float = 120.0, check: bool = True) -> str:
        """``docker compose`` for this project."""
        files = [part for file in self.files for part in ("-f", str(file))]
        return self.command(
            "docker", "compose", "-p", PROJECT, *files, *arguments, timeout=timeout, check=check
        )

    def cli(self, *arguments: str, timeout: float = 300.0) -> str:
        """``storm-dagster`` in a container of the service ``cli``, which starts what is not
        there.
        """
        return self.compose("run", "--rm", "-T", "cli", *arguments, timeout=timeout)

    def name(self, service: str) -> str:
        """The container of a service."""
        return f"{PROJECT}-{service}-1"

    def docker(self, *arguments: str, timeout: float = 90.0, check: bool = True) -> str:
        """Any ``docker`` command."""
        return self.command("docker", *arguments, timeout=timeout, check=check)

    def exec(self, service: str, *command: str, timeout: float = 60.0, check: bool = True) -> str:
        """The output of a command in a service's container."""
        return self.docker("exec", self.name(service), *command, timeout=timeout, check=check)

    def secret_of(self, service: str) -> str:
        """The checksum of the secret that a service's container sees."""
        return self.exec(service, "sha256sum", "/run/secrets/storm_secret").split()[0]

    def container(self, service: str) -> str:
        """The id of a service's container."""
        return self.docker("inspect", "--format", "{{.Id}}", self.name(service)).strip()

    def change_images(self, mark: str) -> None:
        """Give each image that runs one layer more, under its own name, as a release with other
        code would.
        """
        recipe = self.folder / "mark"
        recipe.mkdir(exist_ok=True)
        (recipe / "Dockerfile").write_text(
            "ARG IMAGE\nFROM ${IMAGE}\nARG MARK\nLABEL mark=${MARK}\n", encoding="utf-8"
        )
        images = {
            self.docker("inspect", "--format", "{{.Config.Image}}", self.name(name)).strip()
            for name in LASTING
        }
        for image in sorted(images):
            self.docker(
                "build", "--network", "none", "--build-arg", f"IMAGE={image}", "--build-arg", f"MARK={mark}",
                "--tag", image, str(recipe), timeout=120,
            )  # fmt: skip

    def states(self) -> dict[str, str]:
        """Service -> ``running healthy``, ``exited`` ..., of the project's containers."""
        rows = self.compose("ps", "--all", "--format", "json").splitlines()
        found = [json.loads(row) for row in rows if row.startswith("{")]
        return {row["Service"]: f"{row['State']} {row['Health']}".strip() for row in found}

    def wait_healthy(self, *services: str, timeout: float = 240.0) -> None:
        """Until the services are healthy; all that last by default."""
        wanted = services or LASTING
        deadline = time.monotonic() + timeout
        while True:
            states = self.states()
            late = [service for service in wanted if states.get(service) != "running healthy"]
            if not late:
                return
            if time.monotonic() > deadline:
                said = {service: states.get(service, "absent") for service in late}
                raise Failure(f"not healthy within {timeout:.0f} s: {said}")
            time.sleep(1)

    def leader(self) -> str:
        """The service of the nimbus that leads."""
        text = self.exec("nimbus1", "storm-dagster", "status", "--json", check=False)
        if not text.lstrip().startswith("{") or not json.loads(text)["nimbuses"]:
            text = self.exec("nimbus2", "storm-dagster", "status", "--json")
        rows = json.loads(text)["nimbuses"]
        return next(row["host"] for row in rows if row["leader"])

    def zookeeper_leader(self) -> str:
        """The service of the ensemble's leader."""
        script = "exec 3<>/dev/tcp/127.0.0.1/2181; printf srvr >&3; cat <&3"
        for service in ("zk1", "zk2", "zk3"):
            if "Mode: leader" in self.exec(service, "bash", "-c", script, check=False):
                return service
        raise Failure("no ZooKeeper server leads")

    def logs(self, folder: Path) -> None:
        """Write the log of each container to a file of ``folder``."""
        folder.mkdir(parents=True, exist_ok=True)
        for service in self.states():
            with contextlib.suppress(Failure):
                text = self.docker("logs", "--timestamps", self.name(service))
                (folder / f"{service}.log").write_text(text, encoding="utf-8")

    def down(self) -> None:
        """End and remove containers, networks and volumes, also what is paused."""
        for service, state in self.states().items():
            if state.startswith("paused"):
                self.docker("unpause", self.name(service), check=False)
        self.compose(
            "--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "5", timeout=240
        )


@contextlib.contextmanager
def containers(keep_logs: Path | None = None, *more_files: Path) -> Iterator[Containers]:
    """A project that is gone afterwards, whatever happens."""
    folder = Path(tempfile.mkdtemp(prefix="storm-dagster-docker-"))
    # Bind mounts of it are read by the containers' user.
    folder.chmod(0o755)
    made = Containers(folder, *more_files)
    made.topologies.chmod(0o755)
    try:
        # What a run that was killed left behind.
        made.compose(
            "--profile", "*", "down", "--volumes", "--remove-orphans", "--timeout", "1", timeout=240
        )
        yield made
    except BaseException:
        if keep_logs is not None:
            with contextlib.suppress(Failure):
                made.logs(keep_logs)
        raise
    finally:
        try:
            made.down()
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def project_is_empty(made: Containers) -> bool:
    """Whether no container and no volume of the project is left."""
    label = f"label=com.docker.compose.project={PROJECT}"
    left: list[Any] = [
        made.docker("ps", "-aq", "--filter", label),
        made.docker("volume", "ls", "-q", "--filter", label),
    ]
    return not any(text.strip() for text in left)
