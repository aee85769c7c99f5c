"""Conf: precedence and origin, types, unknown keys with the nearest known one, schema beside defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from storm_dagster.model.conf import (
    default_conf,
    load_cluster_conf,
    parse_assignments,
    unknown_keys,
    validate_conf,
)
from storm_dagster.model.conf_schema import CONF_KEYS, OWNED_PREFIXES
from storm_dagster.model.errors import InvalidRequest


def test_every_default_has_a_schema_and_every_schema_a_default() -> None:
    assert set(default_conf()) == set(CONF_KEYS)
    validate_conf(default_conf(), source="defaults.yaml")


def test_later_sources_win_and_each_value_knows_its_origin(tmp_path: Path) -> None:
    (tmp_path / "storm.yaml").write_text("topology.workers: 3\nnimbus.http.port: 0\n")
    conf = load_cluster_conf(tmp_path, {"topology.workers": 4})
    assert (conf["topology.workers"], conf.origins["topology.workers"]) == (4, "-c")
    assert conf.origins["nimbus.http.port"] == str(tmp_path / "storm.yaml")
    assert conf.origins["topology.acker.executors"] == "default"


def test_an_unknown_key_names_the_nearest_one() -> None:
    with pytest.raises(InvalidRequest, match=r"topology\.workers"):
        validate_conf({"topology.wrokers": 2}, source="--conf")
    _, warnings = validate_conf({"topology.wrokers": 2}, source="thrift", unknown="warn")
    assert len(warnings) == 1


def test_other_prefixes_belong_to_the_user() -> None:
    assert unknown_keys({"my.key": 1, "wordcount.limit": 2}) == {}
    assert all(prefix.endswith(".") for prefix in OWNED_PREFIXES)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("topology.workers", "3"),
        ("topology.workers", 0),
        ("topology.workers", True),
        ("topology.workers", 2.5),
        ("topology.workers", None),
        ("topology.acker.executors", -1),
        ("topology.debug", 1),
        ("supervisor.slots.ports", "6900"),
        ("supervisor.slots.ports", [6900, "x"]),
        ("topology.environment", {"A": 1, 2: 3}),
        ("topology.scheduler.strategy", "clever"),
        ("nimbus.http.port", 70_000),
        ("topology.metric.sample.rate", 1.5),
    ],
)
def test_values_of_a_wrong_type_or_size(key: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=key.replace(".", r"\.")):
        validate_conf({key: value}, source="--conf")


def test_all_wrong_keys_are_named_at_once() -> None:
    with pytest.raises(InvalidRequest) as caught:
        validate_conf({"topology.workers": "x", "topology.debug": 3}, source="f")
    assert "topology.workers" in caught.value.message and "topology.debug" in caught.value.message


def test_assignments_from_the_command_line_are_yaml_values() -> None:
    assert parse_assignments(["a=3", "b=x", "c=[1, 2]", "d=true", "e="]) == {
        "a": 3, "b": "x", "c": [1, 2], "d": True, "e": None,
    }  # fmt: skip
    for wrong in ("a", "=3", "a=[", "a=!!python/object/apply:os.system ['x']"):
        with pytest.raises(InvalidRequest):
            parse_assignments([wrong])


def test_damaged_yaml_is_refused_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "storm.yaml").write_text("a: [")
    with pytest.raises(InvalidRequest, match=r"storm\.yaml"):
        load_cluster_conf(tmp_path)


def test_nimbus_host_is_one_seed_with_a_warning() -> None:
    conf = load_cluster_conf(None, {"nimbus.host": "n1"})
    assert conf["nimbus.seeds"] == ["n1"] and "deprecated" in conf.warnings[0]
