"""A topology as ``defs.yaml`` declares it, what its target turns out to be, and how what runs
differs from it.

Targets are described in a child process, never imported here. Descriptions are kept on disk under
the hash of the code they were made from, because every run loads the definitions again.
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

from storm_dagster.host.files import write_atomically
from storm_dagster.model.conf import mask
from storm_dagster.model.errors import InvalidTopology, StormDagsterError
from storm_dagster.model.groupings import GroupingSpec
from storm_dagster.model.topology import TopologySpec, decode_topology
from storm_dagster.packaging.archive import collect_files, hash_file
from storm_dagster.packaging.target import Target, describe_target, parse_target

DATA_VERSION_TAG = "dagster/data_version"
_DESCRIBE_SECS = 20.0
_FAILURE_LASTS_SECS = 300.0


@dataclass(frozen=True)
class Declaration:
    """The desired state of one topology."""

    name: str
    target: str
    args: tuple[str, ...] = ()
    conf: Mapping[str, Any] = field(default_factory=dict)
    """Without the number of workers, which a rebalance changes."""
    workers: int | None = None
    parallelism: Mapping[str, int] = field(default_factory=dict)
    inactive: bool = False
    home: str | None = None
    declared_in: Path | None = None
    """The ``defs.yaml``."""

    @property
    def submitted_conf(self) -> dict[str, Any]:
        """The conf that goes with a submission, but for the code version."""
        return {**self.conf, **({} if self.workers is None else {"topology.workers": self.workers})}


@dataclass(frozen=True)
class Described:
    """Description of the target as it is now."""

    spec: TopologySpec | None = None
    """``None``: it cannot be described, ``problem`` has the reason."""
    code_version: str | None = None
    """Hash of the code that travels and of the conf; ``None`` when the target does not even
    exist.
    """
    problem: str | None = None
    on_disk: str | None = None
    """Hash of the files that it was described from, the ``defs.yaml`` included."""
    stamps: Mapping[Path, tuple[int, int]] = field(default_factory=dict)
    """Those files and their folders -> modification time and size, read before their content."""


@dataclass(frozen=True)
class Actual:
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
    """Prefix of its code's blobs: another one for every deploy, whatever the code."""
    upgrading_to: str | None = None
    """Version of the code that a gray upgrade under way brings; ``None``: none is, or it is not
    from here.
    """
    upgraded: int = 0
    """Workers that it has upgraded."""

    @property
    def data_version(self) -> str:
        """Version of the asset: another one for each deploy that changed something."""
        return f"{self.topology_id}.{self.code_version or 'unknown'}"

    @property
    def version_tags(self) -> dict[str, str]:
        """Dagster's tags of a materialization: of which code and data it is."""
        return {
            "dagster/code_version": self.code_version or "unknown",
            DATA_VERSION_TAG: self.data_version,
        }


class LoadedFiles:
    """The files that a declaration was loaded from, compared with what stands on disk."""

    def __init__(self, declaration: Declaration, described: Described) -> None:
        self._declaration, self._on_disk = declaration, described.on_disk
        self._stamps, self._changed = described.stamps, False

    def changed(self) -> bool:
        """Whether their content differs. It is read only after a modification time, size or folder
        changed.
        """
        if not self._stamps or any(_stamp(path) != stamp for path, stamp in self._stamps.items()):
            # A target that could not be found has no files to look at: it is looked for each time.
            now = describe_files(self._declaration)
            self._stamps, self._changed = now.stamps, now.on_disk != self._on_disk
        return self._changed


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError:
        return (0, -1)
    return (stat.st_mtime_ns, stat.st_size)


def _files_of(target: Target, home: Path | None) -> list[Path]:
    """Files whose content decides what the target is, found without importing anything."""
    if target.path is not None and target.kind == "archive":
        return [target.path]
    if target.path is not None:
        root, include = target.path.parent, None
    else:
        top = target.module.partition(".")[0]
        spec = importlib.util.find_spec(top)
        if spec is None or not (spec.origin or spec.submodule_search_locations):
            raise InvalidTopology(
                f"module {top!r} of target {target} is not installed here: install it, or put it on PYTHONPATH"
            )
        if not spec.submodule_search_locations:
            return [Path(str(spec.origin))]
        package = Path(next(iter(spec.submodule_search_locations)))
        root, include = package.parent, [package.name]
    found = collect_files(root, include, leave_out=[home] if home is not None else [])
    return [Path(path) for _, path in sorted(found.items())]


def _fingerprint(declaration: Declaration, target: Target, files: Sequence[Path]) -> str:
    digest = hashlib.sha256(json.dumps([str(target), declaration.args, sys.executable]).encode())
    for path in files:
        if path.name == "defs.yaml":
            continue  # What it declares is compared by itself: more workers are no other code.
        digest.update(f"{path.name}:{hash_file(path)}\n".encode())
    return digest.hexdigest()


