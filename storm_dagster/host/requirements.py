"""Requirements of this host, each with a remedy if it is missing."""

import re
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress

from storm_dagster.model.errors import InvalidRequest, MissingPart

# Modules that are not named after the requirement that brings them.
_BROUGHT_BY = {"yaml": "pyyaml", "zmq": "pyzmq", "grpc": "pyspark", "google": "pyspark"}


def _requirements() -> list[str]:
    """Return the requirements of the distribution of this package.

    Empty if the package is only on the path, as in a worker of another interpreter.
    """
    from importlib import metadata

    try:
        return metadata.requires("storm-dagster") or []
    except metadata.PackageNotFoundError:
        return []


def extra_requirements(extra: str) -> list[str]:
    """Return the requirements of an extra, such as ``confluent-kafka<3,>=2.6``.

    Empty if the package is only on the path, as in a worker of another interpreter.
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

    The requirements are those that a package index has; storm-dagster itself is on none.
    """
    quoted = [f"'{requirement}'" for requirement in requirements]
    return " ".join([sys.executable, "-m pip install", *quoted])


def requirements_of(distributions: Collection[str]) -> list[str]:
    """Return the stated requirement of each distribution, or its name without one."""
    stated: dict[str, str] = {}
    for line in _requirements():
        requirement = line.partition(";")[0].strip()
        stated[_normal(_distribution(requirement))] = requirement
    return [stated.get(_normal(name), name) for name in distributions]


def missing_part(error: ModuleNotFoundError, subject: str) -> MissingPart | None:
    """Return the error of ``subject`` that names the distribution to install.

    ``None`` if the module is not of a distribution that this package depends on.
    """
    module = (error.name or "").partition(".")[0]
    distribution = _normal(_BROUGHT_BY.get(module, module))
    if not distribution:
        return None
    requirements = _requirements()
    if not requirements and module in _BROUGHT_BY:
        # This package is only on the path, and states none: the table names a dependency, too.
        requirements = [distribution]
    for line in requirements:
        requirement = line.partition(";")[0].strip()
        name = _distribution(requirement)
        if _normal(name) == distribution:
            return MissingPart(
                f"{subject} needs {name}, which is not installed on this host: "
                f"{install_command([requirement])}, or install storm-dagster with its "
                "dependencies for all that the package needs",
                name=error.name,
            )
    return None


def _normal(name: str) -> str:
    """Return the name of a distribution as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _distribution(requirement: str) -> str:
    """Return the name of the distribution of a requirement."""
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


@contextmanager
def needs(subject: str) -> Iterator[None]:
    """Raise :class:`MissingPart` if an import in the block lacks a dependency.

    The error names ``subject``, which needs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise missing_part(error, subject) or error from error


def require_release(distribution: str, subject: str) -> None:
    """Raise :class:`MissingPart` if an unsupported release is installed.

    The error names ``subject``, which needs it.
    """
    from importlib import metadata

    from packaging.requirements import Requirement

    # A distribution that was imported need not be installed: it may be part of an archive.
    with suppress(metadata.PackageNotFoundError):
        version = metadata.version(distribution)
        for line in _requirements():
            requirement = Requirement(line)
            if requirement.name != distribution or requirement.marker is not None:
                continue
            # A local build (a version with "+") is taken for a supported release.
            if "+" in version or requirement.specifier.contains(version, prereleases=True):
                continue
            command = install_command([str(requirement)])
            raise MissingPart(
                f"{subject} needs {requirement}, and {version} is installed: {command}",
                name=distribution,
            )


def require_linux(subject: str) -> None:
    """Raise :class:`InvalidRequest` on other systems than Linux.

    ``subject`` needs it because it owns processes and holds leases.
    """
    if sys.platform != "linux":
        raise InvalidRequest(
            f"{subject} needs Linux, and this is {sys.platform}: run it on a Linux host, in a "
            "container or in a virtual machine; definitions, clients and the topology harness "
            "work here"
        )
