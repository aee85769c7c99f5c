"""The harness tells what a cluster would: unread streams, conf keys that it ignores or refuses."""

from __future__ import annotations

from storm_dagster.api import Bolt, Spout, Stream, Topology, Tuple
from storm_dagster.testing.topology_harness import run_topology


class Numbers(Spout):
    outputs = ["n"]


class Checks(Bolt):
    outputs = [Stream(["n"]), Stream(["row", "reason"], "rejected"), Stream(["n"], "odd")]

    def process(self, tup: Tuple) -> None:
        self.emit([tup.values[0]], stream="default")


class Ends(Bolt):
    def process(self, tup: Tuple) -> None:
        pass


class Unread(Topology):
    numbers = Numbers.spec()
    checks = Checks.spec(inputs=[numbers])
    ends = Ends.spec(inputs=[checks])


def test_unread_streams_and_ignored_keys_are_shown() -> None:
    conf = {"topology.enable.message.timeouts": False}
    warnings = run_topology(Unread, {"numbers": [[1]]}, conf=conf).warnings
    assert "'rejected' of 'checks'" in warnings[0] and "dead letters" in warnings[0]
    assert "'odd' of 'checks'" in warnings[1]
    assert any("topology.enable.message.timeouts" in warning for warning in warnings[2:])


def test_a_conf_that_a_cluster_refuses_is_shown() -> None:
    conf = {"topology.windows.max.ahead.secs": -1}
    warnings = run_topology(Read, {"numbers": [[1]]}, conf=conf).warnings
    assert len(warnings) == 1 and warnings[0].startswith("a cluster would refuse the topology: ")
    assert "topology.windows.max.ahead.secs must be at least 0" in warnings[0]


class Read(Topology):
    numbers = Numbers.spec()
    checks = Checks.spec(inputs=[numbers])
    ends = Ends.spec(inputs=[checks, checks["rejected"], checks["odd"]])


def test_a_topology_that_reads_all_its_streams_has_no_warning() -> None:
    assert run_topology(Read, {"numbers": [[1]]}).warnings == []
