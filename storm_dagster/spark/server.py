"""The embedded Spark Connect server: pyspark's own jars, bound to loopback, warmed when it starts.

Found without importing pyspark, so that the daemon that only watches it stays small.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from storm_dagster.model.errors import Unavailable

__all__ = ["spark_connect_command", "spark_environment", "spark_home"]

_CLASS = "org.apache.spark.sql.connect.service.SparkConnectServer"


def spark_home() -> Path:
    """Folder of the installed pyspark, with its ``jars`` and ``bin``; :class:`Unavailable` when there is none."""
    spec = importlib.util.find_spec("pyspark")
    for location in (spec.submodule_search_locations if spec else None) or ():
        if (Path(location) / "bin" / "spark-submit").is_file():
            return Path(location)
    raise Unavailable("pyspark is not installed with its jars: run pip install 'pyspark[connect]>=4.1,<5'")


def spark_connect_command(
    port: int,
    *,
    memory: str = "1g",
    host: str = "127.0.0.1",
    master: str = "local[*]",
    local_dir: Path | None = None,
    conf: Mapping[str, str] | None = None,
) -> list[str]:
    """The command line that runs a Spark Connect server on ``host:port`` in the foreground.

    ``memory`` is the driver's heap (Java notation), ``local_dir`` takes shuffle files and the warehouse.
    Start it with :func:`spark_environment`, so that its Python workers can import this package. Raises
    :class:`Unavailable` when pyspark or Java is missing.
    """
    if shutil.which("java") is None and not os.environ.get("JAVA_HOME"):
        raise Unavailable("Spark needs Java 17 or newer and none was found: install it, or set JAVA_HOME")
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
        # Few rows in many small jobs: the default of 200 partitions would be all overhead.
        "spark.sql.shuffle.partitions": str(max(2, 2 * cores)),
        # A pinned session that idles over night is still there in the morning.
        "spark.connect.session.manager.defaultSessionTimeout": "24h",
        "spark.sql.catalogImplementation": "in-memory",
    }
    if local_dir is not None:
        settings["spark.local.dir"] = str(local_dir)
        settings["spark.sql.warehouse.dir"] = str(local_dir / "warehouse")
    settings.update(conf or {})
    command = [str(spark_home() / "bin" / "spark-submit"), "--master", master, "--driver-memory", memory]
    command += ["--name", "storm-dagster", "--class", _CLASS]
    for key, value in settings.items():
        command += ["--conf", f"{key}={value}"]
    return [*command, "spark-internal"]


def spark_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment for :func:`spark_connect_command`: this interpreter, and this package importable.

    Spark's function shipping names functions of this package by module, so its Python workers import it.
    """
    environment = dict(os.environ if base is None else base)
    root = str(Path(__file__).resolve().parents[2])
    present = [part for part in environment.get("PYTHONPATH", "").split(os.pathsep) if part and part != root]
    environment.update(
        SPARK_HOME=str(spark_home()),
        SPARK_LOCAL_IP="127.0.0.1",
        PYSPARK_PYTHON=sys.executable,
        PYTHONPATH=os.pathsep.join([root, *present]),
    )
    # A remote named for clients would make the server look for another server.
    for name in ("SPARK_REMOTE", "SPARK_LOCAL_REMOTE", "SPARK_CONNECT_MODE_ENABLED", "PYSPARK_DRIVER_PYTHON"):
        environment.pop(name, None)
    return environment
