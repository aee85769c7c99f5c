"""`topology_events_sensor`: the events of declared topologies, pulled into this Dagster.

The cluster keeps each event until the location acknowledges it. Dagster stores the events of a
tick, then its cursor, only after the tick has returned. So a tick first acknowledges what its
cursor, the stored one, names, and then pulls the next events. A crash in between repeats events
with their id, and loses none.
"""

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from storm_dagster.client import NimbusClient
from storm_dagster.defs.declared.reports import (
    REPORTS_CHECK,
    AssetEvent,
    DefinedAssets,
    ReportedPart,
    asset_event,
    reports_result,
    stored_undefined,
)
from storm_dagster.defs.declared.targets import merge_reports, translated_event
from storm_dagster.defs.declared.topology import DeclaredTopology
from storm_dagster.defs.observe.checks import outcome_of
from storm_dagster.defs.observe.sensors import digest, read_cursor
from storm_dagster.model.bounded_map import BoundedMap
from storm_dagster.model.dagster_events import DagsterEvent, decode_event
from storm_dagster.model.errors import StormDagsterError, error_text
from storm_dagster.model.event_log import EventLogSummary
from storm_dagster.model.multimap import multimap

EVENTS_SENSOR = "topology_events_sensor"
_INTERVAL_SECS = 10
MAX_TICK_EVENTS = 200
"""Events of a tick, of all topologies. Dagster stores one in about 13 ms."""
_PULL_SECS = 20.0
"""Time after which a tick begins no request.

One that is under way ends within 30 s, before Dagster ends the tick after 60 s.
"""
_MAX_PROBLEMS = 10
"""Undefined parts of a topology that its check names, and errors of its tasks in a tick."""
_PROBLEM_FIELDS = 5
_PROBLEM_SECS = 86_400.0
"""Time after which the check forgets a part that no event has had since."""
_DIRECT_AFTER = 2
"""Repetitions of a tick after which it stores its events itself, one by one."""


def cluster_key(topology: DeclaredTopology) -> str:
    """Key of the topology's cluster in the cursors."""
    zookeeper = topology.zookeeper
    return digest([zookeeper.home, zookeeper.conf_dir])[:8]


