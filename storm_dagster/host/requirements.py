"""Requirements of this host, each with a remedy if it is missing."""

import re
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress

from storm_dagster.model.errors import InvalidRequest, MissingPart

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


def extra_requirements(extra: str) -> list[str]:
    """Return the requirements of one of our extras, such as ``confluent-kafka<3,>=2.6``.

    Empty where a worker of another interpreter finds the package on its path alone.
    """
    marker = re.compile(rf"\bextra == ['\"]{re.escape(extra)}['\"]")
    requirements: list[str] = []
    for line in _requirements():
        requirement, _, condition = line.partition(";")
        if marker.search(condition):
            requirements.append(requirement.strip())
    return requirements


def install_command(requirements: Iterable[str]) -> str:
    """Return the command that installs requirements into this interpreter.

    It names what a package index has: storm-dagster itself is on none.
    """
    quoted = [f"'{requirement}'" for requirement in requirements]
    return " ".join([sys.executable, "-m pip install", *quoted])


def requirements_of(distributions: Collection[str]) -> list[str]:
    """Return our requirement of each distribution, or its name where we state none."""
    stated: dict[str, str] = {}
    for line in _requirements():
        requirement = line.partition(";")[0].strip()
        stated[_normal(_distribution(requirement))] = requirement
    return [stated.get(_normal(name), name) for name in distributions]


def missing_part(error: ModuleNotFoundError, what: str) -> MissingPart | None:
    """Distribution to install so that ``what`` works; ``None`` when the module is not one of those
    we depend on.
    """
    module = (error.name or "").partition(".")[0]
    wanted = _normal(_BROUGHT_BY.get(module, module))
    for line in _requirements() or ([wanted] if module in _BROUGHT_BY else []):
        requirement = line.partition(";")[0].strip()
        name = _distribution(requirement)
        if wanted and _normal(name) == wanted:
            return MissingPart(
                f"{what} needs {name}, which is not installed on this host: "
                f"{install_command([requirement])}, or install storm-dagster with its "
                "dependencies for all that the package needs",
                name=error.name,
            )
    return None


def _normal(name: str) -> str:
    """Return the name of a distribution as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _distribution(requirement: str) -> str:
    """Return the name of the distribution that a requirement asks for."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


@contextmanager
def needs(what: str) -> Iterator[None]:
    """Raise :class:`MissingPart`, naming ``what``, where one of our dependencies is missing in the
    block.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing_part(error, what) or error from error


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
                pip = install_command([str(wanted)])
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
