"""Loader of the cluster conf from the files of a host."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from storm_dagster.host.files import read_private_file
from storm_dagster.model.conf import (
    CONF_KEYS,
    SECRET_KEYS,
    ClusterConf,
    Conf,
    default_conf,
)
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.yaml_text import load_yaml

CONF_FILE = "storm.yaml"
PARTS_FOLDER = "storm.d"
"""Folder beside the conf file with further files, such as one that holds the secrets alone."""


def load_cluster_conf(conf_dir: Path | None = None, overrides: Conf | None = None) -> ClusterConf:
    """Merge the defaults, the conf files of a folder, and ``overrides``.

    The files are those of :func:`conf_files`. Later values win: a key has the whole value of the
    last file that sets it. Raises :class:`InvalidRequest`, with the file, for a file that cannot be
    read, unknown keys and values of a wrong type. ``nimbus.host`` becomes the only seed if
    ``nimbus.seeds`` is not given.
    """
    merged = ClusterConf(default_conf(), dict.fromkeys(CONF_KEYS, "default"))
    if conf_dir is not None:
        for path in conf_files(conf_dir):
            merged = merged.with_values(_read(path), str(path))
        warnings = (*merged.warnings, *_ignored_parts(conf_dir))
        merged = replace(merged, warnings=warnings)
    if overrides:
        merged = merged.with_values(overrides, "-c")
    if merged.get("nimbus.host") and merged.origins["nimbus.seeds"] == "default":
        host = merged["nimbus.host"]
        warning = f"nimbus.host is deprecated: write nimbus.seeds: [{host}]"
        merged = merged.with_values({"nimbus.seeds": [host]}, merged.origins["nimbus.host"])
        merged = replace(merged, warnings=(*merged.warnings, warning))
    return merged


def conf_files(folder: Path) -> list[Path]:
    """Conf files of a folder, in the order in which they are merged.

    ``storm.yaml`` is first, if it exists, then ``storm.d/*.yaml`` by their names. Hidden files are
    left out: Kubernetes keeps the content of a volume in folders with such names. A ``storm.yaml``
    that is no file is one of them, so that its reader refuses it: a container engine makes a folder
    where the file that is mounted there does not exist.
    """
    paths: list[Path] = []
    if _exists(folder / CONF_FILE):
        paths.append(folder / CONF_FILE)
    paths += (path for path in _parts(folder) if path.suffix == ".yaml")
    return paths


def _parts(folder: Path) -> Iterator[Path]:
    """Entries of ``storm.d`` by their names, without hidden ones; none without that folder."""
    parts_folder = folder / PARTS_FOLDER
    if not _exists(parts_folder):
        return
    try:
        entries = sorted(parts_folder.iterdir())
    except OSError as error:
        raise InvalidRequest(
            f"{parts_folder} cannot be listed ({error.strerror}): make it a folder that this user "
            "may read"
        ) from None
    for entry in entries:
        if not entry.name.startswith("."):
            yield entry


def _exists(path: Path) -> bool:
    """True if the path is there, also as a link to nothing.

    :class:`InvalidRequest` if its folder may not be searched: the conf would seem to be empty.
    """
    try:
        path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        # Perhaps the folder of the conf does not exist, and its path may lead through a file.
        return False
    except OSError as error:
        raise InvalidRequest(
            f"{path} cannot be read ({error.strerror}): let this user search the folder "
            f"{path.parent}"
        ) from None
    return True


def _ignored_parts(folder: Path) -> list[str]:
    """Warnings about files of ``storm.d`` whose names look like those of conf files."""
    return [
        f"{path} is not read: conf files end with .yaml"
        for path in _parts(folder)
        if path.suffix != ".yaml" and path.suffix.lower() in (".yaml", ".yml", ".json")
    ]


def _read(path: Path) -> Any:
    """Content of a conf file; an empty one is an empty map.

    A file with a secret must be closed to other users.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} is not valid YAML: it is not UTF-8") from None
    except OSError as error:
        raise InvalidRequest(
            f"{path} cannot be read ({error.strerror}): correct it or remove it"
        ) from None
    try:
        loaded = load_yaml(text)
    except ValueError as error:
        raise InvalidRequest(f"{path} is not valid YAML: {error}") from None
    if isinstance(loaded, dict) and any(loaded.get(key) for key in SECRET_KEYS):
        read_private_file(path, "the conf file with secrets")
    return {} if loaded is None else loaded
