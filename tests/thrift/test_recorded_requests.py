"""Requests of Storm 2.8.3's own Java client, byte for byte as it sent them, and what nimbus
answers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from thriftpy2.thrift import TApplicationException

from storm_dagster.blobstore.local import LocalBlobStore
from storm_dagster.nimbus.thrift.idl import decoder, load_idl
from storm_dagster.testing.waiting import eventually
from storm_dagster.zk.storm_cluster_state import StormClusterState
from storm_rigs.stage.nimbus_thread import NimbusThread
from storm_rigs.stage.records import World

_CONF = "7b226e696d6275732e7365656473223a5b223132372e302e302e31225d2c226e696d6275732e7468726966742e706f7274223a3239393737"
"""``{"nimbus.seeds":["127.0.0.1"],"nimbus.thrift.port":29977``: the client's own options, which it
always sends.
"""
_HEAD = "8001000100000009726562616c616e6365000000020b000100000009776f7264636f756e740c0002"
"""Of ``rebalance wordcount``."""

REBALANCES = {
    "-w 0 -n 3 -e count=2": f"{_HEAD}08000100000000080002000000030d00030b080000000100000005636f756e74000000020b000500000039{_CONF}7d0000",
    "-w 0": f"{_HEAD}08000100000000" + f"0b000500000039{_CONF}7d0000",
    '-t {"topology.debug":true}': f"{_HEAD}0b00050000004f{_CONF}2c22746f706f6c6f67792e6465627567223a747275657d0000",
    '-r {"count":{"cpu":10}}': f"{_HEAD}0d00040b0d0000000100000005636f756e740b04000000010000000363707540240000000000000b000500000039{_CONF}7d0000",
}
OWNERS = "80010001000000196765744f776e65725265736f7572636553756d6d6172696573000000"
DEBUG = "80010001000000056465627567000000040b000100000009776f7264636f756e740b00020000000002000301040004402400000000000000"


@pytest.fixture(scope="module")
def link(nimbus: NimbusThread) -> Iterator[Any]:
    """A connection to a cluster in which ``wordcount`` runs."""
    blobs = LocalBlobStore(nimbus.home / "nimbus" / nimbus.id / "blobs")
    with StormClusterState.open(nimbus.conf) as cluster, closing(nimbus.connect()) as link:
        world = World(cluster, blobs, dict(nimbus.conf.values))
        world.supervisor("s1")
        world.submit("wordcount", conf={"topology.workers": 2, "topology.submitter.user": "alice"})
        # Another session wrote it: nimbus sees it a moment later.
        eventually(
            lambda: nimbus.thrift_client(ours=True).getTopologySummaries(),
            what="nimbus lists the topology",
        )
        yield link


def ask(link: Any, request: str) -> Any:
    """The answer's success; its error is raised."""
    raw = bytes.fromhex(request)
    link.sendall(struct.pack("!i", len(raw)) + raw)
    stream = link.makefile("rb")
    protocol = decoder(stream.read(int.from_bytes(stream.read(4), "big")))
    name, kind, _ = protocol.read_message_begin()
    if kind == 3:
        error = TApplicationException()
        error.read(protocol)
        raise error
    result = getattr(load_idl().Nimbus, f"{name}_result")()
    result.read(protocol)
    for entry in result.thrift_spec.values():
        if entry[1] != "success" and (raised := getattr(result, entry[1])) is not None:
            raise raised
    return getattr(result, "success", None)


@pytest.mark.parametrize("options", ["-w 0", "-w 0 -n 3 -e count=2"])
def test_a_rebalance_without_overrides_reaches_dagster(link: Any, options: str) -> None:
    """All that it lacks here is a Dagster."""
    with pytest.raises(TApplicationException, match="Unavailable: no Dagster is configured"):
        ask(link, REBALANCES[options])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ('-t {"topology.debug":true}', "not topology.debug: update"),
        ('-r {"count":{"cpu":10}}', "resources of count"),
    ],
)
def test_overrides_are_refused_by_key(link: Any, options: str, named: str) -> None:
    with pytest.raises(load_idl().InvalidTopologyException) as refused:
        ask(link, REBALANCES[options])
    assert named in refused.value.msg and "nimbus.seeds" not in refused.value.msg


@pytest.mark.parametrize("overrides", ["[1]", "{", '"x"'])
def test_overrides_that_are_no_conf_are_refused(nimbus: NimbusThread, overrides: str) -> None:
    options = load_idl().RebalanceOptions(topology_conf_overrides=overrides)
    with pytest.raises(load_idl().InvalidTopologyException, match="is not a JSON object"):
        nimbus.thrift_client(ours=True).rebalance("wordcount", options)


@pytest.mark.parametrize("overrides", [None, "", "{}", "null"])
def test_empty_overrides_are_none(link: Any, nimbus: NimbusThread, overrides: str | None) -> None:
    options = load_idl().RebalanceOptions(
        topology_conf_overrides=overrides, topology_resources_overrides={"count": {}}
    )
    with pytest.raises(TApplicationException, match="Unavailable: no Dagster is configured"):
        nimbus.thrift_client(ours=True).rebalance("wordcount", options)


def test_owners_have_what_their_topologies_were_given(link: Any, nimbus: NimbusThread) -> None:
    (row,) = ask(link, f"{OWNERS}0200")
    assert (row.owner, row.total_topologies, row.total_workers, row.total_tasks) == (
        "alice",
        1,
        2,
        7,
    )
    assert (
        row.memory_usage == row.assigned_on_heap_memory == 4096.0 and row.memory_guarantee is None
    )
    assert ask(link, f"{OWNERS}030b0001000000066e6f626f647900") == []
    assert [one.owner for one in nimbus.thrift_client(ours=True).getTopologySummaries()] == [
        "alice"
    ]


def test_debug_is_refused_with_the_reason(link: Any) -> None:
    with pytest.raises(TApplicationException, match="debug is not served: tuples are not sampled"):
        ask(link, DEBUG)
