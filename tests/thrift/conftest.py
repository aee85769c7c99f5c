"""A nimbus in a thread of the test, with a real ZooKeeper and a real Thrift port, and clients that
are not ours.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from storm_dagster.testing.waiting import patience
from storm_rigs.stage.builder import Stage
from storm_rigs.stage.nimbus_thread import NimbusThread

# A session that outlives pauses of a loaded machine: leadership is not what is tested here.
LASTING = {"storm.zookeeper.session.timeout": patience(20_000)}


@pytest.fixture
def start_nimbus(stage: Stage) -> Callable[..., NimbusThread]:
    """Starts nimbuses of a cluster of their own; the first one leads."""

    def start(nimbus_id: str = "n1", *, leads: bool = True, **values: object) -> NimbusThread:
        return stage.nimbus(nimbus_id, LASTING, **values).await_thrift(leading=leads)

    return start


@pytest.fixture(scope="module")
def nimbus(module_stage: Stage) -> NimbusThread:
    """One nimbus, which leads, for all tests of a file."""
    return module_stage.nimbus(conf=LASTING).await_thrift()
