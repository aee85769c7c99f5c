"""The embedded Spark Connect server, and Spark standalone clusters, on loopback.

They use pyspark's own jars. The jars are found without an import of pyspark, so that the daemon
that only watches the server stays small.
"""

import base64
import importlib.util
import os
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from storm_dagster.host.class_data import ClassData
from storm_dagster.host.java import java_command
from storm_dagster.host.machine_size import whole_cpus
from storm_dagster.model.errors import Unavailable

_RESERVED_KEYS = (
    "spark.remote",
    "spark.master",
    "spark.connect.port",
    "spark.connect.master",
    "spark.driver.memory",
)
"""Keys of a cluster's conf that the command line sets: :func:`settings_of` omits them."""
_RESERVED_PREFIXES = (
    "spark.connect.grpc.binding.",
    "spark.connect.authenticate.",
    "spark.driver.host",
    "spark.driver.bindAddress",
)
"""Beginnings of further keys that :func:`settings_of` omits."""
_MAX_SOCKET_FOLDER = 60
"""Longest path that Spark accepts; the system's limit may be higher."""
_LATE_SECOND_COMPILER = (
    "-XX:Tier4InvocationThreshold=50000",
    "-XX:Tier4MinInvocationThreshold=6000",
    "-XX:Tier4CompileThreshold=150000",
    "-XX:Tier4BackEdgeThreshold=400000",
)
"""JVM options: the second of the JVM's two compilers begins ten times later than by default.

On two cores it takes half of the CPU of the first placement, for code that soon is not used any
more. Long work is not slower, since its code reaches these numbers within seconds. Without the
second compiler (``-XX:TieredStopAtLevel=1``) the first placement is made 0.9 s sooner, and counting
words takes 2.5 times as long (docs/performance.md).
"""
_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"
"""Main class of the server."""
_ENCRYPTION = {
    "spark.network.crypto.enabled": "true",
    "spark.network.crypto.cipher": "AES/GCM/NoPadding",
}
"""Settings that encrypt the traffic between processes of a standalone cluster."""
_FILTER = "org.apache.spark.ui.JWSFilter"
"""Filter of the web UI that requires a token signed with its key."""


def spark_home() -> Path:
    """Folder of the installed pyspark, with its ``jars`` and ``bin``.

    :class:`Unavailable` if pyspark is not installed with its jars.
    """
    spec = importlib.util.find_spec("pyspark")
    for location in (spec.submodule_search_locations if spec else None) or ():
        if (Path(location) / "bin" / "spark-submit").is_file():
            return Path(location)
    raise Unavailable(
        "pyspark is not installed with its jars: run pip install 'pyspark[connect]>=4.1,<5'"
    )


def spark_jars() -> list[Path]:
    """Jars of the installed pyspark, sorted. :class:`Unavailable` without them."""
    return sorted((spark_home() / "jars").glob("*.jar"))


