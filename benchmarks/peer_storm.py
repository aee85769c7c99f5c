"""Apache Storm for the benchmark beside other engines: fetched from Maven Central, real daemons, a
Java topology.

The jars are resolved by Apache Ivy, which pyspark ships, and kept in the cache. ZooKeeper is the
one of pyspark's jars.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
from peer_logs import wait_for

from storm_dagster.host.java import java_command
from storm_dagster.model.errors import Unavailable
from storm_dagster.zk.embedded import server_answers, zookeeper_command, zookeeper_jars

VERSION = "2.8.3"
SOURCE = Path(__file__).parent / "storm" / "PeerTopology.java"
_DAEMON = {
    "lib": (
        ("org.apache.storm", "storm-server", VERSION),
        # Used by the daemons, and declared by Storm's own distribution only.
        ("commons-cli", "commons-cli", "1.5.0"),
        ("com.google.guava", "guava", "33.0.0-jre"),
    ),
    "lib-worker": (("org.apache.storm", "storm-client", VERSION),),
}
_COMPILER = (("org.eclipse.jdt", "ecj", "3.36.0"),)
_LOGGING = """<Configuration><Appenders><File name="file" fileName="${sys:storm.log.dir}/${sys:daemon.name:-worker}.log">
<PatternLayout pattern="%d %c{1} [%p] %m%n"/></File></Appenders>
<Loggers><Root level="info"><AppenderRef ref="file"/></Root></Loggers></Configuration>
"""


def cache_folder() -> Path:
    """Where peers are kept between runs."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "storm-dagster" / "peers"
    )


