"""Java runtime of ZooKeeper and Spark."""

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

from storm_dagster.model.errors import Unavailable

MINIMUM_JAVA = 17
"""Oldest Java that the jars of pyspark 4 run on, the embedded ZooKeeper among them."""

_ADVICE = (
    f"install Java {MINIMUM_JAVA} or newer (Debian: apt-get install openjdk-17-jre-headless, "
    "macOS: brew install openjdk@17) or point JAVA_HOME at one"
)
# The output of ``java -version`` has a line such as: openjdk version "17.0.9" 2023-10-17.
_VERSION = re.compile(r'version "(?P<major>[0-9]+)(?:\.(?P<minor>[0-9]+))?')


@functools.cache
def java_version(java: str) -> int:
    """Major version of the Java command ``java``.

    Raises ``Unavailable`` if it does not run.
    """
    try:
        # `-version` prints to standard error. A broken installation may hang, so the wait is
        # bounded.
        result = subprocess.run(
            [java, "-version"], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"Java at {java} does not run ({error}): {_ADVICE}") from None
    match = _VERSION.search(result.stderr + result.stdout)
    if result.returncode != 0 or not match:
        output = (result.stderr or result.stdout).strip()
        raise Unavailable(f"Java at {java} does not print its version ({output!r:.200}): {_ADVICE}")
    major = int(match["major"])
    if major == 1:
        # Up to Java 8 the version was written 1.8.
        return int(match["minor"] or 0)
    return major


def java_command() -> str:
    """Path of a Java command of version 17 or newer.

    It is the command of ``JAVA_HOME``, else the one on the path. Raises ``Unavailable`` with
    install advice if there is none, or it is too old.
    """
    java_home = os.environ.get("JAVA_HOME")
    if java_home:
        command = str(Path(java_home) / "bin" / "java")
        if not os.access(command, os.X_OK):
            raise Unavailable(
                f"JAVA_HOME is {java_home}, but {command} is not a program: {_ADVICE}"
            )
    else:
        on_path = shutil.which("java")
        if on_path is None:
            raise Unavailable(f"no 'java' on the path and JAVA_HOME is not set: {_ADVICE}")
        command = on_path
    version = java_version(command)
    if version < MINIMUM_JAVA:
        raise Unavailable(
            f"Java at {command} has version {version}, {MINIMUM_JAVA} is needed: {_ADVICE}"
        )
    return command
