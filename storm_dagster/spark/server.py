"""The embedded Spark Connect server, and Spark standalone clusters: pyspark's own jars, bound to
loopback.

Found without importing pyspark, so that the daemon that only watches it stays small.
"""

import base64
import importlib.util
import os
import secrets
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from storm_dagster.host.java import class_data_options, java_command
from storm_dagster.model.errors import Unavailable

_OURS = (
    "spark.remote",
    "spark.master",
    "spark.connect.port",
    "spark.connect.master",
    "spark.driver.memory",
)
_GUARDED = (
    "spark.connect.grpc.binding.",
    "spark.connect.authenticate.",
    "spark.driver.host",
    "spark.driver.bindAddress",
)
_LONGEST_SOCKET_FOLDER = 60  # Spark refuses a setting of more, whatever the system takes.
_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
_ENCRYPTION = {
    "spark.network.crypto.enabled": "true",
    "spark.network.crypto.cipher": "AES/GCM/NoPadding",
}
_FILTER = "org.apache.spark.ui.JWSFilter"


def spark_home() -> Path:
    """Folder of the installed pyspark, with its ``jars`` and ``bin``; :class:`Unavailable` when
    there is none.
    """
    spec = importlib.util.find_spec("pyspark")
    for location in (spec.submodule_search_locations if spec else None) or ():
        if (Path(location) / "bin" / "spark-submit").is_file():
            return Path(location)
    raise Unavailable(
        "pyspark is not installed with its jars: run pip install 'pyspark[connect]>=4.1,<5'"
    )


def spark_connect_command(
    port: int,
    local_dir: Path,
    *,
    memory: str = "1g",
    host: str = "127.0.0.1",
    conf: Mapping[str, str] | None = None,
    master: str = "local[*]",
) -> list[str]:
    """The command line that runs a Spark Connect server on ``host:port`` in the foreground.

    Its jobs run on ``master``; for a standalone one (``spark://``), ``conf`` has
    ``spark.authenticate.secret``.

    ``memory`` is the driver's heap (Java notation), ``local_dir`` takes shuffle files, the
    warehouse, the settings (a file of this user's own, since every user can read a command line)
    and the temporary files of the JVM, which leaves them when it is killed
    (:func:`sweep_local_dir`). Start it with :func:`spark_environment`, so that its Python workers
    can import this package. Raises :class:`Unavailable` when pyspark or Java is missing.
    """
    java, home = java_command(), spark_home()
    cores = os.cpu_count() or 2
    settings = {
        "spark.connect.grpc.binding.address": host,
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.host": host,
        "spark.driver.bindAddress": host,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "WARN",
        "spark.pyspark.python": sys.executable,
        "spark.python.daemon.module": "storm_dagster.spark.python_daemon",
        # Few rows in many small jobs: the default of 200 partitions would be all overhead.
        "spark.sql.shuffle.partitions": str(max(2, 2 * cores)),
        # A pinned session that idles over night is still there in the morning.
        "spark.connect.session.manager.defaultSessionTimeout": "24h",
        # Each session keeps its last plans, with the rows of local tables in them: sixteen
        # micro-batches of 20,000 tuples are 40 MB, and what a killed worker's session keeps stays
        # for those 24 hours.
        "spark.connect.session.planCache.maxSize": "3",
        # Its other ports deserialize what they are sent; Spark makes the secret by itself.
        "spark.authenticate": "true",
        "spark.sql.catalogImplementation": "in-memory",
        "spark.local.dir": str(local_dir),
        "spark.sql.warehouse.dir": str(local_dir / "warehouse"),
    }
    if master.startswith("spark://"):
        settings.update(_ENCRYPTION)
        # An executor works in a folder of its own, which its worker removes.
        settings["spark.executor.defaultJavaOptions"] = "-Djava.io.tmpdir=."
    sockets = str(local_dir)
    if (
        len(sockets) > _LONGEST_SOCKET_FOLDER
        and master.startswith("local")
        and os.path.isdir("/proc/self/fd")
    ):
        # A short name of it, as long as this process lives, or what it becomes.
        local_dir.mkdir(parents=True, exist_ok=True)
        folder = os.open(local_dir, os.O_RDONLY)
        os.set_inheritable(folder, True)
        sockets = f"/proc/{os.getpid()}/fd/{folder}"
    if len(sockets) <= _LONGEST_SOCKET_FOLDER:
        # A port of its Python daemon forks a process for whoever connects, before any proof.
        settings["spark.python.unix.domain.socket.enabled"] = "true"
        settings["spark.python.unix.domain.socket.dir"] = sockets
    options = class_data_options("spark", java, sorted((home / "jars").glob("*.jar")))
    options.append(f"-Djava.io.tmpdir={local_dir}")
    # Spark's own place for options that a cluster's spark.driver.extraJavaOptions adds to.
    settings["spark.driver.defaultJavaOptions"] = " ".join(f'"{option}"' for option in options)
    settings.update(conf or {})
    command = [str(home / "bin" / "spark-submit"), "--master", master, "--driver-memory", memory]
    command += ["--name", "storm-dagster", "--class", _CLASS]
    command += [
        "--load-spark-defaults",
        "--properties-file",
        str(_write_properties(local_dir, settings)),
    ]
    return [*command, "spark-internal"]


