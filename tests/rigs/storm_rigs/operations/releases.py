"""The next release, played by a copy of this tree: every record in it has a field more, or an
optional one less.

:func:`copy_release` makes the copy, :class:`OtherRelease` runs Python on it. Both releases find the
record classes, make examples of them and change them by the functions here.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import shutil
import subprocess
import sys
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import storm_dagster
from storm_dagster.model.records import Record, decode_record, encode_record

ADDED = "zz_added"
"""The field that the copy adds. It has a default: what it writes shows it, what this release writes
lacks it.
"""

_TREE = Path(storm_dagster.__file__).parent
_RIGS = Path(__file__).parents[2]


def _record_modules(tree: Path) -> dict[str, list[str]]:
    """Module -> the record classes that it defines, by its source; a class is one when a base of it
    is.
    """
    sources = {
        path: ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(tree.rglob("*.py"))
        if "Record" in path.read_text(encoding="utf-8")
    }
    return {
        "storm_dagster." + ".".join(path.relative_to(tree).with_suffix("").parts): found
        for path, module in sources.items()
        if (found := [each.name for each in module.body if _is_record(each)])
    }


def _is_record(node: ast.stmt) -> typing.TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef) and any(
        isinstance(base, ast.Name) and base.id == "Record" for base in node.bases
    )


def record_names() -> list[str]:
    """``module:class`` of every record of this release, nested ones included."""
    return [
        f"{module}:{name}" for module, names in _record_modules(_TREE).items() for name in names
    ]


def copy_release(folder: Path, *, drop: bool) -> Path:
    """Copy the package into ``folder``, with :data:`ADDED` at the end of every record class.

    With ``drop`` each record class also lacks its last optional field, if it has any. Such a copy
    encodes and decodes, and does nothing else: its code still names the fields.
    """
    target = folder / "storm_dagster"
    shutil.copytree(_TREE, target, ignore=shutil.ignore_patterns("__pycache__"))
    for name, classes in _record_modules(target).items():
        path = folder.joinpath(*name.split(".")).with_suffix(".py")
        module = ast.parse(path.read_text(encoding="utf-8"))
        for node in module.body:
            if _is_record(node) and node.name in classes:
                _change(node, drop)
        path.write_text(ast.unparse(ast.fix_missing_locations(module)), encoding="utf-8")
    return folder


def _change(node: ast.ClassDef, drop: bool) -> None:
    optional = [
        each
        for each in node.body
        if isinstance(each, ast.AnnAssign)
        and isinstance(each.target, ast.Name)
        and each.target.id not in ("v", "model_config")
        and each.value is not None
    ]
    if drop and optional:
        node.body.remove(optional[-1])
    node.body += ast.parse(f"{ADDED}: str = 'kept'").body


def _class_of(name: str) -> type[Record]:
    module, _, attribute = name.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    assert issubclass(found, Record)
    return found


def _example_of(annotation: Any) -> Any:
    """A value of that type, as JSON. Containers hold one element, so that records in records are
    met.
    """
    origin, given = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return _example_of(given[0])
    if origin is typing.Literal:
        return given[-1]
    if origin in (typing.Union, types.UnionType):
        return _example_of(next(each for each in given if each is not types.NoneType))
    if origin is tuple:
        return [_example_of(given[0])]
    if origin is dict:
        return {_example_of(given[0]): _example_of(given[1])}
    if issubclass(annotation, Record):
        return _document_of(annotation)
    return {str: "1", Any: "1", int: 1, float: 1.5, bool: True}[annotation]


def _document_of(cls: type[Record]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return {
        field.alias or name: _example_of(hints[name])
        for name, field in cls.model_fields.items()
        if not field.exclude
    }


def example(name: str) -> bytes:
    """A record of that class with all its fields, as this process's release writes it."""
    cls = _class_of(name)
    return encode_record(decode_record(cls, json.dumps(_document_of(cls)).encode()))


def modify(name: str, raw: bytes) -> bytes:
    """Read the record, change a field that both releases know, and write it."""
    cls = _class_of(name)
    record = decode_record(cls, raw, name)
    return encode_record(record.model_copy(update=changed_fields(cls, record)))


def changed_fields(cls: type[Record], record: Record) -> dict[str, Any]:
    """The first required field of the class with another value."""
    for name, field in cls.model_fields.items():
        value = getattr(record, name)
        if isinstance(value, bool) or not field.is_required():
            continue
        if isinstance(value, int):
            return {name: value + 1}
        if isinstance(value, str) and field.annotation is str and not field.metadata:
            return {name: value + "2"}
    return {}


class OtherRelease:
    """A Python process on a copy of the tree that answers requests, one at a time.

    ``modules`` are folders with further modules; a request is ``module:function`` and arguments
    that JSON can carry.
    """

    def __init__(self, release: Path, *modules: Path) -> None:
        path = os.pathsep.join(str(each) for each in (release, _RIGS, *modules))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "storm_rigs.operations.releases"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=release,
            env={**os.environ, "PYTHONPATH": path},
        )
        origin = self.ask("storm_rigs.operations.releases:package_folder")
        assert Path(origin).is_relative_to(release), f"{origin} is not the copy"

    def ask(self, function: str, *arguments: Any, **named: Any) -> Any:
        """What the function returns there."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(json.dumps([function, arguments, named]) + "\n")
        stdin.flush()
        answer = stdout.readline()
        assert answer, "the other release ended: its traceback is above"
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(20)


def package_folder() -> str:
    """Where this process's release is."""
    return str(_TREE)


def examples(names: list[str]) -> dict[str, str]:
    """:func:`example` of each, as text."""
    return {name: example(name).decode() for name in names}


def modify_all(stored: Mapping[str, str]) -> dict[str, str]:
    """:func:`modify` of each, as text."""
    return {name: modify(name, raw.encode()).decode() for name, raw in stored.items()}


def _serve() -> None:
    for line in sys.stdin:
        function, arguments, named = json.loads(line)
        module, _, attribute = function.partition(":")
        answer = getattr(importlib.import_module(module), attribute)(*arguments, **named)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    _serve()
