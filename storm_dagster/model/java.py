"""Finding a Java runtime that ZooKeeper and Spark can run on."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

from storm_dagster.model.errors import Unavailable

MINIMUM_JAVA = 17
"""The oldest Java that pyspark 4's jars, and so the embedded ZooKeeper among them, run on."""

_ADVICE = (
    f"install Java {MINIMUM_JAVA} or newer (Debian: apt-get install openjdk-17-jre-headless, "
    "macOS: brew install openjdk@17) or point JAVA_HOME at one"
)
_VERSION = re.compile(r'version "(?P<major>[0-9]+)(?:\.(?P<minor>[0-9]+))?')


@functools.cache
def java_version(java: str) -> int:
    """Major version of the Java command ``java``; ``Unavailable`` when it does not run."""
    try:
        # `-version` answers on standard error; a broken installation may hang, so the wait is bounded.
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"Java at {java} does not run ({error}): {_ADVICE}") from None
    match = _VERSION.search(answer.stderr + answer.stdout)
    if answer.returncode != 0 or not match:
        output = (answer.stderr or answer.stdout).strip()
        raise Unavailable(f"Java at {java} does not print its version ({output!r:.200}): {_ADVICE}")
    major = int(match["major"])
    # Up to Java 8 the version was written 1.8.
    return int(match["minor"] or 0) if major == 1 else major


def java_command() -> str:
    """Path of a Java command of version 17 or newer: that of ``JAVA_HOME``, else the one on the path.

    Raises ``Unavailable`` with install advice when there is none, or when it is too old.
    """
    home = os.environ.get("JAVA_HOME")
    if home:
        found = str(Path(home) / "bin" / "java")
        if not os.access(found, os.X_OK):
            raise Unavailable(f"JAVA_HOME is {home}, but {found} is not a program: {_ADVICE}")
    else:
        on_path = shutil.which("java")
        if on_path is None:
            raise Unavailable(f"no 'java' on the path and JAVA_HOME is not set: {_ADVICE}")
        found = on_path
    version = java_version(found)
    if version < MINIMUM_JAVA:
        raise Unavailable(f"Java at {found} has version {version}, {MINIMUM_JAVA} is needed: {_ADVICE}")
    return found
