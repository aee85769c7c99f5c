"""The public names of pystorm and streamparse, read from these packages, beside ours."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pystorm
import pytest
import streamparse

from storm_dagster import api
from storm_dagster.api import Bolt, Grouping, Topology
from storm_dagster.testing.topology_harness import TopologyHarness
from storm_rigs.components import Numbers

CLASSES = ["Spout", "ReliableSpout", "Bolt", "BatchingBolt", "TicklessBatchingBolt"]
PROTOCOL = {
    "read_command",
    "read_handshake",
    "read_message",
    "read_task_ids",
    "read_tuple",
    "run",
    "send_message",
    "serializer",
    # Ends the process of the component, which is the worker's here.
    "exit_on_exception",
    # The thread that makes batches; here they are made in the task.
    "exc_info",
}
"""What belongs to a process that speaks the protocol on its pipes: docs/migration.md says that it
is not here.
"""


def public(kind: type) -> set[str]:
    """Attributes and methods of instances: of the class, and those that its methods assign."""
    found = {name for name in dir(kind) if not name.startswith("_")}
    for base in kind.__mro__:
        if base.__module__.startswith(("pystorm", "streamparse")):
            for name in vars(base):
                code = getattr(vars(base)[name], "__code__", None)
                found |= {
                    word
                    for word in getattr(code, "co_names", ())
                    if f"self.{word} =" in inspect.getsource(code)
                }
    return {name for name in found if not name.startswith("_")}


class Sums(Bolt):
    pass


class Plain(Topology):
    numbers = Numbers.spec()
    sums = Sums.spec(inputs=[numbers])


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_name_of_a_class_is_ours_or_the_protocols(name: str) -> None:
    ours = {each for each in dir(getattr(api, name)) if not each.startswith("_")}
    theirs = public(getattr(streamparse, name)) | public(getattr(pystorm, name))
    assert {"storm_conf", "task_id", "logger", "emit"} <= theirs
    assert theirs - ours - PROTOCOL == set()
    assert ours & PROTOCOL == set()


@pytest.mark.parametrize("name", CLASSES)
def test_methods_take_the_arguments_of_streamparse(name: str) -> None:
    theirs, ours = getattr(streamparse, name), getattr(api, name)
    for method in (
        "emit",
        "ack",
        "fail",
        "process",
        "process_batch",
        "group_key",
        "log",
        "report_metric",
    ):
        if not hasattr(theirs, method):
            continue
        wanted = [
            each.name
            for each in inspect.signature(getattr(theirs, method)).parameters.values()
            if each.kind is each.POSITIONAL_OR_KEYWORD
        ]
        assert list(inspect.signature(getattr(ours, method)).parameters)[: len(wanted)] == wanted, (
            method
        )


def test_names_of_the_package() -> None:
    # docs/migration.md names what stands for each of these.
    missing = {"cli", "dsl", "storm", "JavaBolt", "JavaSpout", "StormHandler"}
    assert {
        name
        for name in streamparse.__all__
        if not hasattr(api, name) and name not in ("bolt", "spout", "component")
    } == missing
    groupings = {each for each in dir(streamparse.Grouping) if not each.startswith("_")}
    assert {each for each in groupings if not hasattr(Grouping, each)} == {
        "custom_object",
        "custom_serialized",
    }
    assert set(pystorm.Tuple._fields) == {"id", "component", "stream", "task", "values"}
    assert all(hasattr(api.Tuple, field) for field in pystorm.Tuple._fields)


def test_attributes_that_the_worker_gives_have_their_values_and_may_be_assigned() -> None:
    with TopologyHarness(Plain, {"numbers": []}, conf={"topology.debug": True}) as harness:
        harness.run()
        (sums,) = harness.tasks("sums")
        assert (sums.component_name, sums.task_id, sums.debug) == (
            "sums",
            sums.context.task_id,
            True,
        )
        assert sums.storm_conf is sums.conf and sums.storm_conf["topology.debug"] is True
        assert sums.topology_name == sums.context.topology_name
        sums.pid, sums.storm_conf, sums.task_id = 1, {}, 2
        assert (sums.pid, sums.storm_conf, sums.task_id) == (1, {}, 2)


def test_the_context_is_the_map_of_the_protocol() -> None:
    with TopologyHarness(Plain, {"numbers": []}) as harness:
        harness.run()
        (sums,) = harness.tasks("sums")
        context: Mapping[str, Any] = dict(sums.context)
        assert set(context) == {
            "task->component", "taskid", "componentid", "stream->target->grouping", "streams", "stream->outputfields",
            "source->stream->grouping", "source->stream->fields",
        }  # fmt: skip
        assert context["source->stream->grouping"] == {
            "numbers": {"default": {"type": "SHUFFLE", "fields": []}}
        }
        assert context["source->stream->fields"] == {"numbers": {"default": ["n"]}}
        assert (
            "taskid" in sums.context
            and "else" not in sums.context
            and sums.context.get("else", 1) == 1
        )
