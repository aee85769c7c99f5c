"""Declaration of a topology in ``defs.yaml``, and its differences from the state.

Targets are described in a child process, never imported here. Descriptions are cached on disk under
the hash of their code, because every run loads the definitions.
"""

import hashlib
import importlib.util
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from storm_dagster.defs.declared.owner import ownership_problem
from storm_dagster.host.files import write_atomically
from storm_dagster.model.conf import mask
from storm_dagster.model.errors import InvalidTopology, StormDagsterError
from storm_dagster.model.groupings import GroupingSpec
from storm_dagster.model.topology import TopologySpec, decode_topology
from storm_dagster.packaging.archive import collect_files, hash_file
from storm_dagster.packaging.target import Target, describe_target, parse_target

DATA_VERSION_TAG = "dagster/data_version"
"""Dagster's tag of a materialization: the version of its data."""
_DESCRIBE_SECS = 20.0
"""Time in which a target must be imported and described."""
_FAILURE_LASTS_SECS = 300.0
"""Time for which a failed description is not repeated."""


@dataclass(frozen=True)
class Declaration:
    """The desired state of one topology."""

    name: str
    target: str
    """Code of the topology: a file, module or archive, with the name in it."""
    args: tuple[str, ...] = ()
    """Arguments of the target."""
    conf: Mapping[str, Any] = field(default_factory=dict)
    """Without the number of workers, which a rebalance changes."""
    workers: int | None = None
    """``None``: any number."""
    parallelism: Mapping[str, int] = field(default_factory=dict)
    """Component -> number of executors; the others have that of the code."""
    inactive: bool = False
    """True if its status should be INACTIVE."""
    home: str | None = None
    """HOME of the cluster; ``None``: that of the environment."""
    declared_in: Path | None = None
    """The ``defs.yaml``."""
    owner: str | None = None
    """Project and deployment of the declaration; ``None``: it deploys over each owner."""

    @property
    def submitted_conf(self) -> dict[str, Any]:
        """The conf of a submission, without the code version."""
        if self.workers is None:
            return dict(self.conf)
        return {**self.conf, "topology.workers": self.workers}


@dataclass(frozen=True)
class TargetDescription:
    """Description of the current target."""

    spec: TopologySpec | None = None
    """``None``: it cannot be described, ``problem`` has the reason."""
    code_version: str | None = None
    """Hash of the packed code and of the conf; ``None`` if the target does not exist."""
    problem: str | None = None
    """Reason why the target cannot be deployed; ``None`` if it can."""
    on_disk: str | None = None
    """Hash of the described files, the ``defs.yaml`` included."""
    stamps: Mapping[Path, tuple[int, int]] = field(default_factory=dict)
    """Described files and their folders -> modification time and size.

    They are read before the content.
    """


@dataclass(frozen=True)
class RunningTopology:
    """A running topology, from ZooKeeper and the blob store."""

    topology_id: str
    status: str
    workers: int
    executors: Mapping[str, int]
    code_version: str | None
    """``None``: it was not deployed from a declaration."""
    conf: Mapping[str, Any] = field(default_factory=dict)
    """The conf that it was deployed with."""
    code_dir: str = ""
    """Prefix of its code's blobs; every deploy has a new one, also of the same code."""
    upgrading_to: str | None = None
    """Code version of the current gray upgrade.

    ``None`` without one, or if its code was not deployed from a declaration.
    """
    upgraded: int = 0
    """Workers that the gray upgrade has upgraded."""
    owner: str | None = None
    """Project and deployment that deployed it; ``None`` without one."""

    @property
    def data_version(self) -> str:
        """Version of the asset; every deploy with a change has a new one."""
        return f"{self.topology_id}.{self.code_version or 'unknown'}"

    @property
    def version_tags(self) -> dict[str, str]:
        """Dagster's tags of a materialization: the versions of its code and data."""
        return {
            "dagster/code_version": self.code_version or "unknown",
            DATA_VERSION_TAG: self.data_version,
        }


class LoadedFiles:
    """The files of a loaded declaration, compared with those on disk."""

    def __init__(self, declaration: Declaration, described: TargetDescription) -> None:
        self._declaration = declaration
        self._on_disk = described.on_disk
        """Hash of the files that were loaded."""
        self._stamps = described.stamps
        """Stamps of the files when their content was last read."""
        self._changed = False
        """True if that content was another one."""

    def changed(self) -> bool:
        """True if the content differs.

        It is read only after a modification time, size or folder changed.
        """
        if not self._stamps or any(_stamp(path) != stamp for path, stamp in self._stamps.items()):
            # A missing target has no files: it is searched at each call.
            current = describe_files(self._declaration)
            self._stamps = current.stamps
            self._changed = current.on_disk != self._on_disk
        return self._changed


