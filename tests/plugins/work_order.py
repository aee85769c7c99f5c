"""The order of test modules, and which of them share a worker of pytest-xdist.

Under ``--dist loadfile`` a module stays on one worker, and modules that share what is expensive
(the cluster, a Spark server) stay together. What takes longest begins first, so that at the end no
worker is left alone with it.
"""

from __future__ import annotations

import gc
import os
from typing import Any

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

TOGETHER = {
    "the shared cluster": (
        *("tests/browser/", "tests/cluster/test_streamparse.py", "tests/cluster/test_faults.py"),
        *(
            "tests/cluster/test_recovery.py",
            "tests/cluster/test_upgrades.py",
            "tests/cluster/test_ack_gaps.py",
            "tests/cluster/test_leader_lost.py",
        ),
        *("tests/cluster/test_storm_client.py", "tests/cluster/test_spares.py"),
        "tests/security/test_other_users_of_a_cluster.py",
    ),
    "the shared Spark server": (
        *("tests/spark/", "tests/dagster/test_spark.py", "tests/dagster/test_streams_and_batch.py"),
        *("tests/dagster/test_postgres.py", "tests/spark_components/"),
        "tests/connectors/test_dataset_schema.py",
    ),
    "the shared webserver of Dagster": (
        *("tests/nimbus/test_leader_work.py", "tests/nimbus/test_dagster_client.py"),
        *("tests/nimbus/test_dagster_access.py", "tests/nimbus/test_existing_dagster.py"),
        *("tests/nimbus/test_lost_launches.py", "tests/nimbus/test_event_road.py"),
    ),
}
"""Group -> beginnings of the paths of its modules, in their order."""

FIRST = (
    *TOGETHER["the shared cluster"],
    "tests/cli/test_lifecycle.py",
    *TOGETHER["the shared Spark server"],
    *TOGETHER["the shared webserver of Dagster"],
    *("tests/cluster/", "tests/dagster/", "tests/operations/"),
    *("tests/simulation/", "tests/launcher/", "tests/supervisor/"),
    *(
        "tests/worker/",
        "tests/nimbus/",
        "tests/zk/",
        "tests/security/",
        "tests/docs/",
        "tests/distribution/",
        "tests/thrift/",
    ),
)
"""Beginnings of paths, the longest runs first; what is not named comes last."""


def rank(nodeid: str) -> int:
    """Position in :data:`FIRST`."""
    return next(
        (number for number, path in enumerate(FIRST) if nodeid.startswith(path)), len(FIRST)
    )


def scope(nodeid: str) -> str:
    """Scope that stays on one worker: a module, or a group of modules."""
    for group, paths in TOGETHER.items():
        if nodeid.startswith(paths):
            return group
    return nodeid.partition("::")[0]


class ModulesTogether(LoadScopeScheduling):
    """Hands out modules and groups of modules, in the order in which they were collected."""

    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """Ours in the place of the one for ``--dist loadfile``."""
    return ModulesTogether(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort by module, tests of a module stay as they are; mark what Hypothesis draws examples
    for.
    """
    items.sort(key=lambda item: rank(item.nodeid))
    searching = os.environ.get("HYPOTHESIS_PROFILE") == "fuzz"
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker("fuzz")
        if searching and item.get_closest_marker("fuzz"):
            item.add_marker(pytest.mark.timeout(7200), append=False)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """What was imported stays: the collector of garbage would go through half a million objects
    again and again.
    """
    gc.collect()
    gc.freeze()
