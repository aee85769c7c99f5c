"""Query parameters of a request, read strictly: numbers, words and switches."""

from __future__ import annotations

import re
from collections.abc import Collection

from starlette.requests import Request

from storm_dagster.model.errors import InvalidRequest

_INT = re.compile(r"-?[0-9]{1,18}")


def query_text(request: Request, name: str, longest: int = 4096) -> str | None:
    """The query parameter, ``None`` when it is absent or empty; :class:`InvalidRequest` when it is too long."""
    value = request.query_params.get(name)
    if value is not None and len(value) > longest:
        raise InvalidRequest(f"parameter {name} has {len(value)} characters: at most {longest} are allowed")
    return value or None


def query_int(request: Request, name: str, default: int | None = None) -> int | None:
    """The parameter as a whole number; :class:`InvalidRequest` when it is none."""
    value = query_text(request, name)
    if value is None:
        return default
    if not _INT.fullmatch(value):
        raise InvalidRequest(f"parameter {name} must be a whole number, got {value!r:.40}")
    return int(value)


def query_flag(request: Request, name: str) -> bool:
    """Whether the parameter is ``1`` or ``true``; :class:`InvalidRequest` unless it is one of these, 0 or false."""
    return query_word(request, name, ("false", "true", "0", "1"), "false") in ("true", "1")


def query_word(request: Request, name: str, words: Collection[str], default: str) -> str:
    """The parameter, if it is one of ``words``; :class:`InvalidRequest` otherwise."""
    value = (query_text(request, name) or default).strip()
    if value not in words:
        raise InvalidRequest(f"parameter {name} must be one of {', '.join(words)}, got {value!r:.40}")
    return value
