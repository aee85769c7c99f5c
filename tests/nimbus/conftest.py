"""Real neighbors for the tests of nimbus: Dagster webservers with our names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from storm_rigs.stage.dagster_webserver import DAGSTER_YAML, DagsterServer, serve_dagster


@pytest.fixture(scope="session")
def dagster_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DagsterServer]:
    home = tmp_path_factory.mktemp("dagster")
    (home / "dagster.yaml").write_text(DAGSTER_YAML)
    with serve_dagster(home) as server:
        yield server


@pytest.fixture(scope="module")
def stock_dagster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, DagsterServer]]:
    """A webserver on an instance without ``dagster.yaml``, and its folder: runs stay in the
    queue.
    """
    home = tmp_path_factory.mktemp("stock-dagster")
    with serve_dagster(home) as server:
        yield home, server
