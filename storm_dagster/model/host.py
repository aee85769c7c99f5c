"""Requirements of this host, with a remedy when one is missing; locks, memory, folders and files of
daemons.
"""

import ctypes
import gc
import importlib
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import IO, Any

from storm_dagster.model.errors import Conflict, InvalidRequest, MissingPart

_M_ARENA_MAX = -8
# Modules that are not named after the requirement that brings them.
_BROUGHT_BY = {"yaml": "pyyaml", "zmq": "pyzmq", "grpc": "pyspark", "google": "pyspark"}


def _requirements() -> list[str]:
    """Those of our distribution; none where a worker of another interpreter finds the package on
    its path alone.
    """
    from importlib import metadata

    try:
        return metadata.requires("storm-dagster") or []
    except metadata.PackageNotFoundError:
        return []


def missing_part(error: ModuleNotFoundError, what: str) -> MissingPart | None:
    """Distribution to install so that ``what`` works; ``None`` when the module is not one of those
    we depend on.
    """
    module = (error.name or "").partition(".")[0]
    wanted = re.sub(r"[-_.]+", "-", _BROUGHT_BY.get(module, module)).lower()
    for line in _requirements() or ([wanted] if module in _BROUGHT_BY else []):
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
    """Raise :class:`MissingPart`, naming ``what``, where one of our dependencies is missing in the
    block.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing_part(error, what) or error from error


class _Metadata(ModuleType):
    """``importlib.metadata`` until it is used: Pydantic imports it, for its plugins alone, and it
    takes 1.7 MiB.
    """

    def __getattr__(self, name: str) -> Any:
        if name == "__path__":  # The import itself asks for it.
            raise AttributeError(name)
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]
        return getattr(importlib.import_module(self.__name__), name)

    def entry_points(self, **group: str) -> Any:
        return self.__getattr__("entry_points")(**group)


@contextmanager
def quick_imports() -> Iterator[None]:
    """Imports of the block take a fifth to a quarter less time: no garbage is searched, then or
    later, among what they make, and models get no plugins of Pydantic, which are searched in all
    installed packages. Users' models get theirs.
    """
    name, collects = "PYDANTIC_DISABLE_PLUGINS", gc.isenabled()
    metadata = _Metadata("importlib.metadata")
    sys.modules.setdefault(metadata.__name__, metadata)
    wanted = os.environ.get(name)
    os.environ[name] = "__all__"
    gc.disable()
    try:
        yield
    finally:
        if sys.modules.get(metadata.__name__) is metadata:
            del sys.modules[metadata.__name__]
        gc.freeze()
        if collects:
            gc.enable()
        os.environ.pop(name)
        os.environ.update({} if wanted is None else {name: wanted})


def return_free_memory() -> None:
    """Return the unused pages of the GNU C library's heap to the system, in about a millisecond;
    call it now and then.

    The library does so only at the end of a heap. Others have no such call.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def keep_one_heap() -> None:
    """Give all threads of this process one heap, before they start; processes that it starts have
    theirs.

    By default each thread has its own, and what is free in each makes a process that never ends
    grow for hours.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def require_release(distribution: str, what: str) -> None:
    """Raise :class:`MissingPart` where ``distribution`` is installed in a release that we do not
    run with.
    """
    from importlib import metadata

    from packaging.requirements import Requirement

    # It may be part of an archive, for example: it was imported.
    with suppress(metadata.PackageNotFoundError):
        found = metadata.version(distribution)
        for wanted in map(Requirement, _requirements()):
            allowed = "+" in found or wanted.specifier.contains(found, prereleases=True)
            if wanted.name == distribution and wanted.marker is None and not allowed:
                pip = f"{sys.executable} -m pip install '{wanted}'"
                raise MissingPart(
                    f"{what} needs {wanted}, and {found} is installed: {pip}", name=distribution
                )


def require_linux(what: str) -> None:
    """Raise :class:`InvalidRequest` on other systems: ``what`` owns processes and holds leases."""
    if sys.platform != "linux":
        raise InvalidRequest(
            f"{what} needs Linux, and this is {sys.platform}: run it on a Linux host, in a container or in a virtual "
            "machine; definitions, clients and the topology harness work here"
        )


def lock_file(stream: IO[Any], *, wait: bool) -> None:
    """Lock an open file until it is closed; without ``wait``, ``BlockingIOError`` when another
    process holds it.
    """
    try:
        import fcntl
    except ImportError:
        raise InvalidRequest(
            f"{stream.name} cannot be locked on {sys.platform}: use Linux or macOS"
        ) from None
    fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))


_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def hold_folder(home: Path, role: str, id: str) -> IO[str]:
    """Hold ``HOME/<role>/<id>`` until the result is closed or the process ends; :class:`Conflict`
    when another does.

    :class:`InvalidRequest` when the id cannot name a folder.
    """
    if not _ID.fullmatch(id) or id == "id":
        raise InvalidRequest(
            f"{role} id {id!r:.120} may hold 1 to 100 letters, digits and any of ._- : choose another"
        )
    folder = home / role / id
    folder.mkdir(parents=True, exist_ok=True)
    stream = (folder / "lock").open("a+", encoding="utf-8")
    try:
        lock_file(stream, wait=False)
    except BlockingIOError:
        stream.close()
        raise Conflict(
            f"another {role} {id!r} runs in {home}: stop it first, or choose another id"
        ) from None
    return stream


def write_atomically(path: Path, text: str, *, mode: int = 0o666, sync: bool = False) -> None:
    """Replace a file: readers see the old or the new one, never a part. ``sync``: it outlives the
    machine, too.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(
        os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "w", encoding="utf-8"
    ) as stream:
        stream.write(text)
        if sync:
            stream.flush()
            os.fsync(stream.fileno())
    os.replace(temporary, path)
