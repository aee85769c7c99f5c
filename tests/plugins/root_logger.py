"""The root logger after a test is as before it: our command line, called in this process, gives it
handlers of its own.

They would outlive the test on its closed standard error, and replace those that ``caplog`` reads
from.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[None]:
    """Restore handlers and level."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
