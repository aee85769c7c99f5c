"""The healing sensor: it blocks on ZooKeeper watches and requests a reassignment when tasks are
dead.

A tick lasts up to 45 seconds (Dagster cuts it off at 60), or one second where sensors share a
thread. Watches only end its waiting; every decision is made from one view of the cluster. Because
limits pass without any event, it also polls every five seconds. While a run that it requested does
not start, it gives up ``/healer``: the leader heals then.
"""

import json
import os
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import dagster as dg
from msgspec import UNSET
from msgspec.structs import replace

from storm_dagster.core.liveness.causes import Cause
from storm_dagster.core.liveness.detection import LivenessLimits, LivenessResult
from storm_dagster.core.liveness.step import HealingSettings, healing_step
from storm_dagster.defs.binding import bind
from storm_dagster.defs.healing.memory import (
    REASSIGN_OP,
    HealingCursor,
    HealingMemory,
    Recovery,
    Restart,
    assign_attempt_numbers,
    recoveries,
    restarts,
    run_requests,
    spare_observations,
    spare_runs,
)
from storm_dagster.defs.instance_settings import tick_limit
from storm_dagster.defs.keys import (
    ACTIVE_TOPOLOGY,
    SUPERVISORS,
    UNFINISHED_STATUSES,
    WAITING_STATUSES,
    WORKERS,
)
from storm_dagster.defs.metadata import table
from storm_dagster.defs.resources.handles import ZooKeeperResource
from storm_dagster.host.clock import boot_clock, boot_id
from storm_dagster.host.memory import return_free_memory
from storm_dagster.model import paths
from storm_dagster.model.dagster_names import REASSIGN_JOB, DagsterNames
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.model.multimap import multimap
from storm_dagster.model.view import ClusterView
from storm_dagster.zk.cached_state import CachedReads
from storm_dagster.zk.cluster_state import ZooKeeperClusterState
from storm_dagster.zk.storm_cluster_state import StormClusterState

_TICK_SECS = 45.0
# Dagster cuts a tick off after 60 seconds, and its cursor with it.
_MAX_TICK_SECS = 55.0
_POLL_EVERY_SECS = 5.0
_COALESCE_SECS = 0.15
_BETWEEN_POLLS_SECS = 0.5
# Longer than the pause between two ticks: after more, silence of the sensor is not silence of a
# worker.
_BLIND_SECS = 20.0
# A run that has not started by then waits behind somebody's queue.
_LONGEST_QUEUE_SECS = 30.0
# A run that was killed hard stays "started" for ever; it must not keep its topology from being
# healed.
_LONGEST_RUN_SECS = 360.0


class _Watch:
    """The armed sensor: one ZooKeeper session with its watches, and the node that marks it as
    armed.
    """

    def __init__(self, cluster: StormClusterState) -> None:
        self.cluster = cluster
        self._changed = threading.Event()
        self._interrupted = threading.Event()
        cluster.state.add_listener(self._on_connection)
        self._reads: CachedReads | None = None
        if isinstance(cluster.state, ZooKeeperClusterState):
            self._reads = CachedReads(cluster.state, None)
            self._reads.register(lambda *_: self._changed.set())
        self._polled_at = 0.0
        self._held_in = 0
        self._holder = {"v": 1, "host": socket.gethostname(), "pid": os.getpid()}
        self._published: str | None = None

    def _on_connection(self, connection: str) -> None:
        if connection != "CONNECTED":
            self._interrupted.set()
        self._changed.set()

    def interrupted(self) -> bool:
        """Whether the connection broke since the last call.

        An outage that ends ours ends the sessions of workers and supervisors too: that their nodes
        are gone then is no evidence about them.
        """
        broken = self._interrupted.is_set()
        self._interrupted.clear()
        return broken

    def poll(self) -> ClusterView:
        """Arm everything, then read: what changes after the view was read wakes the next
        :meth:`wait`.
        """
        self._changed.clear()
        self._polled_at = time.monotonic()
        if self._reads is None:
            return self.cluster.load_view(self._changed.set)
        return self._reads.load_view(self.cluster.cluster_id())

    def hold(self, held: bool) -> None:
        """Hold the node that keeps the leader from healing, or give it up."""
        state = self.cluster.state
        if held:
            # 0 on another state store.
            session = 0 if self._reads is None else self.cluster.session.session_id
            # Another armed sensor (a code reload in progress) may hold it: then it is ours after
            # its end.
            if not session or self._held_in != session:
                mine = state.claim_ephemeral_node(paths.HEALER, json.dumps(self._holder).encode())
                self._held_in = session if mine else 0
                self._published = None
        elif state.owned(paths.HEALER):
            state.delete_node(paths.HEALER)
            self._held_in, self._published = 0, None

    def publish_alarm(self, alarm: str | None) -> None:
        """Write into the armed sensor's node why healing pauses: ``status`` reads it there."""
        if alarm == self._published or not self.cluster.state.owned(paths.HEALER):
            return
        said = self._holder if alarm is None else {**self._holder, "alarm": alarm}
        self.cluster.state.set_data(paths.HEALER, json.dumps(said).encode())
        self._published = alarm

    def wait(self, seconds: float) -> None:
        """Sleep until something changes, at most ``seconds``; changes that follow each other are
        seen together.
        """
        self._changed.wait(max(0.0, seconds))
        time.sleep(max(0.0, min(seconds, self._polled_at + _BETWEEN_POLLS_SECS - time.monotonic())))