def _stamp(path: Path) -> tuple[int, int]:
    """Modification time (ns) and size; 0 and -1 for a missing file."""
    try:
        stat = path.stat()
    except OSError:
        return (0, -1)
    return (stat.st_mtime_ns, stat.st_size)


def _files_of(target: Target, home: Path | None) -> list[Path]:
    """Files whose content defines the target, found without an import.

    They are those that a submission packs: an archive itself, all files beside a module's file, or
    those of an installed package. :class:`InvalidTopology` for a module that is not installed.
    """
    if target.path is not None and target.kind == "archive":
        return [target.path]
    include: list[str] | None = None
    if target.path is not None:
        root = target.path.parent
    else:
        top = target.module.partition(".")[0]
        spec = importlib.util.find_spec(top)
        if spec is None or not (spec.origin or spec.submodule_search_locations):
            raise InvalidTopology(
                f"module {top!r} of target {target} is not installed here: install it, "
                "or put it on PYTHONPATH"
            )
        if not spec.submodule_search_locations:
            return [Path(str(spec.origin))]
        package = Path(next(iter(spec.submodule_search_locations)))
        root = package.parent
        include = [package.name]
    files = collect_files(root, include, leave_out=[home] if home is not None else [])
    return [Path(path) for _, path in sorted(files.items())]


def _fingerprint(declaration: Declaration, target: Target, files: Sequence[Path]) -> str:
    """Hash of the target's files, its arguments and the interpreter."""
    digest = hashlib.sha256(json.dumps([str(target), declaration.args, sys.executable]).encode())
    for path in files:
        if path.name == "defs.yaml":
            continue  # The declaration is compared separately: more workers are not other code.
        digest.update(f"{path.name}:{hash_file(path)}\n".encode())
    return digest.hexdigest()


def _version(fingerprint: str, conf: Mapping[str, Any]) -> str:
    """Code version: hash of the files and of the conf without the number of workers."""
    code_conf = {key: value for key, value in conf.items() if key != "topology.workers"}
    text = fingerprint + json.dumps(code_conf, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _load_cached(path: Path) -> TargetDescription | None:
    """The cached description; ``None`` without one, or for a failure of long ago."""
    try:
        document = json.loads(path.read_bytes())
        if "problem" in document:
            # The environment may have been the reason: a missing package may be installed now.
            age_secs = time.time() - float(document["at"])
            if not 0 <= age_secs < _FAILURE_LASTS_SECS:
                return None
            return TargetDescription(problem=str(document["problem"]))
        return TargetDescription(spec=decode_topology(json.dumps(document["topology"])))
    except (OSError, ValueError, KeyError, TypeError, StormDagsterError):
        return None


def _store_cached(path: Path, description: TargetDescription) -> None:
    """Cache the description, or its problem with the time."""
    if description.spec is None:
        document = {"problem": description.problem, "at": time.time()}
    else:
        document = {"topology": json.loads(description.spec.to_json())}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(document))
    except OSError:
        return  # A read-only home only costs a second at each load.


