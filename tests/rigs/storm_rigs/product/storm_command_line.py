"""Storm's own command line in Java, from Maven Central; kept for the next run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from urllib.parse import quote

import pytest

from storm_dagster.host.java import java_command

VERSION = "2.8.3"
_NEEDS = (
    f"org.apache.storm:storm-server:{VERSION}",
    f"org.apache.storm:storm-core:{VERSION}",
    "commons-cli:commons-cli:1.5.0",
    "com.google.guava:guava:33.0.0-jre",
)
_DEPENDENCY = "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version>{}</dependency>"
# The command line alone: Storm's Clojure needs jars that Maven Central lacks.
_ALONE = (
    "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId></exclusion></exclusions>"
)


def storm_home() -> Path:
    """A folder whose ``lib`` holds Storm's jars; skips the test where they cannot be had."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    home = Path(os.environ.get("STORM_CACHE") or cache / "storm-dagster-tests" / f"storm-{VERSION}")
    if (home / ".complete").exists():
        return home
    maven = shutil.which("mvn")
    if maven is None:
        pytest.skip("Maven is not installed: install maven")
    home.mkdir(parents=True, exist_ok=True)
    needs = "".join(
        _DEPENDENCY.format(*each.split(":"), _ALONE if "storm-core" in each else "")
        for each in _NEEDS
    )
    pom = home / "client.xml"
    pom.write_text(
        "<project><modelVersion>4.0.0</modelVersion><groupId>local</groupId><artifactId>client</artifactId>"
        f"<version>1</version><dependencies>{needs}</dependencies></project>"
    )
    command = [
        maven,
        "-q",
        "-B",
        "-f",
        str(pom),
        "dependency:copy-dependencies",
        "-DincludeScope=runtime",
    ]
    if subprocess.run(
        [*command, f"-DoutputDirectory={home / 'lib'}"], timeout=500, check=False
    ).returncode:
        pytest.skip("Maven Central does not answer")
    (home / "RELEASE").write_text(VERSION)
    (home / ".complete").touch()
    return home


class StormCommandLine:
    """``storm COMMAND`` against one nimbus."""

    def __init__(self, host: str, port: int, folder: Path) -> None:
        self._home, self._folder = storm_home(), folder
        conf = {"nimbus.seeds": [host], "nimbus.thrift.port": port}
        self._options = ",".join(f"{key}={quote(json.dumps(value))}" for key, value in conf.items())

    def run(self, command: str, *args: str) -> tuple[int, str]:
        """Exit code and output of a class of ``org.apache.storm.command``."""
        told = subprocess.run(
            [
                java_command(),
                f"-Dstorm.home={self._home}",
                "-Dstorm.conf.file=",
                f"-Dstorm.options={self._options}",
                f"-Dstorm.log.dir={self._folder}",
                *("-cp", f"{self._home / 'lib'}/*:{self._folder}"),
                f"org.apache.storm.command.{command}",
                *args,
            ],
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        return told.returncode, told.stdout + told.stderr
