"""Child process that imports a user's module, to describe its topology.

Its command line is ``python -m storm_dagster.packaging.describe REQUEST REPLY``. The caller
(:mod:`storm_dagster.packaging.target`) never imports user code itself. REQUEST and REPLY are JSON
files, so that the output of the module cannot be mistaken for the reply.
"""

import importlib
import importlib.util
import inspect
import json
import os
import sys
import traceback
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from storm_dagster.host.files import write_atomically
from storm_dagster.host.imports import quick_imports
from storm_dagster.model.errors import InvalidTopology, StormDagsterError, typed_error_text

with quick_imports():
    from storm_dagster.api import Topology, TopologyBuilder
    from storm_dagster.model.topology import TopologySpec


def _where(error: BaseException, root: str) -> str:
    """The innermost line of the user's own code in the traceback of ``error``.

    ``root`` is the folder of that code.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if Path(frame.filename).is_relative_to(root)]
    if not user_frames:
        return "outside its own files"
    return f"{user_frames[-1].filename}, line {user_frames[-1].lineno}"


def _import(module: str, root: str, expected: str | None) -> ModuleType:
    """Import the user's module from ``root``, the first folder of the path.

    ``expected`` is the file that it must have been loaded from; ``None``: any. Raises
    :class:`InvalidTopology` if the import fails in any way, or loads another file.
    """
    try:
        loaded = importlib.import_module(module)
    except StormDagsterError:
        raise
    except ModuleNotFoundError as error:
        # The module itself or a package around it is missing, not a module that it imports.
        if error.name and (module == error.name or module.startswith(error.name + ".")):
            raise InvalidTopology(
                f"module {module!r} is not importable from {root}: check the name, "
                "or start where its package lies"
            ) from None
        raise InvalidTopology(
            f"module {module!r} needs {error.name!r}, which is not installed "
            f"({_where(error, root)}): install it, and vendor it with --requirements FILE"
        ) from None
    except SystemExit as error:
        raise InvalidTopology(
            f"module {module!r} ended the interpreter with exit code {error.code!r} while it was "
            f'imported ({_where(error, root)}): put such code under if __name__ == "__main__"'
        ) from None
    except BaseException as error:
        reason = f"{typed_error_text(error)} ({_where(error, root)})"
        raise InvalidTopology(f"module {module!r} cannot be imported: {reason}") from None
    if expected is not None:
        file = getattr(loaded, "__file__", None)
        if file is None or not os.path.exists(file) or not os.path.samefile(file, expected):
            raise InvalidTopology(
                f"{expected} would be imported as module {module!r}, "
                f"which is {file or 'built in'}: rename the file"
            )
    return loaded


def _is_topology(value: Any, module: ModuleType) -> bool:
    """True if a module's attribute is a topology of that module.

    A topology that is only imported does not count.
    """
    if inspect.isclass(value):
        return (
            issubclass(value, Topology)
            and value is not Topology
            and value.__module__ == module.__name__
        )
    return isinstance(value, TopologyBuilder | TopologySpec)


def _find(module: ModuleType, attribute: str | None) -> tuple[str, Any, bool]:
    """(name, object, true if it is the only one) of the topology in ``module``.

    With ``attribute`` it is that object, which need not be a topology. Raises
    :class:`InvalidTopology` if there is none, or if it is not clear which.
    """
    candidates: dict[str, Any] = {}
    for name, value in vars(module).items():
        if name.startswith("_") or not _is_topology(value, module):
            continue
        # A second name of the same topology does not make it ambiguous.
        if value not in candidates.values():
            candidates[name] = value
    names = ", ".join(sorted(candidates)) or "none"
    if attribute is not None:
        try:
            return attribute, attrgetter(attribute)(module), len(candidates) <= 1
        except AttributeError:
            raise InvalidTopology(
                f"module {module.__name__!r} has no attribute {attribute!r}; "
                f"topologies in it: {names}"
            ) from None
    if not candidates:
        raise InvalidTopology(
            f"module {module.__name__!r} holds no topology: define a class derived from "
            "storm_dagster.Topology, a TopologyBuilder, or name a callable that returns one "
            "(TARGET:NAME)"
        )
    if len(candidates) > 1:
        raise InvalidTopology(
            f"module {module.__name__!r} holds {len(candidates)} topologies ({names}): "
            f"name one, as in TARGET:{min(candidates)}"
        )
    ((name, value),) = candidates.items()
    return name, value, True


def topology_spec_of(value: Any) -> TopologySpec | None:
    """The spec of a Topology class (or instance), a TopologyBuilder or a spec.

    ``None`` for another value. Raises :class:`InvalidTopology` for a topology that breaks a rule.
    """
    if isinstance(value, TopologySpec):
        return value
    if isinstance(value, TopologyBuilder):
        return value.to_spec()
    if isinstance(value, Topology):
        return type(value).to_spec()
    if inspect.isclass(value) and issubclass(value, Topology):
        return value.to_spec()
    return None


def _spec(name: str, value: Any, args: list[str], root: str) -> TopologySpec:
    """The spec of the object, or of the result of its call with ``args``.

    Raises :class:`InvalidTopology` if it is not a topology, if the user's code fails, and for
    arguments of an object that is not called.
    """
    try:
        spec = topology_spec_of(value)
        if spec is None and callable(value):
            result = value(*args)
            spec = topology_spec_of(result)
            if spec is None:
                raise InvalidTopology(
                    f"{name} returned {type(result).__name__}, which is not a topology: "
                    "return a Topology class, a TopologyBuilder or a TopologySpec"
                )
        elif spec is not None and args:
            raise InvalidTopology(
                f"{name} is a topology and takes no arguments, {len(args)} were given after --"
            )
    except StormDagsterError:
        raise
    except SystemExit as error:
        raise InvalidTopology(
            f"{name} ended the interpreter with exit code {error.code!r} ({_where(error, root)})"
        ) from None
    except BaseException as error:
        raise InvalidTopology(
            f"{name} raised {typed_error_text(error)} ({_where(error, root)})"
        ) from None
    if spec is None:
        raise InvalidTopology(
            f"{name} is {type(value).__name__}, which is not a topology: name a class derived from "
            "storm_dagster.Topology, a TopologyBuilder, or a callable that returns one"
        )
    return spec


def _package_root(module: ModuleType) -> tuple[str, list[str]]:
    """(folder on the import path, names below it to pack) of a module that was found on the path.

    The name is that of its outermost package, or of its file.
    """
    file = Path(inspect.getfile(module)).absolute()
    spec = importlib.util.find_spec(module.__name__.partition(".")[0])
    for location in (spec.submodule_search_locations if spec else None) or ():
        package = Path(location).absolute()
        if file.is_relative_to(package):
            return str(package.parent), [package.name]
    return str(file.parent), [file.name]


def describe(request: dict[str, Any]) -> dict[str, Any]:
    """The reply to one request, whose keys are those of ``target.describe_target``.

    Changes the import path. :class:`InvalidTopology` for every error of the target.
    """
    root: str | None = request["root"]
    import_root = root or request["cwd"]
    # In place of the empty folder that the process was started in.
    sys.path[0] = import_root
    importlib.invalidate_caches()
    module = _import(request["module"], import_root, request["file"])
    name, value, is_only = _find(module, request["attribute"])
    spec = _spec(name, value, request["args"], import_root)
    include: list[str] | None = None
    if root is None:
        root, include = _package_root(module)
        is_single_file = include == [Path(inspect.getfile(module)).name]
        if is_single_file and Path(root) == Path(request["cwd"]):
            # A module of the current folder: the folder is packed, as for file.py.
            include = None
    # A topology without a name gets that of its module, or of its attribute if the module has
    # several topologies.
    qualified_name = request["module"] if is_only else name
    return {
        "topology": json.loads(spec.to_json()),
        "name": spec.name or qualified_name.rpartition(".")[2],
        "attribute": name,
        "root": root,
        "include": include,
    }


def main() -> None:
    """Write the reply to the request file (first argument) into the second file."""
    request_path, reply_path = sys.argv[1:3]
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    os.chdir(request["cwd"])
    # Argument parsers of the target must not see the arguments of this process.
    sys.argv = [request["file"] or request["module"], *request["args"]]
    try:
        reply = {"ok": describe(request)}
    except StormDagsterError as error:
        reply = error.to_document()
    write_atomically(Path(reply_path), json.dumps(reply))
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that the module started must not delay the reply.
    os._exit(0)


if __name__ == "__main__":
    main()
