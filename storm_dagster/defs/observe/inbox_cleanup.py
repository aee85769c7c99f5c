"""`clean_inbox` and its schedule: what nobody needs any more goes, after it was seen to be garbage long enough.

What was seen when stands in the newest observation of `storm/cluster/inbox`, because a schedule has no
cursor. The leader cleans too; whichever comes second finds nothing.
"""

# No `from __future__ import annotations`: Dagster reads the annotations of the decorated functions.
import json
import logging
from collections.abc import Mapping

import dagster as dg

from storm_dagster.defs.keys import INBOX
from storm_dagster.defs.metadata import notes
from storm_dagster.defs.observe.history import newest_observation
from storm_dagster.defs.resources.operating import Handles, connect, operations
from storm_dagster.model.clock import boot_clock, boot_id
from storm_dagster.model.errors import StormDagsterError
from storm_dagster.operations.live.cleaner import clean, survey
from storm_dagster.operations.results import CleanResult

_MEMORY = "seen"
_GRACE_SECS = 60.0
_log = logging.getLogger(__name__)


def load_inbox_memory(instance: dg.DagsterInstance, key: dg.AssetKey = INBOX) -> dict[str, float]:
    """Garbage -> boot clock when it was first seen; empty after another boot, which only delays."""
    document = newest_observation(instance, key).get(_MEMORY)
    if not isinstance(document, dict) or document.get("boot_id") != boot_id():
        return {}
    first = document.get("first_seen")
    if not isinstance(first, dict):
        return {}
    return {str(key): float(since) for key, since in first.items() if isinstance(since, int | float)}


def observation(
    memory: Mapping[str, float], report: CleanResult | None, waiting: int, key: dg.AssetKey = INBOX
) -> dg.AssetObservation:
    """Metadata: what waits, what was removed, and the memory."""
    removed = [*report.nodes, *report.blobs, *report.tokens] if report else []
    return dg.AssetObservation(
        asset_key=key,
        metadata={
            "removed": len(removed),
            "what": notes(removed[:100]),
            "problems": notes(report.problems if report else ()),
            "waiting": waiting,
            _MEMORY: dg.MetadataValue.json({"boot_id": boot_id(), "first_seen": dict(memory)}),
        },
    )


def clean_inbox(context: dg.OpExecutionContext, handles: Handles) -> None:
    """Remove garbage, in fenced steps."""
    key = handles.zookeeper.asset_key(INBOX)
    with operations(context, handles) as ops:
        report, memory = clean(
            ops, load_inbox_memory(context.instance, key), boot_now=boot_clock(), grace_secs=_GRACE_SECS
        )
    for problem in report.problems:
        context.log.warning(problem)
    context.log_event(observation(memory, report, report.waiting, key))


def inbox_cleanup_schedule(context: dg.ScheduleEvaluationContext, handles: Handles) -> dg.RunRequest | dg.SkipReason:
    """Look for garbage; only what has been garbage for its time is worth a run."""
    key = handles.zookeeper.asset_key(INBOX)
    try:
        with connect(handles, _log) as ops:
            before = load_inbox_memory(context.instance, key)
            garbage, memory = survey(ops, before, boot_now=boot_clock(), grace_secs=_GRACE_SECS)
    except StormDagsterError as error:
        return dg.SkipReason(error.message)
    if json.dumps(memory, sort_keys=True) != json.dumps(before, sort_keys=True):
        context.instance.report_runless_asset_event(observation(memory, None, garbage.waiting, key))
    found = [*garbage.nodes, *garbage.blobs, *garbage.tokens]
    if not found:
        return dg.SkipReason(f"nothing to clean now, {garbage.waiting} things are not old enough yet")
    return dg.RunRequest(tags={"storm/garbage": str(len(found))})
