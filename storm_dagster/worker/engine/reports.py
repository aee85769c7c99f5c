"""Report of a task to the topology master."""

from storm_dagster.model.wire import TaskReport
from storm_dagster.worker.tasks.runner import Runner


def task_report(runner: Runner, now: float) -> TaskReport:
    """Create the report of a task; ``now``: time of ``time.monotonic()``."""
    stats = runner.stats
    windows = stats.windows(now)
    state_metrics = runner.state.metrics() if runner.state else {}
    return TaskReport(
        status=runner.status,
        component=runner.component,
        uptime_secs=int(now - stats.opened),
        windows=windows,
        stats=windows[":all-time"],
        streams=stats.by_stream(),
        window_streams=stats.window_streams(now),
        latencies=stats.window_latencies(now),
        waiting=runner.waiting(),
        busy_ns=stats.execute_ns,
        timed=stats.timed,
        held_ms=int(runner.held_secs * 1000),
        errors=stats.errors,
        metrics={**state_metrics, **stats.metrics},
    )
