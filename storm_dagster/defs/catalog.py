"""Words of the definitions, from ``catalog.yaml`` beside this module."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field


@functools.cache
def catalog() -> dict[str, Any]:
    """``catalog.yaml``, which says what it holds."""
    text = Path(__file__).with_name("catalog.yaml").read_text(encoding="utf-8")
    return yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506


def described(field: str, **settings: Any) -> Any:
    """A field with the description and the examples that the catalog has for it; ``settings`` are pydantic's."""
    group, _, name = field.partition(".")
    words = catalog()["fields"][group][name]
    return Field(**(words if isinstance(words, dict) else {"description": words}), **settings)
