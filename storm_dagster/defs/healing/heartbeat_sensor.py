"""The healing sensor, which requests a reassignment of dead tasks.

It blocks on ZooKeeper watches. A tick lasts up to 45 seconds (Dagster ends it at 60), or one second
if sensors share a thread. Watches only end its wait; every decision is made from one view of the
cluster. Because limits pass without an event, it also polls every five seconds. While a run that it
requested does not start, it releases ``/healer``, and the leader heals. Between two ticks
:mod:`storm_dagster.defs.healing.sensor_watch` holds it.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg
from msgspec import UNSET
from msgspec.structs import replace

from storm_dagster.core.liveness.causes import Cause
from storm_dagster.core.liveness.detection import LivenessResult
from storm_dagster.core.liveness.limits import LivenessLimits
from storm_dagster.core.liveness.pause import waiting_text
from storm_dagster.core.liveness.retries import Outlook
from storm_dagster.core.liveness.step import HealingSettings, healing_step
from storm_dagster.core.reassignment import Runnable
from storm_dagster.core.scheduling.plan import plan_placement
from storm_dagster.defs.binding import bind, check_interval
from storm_dagster.defs.healing.memory import (
    REASSIGN_OP,
    HealingCursor,
    HealingMemory,
    Recovery,
    Restart,
    assign_attempt_numbers,
    limit_observations,
    recoveries,
    restarts,
    run_requests,
)
from storm_dagster.defs.healing.observations import (
    alarm_observation,
    pause_observation,
    recovery_observations,
    restart_observations,
)
from storm_dagster.defs.healing.sensor_watch import SensorWatch, open_watch
from storm_dagster.defs.instance_settings import tick_limit
from storm_dagster.defs.keys import (
    ACTIVE_TOPOLOGY,
    SUPERVISORS,
    UNFINISHED_STATUSES,
    WAITING_STATUSES,
    WORKERS,
)
from storm_dagster.defs.resources.handles import BlobStoreResource, ZooKeeperResource
from storm_dagster.host.clock import boot_clock, boot_id
from storm_dagster.host.memory import return_free_memory
from storm_dagster.model.conf import Conf
from storm_dagster.model.dagster_names import REASSIGN_JOB, DagsterNames
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.model.view import ClusterView, TopologyView
from storm_dagster.operations.context import OperationsContext, load_runnable
from storm_dagster.zk.storm_cluster_state import StormClusterState

_TICK_SECS = 45.0
"""Longest tick by default."""
_MAX_TICK_SECS = 55.0
"""Longest tick that can be configured: Dagster ends one after 60 s, and drops its cursor."""
_POLL_EVERY_SECS = 5.0
"""Longest pause between two polls of a tick."""
_COALESCE_SECS = 0.15
"""Pause before the second poll, which sees all workers of one fault together."""
_BLIND_SECS = 20.0
"""Longest gap between two polls over which limits continue to run.

It is longer than the pause between two ticks. In a longer gap a silent worker may have sent
heartbeats that the sensor did not see.
"""
_MAX_QUEUE_SECS = 30.0
"""Age from which on a run that has not started counts as waiting in a queue."""
_MAX_RUN_SECS = 360.0
"""Age from which on a run does not prevent another one of its topology, unless it is queued.