def standalone_command(
    role: Literal["master", "worker"],
    local_dir: Path,
    secret: str,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    ui_port: int | None = None,
    worker: tuple[str, int, str] = ("", 1, "1g"),
) -> list[str]:
    """The command line that runs a master or a worker of a Spark standalone cluster on
    ``host:port`` in the foreground.

    ``worker`` is the master's URL, and the cores and the memory that the worker offers.
    ``local_dir`` takes what the process keeps, its settings with the secret, and the executors'
    folders. Start it with :func:`standalone_environment`. Port 0 is any free one; ``ui_port`` opens
    Spark's web UI on loopback. Raises :class:`Unavailable` when the web UI would be open without
    that.
    """
    home = spark_home()
    settings = {
        **_ENCRYPTION,
        "spark.authenticate": "true",
        "spark.authenticate.secret": secret,
        "spark.local.dir": str(local_dir),
        "spark.worker.timeout": "20",
        "spark.ui.killEnabled": "false",
        "spark.master.rest.enabled": "false",
        # A master that starts again knows the workers and applications of the one before.
        "spark.deploy.recoveryMode": "FILESYSTEM",
        "spark.deploy.recoveryDirectory": str(local_dir / "recovery"),
        "spark.worker.cleanup.enabled": "true",
        "spark.executor.logs.rolling.strategy": "size",
        "spark.executor.logs.rolling.maxRetainedFiles": "9",
    }
    if ui_port is None:
        # Spark cannot omit it: it stays on loopback, and a key that nobody gets refuses every
        # request.
        if not any((home / "jars").glob("jjwt-impl-*.jar")):
            raise Unavailable(
                "pyspark has no jjwt jars, which close Spark's web UI: use a newer one, or --ui-port"
            )
        settings["spark.ui.filters"] = _FILTER
        settings[f"spark.{_FILTER}.param.secretKey"] = base64.urlsafe_b64encode(
            secrets.token_bytes(32)
        ).decode()
    command = [
        str(home / "bin" / "spark-class"),
        f"org.apache.spark.deploy.{role}.{role.title()}",
        "--host",
        host,
    ]
    command += ["--port", str(port), "--webui-port", str(ui_port or 0)]
    command += ["--properties-file", str(_write_properties(local_dir, settings))]
    offer = [
        "--work-dir",
        str(local_dir),
        "--cores",
        str(worker[1]),
        "--memory",
        worker[2],
        worker[0],
    ]
    return [*command, *offer] if role == "worker" else command


def _write_properties(folder: Path, settings: Mapping[str, str]) -> Path:
    """A file of Java properties that only its owner may read."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "spark.properties"
    path.unlink(missing_ok=True)
    with os.fdopen(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8"
    ) as file:
        for key, value in settings.items():
            escaped = value.replace("\\", "\\\\").replace("\n", "\\n")
            file.write(f"{key}={escaped}\n")
    return path


def sweep_local_dir(local_dir: Path) -> None:
    """Create the folder, and remove what servers and executors that were killed left in it."""
    local_dir.mkdir(parents=True, exist_ok=True)
    for pattern in ("artifacts-*", "spark-*", "blockmgr-*", "app-*"):
        for left in local_dir.glob(pattern):
            shutil.rmtree(left, ignore_errors=True)


def settings_of(conf: Mapping[str, Any]) -> dict[str, str]:
    """The ``spark.*`` keys of a cluster's conf that are the embedded server's, such as
    ``spark.jars.packages``.

    Not where it listens and whom it believes: that is checked elsewhere.
    """
    found: dict[str, str] = {}
    for key, value in conf.items():
        if (
            not key.startswith("spark.")
            or key in _OURS
            or key.startswith(_GUARDED)
            or value is None
        ):
            continue
        found[key] = str(value).lower() if isinstance(value, bool) else str(value)
    return found


def _home_without_sources(local_dir: Path) -> Path:
    """A Spark home without the archive of pyspark's sources, which Spark puts before the installed
    package.

    Python compiles what it imports from an archive each time: 2.5 s of a core for each process,
    instead of 1.0.
    """
    made = local_dir / "home"
    made.mkdir(parents=True, exist_ok=True)
    for part in ("bin", "sbin", "jars"):
        link = made / part
        link.unlink(missing_ok=True)
        link.symlink_to(spark_home() / part)
    return made


def spark_environment(local_dir: Path, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for :func:`spark_connect_command`: this interpreter, and this package
    importable.

    Spark's function shipping names functions of this package by module, so its Python workers
    import it.
    """
    environment = dict(os.environ if base is None else base)
    root = str(Path(__file__).resolve().parents[2])
    present = [
        part
        for part in environment.get("PYTHONPATH", "").split(os.pathsep)
        if part and part != root
    ]
    environment.update(
        SPARK_HOME=str(_home_without_sources(local_dir)),
        # Of the JVM that only works out the server's command line.
        SPARK_LAUNCHER_OPTS="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        SPARK_LOCAL_IP="127.0.0.1",
        PYSPARK_PYTHON=sys.executable,
        PYTHONPATH=os.pathsep.join([root, *present]),
    )
    # A remote for clients would make the server connect to another server.
    for name in (
        "SPARK_REMOTE",
        "SPARK_LOCAL_REMOTE",
        "SPARK_CONNECT_MODE_ENABLED",
        "PYSPARK_DRIVER_PYTHON",
    ):
        environment.pop(name, None)
    return environment


def standalone_environment(local_dir: Path) -> dict[str, str]:
    """The environment for :func:`standalone_command`, which executors inherit from their worker."""
    options = f'-XX:+UseSerialGC "-Djava.io.tmpdir={local_dir}"'
    return {
        **spark_environment(local_dir),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": options,
    }