@lru_cache(maxsize=256)
def _describe(target: str, args: tuple[str, ...], fingerprint: str) -> TargetDescription:
    """Spec or problem of the target, from the cache or by a child process.

    The cache on disk is in ``XDG_CACHE_HOME``; this process keeps the result until it ends.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    path = cache / "storm-dagster" / "described" / f"{fingerprint}.json"
    description = _load_cached(path)
    if description is None:
        try:
            topology = describe_target(target, args, _DESCRIBE_SECS).topology
            description = TargetDescription(spec=topology)
        except StormDagsterError as error:
            description = TargetDescription(problem=error.message)
        _store_cached(path, description)
    return description


def describe_declared(declaration: Declaration) -> TargetDescription:
    """Describe the target.

    An error of the target is the ``problem`` and is not raised, and so is a ``parallelism`` of an
    unknown component. A description is made once for each content of the code (and each
    interpreter); another process retries a failure after five minutes, this one when the code
    changes.
    """
    files = describe_files(declaration)
    if files.problem is not None or files.code_version is None:
        return files
    # The description of the files has their hash in place of the code version.
    target = _describe(declaration.target, tuple(declaration.args), files.code_version)
    version = _version(files.code_version, declaration.conf)
    if target.problem:
        return replace(files, spec=None, code_version=version, problem=target.problem)
    problem = _unknown_components(declaration, target.spec)
    return replace(files, spec=target.spec, code_version=version, problem=problem)


def describe_files(declaration: Declaration) -> TargetDescription:
    """The description of the target's files alone.

    Their hash is in place of the code version; an unreadable file is the ``problem``.
    """
    declared_in = declaration.declared_in
    try:
        target = parse_target(declaration.target)
        files = _files_of(target, Path(declaration.home) if declaration.home else None)
        paths = {*files, *(file.parent for file in files)}
        if declared_in:
            paths.add(declared_in)
        stamps = {path: _stamp(path) for path in paths}
        fingerprint = _fingerprint(declaration, target, files)
        declared_hash = ""
        if declared_in and declared_in.exists():
            declared_hash = hash_file(declared_in)
    except StormDagsterError as error:
        return TargetDescription(problem=error.message)
    except (OSError, ValueError) as error:
        return TargetDescription(problem=f"target {declaration.target} cannot be read: {error}")
    return TargetDescription(
        code_version=fingerprint, on_disk=fingerprint + declared_hash, stamps=stamps
    )


def _unknown_components(declaration: Declaration, spec: TopologySpec | None) -> str | None:
    """Problem of a ``parallelism`` with unknown components; ``None`` without one."""
    if spec is None:
        return None
    components = {*spec.spouts, *spec.bolts}
    unknown = sorted(set(declaration.parallelism) - components)
    if not unknown:
        return None
    return (
        f"parallelism names {', '.join(unknown)}, which topology {declaration.name!r} "
        f"does not have: it has {', '.join(sorted(components))}"
    )


def differences(
    declaration: Declaration, described: TargetDescription, actual: RunningTopology | None
) -> dict[str, str]:
    """Differences from the declaration: part -> text.

    Keys are ``target``, ``owner``, ``running``, ``code``, ``conf.<key>``, ``workers``, ``status``
    and ``parallelism.<component>``. A conf that differs is a difference of the code as well,
    because both are deployed together. Of a topology that does not run, or is killed, only
    ``target``, ``owner`` and ``running`` are compared; the status only if it is ACTIVE or INACTIVE.
    """
    differ: dict[str, str] = {}
    if described.problem is not None:
        differ["target"] = described.problem
    owner_problem = None
    if actual is not None:
        owner_problem = ownership_problem(declaration.name, declaration.owner, actual.owner)
    if owner_problem is not None:
        differ["owner"] = owner_problem
    if actual is None or actual.status == "KILLED":
        differ["running"] = f"topology {declaration.name!r} does not run"
        return differ
    if described.code_version is not None and actual.code_version != described.code_version:
        version = actual.code_version or "code that was not deployed from here"
        differ["code"] = f"declared {described.code_version}, running {version}"
        differ.update(_conf_differences(declaration, actual))
    if declaration.workers is not None and actual.workers != declaration.workers:
        differ["workers"] = f"declared {declaration.workers}, running {actual.workers}"
    for component, count in sorted(declaration.parallelism.items()):
        running_count = actual.executors.get(component)
        if running_count != count:
            running_text = "none" if running_count is None else running_count
            differ[f"parallelism.{component}"] = f"declared {count}, running {running_text}"
    status = "INACTIVE" if declaration.inactive else "ACTIVE"
    if actual.status in ("ACTIVE", "INACTIVE") and actual.status != status:
        differ["status"] = f"declared {status}, it is {actual.status}"
    return differ


def _conf_differences(declaration: Declaration, actual: RunningTopology) -> dict[str, str]:
    """Differences of the declared conf keys: ``conf.<key>`` -> text.

    Empty if the running conf is unknown.
    """
    if not actual.conf:
        return {}
    differ: dict[str, str] = {}
    for key, value in sorted(declaration.conf.items()):
        running_value = actual.conf.get(key)
        if running_value != value:
            text = f"declared {mask(value, key)}, running {mask(running_value, key)}"
            differ[f"conf.{key}"] = text
    return differ


def edges(spec: TopologySpec) -> dict[str, Sequence[tuple[str, str, str]]]:
    """Component -> (source component, stream, grouping in words) of each input."""
    inputs_of: dict[str, Sequence[tuple[str, str, str]]] = {}
    for name, _, component in spec.components():
        inputs_of[name] = [
            (source.component, source.stream, _describe_grouping(source.grouping))
            for source in component.inputs
        ]
    return inputs_of


def _describe_grouping(grouping: GroupingSpec) -> str:
    if not grouping.fields:
        return grouping.type
    return f"{grouping.type} on {', '.join(grouping.fields)}"
