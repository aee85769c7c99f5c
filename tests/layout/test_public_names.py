"""Names that leave a process: none of 0.1.0 is lost, but those that were retired on purpose.

Clusters of two releases, clients, dashboards, confs and code of users rely on them. The names of
assets, jobs, sensors and so on in Dagster are looked after by ``tests/dagster/test_names.py``.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

from storm_dagster.model.removed_keys import REMOVED_KEYS
from storm_rigs.product.public_names import Names, public_names

NAMES: dict[str, Names] = json.loads(
    Path(__file__).with_name("names_of_0.1.0.json").read_text(encoding="utf-8")
)

_SHARED = (
    "all declared topologies share one, so that a location loads hundreds of them (CHANGELOG.md)"
)
_ONE_WAY = "`spawn=True` and the command line start and stop clusters (CHANGELOG.md)"
_NO_USER = "Storm needs none, and Dagster's sensors do it in ten lines (CHANGELOG.md)"
RETIRED: dict[tuple[str, str, str], str] = {
    (
        "dagster",
        "of a declared topology",
        "sensor watch_wc",
    ): f"declared_topologies_sensor; {_SHARED}",
    ("dagster", "of a declared topology", "job rebalance_wc"): f"rebalance_declared; {_SHARED}",
    (
        "dagster",
        "of a declared topology",
        "op rebalance_wc_op",
    ): f"rebalance_declared_op; {_SHARED}",
    **{
        ("conf", subject, key): "nothing read it: accepted with a warning (model/storm_keys.yaml)"
        for subject in ("keys", "defaults")
        for key in ("cluster.name", "storm.blobstore.replication.factor", "topology.state.shared")
    },
    **{
        ("python", "storm_dagster.api.TaskState", name): (
            "storm_dagster.testing.task_state.open_task_state and read_task_states: to open a log takes the task "
            "over, so a component has its own from context.state (CHANGELOG.md)"
        )
        for name in (
            *("open", "open(component=)", "open(folder=)", "open(owns=)", "open(task=)"),
            *("open(topology=)", "owns=", "path="),
        )
    },
    **{
        ("conf", subject, key): f"accepted with a warning: {REMOVED_KEYS[key]}"
        for subject in ("keys", "defaults")
        for key in REMOVED_KEYS
        if key in NAMES["conf"][subject]
    },
    **{
        ("dagster", f"fields of {job}.{job}_op", field): f"`storm-dagster {verb}`; {_ONE_WAY}"
        for job, verb in (("start_local_cluster", "dev"), ("stop_local_cluster", "stop"))
        for field in NAMES["dagster"][f"fields of {job}.{job}_op"]
    },
    **{
        ("python", subject, name): f"a sensor of one's own; {_NO_USER}"
        for subject in ("storm_dagster.ZooKeeperChange", "storm_dagster.build_zookeeper_sensor")
        for name in NAMES["python"][subject]
    },
    (
        "dagster",
        "tags",
        ".dagster/storm_warm_run",
    ): "Dagster's own tag of its run launcher: the code server starts the runs (CHANGELOG.md)",
    **{
        ("python", "storm_dagster", name): f"a sensor of one's own; {_NO_USER}"
        for name in ("ZooKeeperChange", "build_zookeeper_sensor")
    },
    **{
        ("nimbus http", "POST /api/v1/topology/{id}/logconfig", f"200 {name}"): (
            "200 namedLoggerLevels; it was described and never sent (CHANGELOG.md)"
        )
        for name in ("status", "topologyId", "topologyOperation")
    },
}
"""(kind, subject, name) of what is no longer there -> what took its place, and the reason."""


def lost_names(before: dict[str, Names], now: dict[str, Names]) -> set[tuple[str, str, str]]:
    """(kind, subject, name) of each name that ``now`` lacks."""
    return {
        (kind, subject, name)
        for kind, subjects in before.items()
        for subject, names in subjects.items()
        for name in set(names) - set(now.get(kind, {}).get(subject, ()))
    }


@pytest.fixture(scope="module")
def now() -> dict[str, Names]:
    """The names of this tree."""
    return public_names()


def test_no_name_is_lost(now: dict[str, Names]) -> None:
    lost = sorted(lost_names(NAMES, now) - RETIRED.keys())
    assert not lost, (
        "restore them, or say in RETIRED and CHANGELOG.md why they went:\n"
        + "\n".join(f"  {kind} / {subject}: {name}" for kind, subject, name in lost)
    )


def test_retired_names_were_there_and_are_gone(now: dict[str, Names]) -> None:
    assert RETIRED.keys() == RETIRED.keys() & lost_names(NAMES, now)


@pytest.mark.parametrize("kind", NAMES)
def test_each_kind_is_compared(now: dict[str, Names], kind: str) -> None:
    assert all(NAMES[kind].values()) and NAMES[kind]
    changed = copy.deepcopy(now)
    subject = next(subject for subject in NAMES[kind] if changed[kind][subject])
    name = changed[kind][subject].pop(changed[kind][subject].index(NAMES[kind][subject][0]))
    assert (kind, subject, name) in lost_names(NAMES, changed)
    del changed[kind]
    assert {one[0] for one in lost_names(NAMES, changed) - RETIRED.keys()} == {kind}