_KEPT: OrderedDict[str, _Watch] = OrderedDict()
_MOST_KEPT = 2


@contextmanager
def _kept_watch(conf: Mapping[str, Any]) -> Iterator[_Watch]:
    """A watch of that cluster; its session and what it has read are kept for the next tick,
    ``/healer`` is not.

    :class:`Unavailable` when ZooKeeper is out of reach or the root does not exist.
    """
    key = json.dumps(
        {name: conf[name] for name in sorted(conf) if name.startswith("storm.")}, default=str
    )
    watch = _KEPT.pop(key, None) or _Watch(StormClusterState.open(conf))
    try:
        yield watch
        watch.hold(False)
    except BaseException:
        watch.cluster.disconnect()
        raise
    # Two ticks at once (a code reload in progress) had one each.
    other, _KEPT[key] = _KEPT.pop(key, None), watch
    if other is not None:
        other.cluster.disconnect()
    while len(_KEPT) > _MOST_KEPT:
        _KEPT.popitem(last=False)[1].cluster.disconnect()


def unfinished_topologies(
    instance: dg.DagsterInstance, names: DagsterNames
) -> tuple[set[str], str | None]:
    """Ids of the topologies that a reassignment is working on now, and the run that does not start,
    if any.
    """
    records = instance.get_run_records(
        filters=dg.RunsFilter(job_name=names.name(REASSIGN_JOB), statuses=UNFINISHED_STATUSES),
        limit=100,
    )
    found: set[str] = set()
    stuck: str | None = None
    now = time.time()
    for record in records:
        age = now - record.create_timestamp.timestamp()
        # However old: a queued one will run once the queue lets it, and another would only wait
        # behind it.
        if age > _LONGEST_RUN_SECS and record.dagster_run.status != dg.DagsterRunStatus.QUEUED:
            continue
        if age > _LONGEST_QUEUE_SECS and record.dagster_run.status in WAITING_STATUSES:
            stuck = record.dagster_run.run_id
        ops: Any = record.dagster_run.run_config.get("ops") or {}
        for document in ((ops.get(names.name(REASSIGN_OP)) or {}).get("config") or {}).get(
            "causes"
        ) or ():
            try:
                found.add(Cause.from_json(document).topology_id)
            except InvalidRequest:
                continue  # A run that somebody launched by hand with a config of his own.
    return found, stuck


def restart_observations(found: Iterable[Restart], key: dg.AssetKey) -> list[dg.AssetObservation]:
    """One observation for each topology whose workers were restarted in place by their
    supervisors.
    """
    by_name = multimap((restart.name, restart) for restart in found)
    return [
        dg.AssetObservation(
            asset_key=key,
            partition=name,
            description=f"{len(members)} workers of {name} were restarted in place",
            metadata={
                "restarts": len(members),
                "workers": table(
                    "host port:int supervisor pid:int",
                    [(r.host, r.port, r.node, r.pid) for r in members],
                ),
                "topology_id": members[0].topology_id,
            },
        )
        for name, members in sorted(by_name.items())
    ]


def recovery_observations(
    found: Iterable[Recovery], topology: dg.AssetKey, workers: dg.AssetKey
) -> list[dg.AssetObservation]:
    """Each recovery, at its topology's partition and at the cluster's workers, where Dagster plots
    the seconds.
    """
    observations: list[dg.AssetObservation] = []
    for recovery in found:
        metadata = {
            "recovery_seconds": round(recovery.seconds, 3),
            "recovered_topology": recovery.topology_id,
            "how": "tasks moved" if recovery.moved else "restarted in place",
        }
        words = f"all workers of {recovery.name} run again after {recovery.seconds:.2f} s"
        observations += [
            dg.AssetObservation(
                asset_key=topology, partition=recovery.name, description=words, metadata=metadata
            ),
            dg.AssetObservation(asset_key=workers, description=words, metadata=metadata),
        ]
    return observations