def fair_shares(waiting: Mapping[str, int], total: int) -> dict[str, int]:
    """Topology -> events that it may get of ``total``.

    None gets more than ``waiting`` for it, and none that could take more gets less than another.
    Those that come first in the mapping get the remainder.
    """
    shares = dict.fromkeys(waiting, 0)
    pending = [name for name, count in waiting.items() if count > 0]
    while pending and total > 0:
        fair_share = max(1, total // len(pending))
        for name in pending:
            part = min(fair_share, waiting[name] - shares[name], total)
            shares[name] += part
            total -= part
        pending = [name for name in pending if shares[name] < waiting[name]]
    return shares


@dataclass
class LogCursor:
    """Part of the cursor: how far the events of one topology's name are stored."""

    log: str
    """Event log that the number belongs to; another one begins from its oldest event."""
    number: int
    """Number of the last event that Dagster has stored, once it has stored this cursor."""
    undefined: dict[str, str] = field(default_factory=dict)
    """Number -> reason, of events after the former cursor that nothing here shows.

    There is one for each reason and task.
    """

    def encode(self) -> list[Any]:
        """The cursor as JSON: ``[log, number]``, and the reasons if there are some."""
        return [self.log, self.number, *([self.undefined] if self.undefined else [])]

    @staticmethod
    def decode(document: Any) -> "LogCursor | None":
        """The cursor of the JSON; ``None`` for another document."""
        try:
            log, number, *reasons = document
        except (TypeError, ValueError):
            return None
        if not isinstance(log, str) or not isinstance(number, int):
            return None
        undefined = reasons[0] if reasons and isinstance(reasons[0], dict) else {}
        return LogCursor(log, number, undefined)


@dataclass(frozen=True)
class _Problem:
    """A part that the location does not define, and the time of its last event."""

    part: ReportedPart
    at: float

    def encode(self) -> list[Any]:
        """The problem as JSON, in :data:`_PROBLEM_FIELDS` fields."""
        part = self.part
        return [part.kind, part.asset, part.partition, part.check, round(self.at)]


class _Problems:
    """Undefined parts of one topology, as the cursor keeps them."""

    def __init__(self, document: Any) -> None:
        self._problems: BoundedMap[Any, _Problem] = BoundedMap(_MAX_PROBLEMS)
        self.are_kept = document is not None
        """True if there is a problem, or was at the last tick."""
        for entry in document if isinstance(document, list) else ():
            if isinstance(entry, list) and len(entry) == _PROBLEM_FIELDS:
                kind, asset, partition, check, at = entry
                self._add(_Problem(ReportedPart(kind, asset, partition, check), at))

    def _add(self, problem: _Problem) -> None:
        # It becomes the newest one.
        self._problems.pop(problem.part.key, None)
        self._problems[problem.part.key] = problem

    def add(self, part: ReportedPart, now: float) -> None:
        """Remember an event that nothing in the location shows."""
        self.are_kept = True
        self._add(_Problem(part, now))

    def texts(self, defined_assets: DefinedAssets, now: float) -> list[str]:
        """Reasons of the parts that are still undefined; the others are forgotten."""
        texts: list[str] = []
        for key, problem in list(self._problems.items()):
            text = defined_assets.problem(problem.part)
            if text is None or now - problem.at > _PROBLEM_SECS:
                del self._problems[key]
            else:
                texts.append(text)
        return texts

    def encode(self) -> list[Any]:
        """The problems as JSON."""
        return [problem.encode() for problem in self._problems.values()]


class EventTick:
    """One tick of the sensor: the cursor that it got, and the next one."""

    def __init__(
        self,
        cursor: Mapping[str, Any],
        defined_assets: DefinedAssets,
        instance: dg.DagsterInstance,
        log: logging.Logger,
        *,
        stores_events: bool = False,
    ) -> None:
        """With ``stores_events`` the tick stores its events itself (see :meth:`_store`)."""
        self._cursor = cursor
        self._defined_assets = defined_assets
        self._instance = instance
        self._log = log
        self._stores_events = stores_events
        self._started = time.monotonic()
        self._now = time.time()
        self._room = MAX_TICK_EVENTS
        self.next_cursor: dict[str, Any] = {}
        """Key of a cluster -> name -> its :class:`LogCursor`, and ``!name`` -> its problems."""
        self.events: list[AssetEvent] = []
        """Events that Dagster stores after the tick."""
        self.pulled = 0
        self.notes: list[str] = []
        """Sentences for the page of the sensor."""

    def read_clusters(self, clusters: Mapping[str, Sequence[DeclaredTopology]]) -> None:
        """Acknowledge and pull the events of all clusters: key -> its declared topologies."""
        clusters_left = len(clusters)
        for key, topologies in clusters.items():
            if self._is_in_time():
                # A cluster leaves each of the next ones its share of the tick.
                self._read_cluster(key, topologies, self._room // clusters_left)
            else:
                self.next_cursor[key] = self._cursor.get(key)
                self.notes.append("the tick is over, other clusters come in the next one")
            clusters_left -= 1

    def _read_cluster(self, key: str, topologies: Sequence[DeclaredTopology], room: int) -> None:
        """Acknowledge and pull at most ``room`` events of one cluster.

        An unreachable cluster keeps its part of the cursor.
        """
        part = self._cursor.get(key)
        part = dict(part) if isinstance(part, dict) else {}
        problems: dict[str, _Problems] = {}
        for topology in topologies:
            problems[topology.name] = _Problems(part.pop(f"!{topology.name}", None))
        cursors: dict[str, LogCursor] = {}
        for name, document in part.items():
            cursor = LogCursor.decode(document)
            if cursor is not None:
                cursors[name] = cursor
        logs: dict[str, EventLogSummary] = {}
        try:
            with topologies[0].zookeeper.cluster(self._instance) as cluster:
                logs = cluster.event_logs()
            # Without its log a cursor has no meaning.
            for name in cursors.keys() - logs.keys():
                del cursors[name]
            self._read_logs(topologies, logs, cursors, problems, room)
        except StormDagsterError as error:
            self.notes.append(error.message)
        next_part: dict[str, Any] = {name: cursor.encode() for name, cursor in cursors.items()}
        for topology in topologies:
            name = topology.name
            if self._check(topology, logs.get(name), problems[name]):
                next_part[f"!{name}"] = problems[name].encode()
        self.next_cursor[key] = next_part

    def _read_logs(
        self,
        topologies: Sequence[DeclaredTopology],
        logs: Mapping[str, EventLogSummary],
        cursors: dict[str, LogCursor],
        problems: Mapping[str, _Problems],
        room: int,
    ) -> None:
        """Acknowledge in all logs in which events wait, then pull a fair share from each."""
        declared = {topology.name: topology for topology in topologies}
        names = [name for name in declared if name in logs and logs[name].waiting]
        if not names:
            # No request: most ticks end here.
            return
        names.sort(key=lambda name: (logs[name].since or 0, name))
        waiting: dict[str, int] = {}
        with topologies[0].nimbus.client(patience_secs=2.0) as nimbus:
            # Without a leader the tick waits once, and not for each topology.
            nimbus.leader()
            for name in names:
                topology = declared[name]
                with self._attempt(name) as is_in_time:
                    if is_in_time:
                        waiting[name] = self._acknowledge(nimbus, topology, logs[name], cursors)
            for name, share in fair_shares(waiting, room).items():
                topology = declared[name]
                with self._attempt(name) as is_in_time:
                    if is_in_time and share:
                        self._pull(nimbus, topology, share, cursors, problems[name])

    def _is_in_time(self) -> bool:
        """True if the tick may begin another request."""
        return time.monotonic() - self._started < _PULL_SECS

    @contextmanager
    def _attempt(self, name: str) -> Iterator[bool]:
        """A request of one topology, whose error is a note; false if the tick has no time for it.

        So the other topologies of the cluster continue.
        """
        is_in_time = self._is_in_time()
        if not is_in_time:
            self.notes.append(f"{name}: the tick is over, its events come in the next one")
        try:
            yield is_in_time
        except StormDagsterError as error:
            self.notes.append(error.message)

    def _acknowledge(
        self,
        nimbus: NimbusClient,
        topology: DeclaredTopology,
        summary: EventLogSummary,
        cursors: dict[str, LogCursor],
    ) -> int:
        """Acknowledge the events of the stored cursor; the number of those that still wait."""
        name = topology.name
        cursor = cursors.get(name)
        if cursor is None:
            return summary.waiting
        if cursor.log != summary.log:
            self._note_new_log(name)
            del cursors[name]
            return summary.waiting
        response = nimbus.post(
            f"/v1/topologies/{name}/events/taken",
            {
                "log": cursor.log,
                "owner": _owner(topology),
                "number": cursor.number,
                "undefined": cursor.undefined,
            },
        )
        cursor.undefined = {}
        return int(response["waiting"])

    def _note_new_log(self, name: str) -> None:
        """Say that the events of a former log are gone or were stored."""
        text = (
            f"{name}: the cluster has another event log than at the last tick, which is read from "
            "its oldest event; events of the former one that were not stored yet are lost with it"
        )
        self.notes.append(text)
        self._log.warning(text)

    def _pull(
        self,
        nimbus: NimbusClient,
        topology: DeclaredTopology,
        share: int,
        cursors: dict[str, LogCursor],
        problems: _Problems,
    ) -> None:
        """Pull at most ``share`` events of one topology."""
        name = topology.name
        cursor = cursors.get(name)
        options: dict[str, Any] = {"owner": _owner(topology), "limit": share}
        if cursor is not None:
            options.update(log=cursor.log, after=cursor.number)
        page = nimbus.get(f"/v1/topologies/{name}/events", **options)
        if page["log"] is None or not page["events"]:
            return
        number_of_reason = self._take_page(topology, page["events"], problems)
        newest = list(number_of_reason.items())[-_MAX_PROBLEMS:]
        undefined = {number: reason for (reason, _), number in newest}
        self.pulled += len(page["events"])
        self._room -= len(page["events"])
        last = page["events"][-1]["number"]
        cursors[name] = LogCursor(page["log"], last, undefined)

    def _take_page(
        self,
        topology: DeclaredTopology,
        documents: Sequence[Mapping[str, Any]],
        problems: _Problems,
    ) -> dict[tuple[str, int | None], str]:
        """Take the events of a page for Dagster.

        (Reason, task) -> number of the newest event that nothing in the location shows for that
        reason: a cursor is small, so that each reason is one error of a task.
        """
        numbers: dict[tuple[str, int | None], str] = {}
        taken: list[Mapping[str, Any]] = []
        events: list[DagsterEvent] = []
        for document in documents:
            try:
                events.append(decode_event(document["event"]))
            except Exception as error:
                # Whatever is wrong with one event must not block those behind it.
                reason = f"Dagster does not accept the event: {error_text(error)}"[:1000]
                numbers[reason, document.get("task")] = str(document["number"])
            else:
                taken.append(document)
        for index, event in merge_reports(events).items():
            document = taken[index]
            reason = self._take(topology, event, str(document["topology"]), problems)
            if reason is not None:
                numbers[reason, document.get("task")] = str(document["number"])
        return numbers

    def _take(
        self,
        topology: DeclaredTopology,
        reported: DagsterEvent,
        topology_id: str,
        problems: _Problems,
    ) -> str | None:
        """Take one event for Dagster; the reason if nothing in the location shows it.

        A sink's report on a table that the declaration no longer has is dropped.
        """
        event = translated_event(topology, reported)
        if event is None:
            return None
        try:
            event_for_dagster = asset_event(event, topology_id)
        except Exception as error:
            return f"Dagster does not accept the event: {error_text(error)}"[:1000]
        if not self._stores_events:
            self.events.append(event_for_dagster)
        elif not self._store(event_for_dagster):
            return f"Dagster cannot store the {event.kind} of asset {event.asset!r}"[:1000]
        reason = self._defined_assets.problem(ReportedPart.of(event))
        if reason is not None:
            problems.add(ReportedPart.of(event), self._now)
        return reason

    def _store(self, event: AssetEvent) -> bool:
        """Store an event in the tick; false if Dagster refuses it, while it stores others.

        The error of Dagster if it stores none: then the tick fails, and the next one repeats it.
        """
        try:
            self._instance.report_runless_asset_event(event)
        except Exception as error:
            self._log.warning(
                f"{type(event).__name__} of {event.asset_key} is refused: {error_text(error)}"
            )
            # A storage that is away is not the fault of the event.
            probe = dg.AssetObservation(
                dg.AssetKey(["storm", "refused_event"]),
                description="An event of a topology that this instance cannot store.",
                metadata={"error": error_text(error)[:1000]},
            )
            self._instance.report_runless_asset_event(probe)
            return False
        return True

    def _check(
        self, topology: DeclaredTopology, log: EventLogSummary | None, problems: _Problems
    ) -> bool:
        """Evaluate the check `reports` if its undefined parts have changed.

        False if the cursor needs no problems: none is left, and Dagster has stored that.
        """
        if not problems.are_kept:
            return False
        texts = problems.texts(self._defined_assets, self._now)
        # The other sensor evaluates the check as well, and repeats texts of a moment ago.
        if texts == stored_undefined(self._instance, topology.key):
            return bool(texts)
        result = reports_result(log, texts, self._now)
        self.events.append(outcome_of(result, topology.key, REPORTS_CHECK, dg.AssetCheckEvaluation))
        return True


def _owner(topology: DeclaredTopology) -> str:
    """Owner for whom the events of the topology are pulled."""
    return topology.declaration.owner or ""


class _Repetitions:
    """Counter of ticks whose events Dagster did not store, in this process."""

    def __init__(self) -> None:
        self._cursor: str | None = None
        self._count = 0

    def count(self, cursor: str | None) -> int:
        """Number of earlier ticks with events that got the same cursor."""
        return self._count if cursor == self._cursor else 0

    def note(self, cursor: str | None, has_events: bool) -> None:
        """Note a tick that returns."""
        self._count = self.count(cursor) + 1 if has_events else 0
        self._cursor = cursor


def events_sensor(
    topologies: Mapping[str, DeclaredTopology], default_status: dg.DefaultSensorStatus
) -> dg.SensorDefinition:
    """The sensor of the events of the ``topologies``, which it reads in each tick."""
    repetitions = _Repetitions()

    @dg.sensor(
        name=EVENTS_SENSOR,
        minimum_interval_seconds=_INTERVAL_SECS,
        default_status=default_status,
        description="Stores what spouts and bolts of the declared topologies report: "
        f"materializations, observations and checks, at most {MAX_TICK_EVENTS} a tick.",
    )
    def pull(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        tick = EventTick(
            read_cursor(context.cursor),
            DefinedAssets(context.repository_def, context.instance),
            context.instance,
            context.log,
            stores_events=repetitions.count(context.cursor) >= _DIRECT_AFTER,
        )
        clusters = multimap((cluster_key(topology), topology) for topology in topologies.values())
        tick.read_clusters(clusters)
        repetitions.note(context.cursor, bool(tick.pulled))
        text = f"{tick.pulled} events" if tick.pulled else "no event waits"
        return dg.SensorResult(
            asset_events=tick.events,
            skip_reason=dg.SkipReason("; ".join([text, *tick.notes[:20]])),
            cursor=json.dumps(tick.next_cursor),
        )

    return pull
