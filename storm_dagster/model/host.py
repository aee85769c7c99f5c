"""Requirements of this host: an operating system, a distribution, a lock; with a remedy when one is missing."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from storm_dagster.model.errors import InvalidRequest, MissingPart

# Modules that are not named after the requirement that brings them.
_BROUGHT_BY = {"yaml": "pyyaml", "zmq": "pyzmq", "grpc": "pyspark", "google": "pyspark"}


def missing_part(error: ModuleNotFoundError, what: str) -> MissingPart | None:
    """Distribution to install so that ``what`` works; ``None`` when the module is not one of those we depend on."""
    module = (error.name or "").partition(".")[0]
    wanted = re.sub(r"[-_.]+", "-", _BROUGHT_BY.get(module, module)).lower()
    try:
        lines = importlib.metadata.requires("storm-dagster") or []
    except importlib.metadata.PackageNotFoundError:
        # A worker of another interpreter finds the package on its path alone.
        lines = [wanted] if module in _BROUGHT_BY else []
    for line in lines:
        requirement = line.partition(";")[0].strip()
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        if wanted and re.sub(r"[-_.]+", "-", name).lower() == wanted:
            return MissingPart(
                f"{what} needs {name}, which is not installed on this host: "
                f"{sys.executable} -m pip install '{requirement}', or storm-dagster in its place for all that the "
                "package needs",
                name=error.name,
            )
    return None


@contextmanager
def needs(what: str) -> Iterator[None]:
    """Raise :class:`MissingPart`, naming ``what``, where one of our dependencies is missing in the block."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing_part(error, what) or error from error


def require_linux(what: str) -> None:
    """Raise :class:`InvalidRequest` on other systems: ``what`` owns processes and holds leases."""
    if sys.platform != "linux":
        raise InvalidRequest(
            f"{what} needs Linux, and this is {sys.platform}: run it on a Linux host, in a container or in a virtual "
            "machine; definitions, clients and the topology harness work here"
        )


def lock_file(stream: IO[Any], *, wait: bool) -> None:
    """Lock an open file until it is closed; without ``wait``, ``BlockingIOError`` when another process holds it."""
    try:
        import fcntl
    except ImportError:
        raise InvalidRequest(f"{stream.name} cannot be locked on {sys.platform}: use Linux or macOS") from None
    fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