def alarm_observation(alarm: str | None, key: dg.AssetKey) -> dg.AssetObservation:
    """Observation of the supervisors: healing pauses, or goes on again."""
    words = f"ALARM, healing pauses: {alarm}" if alarm else "healing goes on"
    return dg.AssetObservation(
        asset_key=key, description=words, metadata={"alarm": alarm or "none"}
    )


def seen_text(view: ClusterView, seen: LivenessResult) -> str:
    """Summary of one poll of the cluster, for the tick's history."""
    workers = sum(len(topology.live_workers) for topology in view.topologies.values())
    text = f"{workers} workers of {len(view.topologies)} topologies live on {len(view.supervisors)} supervisors"
    if seen.silent_supervisors:
        text += f"; silent supervisors: {', '.join(seen.silent_supervisors)}"
    if seen.restarting:
        text += f"; restarting in place: {', '.join(f'{n}:{p}' for _, n, p in seen.restarting)}"
    if seen.waiting:
        text += f"; {'; '.join(seen.waiting[:5])}"
    return text if not seen.frozen else f"healing pauses: {seen.frozen}; {text}"


@dataclass(frozen=True)
class _PollResult:
    """Result of one poll of the cluster."""

    requests: list[dg.RunRequest]
    restarted: list[Restart]
    recovered: list[Recovery]
    memory: HealingMemory
    next_check: float
    """Boot clock at which the next limit or back-off ends."""
    text: str
    """Summary of the cluster's state."""
    causes: list[str]
    """Reasons for the requests, in words."""
    stuck: str | None
    """A requested run that does not start: until it does, the leader heals."""


class _Tick:
    """One evaluation of the sensor."""

    def __init__(
        self,
        sensor: str,
        context: dg.SensorEvaluationContext,
        limits: LivenessLimits,
        names: DagsterNames,
    ) -> None:
        self.context = context
        self.settings = HealingSettings(limits, boot_id(), longest_gap_secs=_BLIND_SECS)
        self.names = names
        self.cursor = HealingCursor(sensor, context.cursor)
        self.memory = HealingMemory()
        self.epoch = -1
        self.seen = False
        """Whether the memory was loaded: until then the cursor stays as it is."""
        self.restarted: list[Restart] = []
        self.recovered: list[Recovery] = []
        self.alarm: str | None = None
        self.text = "the cluster was not seen"
        self.causes: list[str] = []

    def run(self, watch: _Watch, deadline: float) -> list[dg.RunRequest]:
        """Poll until there is something to heal, or until ``deadline`` of the monotonic clock."""
        self.memory = self.cursor.load(watch.cluster)
        self.alarm, self.seen = self.memory.alarm, True
        while True:
            result = self.poll(watch)
            if result.requests:
                # What dies together is seen together: one run for all of it, and no second blind
                # window.
                time.sleep(_COALESCE_SECS)
                result = self.poll(watch)
            self.memory = result.memory
            self.restarted.extend(result.restarted)
            self.recovered.extend(result.recovered)
            self.text, self.causes = result.text, result.causes
            watch.hold(result.stuck is None)
            watch.publish_alarm(result.memory.alarm)
            left = deadline - time.monotonic()
            # An alarm, and its end, are shown at once.
            if (
                result.requests
                or left <= 0
                or (result.memory.alarm is None) != (self.alarm is None)
            ):
                return result.requests
            watch.wait(min(left, _POLL_EVERY_SECS, result.next_check - boot_clock()))

    def poll(self, watch: _Watch) -> _PollResult:
        """Decide by the cluster's current state; after an outage everything gets its full time
        again.
        """
        view = watch.poll()
        self.epoch = view.epoch
        if watch.interrupted():
            self.grant_new_time()
        return self.decide(view, boot_clock())

    def grant_new_time(self) -> None:
        """Give everything its full time again: nobody watches during the gap that begins now."""
        self.memory = replace(self.memory, polled_at=UNSET)

    def decide(self, view: ClusterView, now: float) -> _PollResult:
        """Decide by ``view`` and the memory; changes nothing."""
        stuck: str | None = None

        def busy(causes: Collection[Cause]) -> Collection[str]:
            nonlocal stuck
            unfinished, stuck = unfinished_topologies(self.context.instance, self.names)
            return {cause.topology_id for cause in causes} if stuck else unfinished

        step = healing_step(view, self.memory, now, self.settings, busy=busy)
        attempts, asked = spare_runs(view, step.attempts, step.memory, now)
        due, used = assign_attempt_numbers(view, attempts, self.memory.used)
        restarted, workers = restarts(view, self.memory.workers)
        recovered, recovering = recoveries(view, self.memory.recovering, now)
        restarted, observed = spare_observations(restarted, self.memory.observed, now)
        recovered, observed = spare_observations(recovered, observed, now)
        if step.memory.alarm:
            # What comes back after an alarm was out of sight: how long it was dead is not known.
            recovered, recovering = [], {}
        next_check = now + 60 if step.next_check is None else step.next_check
        return _PollResult(
            requests=run_requests(due, self.names),
            restarted=restarted,
            recovered=recovered,
            memory=replace(
                step.memory,
                used=used,
                workers=workers,
                recovering=recovering,
                asked=asked,
                observed=observed,
            ),
            # A limit that passes at this very moment is looked at a little later, never in a busy
            # loop.
            next_check=max(now + _COALESCE_SECS, next_check),
            text=seen_text(view, step.observation)
            + (f"; run {stuck} does not start: the leader heals" if stuck else ""),
            causes=[attempt.cause.describe() for attempt in due],
            stuck=stuck,
        )


