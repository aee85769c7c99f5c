"""From a TARGET to the topology's description and the archive that travels with it.

Names are loaded at first use: the describing child and the supervisor need only one module of this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from storm_dagster.packaging.archive import Archive, build_archive, collect_files, hash_file
    from storm_dagster.packaging.bundle import Bundle, bundle_target
    from storm_dagster.packaging.describing import Description, describe_target
    from storm_dagster.packaging.target import Target, parse_target

__all__ = [
    "Archive",
    "Bundle",
    "Description",
    "Target",
    "build_archive",
    "bundle_target",
    "collect_files",
    "describe_target",
    "hash_file",
    "parse_target",
]

_MODULES = {
    "Archive": "archive",
    "Bundle": "bundle",
    "Description": "describing",
    "Target": "target",
    "build_archive": "archive",
    "bundle_target": "bundle",
    "collect_files": "archive",
    "describe_target": "describing",
    "hash_file": "archive",
    "parse_target": "target",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
