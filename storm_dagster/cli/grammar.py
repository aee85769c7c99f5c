"""The grammar of the command line, ``verbs.yaml``, and the arguments and options that click makes of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from storm_dagster.model.tables import load_table


@functools.cache
def grammar() -> dict[str, dict[str, Any]]:
    """``verbs.yaml``, which says what it holds."""
    return load_table(__name__, "verbs")


_KINDS: dict[str, Any] = {
    "int": int,
    "float": float,
    "as it is": click.UNPROCESSED,
    "file": click.Path(exists=True, dir_okay=False, path_type=Path),
    "new file": click.Path(dir_okay=False, path_type=Path),
    "new file or -": click.Path(allow_dash=True, dir_okay=False, path_type=Path),
    "file to write": click.File("w", encoding="utf-8", lazy=True),
}


def parameters(rows: Mapping[str, Any] | None, function: Any) -> Any:
    """Add arguments and options of the grammar to a command's function."""
    for names, given in reversed(list((rows or {}).items())):
        settings = dict(given or {})
        if choice := settings.pop("choice", None):
            settings["type"] = click.Choice(choice)
        kind = settings.pop("kind", None)
        if between := settings.pop("between", None):
            settings["type"] = (click.FloatRange if kind == "float" else click.IntRange)(*between)
        elif kind is not None:
            settings["type"] = _KINDS[kind]
        if names.startswith("-"):
            settings.setdefault("show_default", "default" in settings and "/" not in names)
            function = click.option(*names.split(), **settings)(function)
        else:
            function = click.argument(names, **settings)(function)
    return function