def build_heartbeat_sensor(
    names: DagsterNames | None = None,
    *,
    tick_secs: float = _TICK_SECS,
    name: str = "heartbeat_sensor",
    job: Any = None,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """The sensor that heals. It uses the resource ``storm_zookeeper`` of its code location.

    ``names`` are those of the cluster, as :func:`build_storm_resources` takes them too.
    ``tick_secs`` bounds a tick (at most 55: :class:`InvalidRequest`). It launches ``job``, by
    default the one that is called ``reassign_topologies``; alone, give it ``build_reassign_job()``,
    whose resources are ``storm_zookeeper``, ``storm_blobstore`` and ``storm_spark``:
    :func:`build_storm_resources` makes them.
    """
    names = names or DagsterNames()
    if not 0 <= tick_secs <= _MAX_TICK_SECS:
        raise InvalidRequest(
            f"tick_secs={tick_secs:g}: choose 0 to {_MAX_TICK_SECS:g}, Dagster ends ticks at 60"
        )

    def heartbeat_sensor(
        context: dg.SensorEvaluationContext, zookeeper: ZooKeeperResource
    ) -> dg.SensorResult | dg.SkipReason:
        secs, note = tick_limit(context, tick_secs)
        deadline = time.monotonic() + secs
        tick = _Tick(name, context, LivenessLimits.from_conf(zookeeper.conf().values), names)
        requests: list[dg.RunRequest] = []
        lost: str | None = None
        try:
            with _kept_watch(zookeeper.conf().values) as watch:
                requests = tick.run(watch, deadline)
                tick.cursor.store(watch.cluster, tick.memory, tick.epoch)
        except Unavailable as error:
            # What was seen before the connection was lost stands; the gap that follows grants new
            # time.
            lost = error.message
            tick.grant_new_time()
            if not tick.seen:
                return dg.SkipReason(lost)
        for cause in tick.causes:
            context.log.info(cause)
        for request in requests:
            context.log.info(f"asking for {request.run_key}")
        alarm = tick.memory.alarm
        if lost or alarm:
            context.log.warning(lost or alarm)
        shown = zookeeper.asset_key
        events = restart_observations(tick.restarted, shown(ACTIVE_TOPOLOGY))
        events += recovery_observations(tick.recovered, shown(ACTIVE_TOPOLOGY), shown(WORKERS))
        if (alarm is None) != (tick.alarm is None):
            events.append(alarm_observation(alarm, shown(SUPERVISORS)))
        text = f"{lost}; before: {tick.text}" if lost else tick.text
        return_free_memory()
        return dg.SensorResult(
            run_requests=requests,
            skip_reason=None if requests else dg.SkipReason(text + note),
            asset_events=events,
            cursor=tick.cursor.after(tick.memory),
        )

    return dg.sensor(
        name=names.name(name),
        job=job,
        job_name=None if job is not None else names.name(REASSIGN_JOB),
        minimum_interval_seconds=1,
        default_status=default_status,
        description="Watches workers, supervisors and heartbeats; asks for a reassignment when tasks are dead. "
        "Blocks on ZooKeeper watches for up to 45 seconds, and holds /healer meanwhile.",
    )(bind(heartbeat_sensor, names))