def _version(fingerprint: str, conf: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in conf.items() if key != "topology.workers"}
    text = fingerprint + json.dumps(rest, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _load_cached(path: Path) -> Described | None:
    try:
        document = json.loads(path.read_bytes())
        if "problem" in document:
            # It may have been the environment: a package that was missing is there now.
            fresh = 0 <= time.time() - float(document["at"]) < _FAILURE_LASTS_SECS
            return Described(problem=str(document["problem"])) if fresh else None
        return Described(spec=decode_topology(json.dumps(document["topology"])))
    except (OSError, ValueError, KeyError, TypeError, StormDagsterError):
        return None


def _keep(path: Path, found: Described) -> None:
    spec, failed = found.spec, {"problem": found.problem, "at": time.time()}
    document = failed if spec is None else {"topology": json.loads(spec.to_json())}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(document))
    except OSError:
        return  # A home that cannot be written costs a second at each load, nothing else.


@lru_cache(maxsize=256)
def _describe(target: str, args: tuple[str, ...], fingerprint: str) -> Described:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    path = cache / "storm-dagster" / "described" / f"{fingerprint}.json"
    found = _load_cached(path)
    if found is None:
        try:
            found = Described(spec=describe_target(target, args, _DESCRIBE_SECS).topology)
        except StormDagsterError as error:
            found = Described(problem=error.message)
        _keep(path, found)
    return found


def describe_declared(declaration: Declaration) -> Described:
    """Describe the target; whatever is wrong with it is the ``problem``, nothing is raised.

    A description is made once for each content of the code (and each interpreter); a failure is
    tried again after five minutes, or when the code changes.
    """
    files = describe_files(declaration)
    if files.problem is not None or files.code_version is None:
        return files
    found = _describe(declaration.target, tuple(declaration.args), files.code_version)
    version = _version(files.code_version, declaration.conf)
    problem = found.problem or _wrong_names(declaration, found.spec)
    return replace(
        files, spec=None if found.problem else found.spec, code_version=version, problem=problem
    )


def describe_files(declaration: Declaration) -> Described:
    """The target's files alone, their hash in place of the code version; what cannot be read is the
    ``problem``.
    """
    place = declaration.declared_in
    try:
        target = parse_target(declaration.target)
        files = _files_of(target, Path(declaration.home) if declaration.home else None)
        stamps = {path: _stamp(path) for path in {*files, *(file.parent for file in files)}}
        stamps |= {place: _stamp(place)} if place else {}
        fingerprint = _fingerprint(declaration, target, files)
        declared = hash_file(place) if place and place.exists() else ""
    except StormDagsterError as error:
        return Described(problem=error.message)
    except (OSError, ValueError) as error:
        return Described(problem=f"target {declaration.target} cannot be read: {error}")
    return Described(code_version=fingerprint, on_disk=fingerprint + declared, stamps=stamps)


def _wrong_names(declaration: Declaration, spec: TopologySpec | None) -> str | None:
    known = set() if spec is None else {*spec.spouts, *spec.bolts}
    unknown = sorted(set(declaration.parallelism) - known)
    if spec is None or not unknown:
        return None
    return (
        f"parallelism names {', '.join(unknown)}, which topology {declaration.name!r} does not have: it has "
        f"{', '.join(sorted(known))}"
    )


def differences(
    declaration: Declaration, described: Described, actual: Actual | None
) -> dict[str, str]:
    """Differences from the declaration: part -> text; empty when there are none.

    Keys are ``target``, ``running``, ``code``, ``conf.<key>``, ``workers``, ``status`` and
    ``parallelism.<component>``. A conf that differs is a difference of the code as well: both
    travel together.
    """
    found: dict[str, str] = {}
    if described.problem is not None:
        found["target"] = described.problem
    if actual is None or actual.status == "KILLED":
        found["running"] = f"topology {declaration.name!r} does not run"
        return found
    if described.code_version is not None and actual.code_version != described.code_version:
        runs = actual.code_version or "code that was not deployed from here"
        found["code"] = f"declared {described.code_version}, running {runs}"
        for key, value in sorted(declaration.conf.items()) if actual.conf else ():
            if actual.conf.get(key) != value:
                found[f"conf.{key}"] = (
                    f"declared {mask(value, key)}, running {mask(actual.conf.get(key), key)}"
                )
    if declaration.workers is not None and actual.workers != declaration.workers:
        found["workers"] = f"declared {declaration.workers}, running {actual.workers}"
    for component, count in sorted(declaration.parallelism.items()):
        now = actual.executors.get(component)
        if now != count:
            found[f"parallelism.{component}"] = (
                f"declared {count}, running {now if now is not None else 'none'}"
            )
    status = "INACTIVE" if declaration.inactive else "ACTIVE"
    if actual.status in ("ACTIVE", "INACTIVE") and actual.status != status:
        found["status"] = f"declared {status}, it is {actual.status}"
    return found


def with_parallelism(spec: TopologySpec, parallelism: Mapping[str, int]) -> TopologySpec:
    """The topology with the declared numbers of executors."""

    def changed(parts: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: part.model_copy(update={"parallelism": parallelism[name]})
            if name in parallelism
            else part
            for name, part in parts.items()
        }

    return spec.model_copy(update={"spouts": changed(spec.spouts), "bolts": changed(spec.bolts)})


def edges(spec: TopologySpec) -> dict[str, Sequence[tuple[str, str, str]]]:
    """Component -> (component it reads, stream, grouping in words)."""

    def words(grouping: GroupingSpec) -> str:
        return grouping.type + (f" on {', '.join(grouping.fields)}" if grouping.fields else "")

    return {
        name: [(one.component, one.stream, words(one.grouping)) for one in part.inputs]
        for name, _, part in spec.components()
    }
