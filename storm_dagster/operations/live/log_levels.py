"""Changed levels of loggers of a running topology, stored so that restarted workers have them
too.
"""

import time
from collections.abc import Mapping

from storm_dagster.model import paths
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.log_levels import check_level, level_in_force
from storm_dagster.model.records import KeptLevel, KeptLevels, decode_record, encode_record
from storm_dagster.model.view import ClusterView
from storm_dagster.model.wire import LevelChange
from storm_dagster.operations.context import OperationsContext, topology_by_name
from storm_dagster.operations.steps import operation
from storm_dagster.operations.transactions import commit, retry_on_conflict

LOG_LEVELS = operation("log_levels", "log_levels")

MOST_LOGGERS = 200
_LONGEST_SECS = 366 * 86400


def level_change(logger: object, level: object, secs: object, reset: object) -> LevelChange:
    """A change as it was asked for; ``level`` ``None`` takes an earlier one back.
    :class:`InvalidRequest` otherwise.
    """
    if not isinstance(logger, str) or not 0 < len(logger) <= 200:
        raise InvalidRequest(f"{logger!r:.40} names no logger: give 1 to 200 characters, or ROOT")
    if level is None:
        return LevelChange()
    if isinstance(secs, bool) or not isinstance(secs, int) or not 0 <= secs <= _LONGEST_SECS:
        raise InvalidRequest(
            f"the level of logger {logger!r:.80} cannot be kept for {secs!r:.40} s"
        )
    return LevelChange(
        level=check_level(level), secs=secs, reset=check_level(reset) if reset is not None else None
    )


def keep_log_levels(ctx: OperationsContext, name: str, changes: Mapping[str, LevelChange]) -> None:
    """Write the changes to the topology's own record, in one fenced transaction; nothing when
    nothing changes.

    Workers that begin later read it; it goes with the topology. Raises :class:`NotAlive`, and
    :class:`InvalidRequest` beyond 200 loggers.
    """
    epoch = ctx.current_epoch()

    def attempt(view: ClusterView) -> None:
        topology = topology_by_name(view, name)
        path = paths.log_levels(topology.id)
        found = ctx.cluster.state.get_data_with_version(path)
        stored = decode_record(KeptLevels, found[0], path) if found is not None else KeptLevels()
        before = stored.loggers
        now_ms = int(time.time() * 1000)
        after = {
            logger: kept
            for logger, kept in before.items()
            if level_in_force(kept, now_ms) is not None
        }
        for logger, change in changes.items():
            after.pop(logger, None)
            if change.level is not None:
                until_ms = now_ms + 1000 * change.secs if change.secs else None
                after[logger] = KeptLevel(level=change.level, reset=change.reset, until_ms=until_ms)
        if len(after) > MOST_LOGGERS:
            raise InvalidRequest(
                f"{len(after)} loggers of topology {name!r} would have levels of their own, {MOST_LOGGERS} may: "
                "take some back"
            )
        if after == before:
            return
        record = encode_record(stored.model_copy(update={"loggers": after}))
        transaction = ctx.cluster.fenced(epoch).check(
            paths.topology(topology.id), topology.base_at.version
        )
        transaction.put(path, record, None if found is None else found[1].version)
        commit(ctx, transaction, "log_levels")

    retry_on_conflict(ctx, f"keeping the log levels of {name}", attempt)
