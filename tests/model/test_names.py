"""Grammar of names: what is accepted, and why not."""

from __future__ import annotations

import pytest

from storm_dagster.model import paths
from storm_dagster.model.errors import InvalidRequest, InvalidTopology
from storm_dagster.model.names import (
    check_blob_key,
    check_component_id,
    check_stream_id,
    check_topology_name,
    code_key,
    conf_key,
    id_of_blob_key,
    jar_key,
    make_topology_id,
    topology_name_of,
)


@pytest.mark.parametrize(
    "name", ["word_count-1.2", "1a", "a-", "a" * 200, "A.b", "sales-2026-11", "sales-2026-20261122"]
)
def test_names_that_topologies_may_have(name: str) -> None:
    assert check_topology_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "null",
        "NULL",
        "123",
        "a b",
        "a/b",
        "中文",
        "a" * 300,
        "..",
        ".",
        "-",
        "-h",
        "--dry-run",
        "_a",
        ".a",
        "a\n",
        None,
        7,
        "a\x00",
        "billing-1-1700000000",
    ],
)
def test_names_that_they_may_not_have(name: object) -> None:
    with pytest.raises(InvalidTopology):
        check_topology_name(name)


@pytest.mark.parametrize("component", ["a/b", "a$b", "a<b>", "a#1", "a:b", "f()", "x.y-z_1"])
def test_component_ids_of_jstorms_character_set(component: str) -> None:
    assert check_component_id(component) == component


@pytest.mark.parametrize("component", ["__x", "a b", "", "a;b", "a" * 201])
def test_component_and_stream_ids_that_are_refused(component: str) -> None:
    with pytest.raises(InvalidTopology):
        check_component_id(component)
    with pytest.raises(InvalidTopology):
        check_stream_id(component)


def test_topology_ids_carry_the_name() -> None:
    assert make_topology_id("my-topo", 3, 1_500_000_000) == "my-topo-3-1500000000"
    assert topology_name_of("my-topo-3-1500000000") == "my-topo"
    for wrong in ("abc", "a-1", "a-1-", "/etc/passwd-1-1"):
        with pytest.raises(InvalidRequest):
            topology_name_of(wrong)


def test_a_blob_key_leads_back_to_its_topology() -> None:
    topology_id = "t-1-100"
    for key in (jar_key(topology_id), conf_key(topology_id), code_key(topology_id)):
        assert check_blob_key(key) == key
        assert id_of_blob_key(key) == topology_id
    assert id_of_blob_key("staging.x.conf") is None
    assert id_of_blob_key("t-1-100-stormcode.ser.bak") is None


@pytest.mark.parametrize(
    "key", ["", ".", "..", "a/b", "a?b", "a\\b", "../x", "x" * 300, "a\x00b", "a\tb", "ü"]
)
def test_keys_that_could_name_a_path_are_refused(key: str) -> None:
    with pytest.raises(InvalidRequest):
        check_blob_key(key)


def test_a_component_id_with_a_slash_stays_one_node() -> None:
    path = paths.task_errors("t-1-1", "a/b%c")
    assert path.count("/") == 3
    assert paths.task_errors("t-1-1", "..") == "/taskerrors/t-1-1/%2E%2E"
