"""The rule by which layers of a conf are merged, as a table and as properties."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.submission.conf import (
    kept_conf,
    normalize_conf,
    submitted_keys,
    total_conf,
)
from storm_dagster.model.conf import Conf, default_conf
from storm_dagster.model.conf_layers import (
    FORCED_SCHEDULER,
    LAYERS,
    RESERVED_KEYS,
    SUBMITTED_KEYS,
    LayerName,
    component_conf,
    merge_conf,
    merged_value,
    overlay,
    takes_null,
)
from storm_dagster.model.topology import TopologySpec

WORKERS = "topology.workers"
"""A key with a default."""
PENDING = "topology.max.spout.pending"
"""A key without one: null is a value."""
OWN = "my.key"
ZOOKEEPER = "storm.zookeeper.root"


@pytest.mark.parametrize(
    ("layers", "key", "value"),
    [
        ({"defaults": {WORKERS: 1}, "cluster": {WORKERS: 2}}, WORKERS, 2),
        ({"cluster": {WORKERS: 2}, "author": {WORKERS: 3}}, WORKERS, 3),
        ({"author": {WORKERS: 3}, "submission": {WORKERS: 4}}, WORKERS, 4),
        ({"option": {WORKERS: 4}, "file": {WORKERS: 5}}, WORKERS, 5),
        ({"file": {WORKERS: 5}, "pair": {WORKERS: 6}}, WORKERS, 6),
        ({"former": {WORKERS: 5}, "submission": {WORKERS: 6}}, WORKERS, 6),
        ({"submission": {OWN: 1}, "owner": {OWN: 2}}, OWN, 2),
        ({"cluster": {OWN: 1}, "stored": {OWN: 2}}, OWN, 2),
        ({"stored": {OWN: 1}, "forced": {OWN: 2}}, OWN, 2),
        ({"total": {OWN: 1}, "component": {OWN: 2}}, OWN, 2),
        ({"author": {OWN: {"a": 1}}, "submission": {OWN: {"b": 2}}}, OWN, {"b": 2}),
        # Null under a key with a default: what the parties before say counts.
        ({"cluster": {WORKERS: 2}, "stored": {WORKERS: None}}, WORKERS, 2),
        ({"author": {WORKERS: 3}, "submission": {WORKERS: None}}, WORKERS, 3),
        ({"author": {WORKERS: 3}, "file": {WORKERS: 5}, "pair": {WORKERS: None}}, WORKERS, 3),
        ({"total": {WORKERS: 3}, "component": {WORKERS: None}}, WORKERS, 3),
        ({"defaults": {WORKERS: 1}, "cluster": {WORKERS: None}}, WORKERS, 1),
        # Null under any other key is a value.
        ({"cluster": {PENDING: 9}, "stored": {PENDING: None}}, PENDING, None),
        ({"total": {PENDING: 9}, "component": {PENDING: None}}, PENDING, None),
        ({"author": {OWN: 1}, "submission": {OWN: None}}, OWN, None),
        # Keys that a layer cannot set.
        ({"cluster": {ZOOKEEPER: "/a"}, "stored": {ZOOKEEPER: "/b"}}, ZOOKEEPER, "/a"),
        ({"total": {ZOOKEEPER: "/a"}, "component": {ZOOKEEPER: "/b"}}, ZOOKEEPER, "/a"),
        ({"submission": {"topology.id": "forged"}}, "topology.id", None),
        ({"submission": {"topology.id": "a"}, "system": {"topology.id": "b"}}, "topology.id", "b"),
        ({"stored": {"topology.id": "b"}}, "topology.id", "b"),
        ({"cluster": {"storm.cluster.mode": "local"}}, "storm.cluster.mode", "local"),
        ({"author": {"storm.cluster.mode": "local"}}, "storm.cluster.mode", None),
        ({"stored": {SUBMITTED_KEYS: [WORKERS]}}, SUBMITTED_KEYS, None),
        ({"cluster": {FORCED_SCHEDULER: "even"}}, FORCED_SCHEDULER, None),
    ],
)
def test_the_value_that_counts(layers: dict[LayerName, Conf], key: str, value: Any) -> None:
    merged = merge_conf(layers)
    assert merged.get(key) == value
    assert merged_value(layers, key) == value
    # The order in which the layers are given decides nothing.
    assert merge_conf(dict(reversed(layers.items()))) == merged


def test_a_null_stays_until_the_submission_meets_other_parties() -> None:
    """So an update sees that the key is taken back, and does not keep its former value."""
    assert overlay({"file": {WORKERS: 5}, "pair": {WORKERS: None}}) == {WORKERS: None}


def test_a_null_drops_a_user_s_own_key_for_components() -> None:
    """`--conf KEY=null` of an update: the default of the component's code counts again."""
    total = merge_conf({"author": {OWN: 1, PENDING: 9}, "submission": {OWN: None, PENDING: None}})
    assert component_conf(total, {}) == {PENDING: None}
    assert component_conf(total, {OWN: 2})[OWN] == 2
    assert component_conf({OWN: 1}, {OWN: None}) == {OWN: None}
    # It overrides the value that the cluster gives to the key, too.
    assert OWN not in component_conf(merge_conf({"cluster": {OWN: 5}, "stored": total}), {})


