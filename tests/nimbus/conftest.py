"""Real neighbours for the tests of nimbus: a Dagster webserver with our names, and nimbuses on a
fresh root.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from storm_rigs.dagster_server import DAGSTER_YAML, DagsterServer, serve_dagster
from storm_rigs.nimbuses import Nimbuses

MakeNimbuses = Callable[[dict[str, object]], Nimbuses]


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


@contextlib.contextmanager
def nimbuses_in(home: Callable[[], Path]) -> Iterator[MakeNimbuses]:
    """What makes nimbuses, with their files below ``home()``, and stops them all in the end."""
    made: list[Nimbuses] = []

    def make(zk_conf: dict[str, object]) -> Nimbuses:
        made.append(Nimbuses(zk_conf, home()))
        return made[-1]

    yield make
    for nimbuses in made:
        for nimbus in reversed(nimbuses.running):
            nimbus.stop()


@pytest.fixture
def make_nimbuses(tmp_path: Path) -> Iterator[MakeNimbuses]:
    with nimbuses_in(lambda: tmp_path / "home") as make:
        yield make


@pytest.fixture(scope="module")
def make_lasting_nimbuses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MakeNimbuses]:
    """As ``make_nimbuses``, for all tests of a module."""
    with nimbuses_in(lambda: tmp_path_factory.mktemp("nimbuses") / "home") as make:
        yield make


@pytest.fixture
def nimbuses(make_nimbuses: MakeNimbuses, zk_conf: dict[str, object]) -> Nimbuses:
    return make_nimbuses(zk_conf)
