"""Memory of sensors in ZooKeeper: exact, bounded, fenced, and written only when it changed."""

from __future__ import annotations

import os

import pytest

from storm_dagster.model import paths
from storm_dagster.model.records import EpochRecord, encode_record
from storm_dagster.zk.sensor_memory import load_memory, store_memory

pytestmark = pytest.mark.zookeeper


def lead(cluster) -> int:
    record = EpochRecord(leader="127.0.0.1:6627", http="http://127.0.0.1:7621")
    return cluster.state.set_data(paths.EPOCH, encode_record(record))


@pytest.mark.parametrize("size", [2, 300_000, 1_000_000])
def test_what_is_stored_is_read_again_and_written_once(zk_cluster, size) -> None:
    raw = os.urandom(size)
    name = store_memory(zk_cluster, "s", raw, None, epoch=-1)
    assert name is not None and len(name) < 40
    assert load_memory(zk_cluster, "s", name) == raw
    before = zk_cluster.state.get_version(paths.sensor_memory("s"))
    assert store_memory(zk_cluster, "s", raw, name, epoch=-1) == name
    assert zk_cluster.state.get_version(paths.sensor_memory("s")) == before


def test_an_older_cursor_finds_what_it_knew_and_old_records_go(zk_cluster) -> None:
    names: list[str | None] = [None]
    for number in range(20):
        raw = b"%d" % number + b"x" * (300_000 if number % 3 == 0 else 0)
        names.append(store_memory(zk_cluster, "s", raw, names[-1], epoch=-1))
    assert load_memory(zk_cluster, "s", names[-2]) is not None
    assert load_memory(zk_cluster, "s", names[-3]) is not None
    assert len(zk_cluster.state.get_children(paths.sensor_memory("s"))) == 8
    assert load_memory(zk_cluster, "s", names[1]) is None


def test_nothing_is_stored_under_an_epoch_that_is_over(zk_cluster) -> None:
    epoch = lead(zk_cluster)
    first = store_memory(zk_cluster, "s", b"one", None, epoch=epoch)
    lead(zk_cluster)
    assert store_memory(zk_cluster, "s", b"two", first, epoch=epoch) == first
    assert load_memory(zk_cluster, "s", first) == b"one"
    assert len(zk_cluster.state.get_children(paths.sensor_memory("s"))) == 1
    assert store_memory(zk_cluster, "s", b"two", first, epoch=epoch + 1) != first


@pytest.mark.parametrize("name", ["", "nonsense", "../../cluster_id", "1-0123456789abcdef"])
def test_a_name_that_is_not_ours_is_no_memory(zk_cluster, name) -> None:
    assert load_memory(zk_cluster, "s", name) is None


def test_a_damaged_record_is_no_memory(zk_cluster) -> None:
    name = store_memory(zk_cluster, "s", b"as it was", None, epoch=-1)
    assert name is not None
    zk_cluster.state.set_data(paths.sensor_memory("s", name), b"as it was not")
    assert load_memory(zk_cluster, "s", name) is None
