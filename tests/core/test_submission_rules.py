"""Normalization, validation and task numbering."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storm_dagster.core.submission.conf import (
    normalize_conf,
    removed_owner_keys,
    stored_document,
    submitted_keys_in,
    total_conf,
)
from storm_dagster.core.submission.tasks import (
    executor_counts,
    executors_of,
    fixed_task_components,
    normalize_topology,
    number_tasks,
    partition,
    rescale,
    with_system_components,
)
from storm_dagster.core.submission.validation import (
    check_confs,
    normalize_submission,
    validate_topology,
)
from storm_dagster.model.conf import default_conf, validate_conf
from storm_dagster.model.errors import InvalidRequest, InvalidTopology
from storm_dagster.model.ranges import encode_ranges
from storm_dagster.model.records import ComponentTasks, TaskTable
from storm_dagster.model.topology import TopologySpec


def component(
    parallelism: int = 1, *inputs: Any, fields: tuple[str, ...] = ("x",), **more: Any
) -> dict[str, Any]:
    return {
        "object": {"python": "mod:Part"},
        "parallelism": parallelism,
        "inputs": list(inputs),
        "outputs": {"default": {"fields": list(fields)}},
        **more,
    }


def reads(source: str, grouping: str = "shuffle", **more: Any) -> dict[str, Any]:
    stream = more.pop("stream", "default")
    return {"component": source, "stream": stream, "grouping": {"type": grouping, **more}}


def topology(name: str = "wc", **parts: dict[str, Any]) -> TopologySpec:
    spouts = parts.get("spouts", {"s": component()})
    return TopologySpec.model_validate(
        {"name": name, "spouts": spouts, "bolts": parts.get("bolts", {})}
    )


def check(spec: TopologySpec, **conf: Any) -> TopologySpec:
    total = total_conf(default_conf(), conf)
    normal = normalize_topology(total, spec)
    validate_topology(normal, total)
    return normal


class TestConf:
    def test_what_the_system_decides_is_written_down(self) -> None:
        conf = normalize_conf(default_conf(), {"topology.id": "forged"}, topology(), "wc-1-2")
        assert conf["topology.id"] == "wc-1-2" and conf["topology.name"] == "wc"
        assert conf["topology.acker.executors"] == 1 and conf["topology.workers"] == 1
        assert conf["storm.cluster.mode"] == "distributed"

    def test_the_submission_overrides_the_author(self) -> None:
        spec = topology().model_copy(update={"conf": {"topology.workers": 2, "own": 1}})
        conf = normalize_conf(default_conf(), {"topology.workers": 3}, spec, "wc-1-2")
        assert (conf["topology.workers"], conf["own"]) == (3, 1)

    def test_null_ackers_are_one_and_zero_are_none(self) -> None:
        assert (
            normalize_conf({}, {"topology.acker.executors": None}, topology(), "i")[
                "topology.acker.executors"
            ]
            == 1
        )
        assert (
            normalize_conf({}, {"topology.acker.executors": 0}, topology(), "i")[
                "topology.acker.executors"
            ]
            == 0
        )

    def test_normalising_twice_changes_nothing(self) -> None:
        once = normalize_conf(default_conf(), {"topology.workers": 3}, topology(), "wc-1-2")
        assert normalize_conf(default_conf(), once, topology(), "wc-1-2") == once

    @given(st.dictionaries(st.sampled_from(["a", "topology.workers", "z"]), st.integers()))
    def test_the_stored_conf_names_the_keys_that_were_submitted(self, conf: dict[str, int]) -> None:
        """Also to a daemon that reads them there alone, and of a conf that names none."""
        keys = {key for key, value in conf.items() if value > 0}
        assert submitted_keys_in(stored_document(conf, keys)) == tuple(sorted(keys))
        assert submitted_keys_in(conf) == ()

    @pytest.mark.parametrize(
        ("conf", "keys"),
        [
            ({"own": 1, "topology.workers": 2}, []),
            ({"topology.submitter.user": None, "topology.users": [], "topology.groups": ""}, []),
            ({"topology.users": ["ann"]}, ["topology.users"]),
            (
                {"topology.groups": ["g"], "topology.submitter.user": "ann"},
                ["topology.submitter.user", "topology.groups"],
            ),
        ],
    )
    def test_owner_and_lists_of_a_conf_are_named_if_they_have_an_effect(
        self, conf: dict[str, Any], keys: list[str]
    ) -> None:
        assert removed_owner_keys(conf) == keys

    def test_a_local_dir_of_its_own_is_refused(self) -> None:
        cluster = {**default_conf(), "storm.local.dir": "/x"}
        normalize_conf(cluster, {"storm.local.dir": "/x"}, topology(), "i")
        with pytest.raises(InvalidTopology, match=r"storm\.local\.dir"):
            normalize_conf(cluster, {"storm.local.dir": "/y"}, topology(), "i")

    def test_the_conf_of_a_component_is_stored_as_it_is_checked(self) -> None:
        """A writer of JSON may write 2 as 2.0; a Java class and null do not count."""
        bolt_conf = {
            "topology.tasks": 2.0,
            "topology.message.timeout.secs": None,
            "topology.scheduler.strategy": "org.apache.storm.scheduler.EvenScheduler",
            "own": None,
        }
        spec = topology(bolts={"b": component(1, reads("s"), conf=bolt_conf)})
        submitted, checked, _ = check_confs({}, spec, "the conf", "error")
        _, normal = normalize_submission(default_conf(), submitted, checked)
        assert checked.bolts["b"].conf == {"topology.tasks": 2, "own": None}
        assert type(normal.bolts["b"].conf["topology.tasks"]) is int
        assert (checked.spouts, list(checked.bolts)) == (spec.spouts, ["b"])

    def test_all_wrong_keys_are_named_at_once(self) -> None:
        with pytest.raises(InvalidTopology) as caught:
            validate_conf(
                {"topology.workers": "two", "topology.debgu": True}, source="here", submitted=True
            )
        assert "topology.workers must be an integer" in caught.value.message
        assert "did you mean 'topology.debug'" in caught.value.message
        assert validate_conf({"nimbus.x": 1}, source="here", unknown="warn", submitted=True)[1]


class TestParallelism:
    def test_a_component_with_no_tasks_does_not_run(self) -> None:
        bolts = {
            "b": component(2, reads("s"), conf={"topology.tasks": 0}),
            "c": component(1, reads("b")),
        }
        _, normal = normalize_submission(default_conf(), {}, topology(bolts=bolts))
        assert normalize_topology(total_conf(default_conf(), {}), normal) == normal
        whole = with_system_components(normal, total_conf(default_conf(), {}))
        assert "b" not in executor_counts(whole) and executor_counts(whole)["c"] == 1
        assert set(number_tasks(whole, default_conf()).components) == {
            "s",
            "c",
            "__acker",
            "__topology_master",
        }

    @pytest.mark.parametrize(
        ("limits", "conf", "says"),
        [
            ({"nimbus.executors.perTopology": 4}, {}, None),
            ({"nimbus.tasks.perTopology": 20}, {"topology.tasks": 10}, None),
            (
                {"nimbus.tasks.perTopology": 19},
                {"topology.tasks": 10},
                "asks for 20 tasks, nimbus.tasks.perTopology allows 19",
            ),
            (
                {},
                {"topology.tasks": 1_000_000},
                "asks for 2000000 tasks, nimbus.tasks.perTopology allows 100000",
            ),
            (
                {"nimbus.executors.perTopology": 3},
                {},
                "asks for 4 executors, nimbus.executors.perTopology allows 3",
            ),
            ({"nimbus.slots.perTopology": 2}, {"topology.workers": 2}, None),
            (
                {"nimbus.slots.perTopology": 2},
                {"topology.workers": 3},
                "asks for 3 slots, nimbus.slots.perTopology",
            ),
            (
                {"nimbus.slots.perTopology": 2},
                {"topology.workers": 3, "nimbus.slots.perTopology": 9},
                "allows 2",
            ),
        ],
    )
    def test_the_limits_of_the_cluster_name_the_number_that_exceeds_them(
        self, limits: dict[str, Any], conf: dict[str, Any], says: str | None
    ) -> None:
        """A submission cannot raise them for itself; as in Storm, components of the system do not
        count.
        """
        spec = topology(bolts={"b": component(3, reads("s"))})
        refused = nullcontext() if says is None else pytest.raises(InvalidTopology, match=says)
        with refused:
            normalize_submission({**default_conf(), **limits}, conf, spec)

    @pytest.mark.parametrize(
        ("hint", "own", "conf", "executors", "tasks"),
        [
            (10, {}, {"topology.max.task.parallelism": 4}, 4, 4),
            (10, {"topology.max.task.parallelism": 2}, {"topology.max.task.parallelism": 4}, 2, 2),
            (3, {"topology.tasks": 6}, {}, 3, 6),  # JStorm would ignore topology.tasks
            (3, {"topology.tasks": 2}, {}, 3, 3),
            (3, {}, {"topology.tasks": 5}, 3, 5),
            (3, {"topology.tasks": 9}, {"topology.max.task.parallelism": 4}, 3, 4),
            (2, {}, {"topology.bolt.parallelism": {"b": 7, "unknown": 9}}, 7, 7),
            (
                2,
                {},
                {"topology.bolt.parallelism": {"b": 7}, "topology.max.task.parallelism": 5},
                5,
                5,
            ),
            (2, {}, {"topology.spout.parallelism": {"b": 7}}, 2, 2),
        ],
    )
    def test_executors_and_tasks_follow_hint_conf_and_limits(
        self, hint: int, own: dict[str, Any], conf: dict[str, Any], executors: int, tasks: int
    ) -> None:
        spec = topology(bolts={"b": component(hint, reads("s"), conf=own)})
        total = total_conf(default_conf(), conf)
        normal = normalize_topology(total, spec)
        assert normalize_topology(total, normal) == normal
        whole = with_system_components(normal, total)
        assert executor_counts(whole)["b"] == executors
        assert len(number_tasks(whole, total).components["b"].ids) == tasks


class TestValidation:
    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            (topology(name=""), "no name"),
            (topology(name="a b"), "may hold only"),
            (topology(name="123"), "reserved"),
            (topology(name="NULL"), "reserved"),
            (topology(spouts={}), "no spout"),
            (topology(spouts={"s": component(1, reads("s"))}), "spouts only emit"),
            (
                topology(spouts={"x": component()}, bolts={"x": component()}),
                "names a spout and a bolt",
            ),
            (topology(bolts={"__b": component()}), "belongs to the system"),
            (topology(bolts={"a b": component()}), "may hold"),
            (topology(bolts={"b": component(0, reads("s"))}), "parallelism 0"),
            (topology(bolts={"b": component(-1, reads("s"))}), "parallelism -1"),
            (topology(bolts={"b": component(1, reads("z"))}), "components are b, s"),
            (
                topology(spouts={"lines": component()}, bolts={"b": component(1, reads("line"))}),
                "mean 'lines'",
            ),
            (topology(bolts={"b": component(1, reads("s", stream="defualt"))}), "mean 'default'"),
            (topology(bolts={"b": component(1, reads("s", "fields"))}), "names no field"),
            (
                topology(bolts={"b": component(1, reads("s", "fields", fields=["y"]))}),
                "does not declare",
            ),
            (
                topology(bolts={"b": component(1, reads("s", "partial_key", fields=["y"]))}),
                "does not declare",
            ),
            (topology(bolts={"b": component(1, reads("s", "direct"))}), "not a direct stream"),
            (topology(bolts={"b": component(1, reads("s", "custom"))}), "names no function"),
            (
                topology(bolts={"b": component(1, reads("s", "custom", object="x"))}),
                "'module:name'",
            ),
            (topology(bolts={"b": component(1, reads("s"), reads("s", "all"))}), "twice"),
            (topology(bolts={"b": component(fields=("a", "a"))}), "twice in stream"),
            (
                topology(bolts={"b": component(object={"python": "__main__:B"})}),
                "only in the script",
            ),
            (
                topology(bolts={"b": component(object={"python": "m:f.<locals>.B"})}),
                "no worker can import",
            ),
            (
                topology(bolts={"b": component(object={"python": "m:<lambda>"})}),
                "no worker can import",
            ),
            (topology(bolts={"b": component(object={"python": "m;rm -rf:B"})}), "'module:name'"),
            (
                topology(bolts={"b": component(outputs={"__x": {"fields": []}})}),
                "belongs to the system",
            ),
        ],
    )
    def test_a_topology_that_cannot_run_is_refused_with_the_reason(
        self, spec: TopologySpec, message: str
    ) -> None:
        with pytest.raises(InvalidTopology, match=message):
            check(spec)

    @pytest.mark.parametrize("name", ["word_count-1.2", "1a", "a-", "a.b"])
    def test_names_that_are_fine(self, name: str) -> None:
        check(topology(name=name))

    @pytest.mark.parametrize("component_id", ["a/b", "a$b", "a<b>", "a#1", "a:b", "f()"])
    def test_component_ids_that_are_fine(self, component_id: str) -> None:
        check(topology(bolts={component_id: component(1, reads("s"))}))

    def test_a_direct_stream_takes_a_direct_grouping(self) -> None:
        spout = component(outputs={"default": {"fields": ["x"], "direct": True}})
        check(topology(spouts={"s": spout}, bolts={"b": component(1, reads("s", "direct"))}))

    @pytest.mark.parametrize(
        ("conf", "message"),
        [
            ({"topology.workers": 0}, "at least 1"),
            ({"topology.acker.executors": -1}, "at least 0"),
            ({"topology.bolt.parallelism": {"b": "2"}}, "whole number"),
            (
                {"use.userdefine.assignment": [{"hots": "h1"}]},
                r"use\.userdefine\.assignment, worker 1",
            ),
        ],
    )
    def test_wrong_numbers_are_refused(self, conf: dict[str, Any], message: str) -> None:
        with pytest.raises(InvalidTopology, match=message):
            check(topology(bolts={"b": component(1, reads("s"))}), **conf)

    def test_a_conf_without_workers_is_refused(self) -> None:
        with pytest.raises(InvalidTopology, match=r"topology\.workers is not set"):
            validate_topology(topology(), {})
        assert check(topology(), **{"topology.workers": None}), "null: the cluster's value"


class TestTasks:
    def test_ids_follow_the_declared_order(self) -> None:
        spec = topology(
            spouts={"z": component(2), "y": component()},
            bolts={"b": component(2, reads("z")), "a": component(1, reads("b"))},
        )
        conf = default_conf()
        table = number_tasks(with_system_components(check(spec), conf), conf)
        assert {name: part.tasks for name, part in table.components.items()} == {
            "b": "1-2",
            "a": "3",
            "__acker": "4",
            "__topology_master": "5",
            "z": "6-7",
            "y": "8",
        }
        assert table.components["y"].type == "spout" and table.components["__acker"].type == "bolt"

    def test_ackers_are_capped_and_may_be_none(self) -> None:
        for ackers, most, expected in ((5, 2, 2), (0, None, 0), (None, None, 1)):
            conf = {
                **default_conf(),
                "topology.acker.executors": ackers,
                "topology.max.task.parallelism": most,
            }
            whole = with_system_components(topology(), conf)
            part = number_tasks(whole, conf).components.get("__acker")
            assert (len(part.ids) if part else 0) == expected

    def test_the_acker_hears_everyone(self) -> None:
        whole = with_system_components(
            topology(bolts={"b": component(1, reads("s"))}), default_conf()
        )
        heard = {(part.component, part.stream) for part in whole.bolts["__acker"].inputs}
        assert heard == {
            ("s", "__ack_init"),
            ("b", "__ack_ack"),
            ("b", "__ack_fail"),
            ("b", "__ack_reset_timeout"),
        }
        for source, stream in heard:
            part = whole.component(source)
            assert part is not None and stream in part.outputs
        assert list(whole.bolts)[-3:] == ["__acker", "__topology_master", "__system"]

    @pytest.mark.parametrize(
        ("tasks", "groups", "sizes"),
        [
            (5, 3, [2, 2, 1]),
            (12, 8, [2, 2, 2, 2, 1, 1, 1, 1]),
            (2, 5, [1, 1]),
            (3, 0, []),
            (0, 2, []),
        ],
    )
    def test_a_partition_has_its_larger_groups_first(
        self, tasks: int, groups: int, sizes: list[int]
    ) -> None:
        parts = partition(range(1, tasks + 1), groups)
        assert [len(part) for part in parts] == sizes

    @given(st.integers(1, 60), st.integers(1, 80))
    def test_partition_is_even_and_complete(self, tasks: int, groups: int) -> None:
        parts = partition(range(1, tasks + 1), groups)
        assert [task for part in parts for task in part] == list(range(1, tasks + 1))
        sizes = [len(part) for part in parts]
        assert sizes == sorted(sizes, reverse=True) and sizes[0] - sizes[-1] <= 1
        assert len(parts) == min(tasks, groups)


def table_of(**counts: int) -> TaskTable:
    components: dict[str, ComponentTasks] = {}
    first = 1
    for name, count in counts.items():
        components[name] = ComponentTasks(
            type="bolt", tasks=encode_ranges(range(first, first + count))
        )
        first += count
    return TaskTable(components=components)


class TestRescale:
    def test_new_ids_come_above_the_highest_and_go_first(self) -> None:
        table = table_of(split=4, count=2)
        wider = rescale(table, {"split": 6})
        assert wider.components["split"].ids == (1, 2, 3, 4, 7, 8)
        assert rescale(wider, {"split": 4}) == table

    def test_several_at_once_share_no_id(self) -> None:
        wider = rescale(table_of(a=1, b=1), {"a": 3, "b": 2})
        assert (wider.components["a"].ids, wider.components["b"].ids) == ((1, 3, 4), (2, 5))

    def test_fixed_tasks_keep_their_ids(self) -> None:
        table = table_of(a=4)
        assert rescale(table, {"a": 2}, {"a"}) == table
        assert executors_of(table, {"a": 2})["a"] == ((1, 2), (3, 4))
        with pytest.raises(InvalidRequest, match=r"topology\.tasks"):
            rescale(table, {"a": 5}, {"a"})
        spec = topology(bolts={"b": component(1, reads("s"), conf={"topology.tasks": 3})})
        assert fixed_task_components(check(spec)) == {"b"}

    @given(
        st.dictionaries(st.sampled_from("abcd"), st.integers(1, 9), min_size=1),
        st.dictionaries(st.sampled_from("abcd"), st.integers(1, 12)),
    )
    def test_ids_stay_unique_and_others_never_change(
        self, counts: dict[str, int], wanted: dict[str, int]
    ) -> None:
        before = table_of(**counts)
        after = rescale(before, wanted)
        ids = [task for part in after.components.values() for task in part.ids]
        assert len(ids) == len(set(ids))
        for name, part in before.components.items():
            if name not in wanted:
                assert after.components[name] == part
            else:
                assert len(after.components[name].ids) == wanted[name]
                kept = min(wanted[name], len(part.ids))
                assert after.components[name].ids[:kept] == part.ids[:kept]