KEYS = st.sampled_from(
    [WORKERS, PENDING, OWN, ZOOKEEPER, *RESERVED_KEYS, "topology.debug", "your.key"]
)
VALUES = st.none() | st.integers(1, 3)
CONFS = st.dictionaries(KEYS, VALUES, max_size=5)
SOME_LAYERS = st.dictionaries(st.sampled_from(sorted(LAYERS)), CONFS, max_size=6)


@given(layers=SOME_LAYERS)
def test_each_value_has_a_layer_and_null_counts_only_where_allowed(layers: Any) -> None:
    merged = merge_conf(layers)
    for key, value in merged.items():
        assert value in [layer[key] for layer in layers.values() if key in layer]
        assert value is not None or takes_null(key)
        assert merged_value(layers, key) == value


@given(layers=SOME_LAYERS, key=KEYS)
def test_a_key_is_merged_by_itself(layers: Any, key: str) -> None:
    without = {name: {k: v for k, v in layer.items() if k != key} for name, layer in layers.items()}
    merged = merge_conf(layers)
    merged.pop(key, None)
    assert merge_conf(without) == merged


@given(cluster=CONFS, author=CONFS, submission=CONFS)
def test_the_worker_sees_the_value_of_the_submission(
    cluster: dict[str, Any], author: dict[str, Any], submission: dict[str, Any]
) -> None:
    """Nimbus merges the layers when it accepts the topology; the supervisor and the worker merge
    the stored conf with the conf of their host.
    """
    cluster = {**default_conf(), **merge_conf({"cluster": cluster})}
    spec = TopologySpec(name="wc", conf=author)
    stored = normalize_conf(cluster, submission, spec, "wc-1-2")
    accepted = total_conf(cluster, stored)
    worker = merge_conf({"defaults": default_conf(), "cluster": cluster, "stored": stored})
    assert worker == accepted
    # A release before wrote this field into the stored conf.
    former = {**stored, SUBMITTED_KEYS: sorted(submission)}
    assert merge_conf({"cluster": cluster, "stored": former}) == accepted
    assert (accepted["topology.id"], accepted["topology.name"]) == ("wc-1-2", "wc")
    for key in (PENDING, OWN, "topology.debug", "your.key"):
        layers: dict[LayerName, Conf] = {
            "cluster": cluster,
            "author": author,
            "submission": submission,
        }
        assert merged_value(layers, key) == accepted.get(key)


@given(cluster=CONFS, author=CONFS, submission=CONFS, later=CONFS)
def test_an_update_keeps_only_values_that_the_submission_gave(
    cluster: dict[str, Any],
    author: dict[str, Any],
    submission: dict[str, Any],
    later: dict[str, Any],
) -> None:
    cluster = {**default_conf(), **merge_conf({"cluster": cluster})}
    stored = normalize_conf(cluster, submission, TopologySpec(name="wc", conf=author), "wc-1-2")
    kept = kept_conf(cluster, stored, submitted_keys(submission), later)
    assert not kept.keys() & later.keys()
    for key, value in kept.items():
        assert submission[key] == value and merge_conf({"submission": {key: value}})


@given(cluster=CONFS, stored=CONFS, component=CONFS)
def test_what_was_merged_is_a_base_for_components(
    cluster: dict[str, Any], stored: dict[str, Any], component: dict[str, Any]
) -> None:
    at_once = merge_conf({"cluster": cluster, "stored": stored, "component": component})
    total = merge_conf({"cluster": cluster, "stored": stored})
    assert merge_conf({"total": total, "component": component}) == at_once
    assert merge_conf({"total": total}) == total
