"""Events that components report, on their way into the Dagster of the code location that declared
the topology: a real leader, real instances, and a crash at each step.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import httpx
import msgspec
import pytest

from storm_dagster.defs.declared import events as declared_events
from storm_dagster.defs.declared.events import (
    EVENTS_SENSOR,
    MAX_TICK_EVENTS,
    cluster_key,
    fair_shares,
)
from storm_dagster.defs.declared.reports import reports_result
from storm_dagster.defs.keys import PARTITIONS_NAME
from storm_dagster.model import paths
from storm_dagster.model.dagster_events import DagsterEvent, target_key
from storm_rigs.dagster.dagster_results import shown
from storm_rigs.dagster.declared_location import CODE, DeclaredLocation
from storm_rigs.stage.dagster_world import DagsterWorld, connection_waits, leading_nimbus
from storm_rigs.stage.nimbus_thread import NimbusThread

pytestmark = [pytest.mark.dagster, pytest.mark.zookeeper]

LONG = pytest.mark.long
OWNER = "shop:prod"
HOURS = dg.HourlyPartitionsDefinition("2025-01-01-00:00")
CLICKS = dg.AssetKey(["lake", "clicks"])
TOPOLOGY = dg.AssetKey(["topologies", "wc"])


EACH_HOUR = dg.AutomationCondition.eager().without(dg.AutomationCondition.in_latest_time_window())


@dg.asset(deps=[CLICKS], partitions_def=HOURS, automation_condition=EACH_HOUR)
def pages_by_hour() -> None: ...


USER_DEFS = dg.Definitions(
    assets=[
        dg.AssetSpec(CLICKS, partitions_def=HOURS),
        dg.AssetSpec(["lake", "days"]),
        pages_by_hour,
    ],
    jobs=[dg.define_asset_job("check_wc", selection=dg.AssetSelection.checks_for_assets(TOPOLOGY))],
)


@dg.asset_check(asset=CLICKS)
def in_order() -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=True)


def event(kind: str = "observation", key: str = "lake/days", **fields: Any) -> DagsterEvent:
    return DagsterEvent.make("wc/count", kind, key, **fields)


def numbered(count: int, size: int = 0) -> list[DagsterEvent]:
    return [event(metadata={"number": number, "text": "x" * size}) for number in range(count)]


class Road:
    """A cluster in which topologies of :data:`OWNER` report, and a code location that pulls."""

    def __init__(self, world: DagsterWorld, folder: Path, names: tuple[str, ...]) -> None:
        self.world, self.folder, self.names = world, folder, names
        self.nimbus: NimbusThread | None = None
        self.location = self.locate(OWNER)
        conf = {"declared.code.version": self.location.version(names[0]), "declared.owner": OWNER}
        for name in names:
            world.instance.add_dynamic_partitions(PARTITIONS_NAME, [name])
            assert world.submit(name, conf=conf).success
            world.run_workers(name)

    def locate(self, owner: str, extra: dg.Definitions = USER_DEFS) -> DeclaredLocation:
        """The code location of that owner, with these definitions of the user."""
        checked = dg.Definitions.merge(extra, dg.Definitions(asset_checks=[in_order]))
        return DeclaredLocation(
            self.folder / owner.replace(":", "-"),
            self.world.home,
            self.world.instance,
            owner,
            names=self.names,
            code=CODE,
            blob_dir=self.world.home / "blobs",
            extra=checked,
        )

    def report(self, *events: DagsterEvent, name: str = "wc") -> None:
        """Report the events as a worker does, in requests of 50."""
        nimbus = self.nimbus
        assert nimbus is not None
        topology = self.world.topology(name)
        worker = next(iter(self.world.cluster.live_workers(topology.id).values()))
        headers = {"Authorization": f"Bearer {worker.token}"}
        documents = [
            {**msgspec.to_builtins(entry), "component": "count", "task": 3} for entry in events
        ]
        left = documents
        with httpx.Client(base_url=nimbus.url, timeout=60, headers=headers) as client:
            while left:
                body = {"events": left[:50]}
                response = client.post(f"/v1/topologies/{topology.id}/events", json=body)
                assert response.status_code == 200, response.text
                stored = len(response.json()["stored"])
                assert stored, response.text
                left = left[stored:]

    def waiting(self, name: str = "wc") -> int:
        """Events that the cluster keeps."""
        log = self.world.cluster.event_log(name)
        return 0 if log is None else log.waiting

    def tick(self) -> dg.SensorResult:
        return self.location.tick(EVENTS_SENSOR)

    def numbers(self) -> list[int]:
        """Numbers of the stored observations of `lake/days`, oldest first."""
        numbers: list[int] = []
        cursor: str | None = None
        while True:
            page = self.world.instance.fetch_observations(
                dg.AssetKey(["lake", "days"]), limit=1000, cursor=cursor, ascending=True
            )
            seen = [record.asset_observation for record in page.records]
            numbers += [int(str(shown(observation)["number"])) for observation in seen]
            if not page.has_more:
                return numbers
            cursor = page.cursor

    def errors(self) -> str:
        """Errors of the tasks of the component that reports."""
        errors = self.world.cluster.errors_by_component(self.world.topology("wc").id)
        return str(errors.get("count"))

    def reports_check(self) -> Any:
        """The newest evaluation of the check `reports`; ``None`` without one."""
        key = dg.AssetCheckKey(TOPOLOGY, "reports")
        record = self.world.instance.get_latest_asset_check_evaluation_record(key)
        return None if record is None else record.evaluation


@pytest.fixture
def instance(tmp_path: Path) -> Iterator[dg.DagsterInstance]:
    """On disk, so that a test can make the storage refuse an event."""
    (tmp_path / "dagster").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as made:
        yield made


@pytest.fixture
def names() -> tuple[str, ...]:
    """Topologies of :func:`road`."""
    return ("wc",)


@pytest.fixture
def road(
    world: DagsterWorld,
    names: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Road]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = Road(world, tmp_path / "code", names)
    # The nimbus reads the conf of a topology among its own blobs.
    shutil.copytree(world.home / "blobs", world.home / "nimbus" / "n1" / "blobs")
    with leading_nimbus(world) as made.nimbus:
        yield made


def test_events_come_in_order_with_all_their_fields(road: Road) -> None:
    hour = "2025-01-02-10:00"
    road.report(
        event("materialization", "lake/clicks", partition=hour, metadata={"rows": 9},
              data_version="v7", description="an hour"),
        event("check", "lake/clicks", check="in_order", passed=False, severity="WARN"),
        event(metadata={"number": 1}),
    )  # fmt: skip
    result = road.tick()
    made, check, seen = result.asset_events
    assert isinstance(made, dg.AssetMaterialization)
    assert isinstance(check, dg.AssetCheckEvaluation)
    assert isinstance(seen, dg.AssetObservation)
    assert (made.asset_key, made.partition, made.description) == (CLICKS, hour, "an hour")
    assert (made.tags or {})["dagster/data_version"] == "v7"
    assert made.metadata["rows"].value == 9
    assert made.metadata["storm/topology"].value == road.world.topology("wc").id
    assert len(str(made.metadata["storm/event"].value)) == 32
    assert (check.check_name, check.passed, check.severity.value) == ("in_order", False, "WARN")


@pytest.mark.long
def test_the_reports_of_tasks_on_a_table_are_one_materialization(road: Road) -> None:
    wc = road.location.topologies["wc"]
    words = dg.AssetKey(["mart", "words"])
    road.location.topologies["wc"] = replace(wc, targets={("count", "postgres", "words"): words})

    def table_report(component: str, rows: int) -> DagsterEvent:
        key = target_key(component, "postgres/words")
        metadata = {"rows": rows, "tasks": 1, "newest_event_time": f"2025-01-02T0{rows}:00:00"}
        return DagsterEvent.make("wc/count", "materialization", key, metadata=metadata)

    road.report(
        table_report("count", 3),
        event(metadata={"number": 1}),
        table_report("count", 4),
        table_report("gone", 5),
    )
    seen, made, check = road.tick().asset_events
    assert isinstance(check, dg.AssetCheckEvaluation), "the table is an asset of no location"
    assert isinstance(seen, dg.AssetObservation)
    assert isinstance(made, dg.AssetMaterialization)
    assert made.asset_key == words
    assert (made.metadata["rows"].value, made.metadata["tasks"].value) == (7, 2)
    assert made.metadata["newest_event_time"].value == "2025-01-02T04:00:00"
    road.tick()
    assert road.waiting() == 0


def test_an_asset_below_starts_by_the_event_and_a_wrong_partition_stops_none(road: Road) -> None:
    hours = {"2025-01-02-10:00", "2025-01-02-11:00"}
    cursor: Any = None

    def requested() -> set[str | None]:
        nonlocal cursor
        result = dg.evaluate_automation_conditions(
            road.location.defs, road.world.instance, cursor=cursor
        )
        cursor = result.cursor
        return set(result.get_requested_partitions(pages_by_hour.key))

    assert requested() == set()
    keys = ["2025-01-02-10:00", "nonsense", "2025-01-02-11:00"]
    road.report(*(event("materialization", "lake/clicks", partition=key) for key in keys))
    road.tick()
    assert requested() == hours


CRASHES = {
    "before the tick": None,
    "before its events are stored": 0,
    "amid its events": 2,
    "before its cursor is stored": 5,
}


@pytest.mark.parametrize(
    "stored",
    [
        pytest.param(stored, id=crash, marks=LONG if stored != 5 else ())
        for crash, stored in CRASHES.items()
    ],
)
def test_a_crash_repeats_events_and_loses_none(road: Road, stored: int | None) -> None:
    road.report(*numbered(5))
    if stored is not None:
        result = road.location.evaluate(EVENTS_SENSOR)
        road.location.store(result, EVENTS_SENSOR, events=stored)
        assert road.waiting() == 5, "what Dagster may not have stored is kept"
    road.tick()
    assert road.waiting() == 5, "the cursor of this tick is stored after it"
    road.tick()
    assert road.waiting() == 0
    assert road.numbers() == [*range(stored or 0), *range(5)]


@pytest.mark.long
def test_an_acknowledgment_is_repeated_after_a_crash(road: Road) -> None:
    road.report(*numbered(3))
    road.tick()
    acknowledging = road.location.evaluate(EVENTS_SENSOR)
    assert road.waiting() == 0 and not acknowledging.asset_events
    # Its cursor is not stored: the next tick acknowledges the same events, and gets new ones.
    road.report(event(metadata={"number": 3}))
    road.tick()
    road.tick()
    assert road.numbers() == [0, 1, 2, 3]
    assert road.waiting() == 0


@pytest.mark.long
def test_repeated_events_keep_their_id(road: Road) -> None:
    road.report(*numbered(1))
    first = road.location.evaluate(EVENTS_SENSOR).asset_events
    second = road.location.evaluate(EVENTS_SENSOR).asset_events
    assert first[0].metadata["storm/event"] == second[0].metadata["storm/event"]


@pytest.mark.long
def test_a_location_with_a_new_name_repeats_what_was_not_acknowledged(road: Road) -> None:
    road.report(*numbered(2))
    road.tick()
    # The cursor belongs to the name of the location. The owner is the module.
    road.location.cursors.clear()
    road.tick()
    road.tick()
    assert road.numbers() == [0, 1, 0, 1]
    assert road.waiting() == 0


@pytest.mark.long
def test_more_than_a_tick_carries_comes_in_the_next_ones(road: Road) -> None:
    road.report(*numbered(450))
    counts = [len(road.tick().asset_events) for _ in range(4)]
    assert counts == [MAX_TICK_EVENTS, MAX_TICK_EVENTS, 50, 0]
    assert road.numbers() == list(range(450))


@pytest.mark.long
def test_events_of_16_kib_come_in_smaller_pages(road: Road) -> None:
    road.report(*numbered(100, size=16_000))
    ticks = [len(road.tick().asset_events) for _ in range(4)]
    assert sum(ticks) == 100 and 0 < ticks[0] < 100
    assert road.numbers() == list(range(100))


class TestSeveralTopologies:
    @pytest.fixture
    def names(self) -> tuple[str, ...]:
        return ("busy", "quiet", "wc")

    @pytest.mark.long
    def test_a_busy_topology_leaves_room_for_the_others(self, road: Road) -> None:
        road.report(*numbered(250), name="busy")
        road.report(event(metadata={"number": 1000}), name="quiet")
        events = road.tick().asset_events
        assert len(events) == MAX_TICK_EVENTS
        assert 1000 in road.numbers()


def test_shares_are_fair_and_complete() -> None:
    assert fair_shares({"a": 500, "b": 3, "c": 500}, 200) == {"a": 99, "b": 3, "c": 98}
    assert fair_shares({"a": 1, "b": 0}, 200) == {"a": 1, "b": 0}
    assert sum(fair_shares({str(n): 5 for n in range(300)}, 200).values()) == 200
    assert fair_shares({}, 200) == {}


UNDEFINED = {
    "asset": (event("materialization", "lake/clickz"), "'lake/clicks'"),
    "partition": (
        event("materialization", "lake/clicks", partition="2025-13-01"),
        "its newest key is",
    ),
    "not partitioned": (
        event("materialization", "lake/days", partition="2025-01-02"),
        "not partitioned",
    ),
    "no partition": (event("materialization", "lake/clicks"), "partition="),
    "check": (event("check", "lake/clicks", check="in_ordr", passed=True), "'in_order'"),
}


@pytest.mark.parametrize(
    ("bad", "hint"),
    [
        pytest.param(*case, id=part, marks=LONG if part != "asset" else ())
        for part, case in UNDEFINED.items()
    ],
)
def test_what_is_not_defined_is_a_red_check_and_an_error_of_the_task(
    road: Road, bad: DagsterEvent, hint: str
) -> None:
    road.report(bad, event(metadata={"number": 1}))
    road.tick()
    assert road.numbers() == [1], "those behind it are not blocked"
    check = road.reports_check()
    assert not check.passed and check.severity == dg.AssetCheckSeverity.ERROR
    assert bad.asset in check.description and hint in check.description
    road.tick()
    assert road.waiting() == 0
    errors = road.errors()
    assert bad.asset in errors and hint.strip("'") in errors


@pytest.mark.long
def test_a_hour_that_has_not_ended_is_a_known_partition(road: Road) -> None:
    road.report(event("materialization", "lake/clicks", partition="2999-01-01-00:00"))
    road.tick()
    assert road.reports_check() is None


@pytest.mark.long
def test_the_check_is_green_once_the_asset_is_defined(road: Road) -> None:
    road.report(event("materialization", "lake/clickz"))
    road.tick()
    assert not road.reports_check().passed
    # The other sensor and a run evaluate the check as well, and keep its reason.
    road.location.tick()
    assert not road.reports_check().passed
    assert road.location.run("check_wc").success
    assert not road.reports_check().passed and "lake/clickz" in road.reports_check().description
    defined = dg.Definitions.merge(USER_DEFS, dg.Definitions([dg.AssetSpec(["lake", "clickz"])]))
    cursors = road.location.cursors
    road.location = road.locate(OWNER, defined)
    road.location.cursors = cursors
    road.tick()
    assert road.reports_check().passed
    road.tick()
    assert "!wc" not in str(road.location.cursors[EVENTS_SENSOR])


@pytest.mark.long
def test_an_event_that_the_storage_refuses_blocks_none_behind_it(
    road: Road, tmp_path: Path
) -> None:
    road.report(event(key="lake/bad"), event(metadata={"number": 1}))
    trigger = """create trigger refuse before insert on event_logs
        when new.asset_key like '%bad%' begin select raise(abort, 'refused'); end"""
    for path in (tmp_path / "dagster").rglob("*.db"):
        with sqlite3.connect(path) as database:
            if database.execute("select 1 from sqlite_master where name = 'event_logs'").fetchone():
                database.execute(trigger)
    for _ in range(2):
        with pytest.raises(Exception, match="refused"):
            road.tick()
    road.tick()
    assert road.numbers() == [1]
    road.tick()
    assert road.waiting() == 0
    assert "cannot store" in road.errors() and "lake/bad" in road.errors()


@pytest.mark.long
def test_another_owner_gets_no_events_and_the_owner_is_named(road: Road) -> None:
    road.report(*numbered(2))
    branch = road.locate("shop:branch")
    result = branch.tick(EVENTS_SENSOR)
    assert not result.asset_events
    assert OWNER in str(result.skip_reason)
    road.tick()
    assert road.numbers() == [0, 1]


@pytest.mark.long
def test_a_cluster_that_is_made_anew_begins_from_its_oldest_event(road: Road) -> None:
    road.report(*numbered(3))
    road.tick()
    state = road.world.cluster.state
    log = paths.event_log("wc")
    for child in state.find_children(log) or ():
        state.delete_node(f"{log}/{child}")
    state.delete_node(log)
    road.report(event(metadata={"number": 7}))
    result = road.tick()
    assert "another event log" in str(result.skip_reason)
    assert road.numbers() == [0, 1, 2, 7]


@pytest.mark.long
def test_a_cluster_out_of_reach_keeps_the_cursor(
    road: Road, monkeypatch: pytest.MonkeyPatch
) -> None:
    road.report(*numbered(2))
    road.tick()
    with pytest.MonkeyPatch.context() as away:
        connection_waits(away)
        result = road.tick()
        assert "does not answer" in str(result.skip_reason) and not result.asset_events
    road.tick()
    assert road.waiting() == 0
    assert road.numbers() == [0, 1]


@pytest.mark.long
def test_a_cursor_that_a_user_has_changed_begins_from_the_oldest_event(road: Road) -> None:
    road.report(*numbered(1))
    key = cluster_key(road.location.topologies["wc"])
    for part in ("5", '{"wc": 5, "!wc": 7}', '{"wc": ["x", "y"], "!wc": [[1], "z"]}'):
        road.location.cursors[EVENTS_SENSOR] = f'{{"{key}": {part}}}'
        assert len(road.location.evaluate(EVENTS_SENSOR).asset_events) >= 1
    road.tick()
    assert road.numbers() == [0]


@pytest.mark.long
def test_a_cursor_ahead_of_a_restored_cluster_acknowledges_nothing(road: Road) -> None:
    """The cluster counts again from the number of its backup; the cursor is of the time after."""
    road.report(*numbered(1))
    log = road.world.cluster.event_log("wc")
    assert log is not None
    key = cluster_key(road.location.topologies["wc"])
    road.location.cursors[EVENTS_SENSOR] = f'{{"{key}": {{"wc": ["{log.log}", 500]}}}}'
    road.tick()
    assert (road.waiting(), road.numbers()) == (1, [0])
    road.tick()
    assert (road.waiting(), road.numbers()) == (0, [0])


@pytest.mark.long
def test_a_tick_that_has_no_time_left_leaves_events_to_the_next(
    road: Road, monkeypatch: pytest.MonkeyPatch
) -> None:
    road.report(*numbered(2))
    with pytest.MonkeyPatch.context() as slow:
        slow.setattr(declared_events, "_PULL_SECS", 0.0)
        result = road.tick()
        assert not result.asset_events and "next one" in str(result.skip_reason)
    road.tick()
    assert road.numbers() == [0, 1]


@pytest.mark.long
def test_waiting_events_are_shown_and_late_ones_fail_the_check(road: Road) -> None:
    road.report(*numbered(2))
    # The sensor of the events may be stopped: the other one says so.
    road.location.tick()
    check = road.reports_check()
    assert check.passed and "2 events wait since" in check.description
    summary = road.world.cluster.event_log("wc")
    assert summary is not None and summary.since is not None
    late = reports_result(summary, [], summary.since + 601.0)
    assert not late.passed and late.severity == dg.AssetCheckSeverity.WARN
    assert "start topology_events_sensor" in str(late.description)
