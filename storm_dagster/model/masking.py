"""What is secret in a conf, hidden wherever one is shown: pages, logs, errors, Dagster metadata, the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "*****"
"""Replacement of a secret wherever a conf is shown."""
_ZOOKEEPERS = ("storm.zookeeper.auth.payload", "storm.zookeeper.ssl.keystore.password")
SECRET_KEYS = frozenset({"storm.secret", *_ZOOKEEPERS, "dagster.graphql.headers"})
"""Conf keys whose values are secrets: never shown, logged, or given on a command line."""

_TELLTALE = re.compile(
    r"secret|passw|passphrase|(?<![a-z])pwd|token|credential|payload|cookie|jaas|authorization|"
    r"(private|access|api|account|signing)[._-]?key",
    re.IGNORECASE,
)
_HARMLESS = re.compile(r"[._-](secs|ms|file|path|count|size|bytes|ttl|enabled?)$", re.IGNORECASE)
_IN_TEXT = re.compile(
    # User and password in an address, options of a Spark or database address, headers, AWS and GitHub keys.
    r"(?P<login>(?<=://)[^/?#\s]*@)"
    r"|(?P<option>[;?&](?:[a-z_.-]*(?:token|password|passwd|pwd|secret|authorization|key))=)[^;&\s\"']+"
    r"|(?P<header>\b(?:Bearer|Basic)\s+)[A-Za-z0-9+/=._~-]{8,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bgh[pousr]_[A-Za-z0-9]{20,}",
    re.IGNORECASE,
)


def is_secret_key(key: object) -> bool:
    """Whether the value under a conf key, or the name of an environment variable, is to be hidden."""
    name = str(key)
    return name in SECRET_KEYS or bool(_TELLTALE.search(name) and not _HARMLESS.search(name))


def mask_text(text: str) -> str:
    """The text with what looks like a password in it replaced."""
    return _IN_TEXT.sub(
        lambda found: HIDDEN + "@" if found["login"] else (found["option"] or found["header"] or "") + HIDDEN, text
    )


def mask(value: Any, key: object = "") -> Any:
    """A copy of ``value`` without secrets: of every type below a telltale key, and by pattern in text, at any depth."""
    if isinstance(value, Mapping):
        hidden = is_secret_key(key)
        return {name: HIDDEN if hidden and item else mask(item, name) for name, item in value.items()}
    if is_secret_key(key) and value and not isinstance(value, bool):
        return HIDDEN
    if isinstance(value, list | tuple):
        return [mask(item) for item in value]
    return mask_text(value) if isinstance(value, str) else value


def yaml_problem(error: Exception) -> str:
    """What is wrong in a YAML text, and where, without the text itself."""
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or type(error).__name__
    return f"{problem} in line {mark.line + 1}, column {mark.column + 1}" if mark else str(problem)