A run whose process was killed stays "started" permanently.
"""
_CODE_SECS = 3.0
"""Time in which nimbus must send the code of a topology; else it is not planned now."""


def unfinished_topologies(
    instance: dg.DagsterInstance, names: DagsterNames
) -> tuple[set[str], str | None]:
    """Ids of the topologies of current reassignments, and the id of a run that waits.

    ``None`` instead of the run if none has waited for 30 s. Only the newest 100 runs are read.
    """
    records = instance.get_run_records(
        filters=dg.RunsFilter(job_name=names.name(REASSIGN_JOB), statuses=UNFINISHED_STATUSES),
        limit=100,
    )
    topology_ids: set[str] = set()
    stuck: str | None = None
    now = time.time()
    for record in records:
        run = record.dagster_run
        age = now - record.create_timestamp.timestamp()
        # A queued run counts at any age: it will run once the queue permits it, and another run
        # would only wait behind it.
        if age > _MAX_RUN_SECS and run.status != dg.DagsterRunStatus.QUEUED:
            continue
        if age > _MAX_QUEUE_SECS and run.status in WAITING_STATUSES:
            stuck = run.run_id
        for document in _cause_documents(run, names):
            try:
                topology_ids.add(Cause.from_json(document).topology_id)
            except InvalidRequest:
                continue  # A run that was launched by hand with its own config.
    return topology_ids, stuck


def _cause_documents(run: dg.DagsterRun, names: DagsterNames) -> Iterable[Any]:
    """The causes in the config of a reassignment run; empty without a config."""
    ops: Any = run.run_config.get("ops") or {}
    op = ops.get(names.name(REASSIGN_OP)) or {}
    config = op.get("config") or {}
    return config.get("causes") or ()


def poll_summary(view: ClusterView, liveness: LivenessResult, paused: str | None = None) -> str:
    """Summary of one poll of the cluster, for the tick's history.

    ``paused`` is the sentence about a pause by operators.
    """
    workers = sum(len(topology.live_workers) for topology in view.topologies.values())
    text = (
        f"{workers} workers of {len(view.topologies)} topologies live on "
        f"{len(view.supervisors)} supervisors"
    )
    if liveness.silent_supervisors:
        text += f"; silent supervisors: {', '.join(liveness.silent_supervisors)}"
    if liveness.restarting:
        slots = [f"{node}:{port}" for _, node, port in liveness.restarting]
        text += f"; restarting in place: {', '.join(slots)}"
    if liveness.waiting:
        text += f"; {'; '.join(liveness.waiting[:5])}"
    if liveness.frozen:
        text = f"healing is frozen: {liveness.frozen}; {text}"
    if paused:
        waiting = waiting_text([cause.describe() for cause in liveness.causes])
        text = "; ".join(part for part in (paused, waiting, text) if part)
    return text


@dataclass(frozen=True)
class _PollResult:
    """Result of one poll of the cluster."""

    requests: list[dg.RunRequest]
    restarted: list[Restart]
    """Restarts in place to observe."""
    recovered: list[Recovery]
    """Recoveries to observe."""
    memory: HealingMemory
    """Memory for the next poll."""
    next_check: float
    """Boot clock at which the next limit or back-off ends."""
    text: str
    """Summary of the cluster's state."""
    causes: list[str]
    """Reasons for the requests, in words."""
    stuck: str | None
    """Id of a requested run that does not start; until it starts, the leader heals."""
    paused: str | None
    """Sentence about a pause by operators."""


