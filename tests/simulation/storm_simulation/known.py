"""Violations that are known and not mended yet: counted, and not a failure. Whoever mends one
removes its line.
"""

from __future__ import annotations

import re

KNOWN: dict[str, str] = {}
"""What is wrong -> what the violation reads like."""

_PATTERNS = {name: re.compile(pattern) for name, pattern in KNOWN.items()}


def known(violation: str) -> str | None:
    """The known fault that the violation is of."""
    return next((name for name, pattern in _PATTERNS.items() if pattern.search(violation)), None)