def spark_connect_command(
    port: int,
    local_dir: Path,
    *,
    memory: str = "1g",
    host: str = "127.0.0.1",
    conf: Mapping[str, str] | None = None,
    master: str = "local[*]",
    class_data: Sequence[str] | None = None,
) -> list[str]:
    """The command line of a Spark Connect server on ``host:port`` in the foreground.

    Its jobs run on ``master``; for a standalone one (``spark://``), ``conf`` has
    ``spark.authenticate.secret``.

    ``memory`` is the driver's heap (Java notation). ``local_dir`` contains shuffle files, the
    warehouse, the settings (a file of this user alone, because every user can read a command line)
    and the temporary files of the JVM, which a killed JVM leaves (:func:`sweep_local_dir`). Start
    it with :func:`spark_environment`, so that its Python workers can import this package.
    ``class_data`` are the JVM's options for class data; by default an archive that exists is used.
    Raises :class:`Unavailable` if pyspark or Java is missing.
    """
    java = java_command()
    home = spark_home()
    cores = whole_cpus()
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
        # A pinned session survives an idle night.
        "spark.connect.session.manager.defaultSessionTimeout": "24h",
        # Each session keeps its last plans, with the rows of local tables in them: sixteen
        # micro-batches of 20,000 tuples are 40 MB, and the plans of a killed worker's session stay
        # for those 24 hours.
        "spark.connect.session.planCache.maxSize": "3",
        # The server's other ports deserialize their input; Spark makes the secret itself.
        "spark.authenticate": "true",
        "spark.sql.catalogImplementation": "in-memory",
        "spark.local.dir": str(local_dir),
        "spark.sql.warehouse.dir": str(local_dir / "warehouse"),
    }
    if master.startswith("spark://"):
        settings.update(_ENCRYPTION)
        # An executor works in its own folder, which its worker removes.
        settings["spark.executor.defaultJavaOptions"] = "-Djava.io.tmpdir=."
    sockets = _socket_folder(local_dir, master)
    if len(sockets) <= _MAX_SOCKET_FOLDER:
        # A port of the Python daemon would fork a process for every client, before any proof.
        settings["spark.python.unix.domain.socket.enabled"] = "true"
        settings["spark.python.unix.domain.socket.dir"] = sockets
    if class_data is None:
        class_data = ClassData.of("spark", java, spark_jars()).options()
    options = [*class_data, *_LATE_SECOND_COMPILER]
    options.append(f"-Djava.io.tmpdir={local_dir}")
    # Spark adds a cluster's spark.driver.extraJavaOptions to the options of this key.
    settings["spark.driver.defaultJavaOptions"] = " ".join(f'"{option}"' for option in options)
    settings.update(conf or {})
    properties = _write_properties(local_dir, settings)
    command = [str(home / "bin" / "spark-submit"), "--master", master, "--driver-memory", memory]
    command += ["--name", "storm-dagster", "--class", _CLASS]
    command += ["--load-spark-defaults", "--properties-file", str(properties)]
    command.append("spark-internal")
    return command


def _socket_folder(local_dir: Path, master: str) -> str:
    """A path of ``local_dir`` for sockets, short if possible.

    A short path leads through an open descriptor, which an ``exec`` keeps: it is valid while this
    process lives, or the program that replaces it. Only a local master gets one.
    """
    path = str(local_dir)
    if len(path) <= _MAX_SOCKET_FOLDER or not master.startswith("local"):
        return path
    if not os.path.isdir("/proc/self/fd"):
        return path
    local_dir.mkdir(parents=True, exist_ok=True)
    folder = os.open(local_dir, os.O_RDONLY)
    os.set_inheritable(folder, True)
    return f"/proc/{os.getpid()}/fd/{folder}"


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
    """The command line of a master or worker of a Spark standalone cluster.

    It listens on ``host:port`` and runs in the foreground. ``worker`` is the master's URL, and the
    cores and the memory that the worker offers. ``local_dir`` contains the files of the process,
    its settings with the secret, and the executors' folders. Start it with
    :func:`standalone_environment`. Port 0 is any free one; ``ui_port`` opens Spark's web UI on
    loopback. Raises :class:`Unavailable` if the web UI would be open without ``ui_port``.
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
        # A restarted master knows the workers and applications of the former one.
        "spark.deploy.recoveryMode": "FILESYSTEM",
        "spark.deploy.recoveryDirectory": str(local_dir / "recovery"),
        "spark.worker.cleanup.enabled": "true",
        "spark.executor.logs.rolling.strategy": "size",
        "spark.executor.logs.rolling.maxRetainedFiles": "9",
    }
    if ui_port is None:
        # Spark cannot omit the web UI: it stays on loopback, and requires a key that no client has.
        if not any((home / "jars").glob("jjwt-impl-*.jar")):
            raise Unavailable(
                "pyspark has no jjwt jars, which close Spark's web UI: "
                "use a newer one, or --ui-port"
            )
        key = base64.urlsafe_b64encode(secrets.token_bytes(32)).decode()
        settings["spark.ui.filters"] = _FILTER
        settings[f"spark.{_FILTER}.param.secretKey"] = key
    properties = _write_properties(local_dir, settings)
    command = [str(home / "bin" / "spark-class")]
    command += [f"org.apache.spark.deploy.{role}.{role.title()}", "--host", host]
    command += ["--port", str(port), "--webui-port", str(ui_port or 0)]
    command += ["--properties-file", str(properties)]
    if role == "worker":
        master_url, cores, memory = worker
        command += ["--work-dir", str(local_dir), "--cores", str(cores), "--memory", memory]
        command.append(master_url)
    return command


def _write_properties(folder: Path, settings: Mapping[str, str]) -> Path:
    """Write ``spark.properties`` in the folder, which only its owner may read; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "spark.properties"
    # A new file: an old one may have another owner or mode.
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        for key, value in settings.items():
            escaped = value.replace("\\", "\\\\").replace("\n", "\\n")
            file.write(f"{key}={escaped}\n")
    return path