class _Tick:
    """One evaluation of the sensor."""

    def __init__(
        self,
        sensor: str,
        context: dg.SensorEvaluationContext,
        limits: LivenessLimits,
        names: DagsterNames,
        load: Callable[[StormClusterState, TopologyView], Runnable],
    ) -> None:
        self.context = context
        self.settings = HealingSettings(
            limits, boot_id(), longest_gap_secs=_BLIND_SECS, are_runs=True
        )
        self.load = load
        """Reads code and conf of a topology."""
        self.names = names
        self.cursor = HealingCursor(sensor, context.cursor)
        self.memory = HealingMemory()
        """Memory after the last poll."""
        self.epoch = -1
        """Epoch of the last view; -1 before the first."""
        self.is_loaded = False
        """True once the memory was loaded; before, the cursor stays unchanged."""
        self.restarted: list[Restart] = []
        """Restarts of all polls of the tick, to observe."""
        self.recovered: list[Recovery] = []
        """Recoveries of all polls of the tick, to observe."""
        self.former_alarm: str | None = None
        """The alarm at the end of the former tick; ``memory.alarm`` is the current one."""
        self.was_paused = False
        """True if operators had paused healing at the end of the former tick."""
        self.paused: str | None = None
        """Sentence about a pause by operators, of the last poll."""
        self.text = "the cluster was not seen"
        """Summary of the last poll."""
        self.causes: list[str] = []
        """Reasons for the requests, in words."""

    def run_in_session(
        self, conf: Conf, deadline: float, tick_secs: float, interval_secs: int
    ) -> tuple[list[dg.RunRequest], str | None]:
        """Run the tick in a session of ZooKeeper, and store its memory.

        Returns its requests, and the error that ended the session early; ``None`` without one.
        """
        requests: list[dg.RunRequest] = []
        try:
            with open_watch(conf, tick_secs=tick_secs, interval_secs=interval_secs) as watch:
                requests = self.run(watch, deadline)
                self.cursor.store(watch.cluster, self.memory, self.epoch)
        except Unavailable as error:
            # Decisions from before the connection was lost are valid; the gap after it restarts
            # every limit.
            self.grant_new_time()
            return requests, error.message
        return requests, None

    def run(self, watch: SensorWatch, deadline: float) -> list[dg.RunRequest]:
        """Poll until a reassignment is due; the requests of its runs.

        Empty if an alarm begins or ends, or at ``deadline`` of the monotonic clock. The fields have
        the result of the last poll, and the changes of all polls, also after an error.
        """
        self.memory = self.cursor.load(watch.cluster)
        self.former_alarm = self.memory.alarm
        self.was_paused = self.memory.paused
        self.is_loaded = True
        while True:
            result = self.poll(watch)
            if result.requests:
                # Workers that die together are seen together: one run for all of them, and no
                # second blind window. The first result is dropped, and the second poll decides by
                # the same memory.
                time.sleep(_COALESCE_SECS)
                result = self.poll(watch)
            self.memory = result.memory
            self.restarted.extend(result.restarted)
            self.recovered.extend(result.recovered)
            self.text = result.text
            self.paused = result.paused
            self.causes = result.causes
            if result.stuck is None:
                watch.hold_healer()
            else:
                watch.release_healer()
            watch.publish_alarm(result.memory.alarm)
            remaining_secs = deadline - time.monotonic()
            # An alarm or a pause, and its end, end the tick, so that they are shown at once.
            is_alarm_changed = (result.memory.alarm is None) != (self.former_alarm is None)
            is_pause_changed = result.memory.paused != self.was_paused
            if result.requests or remaining_secs <= 0 or is_alarm_changed or is_pause_changed:
                return result.requests
            check_secs = result.next_check - boot_clock()
            watch.wait(min(remaining_secs, _POLL_EVERY_SECS, check_secs))

    def poll(self, watch: SensorWatch) -> _PollResult:
        """Decide by the cluster's current state; after an outage every limit restarts."""
        view = watch.poll()
        self.epoch = view.epoch
        if watch.interrupted():
            self.grant_new_time()
        cluster = watch.cluster
        outlook = watch.outlook.poll(view, lambda topology: self.load(cluster, topology))
        return self.decide(view, boot_clock(), outlook)

    def grant_new_time(self) -> None:
        """Restart every limit, because the sensor does not watch during the next gap."""
        self.memory = replace(self.memory, polled_at=UNSET)

    def decide(self, view: ClusterView, now: float, outlook: Outlook) -> _PollResult:
        """Decide by ``view`` and the memory, without an effect on the cluster."""
        stuck: str | None = None

        def busy(causes: Collection[Cause]) -> Collection[str]:
            nonlocal stuck
            unfinished, stuck = unfinished_topologies(self.context.instance, self.names)
            # While a run does not start, the leader heals: no topology gets another run.
            return {cause.topology_id for cause in causes} if stuck else unfinished

        step = healing_step(view, self.memory, now, self.settings, busy=busy, outlook=outlook)
        due, used = assign_attempt_numbers(view, step.attempts, self.memory.used)
        restarted, workers = restarts(view, self.memory.workers)
        recovered, recovering = recoveries(view, self.memory.recovering, now)
        restarted, observed = limit_observations(restarted, self.memory.observed, now)
        recovered, observed = limit_observations(recovered, observed, now)
        if step.memory.alarm:
            # Workers that return after an alarm were out of sight: their outage is unknown.
            recovered = []
            recovering = {}
        next_check = now + 60 if step.next_check is None else step.next_check
        text = poll_summary(view, step.observation, step.paused)
        if step.waiting:
            names = ", ".join(step.waiting[:5])
            text += f"; no plan would change {len(step.waiting)} topologies that wait: {names}"
        if stuck:
            text += f"; run {stuck} does not start: the leader heals"
        return _PollResult(
            requests=run_requests(due, self.names),
            restarted=restarted,
            recovered=recovered,
            memory=replace(
                step.memory,
                used=used,
                workers=workers,
                recovering=recovering,
                asked={},
                observed=observed,
            ),
            # A limit that passes at this moment is checked a little later, never in a busy loop.
            next_check=max(now + _COALESCE_SECS, next_check),
            text=text,
            causes=[attempt.cause.describe() for attempt in due],
            stuck=stuck,
            paused=step.paused,
        )

    def log_result(self, requests: Sequence[dg.RunRequest], lost: str | None) -> None:
        """Log causes, requests, and the alarm or the error that ``lost`` ZooKeeper."""
        for cause in self.causes:
            self.context.log.info(cause)
        for request in requests:
            self.context.log.info(f"requesting {request.run_key}")
        if lost or self.memory.alarm:
            self.context.log.warning(lost or self.memory.alarm)

    def observations(self, zookeeper: ZooKeeperResource) -> list[dg.AssetObservation]:
        """Observations of the changes in all polls of the tick."""
        topology_key = zookeeper.asset_key(ACTIVE_TOPOLOGY)
        workers_key = zookeeper.asset_key(WORKERS)
        events = restart_observations(self.restarted, topology_key)
        events += recovery_observations(self.recovered, topology_key, workers_key)
        alarm = self.memory.alarm
        if (alarm is None) != (self.former_alarm is None):
            # An alarm began or ended.
            events.append(alarm_observation(alarm, zookeeper.asset_key(SUPERVISORS)))
        if self.memory.paused != self.was_paused:
            events.append(pause_observation(self.paused, zookeeper.asset_key(SUPERVISORS)))
        return events


