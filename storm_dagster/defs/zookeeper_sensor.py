"""A sensor on any node of ZooKeeper: :func:`build_zookeeper_sensor`.

A tick blocks on a watch, so that a change is seen within milliseconds instead of at the next poll,
and ends below Dagster's limit of 60 seconds. The cursor is the node's zxid, which ZooKeeper raises
with every change of the whole ensemble: no change of state is missed while Dagster is down, and
none is handed over twice.
"""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import dagster as dg

from storm_dagster.defs.instance_settings import tick_limit
from storm_dagster.defs.resources.handles import ZooKeeperResource
from storm_dagster.model.errors import InvalidRequest, Unavailable
from storm_dagster.zk.path_watch import NodeState, PathWatch

LONGEST_TICK_SECS = 55.0
"""Dagster cuts a tick off after 60 seconds, and its cursor with it."""


@dataclass(frozen=True)
class ZooKeeperChange:
    """A node that is not as the sensor saw it last. Several writes between two looks are one
    change.
    """

    path: str
    exists: bool
    """False: the node is gone."""
    data: bytes
    """Empty when the node is gone."""
    children: tuple[str, ...]
    """Sorted; empty without ``children=True``."""
    version: int
    """Data version; -1 when the node is gone."""
    zxid: int
    """zxid of the newest change of the node (or its list of children); for a node that is gone, of
    the last one seen.
    """

    @property
    def run_key(self) -> str:
        """Given to requests without a run key: one run for each change, however often the tick is
        repeated.
        """
        return f"{self.path}:{self.zxid}{'' if self.exists else ':gone'}"


_Requested = dg.RunRequest | Iterable[dg.RunRequest] | dg.SkipReason | None
ChangeFunction = Callable[[dg.SensorEvaluationContext, ZooKeeperChange], _Requested]


def _seen(cursor: str | None) -> dict[str, Any] | None:
    """State at the last tick; ``None`` for the first tick, or after a cursor that is not ours."""
    try:
        document = json.loads(cursor or "")
        return {"marks": [int(zxid) for zxid in document["marks"]], "last": int(document["last"])}
    except (ValueError, TypeError, KeyError):
        return None


def _marks(node: NodeState) -> list[int]:
    return [node.czxid, node.mzxid, node.pzxid] if node.exists else []


def _requests(made: _Requested, change: ZooKeeperChange) -> list[dg.RunRequest]:
    if made is None or isinstance(made, dg.SkipReason):
        return []
    requests = [made] if isinstance(made, dg.RunRequest) else list(made)
    return [
        request
        if request.run_key is not None
        else request._replace(run_key=change.run_key + (f":{index}" if index else ""))
        for index, request in enumerate(requests)
    ]


def build_zookeeper_sensor(
    name: str,
    path: str,
    on_change: ChangeFunction,
    *,
    job: Any = None,
    job_name: str | None = None,
    jobs: Iterable[Any] | None = None,
    children: bool = False,
    on_first_look: bool = False,
    tick_secs: float = 45.0,
    home: str | None = None,
    conf_dir: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    default_status: dg.DefaultSensorStatus = dg.DefaultSensorStatus.RUNNING,
    description: str | None = None,
) -> dg.SensorDefinition:
    """A sensor that calls ``on_change(context, change)`` whenever the node at ``path`` changes.

    ``path`` is absolute, inside the cluster's root or not; it need not exist. With ``children`` the
    list of its children counts too. ``on_change`` returns the run requests; those without a run key
    get one from the zxid. What it raises fails the tick, and the same change is handed over again
    by the next one. The first look only notes what is there, unless ``on_first_look``.

    The ensemble is the one of ``conf_dir``, else ``home`` (a local cluster), else
    ``STORM_DAGSTER_HOME``, with the conf keys of ``overrides`` (``storm.zookeeper.servers``) on
    top. ``tick_secs`` bounds a tick; above 55, or with a relative path, :class:`InvalidRequest`.
    While ZooKeeper is out of reach ticks are skipped and say so. Without ``sensors: {use_threads:
    true}`` in dagster.yaml a waiting tick would hold up the other sensors: ticks are then at most 1
    s long, and say so.
    """
    if not 0 <= tick_secs <= LONGEST_TICK_SECS:
        raise InvalidRequest(
            f"tick_secs={tick_secs:g} of sensor {name!r}: choose 0 to {LONGEST_TICK_SECS:g}, Dagster ends ticks at 60"
        )
    if not path.startswith("/"):
        raise InvalidRequest(
            f"path {path!r} of sensor {name!r} must be absolute, such as /storm/topology"
        )
    cluster = ZooKeeperResource(home=home, conf_dir=conf_dir, overrides=dict(overrides or {}))

    @dg.sensor(
        name=name,
        job=job,
        job_name=job_name,
        jobs=list(jobs) if jobs is not None else None,
        minimum_interval_seconds=1,
        default_status=default_status,
        description=description or f"Watches {path} in ZooKeeper.",
    )
    def zookeeper_sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        secs, note = tick_limit(context, tick_secs)
        deadline = time.monotonic() + secs
        seen = _seen(context.cursor)
        try:
            with PathWatch(cluster.conf(context.instance).values, path, children=children) as watch:
                node = watch.snapshot()
                if seen is None and not on_first_look:
                    seen = {"marks": _marks(node), "last": max(node.mzxid, node.pzxid)}
                while seen is not None and _marks(node) == seen["marks"]:
                    if (left := deadline - time.monotonic()) <= 0:
                        break
                    watch.wait(left)
                    node = watch.snapshot()
        except Unavailable as error:
            return dg.SkipReason(error.message)
        # Not the larger of both: a new ensemble counts from 1, and its changes need run keys of
        # their own.
        last = (
            max(node.mzxid, node.pzxid) if node.exists else seen["last"] if seen is not None else -1
        )
        cursor = json.dumps({"marks": _marks(node), "last": last})
        if (seen is not None and _marks(node) == seen["marks"]) or (
            seen is None and not node.exists
        ):
            return dg.SensorResult(
                cursor=cursor,
                skip_reason=dg.SkipReason(f"{path} has not changed since zxid {last}{note}"),
            )
        change = ZooKeeperChange(
            path, node.exists, node.data or b"", node.children, node.version, last
        )
        made = on_change(context, change)
        requests = _requests(made, change)
        skip = (
            made
            if isinstance(made, dg.SkipReason)
            else dg.SkipReason(f"{path} changed, no run asked for")
        )
        return dg.SensorResult(
            run_requests=requests, cursor=cursor, skip_reason=None if requests else skip
        )

    return zookeeper_sensor