def _fetch(folder: Path, modules: tuple[tuple[str, str, str], ...]) -> None:
    """Jars of these modules and what they depend on, from Maven Central."""
    if (folder / ".complete").exists():
        return
    ivy = next(iter(zookeeper_jars()[0].parent.glob("ivy-*.jar")), None)
    if ivy is None:
        raise Unavailable(
            "pyspark has no ivy-*.jar, which fetches Storm: install pyspark from PyPI"
        )
    folder.mkdir(parents=True, exist_ok=True)
    wanted = "".join(
        f'<dependency org="{o}" name="{n}" rev="{v}" conf="default->default"/>'
        for o, n, v in modules
    )
    document = folder / "ivy.xml"
    document.write_text(
        f'<ivy-module version="2.0"><info organisation="local" module="peer"/>'
        f"<dependencies>{wanted}</dependencies></ivy-module>",
        encoding="utf-8",
    )
    pattern = f"{folder}/[artifact]-[revision](-[classifier]).[ext]"
    command = [
        java_command(),
        "-jar",
        str(ivy),
        "-warn",
        "-cache",
        str(cache_folder() / "ivy"),
        "-ivy",
        str(document),
    ]
    command += ["-retrieve", pattern, "-types", "jar", "bundle"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    missing = [
        name for _, name, version in modules if not (folder / f"{name}-{version}.jar").exists()
    ]
    if done.returncode or missing:
        raise Unavailable(
            f"Maven Central gives no {', '.join(missing)}: {(done.stdout + done.stderr)[-300:]}"
        )
    (folder / ".complete").touch()


def _compile(home: Path, folder: Path) -> Path:
    """A jar of the Java topology, made by ``javac`` or, where there is only a runtime, by ecj of
    Maven Central.
    """
    classes = folder / "classes"
    classes.mkdir()
    if shutil.which("javac"):
        compiler = ["javac"]
    else:
        _fetch(cache_folder() / "ecj", _COMPILER)
        compiler = [java_command(), "-jar", str(next((cache_folder() / "ecj").glob("ecj-*.jar")))]
    done = subprocess.run(
        [
            *compiler,
            "--release",
            "17",
            "-nowarn",
            "-cp",
            _jars(home / "lib-worker"),
            "-d",
            str(classes),
            str(SOURCE),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise Unavailable(f"{SOURCE} is not compiled: {done.stderr[-500:]}")
    jar = folder / "peer.jar"
    with zipfile.ZipFile(jar, "w") as archive:
        for path in sorted(classes.iterdir()):
            archive.write(path, path.name)
    return jar


def _jars(folder: Path) -> str:
    return os.pathsep.join(str(path) for path in sorted(folder.glob("*.jar")))


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


class Storm:
    """ZooKeeper, nimbus and a supervisor with four slots; a context manager."""

    name = f"Storm {VERSION}"

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._home = cache_folder() / f"storm-{VERSION}"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Storm:
        for part, modules in _DAEMON.items():
            _fetch(self._home / part, modules)
        for part in ("extlib", "extlib-daemon", "conf", "bin", "public", "external", "log4j2"):
            (self._home / part).mkdir(exist_ok=True)
        (self._home / "RELEASE").write_text(VERSION, encoding="utf-8")
        for part in ("cluster", "worker"):
            (self._home / "log4j2" / f"{part}.xml").write_text(_LOGGING, encoding="utf-8")
        (self._folder / "logs").mkdir(parents=True)
        self._jar = _compile(self._home, self._folder)
        zookeeper, nimbus, supervisor, *slots = free_ports(7)
        (self._folder / "storm.yaml").write_text(
            f'storm.zookeeper.servers: ["127.0.0.1"]\nstorm.zookeeper.port: {zookeeper}\n'
            f'nimbus.seeds: ["127.0.0.1"]\nnimbus.thrift.port: {nimbus}\nsupervisor.thrift.port: {supervisor}\n'
            f'storm.local.dir: "{self._folder}/local"\nstorm.local.hostname: "127.0.0.1"\n'
            f'storm.log4j2.conf.dir: "{self._home}/log4j2"\nsupervisor.slots.ports: {slots}\n',
            encoding="utf-8",
        )
        try:
            self._start(zookeeper_command(self._folder / "zookeeper", zookeeper), "zookeeper")
            wait_for(lambda: server_answers("127.0.0.1", zookeeper), 60, "ZooKeeper")
            for kind, port in (("nimbus", nimbus), ("supervisor", supervisor)):
                self._start(
                    self._java(kind, f"org.apache.storm.daemon.{kind}.{kind.title()}"), kind
                )
                wait_for(lambda port=port: _listens(port), 120, f"Storm's {kind}")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        found = [each for daemon in self._daemons for each in _family(daemon.pid)]
        for process in found:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        for daemon in self._daemons:
            daemon.wait(30)

    def _start(self, command: list[str], name: str) -> None:
        with (self._folder / "logs" / f"{name}.out").open("wb") as out:
            # The supervisor hands the folder of its conf on to the workers.
            daemon = subprocess.Popen(
                command,
                cwd=self._folder,
                env={**os.environ, "STORM_CONF_DIR": str(self._folder)},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        self._daemons.append(daemon)

    def _java(self, name: str, main: str, *args: str, libraries: str = "lib") -> list[str]:
        path = os.pathsep.join([_jars(self._home / libraries), str(self._jar), str(self._folder)])
        return [
            java_command(), "-Xmx512m", f"-Ddaemon.name={name}", "-Dstorm.options=", "-Dstorm.conf.file=",
            f"-Dstorm.home={self._home}", f"-Dstorm.log.dir={self._folder}/logs", f"-Dstorm.jar={self._jar}",
            f"-Dlog4j.configurationFile={self._home}/log4j2/cluster.xml", "-cp", path, main, *args,
        ]  # fmt: skip

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(
            command, cwd=self._folder, capture_output=True, text=True, timeout=180, check=False
        )
        if done.returncode:
            raise Unavailable(f"Storm's client failed: {(done.stdout + done.stderr)[-500:]}")

    def submit(self, shape: str, workers: int, conf: Mapping[str, Any]) -> None:
        """Submit a topology; ``conf`` is its conf."""
        pairs = [
            f"{key}={str(value).lower() if isinstance(value, bool) else value}"
            for key, value in conf.items()
        ]
        self._run(
            self._java(
                "submit",
                "PeerTopology",
                "peer",
                shape,
                str(workers),
                *pairs,
                libraries="lib-worker",
            )
        )

    def kill(self) -> None:
        """Kill it, and wait until its workers are gone."""
        self._run(self._java("kill", "PeerTopology", "peer", "kill", libraries="lib-worker"))
        supervisor = self._daemons[-1].pid
        wait_for(
            lambda: not psutil.Process(supervisor).children(recursive=True),
            120,
            "the end of Storm's workers",
        )


def _family(pid: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return [*process.children(recursive=True), process]
    except psutil.NoSuchProcess:
        return []