def _code_loader(
    zookeeper: ZooKeeperResource, blobstore: BlobStoreResource
) -> Callable[[StormClusterState, TopologyView], Runnable]:
    """Function that reads code and conf of a topology, in at most 3 s."""

    def load(cluster: StormClusterState, topology: TopologyView) -> Runnable:
        conf = zookeeper.conf()
        with blobstore.blobs(cluster, deadline_secs=_CODE_SECS) as blobs:
            ops = OperationsContext(cluster, blobs, conf, planner=plan_placement)
            return load_runnable(ops, topology)

    return load


def build_heartbeat_sensor(
    names: DagsterNames | None = None,
    *,
    tick_secs: float = _TICK_SECS,
    interval_secs: int = 1,
    name: str = "heartbeat_sensor",
    job: Any = None,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
) -> dg.SensorDefinition:
    """The healing sensor, with two resources of its code location.

    They are ``storm_zookeeper``, and ``storm_blobstore``, from which it reads the code of a
    topology whose reassignment it plans.

    ``names`` are those of the cluster, as for :func:`build_storm_resources`. ``tick_secs`` limits a
    tick (at most 55: :class:`InvalidRequest`), ``interval_secs`` is the least time from the start
    of one to the next; the leader heals what waits too long for it. The sensor launches ``job``, by
    default the job ``reassign_topologies``. Used alone, it needs ``build_reassign_job()``, whose
    resources are ``storm_zookeeper``, ``storm_blobstore`` and ``storm_spark``;
    :func:`build_storm_resources` makes them.
    """
    names = names or DagsterNames()
    if not 0 <= tick_secs <= _MAX_TICK_SECS:
        raise InvalidRequest(
            f"tick_secs={tick_secs:g}: choose 0 to {_MAX_TICK_SECS:g}, Dagster ends ticks at 60"
        )
    check_interval(interval_secs)

    def heartbeat_sensor(
        context: dg.SensorEvaluationContext,
        zookeeper: ZooKeeperResource,
        blobstore: BlobStoreResource,
    ) -> dg.SensorResult | dg.SkipReason:
        """One tick: run requests or the reason without one, observations and the next cursor.

        If ZooKeeper is unreachable from the start, the cursor stays unchanged. If the connection is
        lost later, the decisions from before that count.
        """
        # ``note`` is why the tick is short; empty if it is not.
        secs, note = tick_limit(context, tick_secs)
        deadline = time.monotonic() + secs

        conf = zookeeper.conf().values
        limits = LivenessLimits.from_conf(conf)
        tick = _Tick(name, context, limits, names, _code_loader(zookeeper, blobstore))
        requests, lost = tick.run_in_session(conf, deadline, secs, interval_secs)
        if lost is not None and not tick.is_loaded:
            return dg.SkipReason(lost)
        tick.log_result(requests, lost)
        text = f"{lost}; before: {tick.text}" if lost else tick.text
        # The code server's process lives long, and would grow by the unused pages of its ticks.
        return_free_memory()
        return dg.SensorResult(
            run_requests=requests,
            skip_reason=None if requests else dg.SkipReason(text + note),
            asset_events=tick.observations(zookeeper),
            # It names the last record that was stored: after an outage that of an earlier tick.
            cursor=tick.cursor.after(tick.memory),
        )

    return dg.sensor(
        name=names.name(name),
        job=job,
        job_name=None if job is not None else names.name(REASSIGN_JOB),
        minimum_interval_seconds=interval_secs,
        default_status=default_status,
        description="Watches workers, supervisors and heartbeats; requests a reassignment of dead "
        "tasks. Blocks on ZooKeeper watches for up to 45 seconds, and holds /healer until the next "
        "tick is overdue by 10 seconds.",
    )(bind(heartbeat_sensor, names))