def sweep_local_dir(local_dir: Path) -> None:
    """Create the folder, and remove the files of killed processes from it.

    They are servers and executors.
    """
    local_dir.mkdir(parents=True, exist_ok=True)
    for pattern in ("artifacts-*", "spark-*", "blockmgr-*", "app-*"):
        for folder in local_dir.glob(pattern):
            shutil.rmtree(folder, ignore_errors=True)


def settings_of(conf: Mapping[str, Any]) -> dict[str, str]:
    """The ``spark.*`` keys of a cluster's conf for the embedded server.

    An example is ``spark.jars.packages``. The addresses and the authentication of the server are
    not among them, because they are checked elsewhere.
    """
    settings: dict[str, str] = {}
    for key, value in conf.items():
        if not key.startswith("spark.") or value is None:
            continue
        if key in _RESERVED_KEYS or key.startswith(_RESERVED_PREFIXES):
            continue
        settings[key] = str(value).lower() if isinstance(value, bool) else str(value)
    return settings


def _home_without_sources(local_dir: Path) -> Path:
    """Create a Spark home without the archive of pyspark's sources, and return its path.

    Spark puts that archive before the installed package, and Python compiles imports from an
    archive each time: 2.5 s of a core for each process, instead of 1.0.

    All servers of this pyspark have the same home, beside their class data: a JVM maps class data
    only if the jars still have the paths that they had when it was made. Without a cache folder the
    home is in ``local_dir``.
    """
    archive = ClassData.of("spark", java_command(), spark_jars()).path
    home = local_dir / "home" if archive is None else archive.with_suffix(".home")
    home.mkdir(parents=True, exist_ok=True)
    for part in ("bin", "sbin", "jars"):
        target = spark_home() / part
        link = home / part
        if link.is_symlink() and link.readlink() == target:
            continue
        # Atomically: another server may be starting.
        new_link = home / f".{part}-{os.getpid()}"
        new_link.unlink(missing_ok=True)
        new_link.symlink_to(target)
        os.replace(new_link, link)
    return home


def spark_environment(local_dir: Path, base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for :func:`spark_connect_command`.

    It has this interpreter, and this package is importable: Spark names shipped functions of this
    package by module, so that its Python workers import it.
    """
    environment = dict(os.environ if base is None else base)
    root = str(Path(__file__).resolve().parents[2])
    former_path = environment.get("PYTHONPATH", "").split(os.pathsep)
    python_path = [root, *(part for part in former_path if part and part != root)]
    environment.update(
        SPARK_HOME=str(_home_without_sources(local_dir)),
        # For the JVM that only computes the server's command line.
        SPARK_LAUNCHER_OPTS="-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        SPARK_LOCAL_IP="127.0.0.1",
        PYSPARK_PYTHON=sys.executable,
        PYTHONPATH=os.pathsep.join(python_path),
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
    """The environment for :func:`standalone_command`.

    Executors inherit it from their worker.
    """
    options = f'-XX:+UseSerialGC "-Djava.io.tmpdir={local_dir}"'
    return {
        **spark_environment(local_dir),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_DAEMON_JAVA_OPTS": options,
    }
