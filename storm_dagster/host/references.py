"""References in a conf to variables and files of the host on which a task runs."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storm_dagster.model.errors import InvalidRequest

# "${env:NAME}" and "${file:PATH}".
_REFERENCE = re.compile(r"\$\{(env|file):([^{}]*)\}")
_MAX_FILE_LENGTH = 1024 * 1024
"""Largest file that a reference may name, in characters."""


def resolve_references(value: Any, key: str = "") -> Any:
    """Copy a conf, or the value under ``key``, and replace all references.

    ``${env:NAME}`` and ``${file:PATH}``: only the process that runs the tasks resolves them.
    Nimbus, Dagster, pages and logs have the reference. :class:`InvalidRequest` names the key.
    """
    if isinstance(value, str):
        if "${" not in value:
            return value
        return _REFERENCE.sub(lambda match: _referenced_value(match[1], match[2], key), value)
    if isinstance(value, Mapping):
        resolved: dict[Any, Any] = {}
        for name, part in value.items():
            resolved[name] = resolve_references(part, f"{key}.{name}" if key else str(name))
        return resolved
    if isinstance(value, list):
        return [resolve_references(part, key) for part in value]
    return value


def _referenced_value(kind: str, name: str, key: str) -> str:
    """Return the value of a reference under a conf key.

    ``InvalidRequest`` if there is none.
    """
    if kind == "env":
        if name in os.environ:
            return os.environ[name]
        reason = (
            "this process has no such variable: set it; for the workers of a cluster, name it in "
            "supervisor.worker.environment and set it for the supervisor"
        )
    else:
        try:
            with Path(name).expanduser().open(encoding="utf-8") as file:
                text = file.read(_MAX_FILE_LENGTH + 1)
            if len(text) <= _MAX_FILE_LENGTH:
                return text.strip()
            reason = f"the file has more than {_MAX_FILE_LENGTH} characters"
        except (OSError, ValueError, RuntimeError) as error:
            cause = getattr(error, "strerror", None) or type(error).__name__
            reason = f"this process cannot read it ({cause}): put it on each host that runs tasks"
    raise InvalidRequest(f"conf key {key!r} refers to ${{{kind}:{name}}}: {reason}")
