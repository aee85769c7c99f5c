"""Public names of a package that are loaded at first use."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package: ``modules`` are its modules, each with its names in one text."""
    public = {name: module for module, names in modules.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in public:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        from storm_dagster.model.host import needs

        with needs(f"{package}.{name}"):
            value = getattr(importlib.import_module(f"{package}.{public[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(sys.modules[package].__all__)
