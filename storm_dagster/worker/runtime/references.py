"""References in the values of a topology's conf, ``${env:NAME}`` and ``${file:PATH}``: passwords need not travel in it.

Only the worker resolves them. Nimbus, Dagster, pages and logs have the reference.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from storm_dagster.model.errors import InvalidRequest

_REFERENCE = re.compile(r"\$\{(env|file):([^{}]*)\}")
_MOST_BYTES = 1024 * 1024


def resolve_references(value: Any, key: str = "") -> Any:
    """A copy of a conf, or of the value under ``key``, with all references replaced; :class:`InvalidRequest` names the key."""
    if isinstance(value, str):
        return _REFERENCE.sub(lambda found: _target(found[1], found[2], key), value) if "${" in value else value
    if isinstance(value, Mapping):
        return {name: resolve_references(part, f"{key}.{name}" if key else str(name)) for name, part in value.items()}
    return [resolve_references(part, key) for part in value] if isinstance(value, list) else value


def _target(kind: str, name: str, key: str) -> str:
    if kind == "env":
        if name in os.environ:
            return os.environ[name]
        reason = (
            "the worker has no such variable: name it in supervisor.worker.environment and set it for the supervisor"
        )
    else:
        try:
            with Path(name).expanduser().open(encoding="utf-8") as file:
                text = file.read(_MOST_BYTES + 1)
            if len(text) <= _MOST_BYTES:
                return text.strip()
            reason = f"the file has more than {_MOST_BYTES} characters"
        except (OSError, ValueError, RuntimeError) as error:
            why = getattr(error, "strerror", None) or type(error).__name__
            reason = f"the worker cannot read it ({why}): put it on each supervisor's host"
    raise InvalidRequest(f"conf key {key!r} refers to ${{{kind}:{name}}}: {reason}")
