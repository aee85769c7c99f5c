"""A Dagster that exists beside a local cluster, and has the cluster as a code location.

``dev --dagster-url`` and ``dev --no-dagster`` use it. Its webserver launches the runs of the
cluster, its daemon evaluates the sensors that heal, and its workspace is never written.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from storm_dagster.host.waiting import poll
from storm_dagster.model.conf import ClusterConf
from storm_dagster.model.dagster_names import SUBMIT_JOB, DagsterNames
from storm_dagster.model.errors import InvalidRequest, Misconfigured, Unavailable
from storm_dagster.nimbus.dagster.client import REPOSITORY, location_problem
from storm_dagster.nimbus.dagster.transport import DagsterAccess, DagsterTransport
from storm_dagster.security.settings import Security

URL_KEY = "dagster.graphql.url"
DEFAULT_URL = "http://127.0.0.1:3000/graphql"
"""Address of ``dg dev`` and ``dagster dev`` without options."""
OWN_LOCATION = "storm"
"""Name of the cluster's code location in the Dagster that ``dev`` starts."""
_TIMEOUT_SECS = 15.0
"""Time in which Dagster lists its code locations; a webserver that has just started is slow."""
_PAUSE_SECS = 1.0
"""Pause between two checks of a Dagster that is waited for."""


def graphql_url(address: str) -> str:
    """GraphQL address of the Dagster whose UI is at ``address`` (``--dagster-url``).

    ``/graphql`` at its end may be omitted. :class:`InvalidRequest` for an address without http or
    host, and for one with a user: every user of the machine can read a command line.
    """
    problem = "is not an address such as http://127.0.0.1:3000: correct it"
    try:
        parts = urlsplit(address)
        host = parts.hostname
        # Reading the port checks it.
        _ = parts.port
    except ValueError:
        raise InvalidRequest(f"--dagster-url {problem}") from None
    if "@" in address:
        raise InvalidRequest(
            "--dagster-url has a user or password, and every user of the machine can read a "
            f"command line: write the address as {URL_KEY} into HOME/storm.yaml, or its token into "
            "the file of dagster.graphql.token.file, and use --no-dagster"
        )
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
        raise InvalidRequest(f"--dagster-url {address!r:.200} {problem}")
    return address.rstrip("/").removesuffix("/graphql").rstrip("/") + "/graphql"


def definition_lines(home: Path, conf: ClusterConf) -> str:
    """The module and the workspace entry that make this cluster a code location."""
    arguments = f"home={str(home)!r}"
    if conf["dagster.cluster"]:
        arguments = f"cluster={conf['dagster.cluster']!r}, {arguments}"
    location = conf["dagster.location"]
    return (
        "  # storm_cluster.py, or merged into the definitions of a project: dg.Definitions.merge\n"
        "  from storm_dagster import build_storm_defs\n"
        "\n"
        f"  defs = build_storm_defs({arguments})\n"
        "\n"
        "  # an entry below load_from in its workspace.yaml; the name is dagster.location\n"
        f"  - python_file: {{relative_path: storm_cluster.py, location_name: {location}}}"
    )


def check_location(conf: ClusterConf, home: Path) -> None:
    """Check that the Dagster of the conf has a code location with this cluster's definitions.

    :class:`Unavailable` if it does not answer, or has not loaded the location;
    :class:`Misconfigured` if it refuses the credentials, or lacks the definitions: the error has
    the lines to add, or the ``dagster.location`` that has them. The definitions of another cluster
    have the same names: they are not told apart.
    """
    access = DagsterAccess.of(conf)
    assert access is not None, "the verb has set the address"
    transport = DagsterTransport(lambda: access, timeout=_TIMEOUT_SECS, security=Security.of(conf))
    with closing(transport):
        answer = transport.graphql("LocationJobs", {})
    entries: Sequence[Mapping[str, Any]] = answer.get("locationEntries") or []
    location = conf["dagster.location"]
    job = DagsterNames(conf["dagster.cluster"]).name(SUBMIT_JOB)
    suitable = [str(entry["name"]) for entry in entries if _has_job(entry, job)]
    if location in suitable:
        return
    doing = f"Dagster at {access.url} cannot launch the runs of this cluster"
    for entry in entries:
        if entry["name"] == location and entry.get("loadStatus") == "LOADING":
            raise Unavailable(f"{doing}: it still loads code location {location!r}: wait for it")
    if suitable:
        names = ", ".join(map(repr, suitable))
        raise Misconfigured(
            f"{doing}: dagster.location is {location!r}, and the job {job} is in {names}: "
            f"add -c dagster.location={suitable[0]}, or set it in storm.yaml"
        )
    problem = location_problem(
        doing, entries, repositoryLocationName=location, repositoryName=REPOSITORY
    )
    if isinstance(problem, Unavailable):
        # The location exists, and failed to load.
        raise problem
    locations = ", ".join(sorted(repr(str(entry["name"])) for entry in entries)) or "none"
    raise Misconfigured(
        f"{doing}: none of its code locations (it has: {locations:.500}) has the job {job}: "
        f"add the cluster to them, and reload them:\n{definition_lines(home, conf)}"
    )


def _has_job(entry: Mapping[str, Any], job: str) -> bool:
    """True if a code location is loaded and its definitions have the job."""
    loaded = entry.get("locationOrLoadError") or {}
    for repository in loaded.get("repositories") or ():
        if repository["name"] == REPOSITORY:
            return any(row["name"] == job for row in repository["jobs"])
    return False


def await_location(
    conf: ClusterConf, home: Path, timeout: float, on_wait: Callable[[str], None]
) -> None:
    """Wait until Dagster answers and has the location: :func:`check_location`.

    ``on_wait`` gets the reason of the wait, repeatedly. Raises :class:`Misconfigured` at once, and
    the last :class:`Unavailable` after ``timeout`` seconds.
    """
    errors: list[Unavailable] = []

    def is_ready() -> bool:
        try:
            check_location(conf, home)
        except Unavailable as error:
            errors.append(error)
            on_wait(error.message)
            return False
        return True

    if not poll(is_ready, timeout=timeout, pause=_PAUSE_SECS):
        raise errors[-1]


def check_workspace(path: Path) -> None:
    """Check a workspace file of the user, before Dagster's daemons would end because of it.

    :class:`InvalidRequest` if it is not YAML with ``load_from``, or names a location as the
    cluster's own is named.
    """
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidRequest(f"--workspace {path} cannot be read ({error}): correct it") from None
    entries = document.get("load_from") if isinstance(document, dict) else None
    if not isinstance(entries, list):
        raise InvalidRequest(
            f"--workspace {path} has no list load_from: name a workspace.yaml of Dagster"
        )
    if OWN_LOCATION in _location_names(entries):
        raise InvalidRequest(
            f"--workspace {path} has a code location named {OWN_LOCATION!r}, as the cluster's own "
            "is: give it another location_name"
        )


def _location_names(entries: Sequence[Any]) -> set[str]:
    """The names that entries of a workspace give to their code locations."""
    names: set[str] = set()
    for entry in entries:
        for target in entry.values() if isinstance(entry, dict) else ():
            if isinstance(target, dict) and target.get("location_name"):
                names.add(str(target["location_name"]))
    return names
