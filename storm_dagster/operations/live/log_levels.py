"""Changed log levels of a running topology, stored for restarted workers."""

import time
from collections.abc import Mapping

from storm_dagster.model import paths
from storm_dagster.model.errors import InvalidRequest
from storm_dagster.model.log_levels import KeptLevel, KeptLevels, check_level, level_in_force
from storm_dagster.model.records import decode_record, encode_record
from storm_dagster.model.view import ClusterView
from storm_dagster.model.wire import LevelChange
from storm_dagster.operations.context import OperationsContext, topology_by_name
from storm_dagster.operations.steps import operation
from storm_dagster.operations.transactions import commit, retry_on_conflict

LOG_LEVELS = operation("log_levels", "log_levels")

MAX_LOGGERS = 200
"""Loggers of a topology that can have a changed level."""
_MAX_SECS = 366 * 86400
"""Longest time of a changed level: a year."""


def level_change(logger: object, level: object, secs: object, reset: object) -> LevelChange:
    """Check the requested change of a logger's level.

    ``level`` is kept for ``secs`` (0: until it is removed), ``reset`` is the level afterwards.
    ``level`` ``None`` reverts an earlier change. :class:`InvalidRequest` for an invalid request.
    """
    if not isinstance(logger, str) or not 0 < len(logger) <= 200:
        raise InvalidRequest(f"{logger!r:.40} names no logger: give 1 to 200 characters, or ROOT")
    if level is None:
        return LevelChange()
    if isinstance(secs, bool) or not isinstance(secs, int) or not 0 <= secs <= _MAX_SECS:
        raise InvalidRequest(
            f"the level of logger {logger!r:.80} cannot be kept for {secs!r:.40} s"
        )
    reset_level = check_level(reset) if reset is not None else None
    return LevelChange(level=check_level(level), secs=secs, reset=reset_level)


def keep_log_levels(ctx: OperationsContext, name: str, changes: Mapping[str, LevelChange]) -> None:
    """Write the changes to the topology's own record, in one fenced transaction.

    Changes whose time is over are removed. Without a difference the record is not written. Workers
    that begin later read it; it is removed with the topology. Raises :class:`NotAlive`, and
    :class:`InvalidRequest` beyond 200 loggers.
    """
    epoch = ctx.current_epoch()

    def attempt(view: ClusterView) -> None:
        topology = topology_by_name(view, name)
        path = paths.log_levels(topology.id)
        stored = KeptLevels()
        version: int | None = None
        stored_node = ctx.cluster.state.get_data_with_version(path)
        if stored_node is not None:
            raw, node = stored_node
            stored = decode_record(KeptLevels, raw, path)
            version = node.version
        before = stored.loggers
        now_ms = int(time.time() * 1000)
        after = {
            logger: level
            for logger, level in before.items()
            if level_in_force(level, now_ms) is not None
        }
        for logger, change in changes.items():
            after.pop(logger, None)
            if change.level is not None:
                until_ms = now_ms + 1000 * change.secs if change.secs else None
                after[logger] = KeptLevel(level=change.level, reset=change.reset, until_ms=until_ms)
        if len(after) > MAX_LOGGERS:
            raise InvalidRequest(
                f"{len(after)} loggers of topology {name!r} would have levels of their own, "
                f"{MAX_LOGGERS} may: take some back"
            )
        if after == before:
            return
        record = encode_record(stored.model_copy(update={"loggers": after}))
        transaction = ctx.cluster.fenced(epoch).check(
            paths.topology(topology.id), topology.base_at.version
        )
        transaction.put(path, record, version)
        commit(ctx, transaction, "log_levels")

    retry_on_conflict(ctx, f"keeping the log levels of {name}", attempt)
