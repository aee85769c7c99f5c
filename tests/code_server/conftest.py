"""A code server for the tests of one module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from storm_dagster.testing.waiting import eventually
from storm_rigs.dagster.code_server import CodeServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CodeServer]:
    """One whose fork server runs already."""
    made = CodeServer(tmp_path_factory.mktemp("code"))
    try:
        made.connect()
        eventually(lambda: made.fork_server() is not None, 60, "the process that forks")
        yield made
    finally:
        made.close()
