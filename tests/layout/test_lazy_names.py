"""Packages that load their names at first use say the same for Python and for type checkers."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGES = (
    "storm_dagster",
    "storm_dagster.api",
    "storm_dagster.client",
    "storm_dagster.connectors",
    "storm_dagster.testing",
)


def tree_of(package: str) -> ast.Module:
    module = importlib.import_module(package)
    return ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))


def blocks(tree: ast.Module, condition: str) -> Iterator[ast.If]:
    for node in tree.body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == condition:
            yield node


def imports_for_type_checkers(package: str) -> dict[str, str]:
    """Name -> module, of the imports under ``if TYPE_CHECKING``."""
    modules: dict[str, str] = {}
    for block in blocks(tree_of(package), "TYPE_CHECKING"):
        for node in block.body:
            assert isinstance(node, ast.ImportFrom), ast.unparse(node)
            for alias in node.names:
                modules[alias.name] = str(node.module)
    return modules


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_exports_and_modules_agree(package: str) -> None:
    module = importlib.import_module(package)
    modules: dict[str, str] = module._MODULES
    assert modules == imports_for_type_checkers(package)
    assert modules.keys() == set(module.__all__) - {"__version__"}
    assert module.__all__ == sorted(module.__all__)
    for name, defining_module in modules.items():
        assert getattr(module, name) is getattr(importlib.import_module(defining_module), name)
    assert dir(module) == module.__all__


@pytest.mark.parametrize("package", PACKAGES)
def test_a_misspelt_name_is_an_error_for_python_and_type_checkers(package: str) -> None:
    with pytest.raises(AttributeError, match=f"{package}.* has no attribute 'no_such_name'"):
        _ = importlib.import_module(package).no_such_name
    # A type checker that sees `__getattr__` takes every name.
    (block,) = blocks(tree_of(package), "not TYPE_CHECKING")
    assert "__getattr__" in ast.unparse(block)
    top_level = [node for node in tree_of(package).body if not isinstance(node, ast.If)]
    assert not any("__getattr__" in ast.unparse(node) for node in top_level)
