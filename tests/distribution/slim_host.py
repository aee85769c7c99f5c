"""``slim_host.py REQUIREMENTS PROGRAM [ARGUMENT…]``: run a program as on a host where only
REQUIREMENTS are installed.

All other distributions of this interpreter are invisible to imports. At the end of the program the
names of the distributions that it loaded are printed, as a JSON list, the last line.
"""

from __future__ import annotations

import json
import re
import sys
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def wanted(path: Path) -> set[str]:
    """Names of the listed distributions, and of all that they require without extras."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    todo, found = [Requirement(line) for line in lines], set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        if name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        try:
            todo += [Requirement(line) for line in requires(name) or []]
        except PackageNotFoundError:
            continue
        found.add(name)
    return found


class Visible(PathFinder):
    """Finds what is no distribution's, or a wanted one's."""

    names: dict[str, set[str]] = {}
    listed: set[str] = set()

    @classmethod
    def find_spec(cls, fullname: str, path=None, target=None) -> ModuleSpec | None:
        owners = cls.names.get(fullname.partition(".")[0])
        return (
            None
            if owners and not owners & cls.listed
            else PathFinder.find_spec(fullname, path, target)
        )


def main() -> None:
    requirements, program, *arguments = sys.argv[1:]
    Visible.names = {
        module: {canonicalize_name(name) for name in names}
        for module, names in packages_distributions().items()
    }
    Visible.listed = {*wanted(Path(requirements)), "storm-dagster"}
    for module in [name for name in sys.modules if name.partition(".")[0] in Visible.names]:
        del sys.modules[module]
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Visible]
    sys.path.pop(0)
    sys.argv = ["program", *arguments]
    exec(compile(program, "program", "exec"), {"__name__": "__main__"})  # noqa: S102 - the program is the test's own
    tops = {name.partition(".")[0] for name in list(sys.modules)}
    loaded = {name for top in tops for name in Visible.names.get(top, ())}
    print(json.dumps(sorted(name for name in loaded if re.match(r"\w", name))))


main()
