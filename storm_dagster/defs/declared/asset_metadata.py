"""Metadata of the asset that a bolt writes, from templates of its conf.

A sink knows its table, and the conf has the database. So a component has templates in its conf key
``topology.component.asset.metadata``, whose ``{conf.key}`` are filled in here.
"""

import re
from collections.abc import Mapping
from typing import Any

_PLACEHOLDER = re.compile(r"\{([\w.-]+)(?:=([^{}]*))?\}")
"""``{conf.key}``, or ``{conf.key=value of a conf without it}``."""


def fill_templates(templates: Mapping[str, Any], conf: Mapping[str, Any]) -> dict[str, str]:
    """The entries of ``templates``, filled in from the ``conf``.

    An entry is left out if the conf lacks a key without a default: a part of an address would be
    that of another table.
    """
    filled: dict[str, str] = {}
    for name, template in templates.items():
        text = _fill(str(template), conf)
        if text is not None:
            filled[name] = text
    return filled


def _fill(template: str, conf: Mapping[str, Any]) -> str | None:
    """The text of a template; ``None`` if a key is missing."""
    is_complete = True

    def value(match: re.Match[str]) -> str:
        nonlocal is_complete
        key, default = match.groups()
        setting = conf.get(key)
        if setting is None and default is None:
            is_complete = False
        return str(default if setting is None else setting)

    text = _PLACEHOLDER.sub(value, template)
    return text if is_complete else None
